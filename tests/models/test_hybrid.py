"""Hybrids: a ViT, tested elsewhere, on a feature map that NumPy makes."""

import functools
from typing import Any

import jax
import numpy as np
import pytest

from tests.models import numpy_convnet
from vit_jax.models import features, hybrid, vit

QUICK = {"xla_backend_optimization_level": 0}  # Compiles in half the time.

VIT: dict[str, Any] = {
  "num_classes": 5,
  "width": 8,
  "depth": 2,
  "num_heads": 2,
  "mlp_dim": 12,
}
STEM: dict[str, Any] = VIT | {"stages": ()}
ODD = np.random.default_rng(7).normal(size=(2, 35, 43, 3)).astype(np.float32)
# 9 x 10 cells of a stem.
EVEN = np.random.default_rng(8).normal(size=(2, 36, 40, 3)).astype(np.float32)


def small(**fields):
  return hybrid.Hybrid(**(STEM | fields))


def random_params(model, image, *, seed=0):
  """Parameters where no leaf is zero, one or symmetric."""
  shapes = jax.eval_shape(model.init, jax.random.key(0), image)["params"]
  rng = np.random.default_rng(seed)
  return jax.tree.map(
    lambda x: rng.normal(0.1, 0.4, x.shape).astype(np.float32), shapes
  )


@pytest.mark.parametrize(
  ("fields", "image", "grid"),
  [
    ({"stages": (2, 1)}, ODD, (5, 6)),
    ({"patch_size": (3, 2), "pool": "map", "posemb": "sincos2d"}, EVEN, (3, 5)),
  ],
  ids=["units", "stem"],
)
def test_hybrid_is_a_vit_of_the_map_that_numpy_makes(fields, image, grid):
  model = small(**fields)
  params = random_params(model, image)
  f = jax.jit(model.apply, compiler_options=QUICK)
  out = f({"params": params}, image)
  assert model.grid(image.shape[1:3]) == grid
  assert out.tokens.shape == (2, grid[0] * grid[1], 8)

  trunk = jax.tree.map(np.float64, params.pop("trunk"))
  maps = [numpy_convnet.resnet(trunk, x, stages=model.stages) for x in image]
  fields = {"patch_size": (1, 1)} | fields
  fields.pop("stages", None)
  plain = jax.jit(vit.ViT(**VIT | fields).apply, compiler_options=QUICK)
  expected = plain({"params": params}, np.array(maps, np.float32))
  for actual, wanted in zip(out, expected, strict=True):
    # f32 through 10 convolutions, then sums over up to 512 channels.
    np.testing.assert_allclose(actual, wanted, atol=5e-5)


def test_parameters_are_those_of_a_vit_and_a_trunk():
  model = small(stages=(1, 1), width_factor=2)
  params = jax.eval_shape(model.init, jax.random.key(0), ODD)["params"]
  assert params.keys() == {
    *("trunk", "patch_embed", "cls", "cls_posemb", "posemb", "encoder", "head")
  }
  assert params["trunk"].keys() == {"root", "stage1", "stage2"}
  assert params["patch_embed"]["kernel"].shape == (1, 1, 1024, 8)
  assert params["posemb"].shape == (1, 30, 8)


@pytest.mark.parametrize(
  ("variant", "small_grid", "large_grid", "channels"),
  [
    ("R+Ti/16", 7, 12, 64),
    ("R26+S/32", 7, 12, 2048),
    ("R26+B/32", 7, 12, 2048),
    ("R50+B/16", 14, 24, 1024),
    ("R50+L/16", 14, 24, 1024),
    ("R50+B/32", 7, 12, 2048),
    ("R50+L/32", 7, 12, 2048),
  ],
)
def test_variants_have_the_published_grids(
  variant, small_grid, large_grid, channels
):
  model = hybrid.Hybrid(**hybrid.sizes(variant), num_classes=0)
  assert model.grid((224, 224)) == (small_grid, small_grid)
  assert model.grid((384, 224)) == (large_grid, small_grid)
  stages = len(model.stages)
  assert channels == (256 * 2 ** (stages - 1) if stages else 64)


def test_sizes_are_the_arguments_of_hybrid():
  assert hybrid.sizes("R+Ti/16") == {
    "patch_size": (8, 8),
    "width": 192,
    "depth": 12,
    "mlp_dim": 768,
    "num_heads": 3,
    "stages": (),
    "width_factor": 1,
  }
  assert hybrid.sizes("R50+B/16")["stages"] == (3, 4, 9)


def test_unknown_variant_suggests_the_closest():
  match = r"variant: got 'R50x1\+B/16'; must be .* Did you mean 'R50\+B/16'\?"
  with pytest.raises(ValueError, match=match):
    hybrid.sizes("R50x1+B/16")


def test_attention_of_a_hybrid_can_be_looked_at():
  model = small(patch_size=(3, 2))
  seen = jax.eval_shape(
    functools.partial(features.extract, model, attention=[-1]),
    random_params(model, EVEN),
    EVEN,
  )
  assert seen.attention[-1].shape == (2, 2, 16, 16)


@pytest.mark.parametrize(
  ("image", "match"),
  [
    (EVEN[0], r"image: got shape \(36, 40, 3\); must be \[B, H, W, C\]"),
    (EVEN.astype(np.uint8), "image: got dtype uint8; must be floating"),
    (EVEN[..., :1], r"3 channels and takes \[B, H, W, 3\]"),
    (
      EVEN[:, :29],
      r"got height 29 in shape \(2, 29, 40, 3\); the ResNet makes 8 cells of "
      "it, which must be a multiple of the patch height 3. Use 24 or 36 pixels",
    ),
    (EVEN[:, :, :4], "makes 1 cells .* patch width 2. Use 8 pixels"),
    (EVEN[:, :24], "posemb: got a grid of 2x5 patches, .* trained on 15"),
  ],
  ids=["rank", "dtype", "channels", "height", "width", "grid"],
)
def test_image_that_does_not_fit_is_refused(image, match):
  model = small(patch_size=(3, 2))
  f = functools.partial(model.apply, {"params": random_params(model, EVEN)})
  with pytest.raises(ValueError, match=match):
    jax.eval_shape(f, image)


@pytest.mark.parametrize(
  ("fields", "message"),
  [
    ({"stages": (3, 0)}, r"stages: got \(3, 0\); each must have at least 1"),
    ({"width_factor": 0}, "width_factor: got 0; must be at least 1"),
    ({"depth": 0}, "depth: got 0; must be at least 1"),
  ],
  ids=str,
)
def test_fields_that_make_no_model_are_named(fields, message):
  with pytest.raises(ValueError, match=message):
    small(**fields)
