"""Laws that every model class obeys."""

import functools
import importlib
import inspect
import pkgutil

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from vit_jax import models
from vit_jax.models import (
  axial,
  axial_resnet,
  bit,
  hybrid,
  mixer,
  output,
  resnet,
  vit,
)

# Small arguments for each class, as often as it has ways to work.
SMALL = {
  "width": 8,
  "depth": 2,
  "num_heads": 2,
  "mlp_dim": 12,
  "patch_size": (4, 2),
}
RANDOM = {"dropout": 0.2, "attention_dropout": 0.2, "stochastic_depth": 0.2}
CASES = (
  (vit.ViT, SMALL | RANDOM | {"pool": "cls", "representation_size": 4}),
  (vit.ViT, SMALL | RANDOM | {"pool": "map", "layer_scale": 0.1}),
  (vit.ViT, SMALL | {"pool": "gap", "posemb": "relative", "qk_norm": True}),
  (axial.AxialViT, SMALL | RANDOM | {"pool": "gap", "posemb": "relative"}),
  (
    mixer.Mixer,
    {
      "width": 8,
      "depth": 2,
      "tokens_mlp_dim": 6,
      "channels_mlp_dim": 12,
      "patch_size": (4, 2),
      "stochastic_depth": 0.2,
    },
  ),
  (axial_resnet.AxialResNet, {"stages": (1,)}),
  (resnet.ResNet, {"stages": (1, 1)}),
  (bit.BiT, {"stages": (1, 1)}),
  (hybrid.Hybrid, SMALL | RANDOM | {"stages": (1,), "patch_size": (1, 1)}),
)
K = 3

# Compiles the random bits of a training step in a third of the time.
QUICK = {"xla_backend_optimization_level": 0}

each_model = pytest.mark.parametrize(
  "case",
  range(len(CASES)),
  ids=[f"{c.__name__}-{k.get('pool', '')}".rstrip("-") for c, k in CASES],
)


@functools.cache
def images(case):
  """Images that the patches divide; convolutions take odd sizes too."""
  size = (35, 43) if "stages" in CASES[case][1] else (8, 4)
  return np.random.default_rng(0).normal(size=(3, *size, 3)).astype(np.float32)


def build(case, **fields):
  cls, kwargs = CASES[case]
  return cls(**({"num_classes": K} | kwargs | fields))


@functools.cache
def random_params(case):
  """Parameters without zeros, or a fresh head would hide everything."""
  shapes = jax.eval_shape(build(case).init, jax.random.key(0), images(case))
  rng = np.random.default_rng(1)
  return jax.tree.map(
    lambda x: rng.normal(0.1, 0.4, x.shape).astype(np.float32), shapes
  )


@functools.cache
def forward(case, train=False):
  return jax.jit(
    functools.partial(build(case).apply, train=train), compiler_options=QUICK
  )


def test_every_model_class_has_a_case():
  found = set()
  for module in pkgutil.iter_modules(models.__path__, f"{models.__name__}."):
    for cls in vars(importlib.import_module(module.name)).values():
      if inspect.isclass(cls) and issubclass(cls, nn.Module):
        signature = inspect.signature(cls.__call__, eval_str=True)
        if signature.return_annotation is output.ModelOutput:
          found.add(cls)
  assert found == {cls for cls, _ in CASES}


@each_model
def test_one_image_does_not_see_its_neighbours(case):
  others = images(case)[::-1] * 3.0
  others[1] = images(case)[1]
  for a, b in zip(
    forward(case)(random_params(case), images(case)),
    forward(case)(random_params(case), others),
    strict=True,
  ):
    np.testing.assert_array_equal(a[1], b[1])
    assert not np.allclose(a[0], b[0])


@each_model
def test_evaluation_needs_no_key_and_repeats_itself(case):
  first, again = (
    forward(case)(random_params(case), images(case)) for _ in range(2)
  )
  jax.tree.map(np.testing.assert_array_equal, first, again)


@each_model
def test_training_depends_on_the_key_alone(case):
  step = forward(case, train=True)
  a, b, c = (
    step(
      random_params(case), images(case), rngs={"dropout": jax.random.key(seed)}
    )
    for seed in (0, 0, 1)
  )
  jax.tree.map(np.testing.assert_array_equal, a, b)
  has_randomness = bool(RANDOM.keys() & CASES[case][1].keys())
  assert np.allclose(a.logits, c.logits) != has_randomness


@each_model
def test_jit_changes_nothing_and_numpy_parameters_stay_as_they_are(case):
  before = jax.tree.map(np.copy, random_params(case))
  plain = build(case).apply(random_params(case), images(case))
  jax.tree.map(np.testing.assert_array_equal, before, random_params(case))
  jitted = forward(case)(random_params(case), images(case))
  for a, b in zip(plain, jitted, strict=True):
    np.testing.assert_allclose(a, b, atol=3e-5)  # f32, other fusions


@each_model
def test_gradient_is_finite_and_reaches_every_parameter(case):
  # Without randomness: a block may be dropped.
  def loss(params):
    logits = build(case).apply(params, images(case)).logits
    return (nn.log_softmax(logits) ** 2).mean()

  gradient = jax.jit(jax.grad(loss), compiler_options=QUICK)
  for path, g in jax.tree_util.tree_leaves_with_path(
    gradient(random_params(case))
  ):
    name = jax.tree_util.keystr(path, simple=True, separator="/")
    assert np.isfinite(g).all(), name
    # Softmax is blind to the key's bias: its gradient is zero but for rounding.
    assert np.abs(g).max() > 0 or name.endswith("key/bias"), name


@each_model
def test_forward_promotes_no_dtype_silently(case):
  model = build(case)
  with jax.numpy_dtype_promotion("strict"):
    jax.eval_shape(
      functools.partial(model.apply, train=True),
      random_params(case),
      images(case),
      rngs={"dropout": jax.random.key(0)},
    )


@each_model
def test_bfloat16_keeps_parameters_logits_and_representation_in_float32(case):
  model = build(case, dtype="bfloat16")
  out, variables = jax.eval_shape(
    model.init_with_output, jax.random.key(0), images(case)
  )
  assert {x.dtype for x in jax.tree.leaves(variables)} == {jnp.dtype("float32")}
  assert out.logits.dtype == out.representation.dtype == jnp.float32
  assert out.tokens.dtype == jnp.bfloat16
  low = jax.jit(model.apply, compiler_options=QUICK)(
    random_params(case), images(case)
  ).logits
  high = forward(case)(random_params(case), images(case)).logits
  assert 0 < np.abs(low - high).max() < 0.1  # bf16 has 3 digits; logits near 1


@each_model
def test_model_without_classes_has_no_head(case):
  out, variables = jax.eval_shape(
    build(case, num_classes=0).init_with_output, jax.random.key(0), images(case)
  )
  with_head = forward(case).eval_shape(random_params(case), images(case))
  assert out.logits.shape == (3, 0)
  assert out.logits.dtype == jnp.float32
  assert out.representation.shape == with_head.representation.shape
  assert out.tokens.shape == with_head.tokens.shape
  assert set(random_params(case)["params"]) - set(variables["params"]) == {
    "head"
  }
