"""The .npz of vision_transformer, from its documented names and in NumPy."""

import logging
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from tests.weights import google_files
from vit_jax import spec
from vit_jax.data import transforms
from vit_jax.models import axial, hybrid, resnet, vit
from vit_jax.weights import (
  adapt,
  big_vision,
  bit,
  google,
  layout,
  mixer,
  official,
  tensors,
)
from vit_jax.weights import card as card_lib

IMAGE = np.random.default_rng(7).uniform(-1, 1, (2, 12, 12, 3))
IMAGE = IMAGE.astype(np.float32)
MAP_IMAGE = np.random.default_rng(8).uniform(-1, 1, (1, 24, 24, 3))
MAP_IMAGE = MAP_IMAGE.astype(np.float32)
POSEMB = google_files.OFFICIAL_POSEMB


def small(*, rows=10, layers=google_files.BEFORE_LINEN, **fields):
  """Shapes of a ViT of 3 x 3 patches of 4 pixels."""
  sizes: dict[str, Any]
  sizes = {"patch": 4, "d": 12, "depth": 3, "heads": 3, "mlp": 20}
  sizes |= fields
  shapes = google_files.vit_shapes(
    **sizes, posemb=(POSEMB, rows), layers=layers
  )
  return shapes | google_files.head_shapes(fields.get("rep") or 12, 5)


def small_hybrid():
  """Shapes of a hybrid that makes 3 x 3 cells of 24 pixels."""
  vit_part = small(patch=1, channels=512)
  return vit_part | google_files.trunk_shapes((2, 1))


VITS = {
  "class token and tanh layer": {"rep": 8},
  "average": {"cls": False, "rows": 9},
  "names of Linen": {"layers": google_files.LINEN},
}


def model_card(model_class=vit.ViT, **fields):
  sizes = {"width": 12, "depth": 3, "num_heads": 3, "mlp_dim": 20}
  if model_class is not resnet.ResNet:
    fields = sizes | {"patch_size": (4, 4)} | fields
  model = spec.spec(model_class, num_classes=5, **fields)
  return google.card(model, (12, 12), num_channels=3)


def draw_params(card, *, seed=0):
  shapes = adapt.param_shapes(card.build_model(), (12, 12, 3))
  return google_files.draw(shapes, seed=seed)


@pytest.mark.parametrize("fields", VITS.values(), ids=VITS.keys())
def test_file_written_from_the_documentation_gives_the_logits_of_numpy(
  tmp_path, fields
):
  arrays = google_files.draw(small(**fields))
  opened = google_files.write(tmp_path / "vit.npz", arrays)
  model, params, card = google_files.load(official, opened)
  expected = google_files.forward(
    arrays, IMAGE, layers=fields.get("layers", google_files.BEFORE_LINEN)
  )
  actual = google_files.logits(model, params, IMAGE)
  np.testing.assert_allclose(actual, expected, atol=2e-6)  # f32, 3 blocks
  assert card.image_size == (12, 12)


@pytest.mark.parametrize("old", [False, True], ids=["[C]", "[1, 1, 1, C]"])
def test_hybrid_written_from_the_documentation_gives_the_logits_of_numpy(
  tmp_path, old
):
  arrays = google_files.draw(small_hybrid())
  file = {
    name: x.reshape(1, 1, 1, -1) if old and "gn" in name else x
    for name, x in arrays.items()
  }
  opened = google_files.write(tmp_path / "hybrid.npz", file)
  model, params, card = google_files.load(official, opened)
  assert isinstance(model, hybrid.Hybrid)
  assert (model.stages, model.width_factor) == ((2, 1), 1)
  assert card.image_size == (24, 24)  # 3 cells of 8 pixels
  again = google_files.save(official, params, card)
  assert {name: x.shape for name, x in again.items()} == small_hybrid()
  if not old:
    expected = google_files.forward(
      arrays, MAP_IMAGE, layers=google_files.BEFORE_LINEN, stages=(2, 1)
    )
    actual = google_files.logits(model, params, MAP_IMAGE)
    np.testing.assert_allclose(actual, expected, atol=1e-5)  # f32, 8 convs
  for name, x in again.items():
    np.testing.assert_array_equal(x, arrays[name], name)


@pytest.mark.parametrize("fields", VITS.values(), ids=VITS.keys())
def test_what_is_written_has_the_documented_names_and_shapes(fields):
  fields = fields | {"layers": google_files.BEFORE_LINEN}
  arrays = google_files.draw(small(**fields))
  _, params, card = google_files.load(official, tensors.from_arrays(arrays))
  again = google_files.save(official, params, card)
  assert {name: x.shape for name, x in again.items()} == small(**fields)
  for name, x in again.items():
    np.testing.assert_array_equal(x, arrays[name], name)


