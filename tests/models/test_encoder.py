"""Randomness and sharding of the stack of blocks."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from vit_jax.models import encoder, vit

DEPTH, WIDTH = 3, 8


def blocks_that_add_biases(attention_bias, mlp_bias, **fields):
  """An encoder whose block i adds only attention_bias[i] and mlp_bias[i]."""
  module = encoder.Encoder(depth=DEPTH, num_heads=2, mlp_dim=4, **fields)
  x = jnp.zeros((1, 2, WIDTH))
  shapes = jax.eval_shape(
    lambda: module.init(jax.random.key(0), x, train=False, grid=(1, 2))
  )
  params = jax.tree.map(lambda s: np.zeros(s.shape, s.dtype), shapes)["params"]
  out, fc2 = (
    params["blocks"]["attention"]["out"],
    params["blocks"]["mlp"]["fc2"],
  )
  out["bias"] += np.reshape(attention_bias, (DEPTH, 1))
  fc2["bias"] += np.reshape(mlp_bias, (DEPTH, 1))

  def f(x, key):
    rngs = {"dropout": key}
    return module.apply(
      {"params": params}, x, train=True, grid=(1, 2), rngs=rngs
    )

  # Compiles the random bits in a third of the time.
  return jax.jit(f, compiler_options={"xla_backend_optimization_level": 0})


def test_stochastic_depth_grows_linearly_and_keeps_the_mean():
  rates = np.array([0.0, 0.25, 0.5])
  # A kept residual is divided by 1 - rate, which leaves a power of two: each
  # bit of the sum says whether one residual of one block was kept.
  f = blocks_that_add_biases(
    (1 - rates) * [1, 4, 16], (1 - rates) * [2, 8, 32], stochastic_depth=0.5
  )
  y = np.asarray(f(jnp.zeros((4096, 2, WIDTH)), jax.random.key(0)))
  bits = np.rint(y[:, 0, 0]).astype(int)
  np.testing.assert_allclose(
    y, bits[:, None, None] * np.ones_like(y), atol=1e-5
  )
  kept = bits[:, None] >> np.arange(6) & 1  # [B, 6]
  # 4 sigma of 4096 draws at rate 0.5 is 0.031.
  expected = [1, 1, 0.75, 0.75, 0.5, 0.5]
  np.testing.assert_allclose(kept.mean(axis=0), expected, atol=0.031)
  # Independent between the residuals and between blocks.
  correlation = np.corrcoef(kept[:, 2:].T) - np.eye(4)
  assert np.abs(correlation).max() < 0.07  # 4 sigma of 4096 draws: 0.063


def test_blocks_and_keys_draw_different_dropout_masks():
  f = blocks_that_add_biases([0, 0, 0], [0.5, 0.5, 0.5], dropout=0.5)
  x = jnp.zeros((64, 2, WIDTH))
  y = f(x, jax.random.key(0))
  # Each block adds 0 or 1: with one mask for all, only 0 and 3 would occur.
  values, counts = np.unique(np.asarray(y), return_counts=True)
  np.testing.assert_array_equal(values, [0, 1, 2, 3])
  np.testing.assert_allclose(  # 4 sigma of 1024 draws is 0.062
    counts / y.size, np.array([1, 3, 3, 1]) / 8, atol=0.062
  )
  np.testing.assert_array_equal(y, f(x, jax.random.key(0)))
  assert (y != f(x, jax.random.key(1))).mean() > 0.5


def on_the_mesh(x):
  """Pins the batch over all devices, as a caller would."""
  mesh = jax.make_mesh(
    (8,), ("data",), axis_types=(jax.sharding.AxisType.Auto,)
  )
  spec = jax.sharding.PartitionSpec("data")
  return jax.lax.with_sharding_constraint(
    x, jax.sharding.NamedSharding(mesh, spec)
  )


@pytest.mark.parametrize("train", [False, True])
def test_constrain_pins_the_embedding_and_the_input_of_each_block(train):
  model = vit.ViT(
    num_classes=3,
    width=8,
    depth=DEPTH,
    num_heads=2,
    mlp_dim=4,
    patch_size=(2, 2),
    constrain=on_the_mesh,
  )
  image = jnp.zeros((8, 4, 4, 3))
  params = jax.eval_shape(model.init, jax.random.key(0), image)

  apply = jax.jit(functools.partial(model.apply, train=train))
  lowered = apply.lower(params, image)
  text = lowered.as_text()
  constraints = re.findall(
    r"sharding_constraint.*\"data\".*tensor<8x(\d+)x8xf32>", text
  )
  # The embedding (4 patches), and the body of the loop (with a class token).
  assert sorted(constraints) == ["4", "5"]
  assert text.count("stablehlo.while") == 1
  # What the compiler makes of it: each device holds 1 of the 8 examples.
  compiled = lowered.compile().as_text() or ""
  assert re.search(r"f32\[1,5,8\]", compiled)
  assert not re.search(r"f32\[8,5,8\]", compiled)
