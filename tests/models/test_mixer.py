"""MLP-Mixer against an independent NumPy forward pass, and its own laws."""

import operator
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from vit_jax.models import mixer

# A rectangular image (12 x 6) of rectangular patches (4 x 3): a 3 x 2 grid.
SMALL = {
  "num_classes": 5,
  "width": 8,
  "depth": 3,
  "tokens_mlp_dim": 7,
  "channels_mlp_dim": 12,
  "patch_size": (4, 3),
}
IMAGE = np.random.default_rng(7).normal(size=(2, 12, 6, 3)).astype(np.float32)

QUICK = {"xla_backend_optimization_level": 0}  # Compiles in half the time.


def small(**fields):
  return mixer.Mixer(**(SMALL | fields))


def random_params(model, *, seed=0):
  """Parameters where no leaf is zero, one or symmetric."""
  shapes = jax.eval_shape(model.init, jax.random.key(0), IMAGE)["params"]
  rng = np.random.default_rng(seed)
  return jax.tree.map(
    lambda x: rng.normal(0.1, 0.4, x.shape).astype(np.float32), shapes
  )


# The NumPy model: float64, one example and one block at a time.


def np_norm(p, x, epsilon):
  x = x - x.mean(axis=-1, keepdims=True)
  x = x / np.sqrt((x**2).mean(-1, keepdims=True) + epsilon)
  return x * p["scale"] + p["bias"]


def np_mlp(p, x):
  y = x @ p["fc1"]["kernel"] + p["fc1"]["bias"]
  y = y * (1 + np.tanh(np.sqrt(2 / np.pi) * (y + 0.044715 * y**3))) / 2
  return y @ p["fc2"]["kernel"] + p["fc2"]["bias"]


def np_mixer(model, params, image):
  """Returns logits, representation and tokens of one image."""
  p, eps = jax.tree.map(np.float64, params), model.norm_epsilon
  (ph, pw), x = model.patch_size, []
  for top in range(0, image.shape[0], ph):
    for left in range(0, image.shape[1], pw):
      patch = image[top : top + ph, left : left + pw]
      x.append(np.einsum("hwc,hwcd->d", patch, p["patch_embed"]["kernel"]))
  x = np.stack(x) + p["patch_embed"]["bias"]
  for i in range(model.depth):
    b = jax.tree.map(operator.itemgetter(i), p["encoder"]["blocks"])
    x = x + np_mlp(b["token_mlp"], np_norm(b["norm1"], x, eps).T).T
    x = x + np_mlp(b["channel_mlp"], np_norm(b["norm2"], x, eps))
  tokens = np_norm(p["encoder"]["norm"], x, eps)
  pooled = tokens.mean(axis=0)
  return pooled @ p["head"]["kernel"] + p["head"]["bias"], pooled, tokens


@pytest.mark.parametrize(
  "fields", [{"norm_epsilon": 0.1}, {"scan_unroll": 3}], ids=str
)
def test_forward_equals_numpy(fields):
  model = small(**fields)
  params = random_params(model)
  out = jax.jit(model.apply, compiler_options=QUICK)({"params": params}, IMAGE)
  for i, image in enumerate(IMAGE):
    expected = np_mixer(model, params, image)
    for actual, wanted in zip(out, expected, strict=True):
      # f32 through 3 blocks of weights up to 1.5.
      np.testing.assert_allclose(actual[i], wanted, atol=2e-5)


@pytest.mark.parametrize(
  ("variant", "num_classes", "count"),
  [
    ("B/16", 1000, 59_880_472),
    ("B/32", 1000, 60_293_428),
    ("L/16", 1000, 208_196_168),
  ],
)
def test_count_equals_vision_transformer(variant, num_classes, count):
  assert count_params(variant, num_classes=num_classes) == count


@pytest.mark.parametrize(
  ("variant", "millions"),
  [
    *(("S/32", 19), ("S/16", 18), ("B/32", 60), ("B/16", 59)),
    *(("L/32", 206), ("L/16", 207), ("H/14", 431)),
  ],
)
def test_count_without_a_head_rounds_to_the_papers(variant, millions):
  # Table 1 of arXiv:2105.01601.
  assert round(count_params(variant, num_classes=0) / 1e6) == millions


def count_params(variant, *, num_classes):
  model = mixer.Mixer(**mixer.sizes(variant), num_classes=num_classes)
  image = jax.ShapeDtypeStruct((1, 224, 224, 3), np.float32)
  params = jax.eval_shape(model.init, jax.random.key(0), image)["params"]
  return sum(x.size for x in jax.tree.leaves(params))