@pytest.mark.parametrize(
  ("variant", "sizes", "count"),
  [
    ("B/16", (16, 768, 12, 12, 3072), 86_567_656),
    ("L/16", (16, 1024, 24, 16, 4096), 304_326_632),
    ("R50+B/16", (1, 768, 12, 12, 3072), 98_659_112),
  ],
)
def test_published_sizes_have_the_documented_names_and_shapes(
  variant, sizes, count
):
  patch, d, depth, heads, mlp = sizes
  is_hybrid = variant.startswith("R")
  expected = google_files.vit_shapes(
    patch=patch,
    d=d,
    depth=depth,
    heads=heads,
    mlp=mlp,
    posemb=(POSEMB, 197),
    layers=google_files.BEFORE_LINEN,
    channels=1024 if is_hybrid else 3,
  )
  expected |= google_files.head_shapes(d, 1000)
  model_class, fields = vit.ViT, vit.sizes
  if is_hybrid:
    expected |= google_files.trunk_shapes((3, 4, 9))
    model_class, fields = hybrid.Hybrid, hybrid.sizes
  model = spec.spec(model_class, num_classes=1000, **fields(variant))
  card = google.card(model, (224, 224), num_channels=3)
  shapes = adapt.param_shapes(card.build_model(), (224, 224, 3))
  written = layout.expected_shapes(official.rules(card, shapes, {}), shapes)
  assert written == expected
  assert sum(np.prod(shape) for shape in written.values()) == count


def test_stem_without_stages_is_the_hybrid_of_stride_32():
  shapes = small(patch=8, channels=64, rows=50)
  shapes |= google_files.trunk_shapes(())
  arrays = google_files.draw(shapes)
  card = official.describe(tensors.from_arrays(arrays), {})
  assert card.model["stages"] == ()
  assert card.image_size == (224, 224)  # As R+Ti/16: 7 cells of 4 * 8 pixels.


def test_card_says_what_the_arrays_do():
  arrays = google_files.draw(small(rep=8))
  card = official.describe(tensors.from_arrays(arrays), {})
  fields = {
    "fn": vit.ViT,
    "num_classes": 5,
    "width": 12,
    "depth": 3,
    "num_heads": 3,
    "mlp_dim": 20,
    "patch_size": (4, 4),
    "representation_size": 8,
    "pool": "cls",
    "posemb": "learned",
    "activation": "gelu_tanh",
    "norm_epsilon": 1e-6,
  }
  assert {name: card.model[name] for name in fields} == fields
  assert card.num_channels == 3
  resize = spec.spec(transforms.resize, size=(12, 12))
  assert card.transform == spec.as_dict(resize)
  normalize = spec.build(card.normalize)
  pixels = np.array([[0, 127.5, 255]])
  np.testing.assert_array_equal(normalize(pixels), [[-1, 0, 1]])
  assert official.sidecars(card) == {}


def test_file_without_a_head_has_no_classes():
  arrays = google_files.draw(small(rep=8))
  del arrays["head/kernel"], arrays["head/bias"]
  _, params, card = google_files.load(official, tensors.from_arrays(arrays))
  assert card.model["num_classes"] == 0
  assert card.model["representation_size"] == 8
  assert "head/kernel" not in params


def test_grid_that_is_no_square_needs_the_image_size():
  arrays = google_files.draw(small(rows=1 + 6))
  opened = tensors.from_arrays(arrays)
  with pytest.raises(ValueError, match=r"image_size: got weights for 6 patch"):
    official.describe(opened, {})
  _, params, card = google_files.load(official, opened, image_size=(8, 12))
  assert card.image_size == (8, 12)
  np.testing.assert_array_equal(params["posemb"], arrays[POSEMB][:, 1:])


def test_arrays_of_bfloat16_are_read_by_their_bits(tmp_path):
  arrays = {
    name: x.astype(ml_dtypes.bfloat16)
    for name, x in google_files.draw(small()).items()
  }
  opened = google_files.write(tmp_path / "vit.npz", arrays)
  _, params, _ = google_files.load(official, opened)
  assert params["cls"].dtype == np.float32
  for path, name in {
    "cls": "cls",
    "patch_embed/bias": "embedding/bias",
  }.items():
    np.testing.assert_array_equal(params[path], np.float32(arrays[name]))


