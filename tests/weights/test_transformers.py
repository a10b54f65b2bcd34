"""The format of Transformers, against its files: tests/golden/weights."""

import json
import pathlib
from typing import Any

import jax
import numpy as np
import pytest
from flax import traverse_util

from vit_jax import spec
from vit_jax.data import transforms
from vit_jax.models import hybrid, vit
from vit_jax.weights import adapt, layout, pytorch, tensors, transformers
from vit_jax.weights.card import Card

GOLDEN = pathlib.Path(__file__).parents[1] / "golden" / "weights"
CASES = sorted(p.name for p in GOLDEN.glob("transformers_*"))
VIT_PIXELS = {
  "do_resize": True,
  "size": {"height": 224, "width": 224},
  "resample": 2,
  "do_rescale": True,
  "rescale_factor": 1 / 255,
  "do_normalize": True,
  "image_mean": [0.5, 0.5, 0.5],
  "image_std": [0.5, 0.5, 0.5],
}
DINOV2_PIXELS = VIT_PIXELS | {
  "size": {"shortest_edge": 256},
  "do_center_crop": True,
  "crop_size": {"height": 224, "width": 224},
  "resample": 3,
  "image_mean": [0.485, 0.456, 0.406],
  "image_std": [0.229, 0.224, 0.225],
}


def read_golden(name: str) -> tuple[tensors.Tensors, Any]:
  """Returns the arrays of a case, and the JSON beside them."""
  arrays = tensors.open_safetensors([GOLDEN / name / "model.safetensors"])
  config = json.loads((GOLDEN / name / "config.json").read_text("utf-8"))
  return arrays, {"config.json": config}


def shapes_of(card: Card) -> dict[str, tuple[int, ...]]:
  shape = (*card.image_size, card.num_channels)
  return adapt.param_shapes(card.build_model(), shape)


def read_params(arrays: tensors.Tensors, card: Card) -> layout.Params:
  shapes = shapes_of(card)
  rules = transformers.rules(card, shapes, arrays.shapes)
  return layout.read(arrays, rules, shapes)


def describe(name: str, pixels: Any = None, **config: Any) -> Card:
  arrays, files = read_golden(name)
  files["config.json"] |= config
  if pixels is not None:
    files["preprocessor_config.json"] = pixels
  return transformers.describe(arrays, files)


def make_card(fn: Any = vit.ViT, size: Any = (16, 16), **fields: Any) -> Card:
  sizes = {"num_classes": 5, "width": 24, "depth": 1, "num_heads": 3}
  sizes |= {"mlp_dim": 48, "patch_size": (4, 4), "activation": "gelu_erf"}
  return Card(
    model=spec.spec(fn, **sizes | fields),
    image_size=size,
    num_channels=3,
    transform=None,
    normalize=pytorch.normalize((0.5,), (0.5,)),
  )


@pytest.mark.parametrize("name", CASES)
def test_a_file_of_transformers_gives_the_output_that_it_gives(name):
  arrays, files = read_golden(name)
  card = transformers.describe(arrays, files)
  params = traverse_util.unflatten_dict(read_params(arrays, card), sep="/")
  model: Any = card.build_model()
  with np.load(GOLDEN / name / "expected.npz") as expected:
    image, theirs = expected["image"], expected["output"]
  ours = jax.jit(model.apply)({"params": params}, image)
  ours = ours.logits if model.num_classes else ours.representation
  scale = np.abs(theirs).max()
  # float32 over two blocks, scaled to a maximum of one.
  np.testing.assert_allclose(ours / scale, theirs / scale, rtol=0, atol=2e-6)


