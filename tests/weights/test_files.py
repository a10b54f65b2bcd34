"""Weights through files: every format, what is refused, what a card keeps."""

import dataclasses
import json

import numpy as np
import pytest
from flax import traverse_util

import vit_jax
from tests.tiny_weights import (
  CARD,
  FORMATS,
  IMAGE,
  logits,
  random_flat,
  random_params,
  save,
)
from vit_jax import weights
from vit_jax.weights import card, tensors


@pytest.mark.parametrize("format", FORMATS)
def test_what_is_saved_loads_as_it_was(tmp_path, format):
  # big_vision has no position of the class token: there it is folded into cls.
  fields = {"cls_posemb": False} if format == "big_vision" else {}
  path = save(tmp_path, format, **fields)
  model, params, read = weights.load(path)
  assert model == card.edit_model(CARD, **fields).build_model()
  flat = traverse_util.flatten_dict(params, sep="/")
  assert flat.keys() == random_flat(**fields).keys()
  for name, value in random_flat(**fields).items():
    np.testing.assert_array_equal(flat[name], value, err_msg=name)
  assert read == dataclasses.replace(
    card.edit_model(CARD, **fields), origin=str(path), history=read.history
  )


@pytest.mark.parametrize("format", FORMATS)
def test_file_without_its_card_describes_itself(tmp_path, format):
  path = save(tmp_path, format, activation="gelu_erf")
  for file in tmp_path.rglob("*card.json"):
    file.unlink()
  # A square of patches tells its size; what .npz files leave open is the
  # published way.
  model, params, read = weights.load(path, num_heads=3)
  assert read.image_size == (12, 12)
  assert (model.width, model.depth, model.mlp_dim) == (12, 3, 20)
  if format in ("timm", "transformers"):
    want = logits(
      card.edit_model(CARD, activation="gelu_erf").build_model(),
      random_params(),
    )
    np.testing.assert_allclose(logits(model, params), want, atol=1e-6)
  else:
    assert model.activation == "gelu_tanh"


def test_top_level_load_is_the_same():
  assert vit_jax.load is weights.load
  with pytest.raises(AttributeError, match="no attribute 'laod'"):
    _ = vit_jax.laod


def test_other_classes_size_and_channels_are_asked_for_in_one_line(tmp_path):
  path = save(tmp_path, "npz")
  model, params, read = weights.load(
    path, num_classes=2, image_size=(16, 8), num_channels=1, dropout=0.5
  )
  assert model.num_classes == 2 and model.dropout == 0.5
  assert read.class_names is None  # Those were of another head.
  assert read.image_size == (16, 8) and read.num_channels == 1
  assert read.transform is not None
  assert read.transform["size"] == (16, 8)
  assert read.transform["resize"] == (21, 11)  # 16 / 12 as before.
  assert read.normalize["mean"] == (2.0,)
  assert not params["head"]["kernel"].any()
  out = logits(model, params, IMAGE[:, :8, :8, :1].repeat(2, axis=1))
  np.testing.assert_array_equal(out, np.zeros((2, 2)))
  assert [line.split(":")[0] for line in read.history] == [
    "head",
    "posemb",
    "patch_embed/kernel",
  ]


def test_zero_classes_drop_the_head(tmp_path):
  model, params, _ = weights.load(save(tmp_path, "timm"), num_classes=0)
  assert "head" not in params
  assert logits(model, params).shape == (2, 0)


def test_load_params_fits_a_model_that_is_there(tmp_path):
  path = save(tmp_path, "transformers")
  model = card.edit_model(CARD, num_classes=7).build_model()
  params, read = weights.load_params(path, model, image_shape=(12, 12, 3))
  assert params["head"]["kernel"].shape == (12, 7)
  assert read.model["num_classes"] == 5  # The card is the file's.
  np.testing.assert_array_equal(
    params["encoder"]["blocks"]["mlp"]["fc1"]["kernel"],
    random_params()["encoder"]["blocks"]["mlp"]["fc1"]["kernel"],
  )


# --- What is refused.


def arrays_of(path):
  return dict(tensors.open_safetensors([path]))


def test_wrong_arrays_are_all_named_with_both_shapes(tmp_path):
  path = save(tmp_path, "timm")
  arrays = arrays_of(path)
  arrays["blocks.1.mlp.fc1.weights"] = arrays.pop("blocks.1.mlp.fc1.weight")
  arrays["blocks.2.attn.proj.weight"] = arrays["blocks.2.attn.proj.weight"][:5]
  arrays["extra"] = np.zeros((2, 3), np.float32)
  tensors.write_safetensors(path, arrays)
  with pytest.raises(ValueError, match="do not fit the model") as error:
    weights.load(path)
  assert str(error.value).splitlines()[1:] == [
    "  missing: blocks.1.mlp.fc1.weight (20, 12)",
    "  unexpected: blocks.1.mlp.fc1.weights (20, 12)",
    "  unexpected: extra (2, 3)",
    "  shape: blocks.2.attn.proj.weight is (5, 12); expected (12, 12)",
  ]