def test_initial_values_are_the_published_ones():
  model = small(
    width=128, tokens_mlp_dim=96, channels_mlp_dim=256, head_bias_init=-10.0
  )
  init = jax.jit(model.init, compiler_options=QUICK)
  params = init(jax.random.key(0), IMAGE)["params"]
  blocks = params["encoder"]["blocks"]
  for mlp, fan_in, hidden in (
    ("token_mlp", 6, 96),
    ("channel_mlp", 128, 256),
  ):
    fc1, fc2 = blocks[mlp]["fc1"], blocks[mlp]["fc2"]
    # 1,728 draws, the fewest here, estimate a deviation to 2 % (1 sigma).
    np.testing.assert_allclose(fc1["kernel"].std(), fan_in**-0.5, rtol=0.08)
    np.testing.assert_allclose(fc2["kernel"].std(), hidden**-0.5, rtol=0.08)
    assert not fc1["bias"].any() and not fc2["bias"].any()
    assert not np.allclose(fc1["kernel"][0], fc1["kernel"][1])
  assert not params["head"]["kernel"].any()
  np.testing.assert_array_equal(params["head"]["bias"], np.full(5, -10.0))


def test_stochastic_depth_spares_the_first_block_and_keeps_the_mean():
  # One block of two at rate 1/2, whose two MLPs add 1 and 2 if kept.
  model = small(depth=2, stochastic_depth=0.5)
  shapes = jax.eval_shape(model.init, jax.random.key(0), IMAGE)["params"]
  params = jax.tree.map(lambda x: np.zeros(x.shape, x.dtype), shapes)
  blocks = params["encoder"]["blocks"]
  blocks["token_mlp"]["fc2"]["bias"] += np.array([[4], [0.5]], np.float32)
  blocks["channel_mlp"]["fc2"]["bias"] += np.array([[8], [1]], np.float32)

  def last_block(key):
    _, seen = model.apply(
      {"params": params},
      jnp.zeros((4096, 12, 6, 3)),
      train=True,
      rngs={"dropout": key},
      mutable=["blocks"],
    )
    return seen["blocks"]["encoder"]["blocks"]["tokens"][0][-1]  # [B, N, D]

  f = jax.jit(last_block, compiler_options=QUICK)
  x = np.asarray(f(jax.random.key(0)))
  np.testing.assert_array_equal(x, x[:, :1, :1] * np.ones_like(x))
  values, counts = np.unique(x[:, 0, 0], return_counts=True)
  np.testing.assert_array_equal(values, [12, 13, 14, 15])
  # 4 sigma of 4096 draws at 1/4 is 0.027.
  np.testing.assert_allclose(counts / 4096, 0.25, atol=0.027)


def test_image_of_another_grid_is_refused():
  model = small()
  params = random_params(model)
  match = "image: got a grid of 6x2 patches, 12 in all; .* trained on 6. Use"
  with pytest.raises(ValueError, match=match):
    model.apply({"params": params}, jnp.zeros((1, 24, 6, 3)))


@pytest.mark.parametrize(
  ("fields", "message"),
  [
    ({"tokens_mlp_dim": 0}, "tokens_mlp_dim: got 0; must be at least 1"),
    ({"num_classes": -1}, "num_classes: got -1; must be at least 0"),
    ({"stochastic_depth": 1.0}, r"stochastic_depth: got 1.0; must be in"),
    ({"dtype": "bf16"}, "Did you mean 'bfloat16'"),
    ({"patch_size": (16,)}, r"patch_size: got \(16,\); must be \(height"),
    ({"norm_epsilon": 0.0}, r"norm_epsilon: got 0.0; must be > 0"),
    ({"depth": 0, "width": 0}, r"width: got 0.*\n.*depth: got 0"),
  ],
  ids=str,
)
def test_fields_that_make_no_model_are_named(fields, message):
  with pytest.raises(ValueError, match=message):
    small(**fields)


@pytest.mark.parametrize("variant", ["b/16", "B", "B/0", "Mixer-B/16"])
def test_unknown_variant_lists_the_known(variant):
  message = f"variant: got {variant!r}; must be NAME/PATCH with a NAME of ['S'"
  with pytest.raises(ValueError, match=re.escape(message)):
    mixer.sizes(variant)
