"""Axial-ViT against an independent NumPy forward pass, and its own laws."""

import functools
import operator

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.special

from vit_jax.models import axial, vit

# A rectangular image (12 x 6) of rectangular patches (4 x 3): a 3 x 2 grid.
SMALL = {
  "num_classes": 5,
  "width": 8,
  "depth": 2,
  "num_heads": 2,
  "mlp_dim": 12,
  "patch_size": (4, 3),
}
GRID = (3, 2)
IMAGE = np.random.default_rng(7).normal(size=(2, 12, 6, 3)).astype(np.float32)

QUICK = {"xla_backend_optimization_level": 0}  # Compiles in half the time.


def small(**fields):
  return axial.AxialViT(**(SMALL | fields))


def random_params(model, *, seed=0):
  """Parameters where no leaf is zero, one or symmetric."""
  shapes = jax.eval_shape(model.init, jax.random.key(0), IMAGE)["params"]
  rng = np.random.default_rng(seed)
  return jax.tree.map(
    lambda x: rng.normal(0.1, 0.4, x.shape).astype(np.float32), shapes
  )


def apply(model, params, image):
  f = jax.jit(model.apply, compiler_options=QUICK)
  return f({"params": params}, image)


# The NumPy model: float64, one example, one block and one token at a time.


def np_norm(p, x):
  x = x - x.mean(axis=-1, keepdims=True)
  x = x / np.sqrt((x**2).mean(-1, keepdims=True) + 1e-6)
  return x * p["scale"] + p["bias"]


def np_dense(p, x):
  return x @ p["kernel"] + p["bias"]


def np_block(p, x, axis):
  """Returns [h, w, D] of it; each token sees its line along `axis`."""
  y = np_norm(p["norm1"], x)
  a, attended = p["attention"], np.zeros(x.shape)
  for i in np.ndindex(x.shape[:2]):
    line = y[i[0]] if axis == 1 else y[:, i[1]]  # [n, D]
    for h in range(SMALL["num_heads"]):
      q = y[i] @ a["query"]["kernel"][:, h] + a["query"]["bias"][h]
      k = line @ a["key"]["kernel"][:, h] + a["key"]["bias"][h]
      v = line @ a["value"]["kernel"][:, h] + a["value"]["bias"][h]
      logits = k @ q
      if "relative_posemb" in a:
        offsets = np.arange(len(line)) - i[axis] + len(line) - 1
        logits = logits + a["relative_posemb"][offsets] @ q
      weights = scipy.special.softmax(logits / np.sqrt(len(q)))
      attended[i] += weights @ v @ a["out"]["kernel"][h]
  x = x + p.get("layer_scale1", 1.0) * (attended + a["out"]["bias"])
  y = np_dense(p["mlp"]["fc1"], np_norm(p["norm2"], x))
  y = y * (1 + np.tanh(np.sqrt(2 / np.pi) * (y + 0.044715 * y**3))) / 2
  return x + p.get("layer_scale2", 1.0) * np_dense(p["mlp"]["fc2"], y)


def np_axial(model, params, image):
  """Returns logits, representation and tokens of one image."""
  p = jax.tree.map(np.float64, params)
  patches = image.reshape(3, 4, 2, 3, 3)  # h, Ph, w, Pw, C
  x = np.einsum("hywxc,yxcd->hwd", patches, p["patch_embed"]["kernel"])
  x = x + p["patch_embed"]["bias"]
  stem = p["posemb"].reshape(x.shape) if "posemb" in p else 0.0
  shared = model.posemb_at == "every_layer_shared"
  x = x if shared else x + stem
  for i in range(model.depth):
    b = jax.tree.map(operator.itemgetter(i), p["encoder"]["blocks"])
    b = b | {"posemb": b["row"]["posemb"]} if "posemb" in b["row"] else b
    x = x + b["posemb"].reshape(x.shape) if "posemb" in b else x
    x = x + stem if shared else x
    x = np_block(b["row"], x, axis=1)
    x = np_block(b["column"], x, axis=0)
  tokens = np_norm(p["encoder"]["norm"], x).reshape(-1, x.shape[-1])
  pooled = tokens.mean(axis=0)
  return np_dense(p["head"], pooled), pooled, tokens


@pytest.mark.parametrize(
  "fields",
  [
    {"posemb": "relative", "layer_scale": 0.1, "scan_unroll": 2},
    {"posemb_at": "every_layer"},
    pytest.param({"posemb_at": "every_layer_shared"}, marks=pytest.mark.slow),
    pytest.param({}, marks=pytest.mark.slow),
  ],
  ids=str,
)
def test_forward_equals_numpy(fields):
  model = small(**fields)
  params = random_params(model)
  out = apply(model, params, IMAGE)
  for i, image in enumerate(IMAGE):
    expected = np_axial(model, params, image)
    for actual, wanted in zip(out, expected, strict=True):
      # f32 through 4 blocks of weights up to 1.5.
      np.testing.assert_allclose(actual[i], wanted, atol=2e-5)