def test_transposed_array_is_named(tmp_path):
  path = save(tmp_path, "timm")
  arrays = arrays_of(path)
  name = "blocks.0.mlp.fc2.weight"
  arrays[name] = arrays[name].T
  tensors.write_safetensors(path, arrays)
  match = rf"shape: {name} is \(20, 12\); expected \(12, 20\)"
  with pytest.raises(ValueError, match=match):
    weights.load(path)


@pytest.mark.parametrize("format", FORMATS)
def test_truncated_file_is_one_line(tmp_path, format):
  path = save(tmp_path, format)
  path.write_bytes(path.read_bytes()[:-200])
  with pytest.raises(ValueError, match="the file is damaged") as error:
    weights.load(path)
  assert "\n" not in str(error.value)


def test_formats_that_can_run_code_are_refused(tmp_path):
  file = tmp_path / "pytorch_model.bin"
  file.write_bytes(b"anything")
  with pytest.raises(ValueError, match=r"must be an \.npz, \.safetensors or"):
    weights.load(file)


def test_arrays_of_nothing_known_are_refused(tmp_path):
  file = tmp_path / "x.npz"
  np.savez(file, a=np.zeros(3), b=np.zeros(4))
  match = r"with 2 arrays such as \['a', 'b'\]; none of the formats"
  with pytest.raises(ValueError, match=match):
    weights.load(file)


def test_folder_without_weights_says_what_to_name(tmp_path):
  with pytest.raises(ValueError, match=r"no \.safetensors and no checkpoint"):
    weights.load(tmp_path)
  (tmp_path / "a.npz").write_bytes(b"")
  with pytest.raises(ValueError, match=r"Name one file, e\.g\. .*a\.npz"):
    weights.load(tmp_path)


def test_unknown_format_names_the_closest(tmp_path):
  with pytest.raises(ValueError, match=r"got 'tim'; .* Did you mean 'timm'"):
    weights.save(tmp_path, random_params(), CARD, format="tim")


def test_card_from_elsewhere_runs_no_code(tmp_path):
  path = save(tmp_path, "npz")
  file = path.with_suffix(".card.json")
  content = json.loads(file.read_text())
  content["transform"] = {"fn": "os:system", "command": "true"}
  file.write_text(json.dumps(content))
  with pytest.raises(ValueError, match=r"w\.card\.json: fn: got 'os:system'"):
    weights.load(path)


def test_card_that_is_none_is_refused(tmp_path):
  path = save(tmp_path, "npz")
  path.with_suffix(".card.json").write_text('{"model": 1}')
  with pytest.raises(ValueError, match=r"got the fields \['model'\]; expected"):
    weights.load(path)


def test_part_of_a_file_with_two_models_is_named_behind_a_colon(tmp_path):
  path = save(tmp_path, "big_vision", cls_posemb=False)
  path.with_suffix(".card.json").unlink()
  arrays = {
    name.replace("params/", "params/img/", 1): x
    for name, x in tensors.open_npz(path).items()
  }
  assert all(name.startswith("params/img/") for name in arrays)
  tensors.write_npz(path, arrays | {"params/txt/w": np.zeros(2)})
  model, params, _ = weights.load(f"{path}:img")
  want = logits(
    card.edit_model(CARD, cls_posemb=False).build_model(),
    random_params(cls_posemb=False),
  )
  np.testing.assert_allclose(logits(model, params), want, atol=1e-6)
  with pytest.raises(ValueError, match=r"got the part 'im'; .*'img', 'txt'"):
    weights.load(f"{path}:im")


def test_strictness_is_chosen(tmp_path):
  path = save(tmp_path, "npz")
  with pytest.raises(ValueError, match="head"):
    weights.load(path, num_classes=7, head="keep")
  _, params, _ = weights.load(path, head="reset")
  assert not params["head"]["kernel"].any()
  with pytest.raises(ValueError, match="missing: map_head/probe"):
    weights.load(path, pool="map")
  _, params, card = weights.load(path, pool="map", relax=("map_head/*",))
  assert params["map_head"]["probe"].any()
  assert "map_head/probe: none there; initialised" in card.history


@pytest.mark.parametrize("method", ["half_pixel_linear", "timm"])
def test_way_of_resizing_is_chosen_and_recorded(tmp_path, method):
  path = save(tmp_path, "npz")
  published, other = (
    weights.load(path, image_size=(16, 16), posemb_resize=way)
    for way in ("corner_linear", method)
  )
  difference = np.abs(published.params["posemb"] - other.params["posemb"])
  assert difference.max() > 0.01
  assert any(f"resized by {method}" in line for line in other.card.history)