@pytest.mark.parametrize("name", CASES)
def test_a_file_of_transformers_is_written_back_as_it_was(name):
  arrays, files = read_golden(name)
  card = transformers.describe(arrays, files)
  params = read_params(arrays, card)
  rules = transformers.rules(card, shapes_of(card), {})
  written = layout.write(params, rules)
  assert written.keys() == arrays.keys()
  for key, x in written.items():
    if not key.endswith("mask_token"):
      np.testing.assert_array_equal(x, arrays[key])
  ours = json.loads(transformers.sidecars(card)["config.json"])
  theirs = files["config.json"]
  assert ours["architectures"] == theirs["architectures"]
  size = ours["image_size"]
  if isinstance(theirs["image_size"], list) and isinstance(size, int):
    theirs["image_size"] = size
  assert theirs.items() >= ours.items()
  assert transformers.describe(arrays, {"config.json": ours}) == card


@pytest.mark.parametrize(
  "name, fields",
  [
    ("transformers_vit", {"pool": "cls", "norm_epsilon": 1e-12}),
    ("transformers_vit", {"activation": "gelu_erf", "num_classes": 5}),
    ("transformers_pooler", {"representation_size": 24, "num_classes": 0}),
    ("transformers_pooler", {"activation": "gelu_tanh"}),
    ("transformers_dinov2", {"pool": "cls_gap", "activation": "swiglu"}),
    ("transformers_dinov2", {"layer_scale": 1.0, "norm_epsilon": 1e-6}),
    ("transformers_registers", {"pool": "cls", "num_registers": 2}),
  ],
)
def test_what_the_folder_tells_is_in_the_card(name, fields):
  card = describe(name)
  assert {key: card.model[key] for key in fields} == fields


def test_what_an_old_config_leaves_out_is_the_default():
  arrays, files = read_golden("transformers_vit")
  for key in ("hidden_act", "qkv_bias", "layer_norm_eps", "pooler_act"):
    del files["config.json"][key]
  assert transformers.describe(arrays, files) == describe("transformers_vit")


def test_other_arrays_are_not_recognised():
  arrays, _ = read_golden("transformers_vit")
  assert transformers.recognises(arrays, {})
  assert not transformers.recognises(tensors.from_arrays({}), {})


def test_a_vit_of_the_hub_is_squashed_and_scaled_to_minus_one_and_one():
  card = describe("transformers_vit", VIT_PIXELS)
  assert card.transform == dict(
    spec.spec(
      transforms.resize, size=(16, 24), interpolation="bilinear_antialias"
    )
  )
  assert card.normalize["mean"] == (127.5, 127.5, 127.5)
  written = json.loads(transformers.sidecars(card)["preprocessor_config.json"])
  size = {"size": {"height": 16, "width": 24}}
  assert written.items() >= (VIT_PIXELS | size).items()


def test_dinov2_is_cropped_in_the_size_of_its_positions():
  # 16 pixels of 18.3 are 224 of 256.
  card = describe("transformers_registers", DINOV2_PIXELS)
  assert card.transform == dict(
    spec.spec(
      transforms.resize_center_crop,
      resize=(18, 18),
      size=(16, 16),
      interpolation="bicubic_antialias",
    )
  )
  np.testing.assert_allclose(card.normalize["std"], (58.395, 57.12, 57.375))
  written = json.loads(transformers.sidecars(card)["preprocessor_config.json"])
  assert written["image_mean"] == DINOV2_PIXELS["image_mean"]
  assert written["size"] == {"shortest_edge": 18}
  assert written["crop_size"] == {"height": 16, "width": 16}


@pytest.mark.parametrize(
  "changes",
  [
    {"do_resize": False},
    {"resample": 1},
    {"size": {"shortest_edge": 256}, "do_center_crop": False},
  ],
)
def test_other_preprocessing_is_unknown(changes):
  card = describe("transformers_vit", VIT_PIXELS | changes)
  assert card.transform is None
  assert "preprocessor_config.json" not in transformers.sidecars(card)


@pytest.mark.parametrize(
  "changes, mean, std",
  [
    ({"do_normalize": False}, 0, 255),
    ({"do_rescale": False}, 0.5, 0.5),
    ({"rescale_factor": 1 / 127.5}, 63.75, 63.75),
  ],
)
def test_pixels_are_scaled_as_the_preprocessor_says(changes, mean, std):
  normalize = describe("transformers_vit", VIT_PIXELS | changes).normalize
  np.testing.assert_allclose(normalize["mean"], mean)
  np.testing.assert_allclose(normalize["std"], std)