def reached(block, *arguments):
  """Returns, for a grid, where a change of row 1, column 1 arrives."""
  rng = np.random.default_rng(0)
  x = rng.normal(size=(1, 6, 8)).astype(np.float32)
  changed = x.copy()
  changed[0, 3, 0] += 1.0
  shapes = jax.eval_shape(lambda: block.init(jax.random.key(0), x, *arguments))
  params = jax.tree.map(
    lambda s: rng.normal(size=s.shape).astype(s.dtype), shapes
  )

  @functools.partial(jax.jit, compiler_options=QUICK)
  def f(x):
    return jax.tree.leaves(block.apply(params, x, *arguments))[0]

  return np.abs(f(changed) - f(x)).max(axis=-1).reshape(GRID) > 1e-4


def test_a_row_block_reaches_its_row_and_the_pair_the_whole_grid():
  row = axial.RowBlock(num_heads=2, mlp_dim=12)
  pair = axial.AxialPair(num_heads=2, mlp_dim=12)
  rate = jnp.zeros(())
  only_row = [[False, False], [True, True], [False, False]]
  np.testing.assert_array_equal(reached(row, rate, False, GRID, None), only_row)
  assert reached(pair, rate, False, GRID, None).all()


@pytest.mark.parametrize(
  ("variant", "count"),
  # ViT with "gap", and once more 12 blocks of 7,087,872.
  [("B/16", 171_620_584), ("B/32", 173_277_160)],
)
def test_count_is_that_of_a_vit_of_twice_the_depth(variant, count):
  model = axial.AxialViT(**vit.sizes(variant), num_classes=1000)
  image = jax.ShapeDtypeStruct((1, 224, 224, 3), np.float32)
  params = jax.eval_shape(model.init, jax.random.key(0), image)["params"]
  assert sum(x.size for x in jax.tree.leaves(params)) == count


def test_parameters_of_rows_and_columns_are_stacked_over_the_depth():
  model = small(posemb="relative", pool="map", layer_scale=0.1)
  params = jax.eval_shape(model.init, jax.random.key(0), IMAGE)["params"]
  assert params.keys() == {"patch_embed", "encoder", "map_head", "head"}
  blocks = params["encoder"]["blocks"]
  assert blocks.keys() == {"row", "column"}
  assert {x.shape[0] for x in jax.tree.leaves(blocks)} == {2}
  for name, length in (("row", 2), ("column", 3)):
    table = blocks[name]["attention"]["relative_posemb"]
    assert table.shape == (2, 2 * length - 1, 4)


def test_stochastic_depth_drops_whole_examples():
  # Residuals of the second pair add 0.5, 1, 2 and 4, doubled if kept.
  model = small(stochastic_depth=0.5, posemb="none")
  shapes = jax.eval_shape(model.init, jax.random.key(0), IMAGE)["params"]
  params = jax.tree.map(lambda x: np.zeros(x.shape, x.dtype), shapes)
  blocks = params["encoder"]["blocks"]
  for name, size in (("row", 0.5), ("column", 2.0)):
    blocks[name]["attention"]["out"]["bias"][1] = size
    blocks[name]["mlp"]["fc2"]["bias"][1] = 2 * size

  def last_block(key):
    _, seen = model.apply(
      {"params": params},
      jnp.zeros((1024, 12, 6, 3)),
      train=True,
      rngs={"dropout": key},
      mutable=["blocks"],
    )
    return seen["blocks"]["encoder"]["blocks"]["tokens"][0][-1]  # [B, N, D]

  f = jax.jit(last_block, compiler_options=QUICK)
  x = np.asarray(f(jax.random.key(0)))
  np.testing.assert_array_equal(x, x[:, :1, :1] * np.ones_like(x))
  bits = x[:, :1, 0].astype(int) >> np.arange(4) & 1  # [B, 4]
  # 4 sigma of 1024 draws at 1/2 is 0.063.
  np.testing.assert_allclose(bits.mean(axis=0), 0.5, atol=0.063)
  correlation = np.corrcoef(bits.T) - np.eye(4)
  assert np.abs(correlation).max() < 0.125  # 4 sigma of 1024 draws


@pytest.mark.parametrize(
  ("fields", "message"),
  [
    ({"pool": "cls"}, "pool: got 'cls'; an axial model has no class token, wh"),
    ({"pool": "cls_gap"}, r'pool: got \'cls_gap\';.* Use "gap" or "map"'),
    ({"num_registers": 4}, "num_registers: got 4; must be 0: a register would"),
    ({"depth": 0}, "depth: got 0; must be at least 1"),
  ],
  ids=str,
)
def test_fields_that_make_no_model_are_named(fields, message):
  with pytest.raises(ValueError, match=message):
    small(**fields)


@pytest.mark.parametrize(
  ("posemb", "match"),
  [
    ("learned", "a grid of 6x2 patches, which needs 12 .* trained on 6"),
    ("relative", "posemb: got 6 tokens; .* trained on 3"),
  ],
)
def test_image_of_another_grid_is_refused(posemb, match):
  model = small(posemb=posemb)
  params = random_params(model)
  with pytest.raises(ValueError, match=match):
    model.apply({"params": params}, jnp.zeros((1, 24, 6, 3)))