@pytest.mark.parametrize(
  "fields",
  [{}, {"cls_posemb": False}, {"pool": "gap"}, {"posemb": "none"}],
  ids=str,
)
def test_round_trip_is_bit_equal(tmp_path, fields):
  card = model_card(**fields)
  params = draw_params(card)
  arrays = google_files.save(official, params, card)
  tensors.write_npz(tmp_path / "vit.npz", arrays)
  opened = tensors.open_npz(tmp_path / "vit.npz")
  assert official.recognises(opened, {})
  shapes = {path: x.shape for path, x in params.items()}
  again = layout.read(
    opened, official.rules(card, shapes, opened.shapes), shapes
  )
  for path, x in params.items():
    np.testing.assert_array_equal(again[path], x, path)


def test_class_token_without_a_position_is_written_with_zeros():
  card = model_card(cls_posemb=False)
  arrays = google_files.save(official, draw_params(card), card)
  assert arrays[POSEMB].shape == (1, 10, 12)
  assert not arrays[POSEMB][:, 0].any() and arrays[POSEMB][:, 1:].all()


@pytest.mark.parametrize(
  ("fields", "message"),
  [
    ({"pool": "map"}, r"'npz' for pool='map'; it holds \['cls', 'gap'\]"),
    ({"posemb": "sincos2d"}, "'npz' for posemb='sincos2d'"),
    ({"posemb": "relative"}, "'npz' for posemb='relative'"),
    (
      {"posemb_at": "every_layer_shared"},
      "'npz' for posemb_at='every_layer_shared'",
    ),
    ({"pool": "gap", "norm_after_pool": True}, "for norm_after_pool=True"),
    ({"num_registers": 2}, r"for a model with \['registers'\]"),
    ({"layer_scale": 0.1}, "blocks/layer_scale1', 'encoder/blocks/layer_sc"),
    ({"qk_norm": True}, "attention/key_norm/bias"),
    ({"activation": "swiglu"}, "mlp/gate/kernel"),
    ({"model_class": axial.AxialViT}, "'npz' for AxialViT; it holds"),
    (
      {"model_class": resnet.ResNet, "stages": ()},
      r"'npz' for ResNet; it holds \['ViT', 'Hybrid'\]. Use another",
    ),
  ],
  ids=str,
)
def test_model_that_the_format_cannot_hold_is_refused(fields, message):
  card = model_card(**fields)
  shapes = adapt.param_shapes(card.build_model(), (12, 12, 3))
  with pytest.raises(ValueError, match=message):
    official.rules(card, shapes, {})


def test_what_other_readers_assume_otherwise_is_logged_once_written(caplog):
  card = model_card(activation="gelu_erf")
  params = draw_params(card)
  with caplog.at_level(logging.WARNING):
    arrays = google_files.save(official, params, card)
  assert "assume 'gelu_tanh'" in caplog.text
  caplog.clear()
  plain = card_lib.edit_model(card, activation="gelu_tanh")
  google_files.save(official, params, plain)
  google_files.load(official, tensors.from_arrays(arrays))
  assert not caplog.text


def test_arrays_that_make_no_whole_model_are_listed_together():
  arrays = google_files.draw(small())
  block = "Transformer/encoderblock_1"
  arrays["head/kernel"] = arrays["head/kernel"].T
  arrays["extra"] = np.zeros(3)
  arrays[f"{block}/LayerNorm_7/scale"] = arrays.pop(
    f"{block}/LayerNorm_2/scale"
  )
  with pytest.raises(ValueError) as error:
    google_files.load(official, tensors.from_arrays(arrays))
  lines = str(error.value).splitlines()[1:]
  assert [line.strip() for line in lines] == [
    f"missing: {block}/LayerNorm_2/scale (12,)",
    "unexpected: extra (3,)",
    f"unexpected: {block}/LayerNorm_7/scale (12,)",
    "shape: head/kernel is (5, 12); expected (12, 5)",
  ]


def test_file_without_what_tells_the_sizes_is_refused():
  arrays = google_files.draw(small())
  cut = {k: x for k, x in arrays.items() if "MlpBlock" not in k}
  with pytest.raises(ValueError, match=r"none of them has a name like .*Dense"):
    official.describe(tensors.from_arrays(cut), {})


def test_each_format_recognises_its_own_files_alone():
  files = {
    official: small(),
    big_vision: {f"params/{name}": x for name, x in small().items()},
    bit: {"resnet/root_block/standardized_conv2d/kernel": (7, 7, 3, 64)},
    mixer: {"stem/kernel": (4, 4, 3, 8), "pre_head_layer_norm/scale": (8,)},
  }
  for one, shapes in files.items():
    opened = tensors.from_arrays(google_files.draw(shapes))
    assert [fmt for fmt in files if fmt.recognises(opened, {})] == [one]