def test_class_names_are_read_and_placeholders_are_not():
  assert describe("transformers_vit").class_names is None
  names = {str(i): name for i, name in enumerate("abcde")}
  card = describe("transformers_vit", id2label=names)
  assert card.class_names == ("a", "b", "c", "d", "e")
  written = json.loads(transformers.sidecars(card)["config.json"])
  assert written["id2label"] == names
  assert written["label2id"]["c"] == 2


@pytest.mark.parametrize(
  "config, message",
  [
    ({"model_type": "deit"}, "model_type: got 'deit'"),
    ({"hidden_act": "relu"}, "hidden_act: got 'relu'"),
    ({"qkv_bias": False}, "qkv_bias: got false"),
    ({"pooler_act": "gelu"}, "pooler_act: got 'gelu'"),
  ],
)
def test_what_no_model_here_has_is_refused(config, message):
  with pytest.raises(ValueError, match=message):
    describe("transformers_vit", **config)


def test_a_file_without_its_config_is_refused():
  arrays, _ = read_golden("transformers_vit")
  message = r"config.json: got none of \['image_size', 'num_hidden_layers'"
  with pytest.raises(ValueError, match=message):
    transformers.describe(arrays, {})


def test_a_renamed_array_is_named_and_so_is_the_one_it_should_be():
  arrays, files = read_golden("transformers_vit")
  names = {k.replace("layer.0.output", "layer.0.out"): k for k in arrays}
  renamed = arrays.renamed(names)
  card = transformers.describe(renamed, files)
  with pytest.raises(ValueError) as error:
    read_params(renamed, card)
  path = "vit.encoder.layer.0"
  assert f"missing: {path}.output.dense.weight (24, 36)" in str(error.value)
  assert f"unexpected: {path}.out.dense.weight (24, 36)" in str(error.value)


def test_a_class_token_without_a_position_is_written_as_zero():
  card = make_card(layer_scale=1.0, pool="cls_gap", cls_posemb=False)
  params = {k: np.ones(v, np.float32) for k, v in shapes_of(card).items()}
  rules = transformers.rules(card, shapes_of(card), {})
  written = layout.write(params, rules)
  table = written["dinov2.embeddings.position_embeddings"]
  np.testing.assert_array_equal(table[0, 0], 0)
  np.testing.assert_array_equal(table[0, 1:], 1)
  again = read_params(tensors.from_arrays(written), card)
  np.testing.assert_array_equal(again["posemb"], params["posemb"])


@pytest.mark.parametrize(
  "card, message",
  [
    (
      make_card(hybrid.Hybrid, (32, 32), patch_size=(1, 1), stages=()),
      "model: got Hybrid",
    ),
    (make_card(pool="gap"), "pool: got 'gap'; in Transformers ViT with"),
    (
      make_card(layer_scale=1.0),
      "pool: got 'cls'; in Transformers DINOv2 with a head has 'cls_gap'",
    ),
    (make_card(posemb="sincos2d"), "posemb: got 'sincos2d'"),
    (make_card(posemb_at="every_layer"), "posemb_at: got 'every_layer'"),
    (make_card(qk_norm=True), "qk_norm: got True"),
    (make_card(representation_size=8), "representation_size: got 8"),
    (make_card(num_registers=2), "num_registers, activation: got 2"),
    (make_card(activation="swiglu"), "num_registers, activation: got 0"),
    (
      make_card(layer_scale=1.0, pool="cls_gap", mlp_dim=50),
      "mlp_dim: got 50 with width 24",
    ),
    (
      make_card(vit.ViT, (16, 24), layer_scale=1.0, pool="cls_gap"),
      r"image_size: got \(16, 24\)",
    ),
  ],
)
def test_what_transformers_cannot_hold_is_not_written(card, message):
  with pytest.raises(ValueError, match=message):
    transformers.rules(card, {}, {})
  with pytest.raises(ValueError, match=message):
    transformers.sidecars(card)
