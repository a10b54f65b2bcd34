"""Transformers' own models and files against ours, both ways."""

import json
import pathlib
from typing import Any

import numpy as np
import pytest
import transformers

from tests.parity import both
from vit_jax import spec
from vit_jax.models import vit
from vit_jax.weights import card as card_lib
from vit_jax.weights import files, pytorch

SMALL = {"hidden_size": 64, "num_attention_heads": 2, "num_hidden_layers": 3}
SMALL |= {"image_size": 32, "patch_size": 8, "num_labels": 7}
DINO = SMALL | {"image_size": 42, "patch_size": 14}
SIZES = {
  "Ti": {"hidden_size": 192, "num_attention_heads": 3},
  "S": {"hidden_size": 384, "num_attention_heads": 6},
  "B": {"hidden_size": 768, "num_attention_heads": 12},
}


def sizes(name: str, **others: Any) -> dict[str, Any]:
  width = SIZES[name]["hidden_size"]
  return {**SIZES[name], "intermediate_size": 4 * width, **others}


# The class and the arguments of its config.
CASES = {
  "Ti/16": ("ViTForImageClassification", sizes("Ti")),
  "Ti/16 with tanh": (
    "ViTForImageClassification",
    sizes("Ti", hidden_act="gelu_pytorch_tanh", layer_norm_eps=1e-6),
  ),
  "S/16 at 96x160": (
    "ViTForImageClassification",
    sizes("S", num_hidden_layers=4, image_size=[96, 160]),
  ),
  "B/16 cut": (
    "ViTForImageClassification",
    sizes("B", num_hidden_layers=3),
  ),
  "pooler": ("ViTModel", SMALL | {"intermediate_size": 100}),
  "pooler of another size": ("ViTModel", SMALL | {"pooler_output_size": 40}),
  "one channel": ("ViTForImageClassification", SMALL | {"num_channels": 1}),
  "DINOv2": ("Dinov2Model", DINO),
  "DINOv2 with a head": ("Dinov2ForImageClassification", DINO),
  "DINOv2 with SwiGLU": (
    "Dinov2ForImageClassification",
    DINO | {"use_swiglu_ffn": True, "mlp_ratio": 3},
  ),
  "DINOv2 without a mask token": (
    "Dinov2Model",
    DINO | {"use_mask_token": False},
  ),
  "DINOv2 with registers": ("Dinov2WithRegistersModel", DINO),
  "DINOv2 with registers and a head": (
    "Dinov2WithRegistersForImageClassification",
    DINO | {"num_register_tokens": 3, "image_size": [28, 28]},
  ),
  "DINOv2 with registers and SwiGLU": (
    "Dinov2WithRegistersForImageClassification",
    DINO | {"use_swiglu_ffn": True},
  ),
}
SLOW = {
  "S/16": ("ViTForImageClassification", sizes("S")),
  "B/16": ("ViTForImageClassification", sizes("B")),
  "B/16 at 384": ("ViTForImageClassification", sizes("B", image_size=384)),
}


def make(name: str, arguments: Any) -> Any:
  """Returns a random model of one of their classes."""
  model_class = getattr(transformers, name)
  return both.randomise(model_class(model_class.config_class(**arguments)))


def result(outputs: Any) -> Any:
  """Returns what ours calls logits, or representation if there is no head."""
  return outputs.logits if "logits" in outputs else outputs.pooler_output


def run(model: Any, params: Any, image: np.ndarray) -> np.ndarray:
  ours = both.apply(model, params, image)
  return ours.logits if model.num_classes else ours.representation


def check_read(tmp_path: pathlib.Path, name: str, arguments: Any) -> None:
  theirs = make(name, arguments)
  theirs.save_pretrained(tmp_path)
  model, params, card = files.load(tmp_path)
  image = both.images(card.image_size, channels=card.num_channels)
  expected = result(theirs(both.to_torch(image)))
  both.assert_close(run(model, params, image), expected)


@pytest.mark.parametrize("case", CASES)
def test_a_model_of_transformers_reads_as_equal_output(case, tmp_path):
  check_read(tmp_path, *CASES[case])


@pytest.mark.slow
@pytest.mark.parametrize("case", SLOW)
def test_whole_models_of_transformers_read_as_equal_logits(case, tmp_path):
  check_read(tmp_path, *SLOW[case])


def test_a_model_in_several_files_reads_as_one(tmp_path):
  theirs = make("ViTForImageClassification", SMALL)
  theirs.save_pretrained(tmp_path, max_shard_size="100kB")
  assert len(list(tmp_path.glob("*.safetensors"))) > 1
  model, params, card = files.load(tmp_path)
  image = both.images(card.image_size)
  expected = theirs(both.to_torch(image)).logits
  both.assert_close(run(model, params, image), expected)


OURS = {"num_classes": 7, "width": 48, "depth": 2, "num_heads": 3}
OURS |= {"mlp_dim": 96, "patch_size": (8, 8), "activation": "gelu_erf"}
HEAD = {"layer_scale": 0.5, "pool": "cls_gap"}
WRITTEN = {
  "ViT": {},
  "tanh": {"activation": "gelu_tanh", "norm_epsilon": 1e-12},
  "any MLP": {"mlp_dim": 100},
  "tall patches": {"patch_size": (8, 4)},
  "pooler": {"num_classes": 0, "representation_size": 20},
  "DINOv2": {"num_classes": 0, "layer_scale": 0.5},
  "DINOv2 with a head": HEAD,
  "SwiGLU": HEAD | {"activation": "swiglu", "mlp_dim": 128},
  "registers": HEAD | {"num_registers": 2},
  "registers, no head": {
    "num_classes": 0,
    "layer_scale": 0.5,
    "num_registers": 2,
  },
}


def check_written(tmp_path: pathlib.Path, size: Any, **fields: Any) -> None:
  card = card_lib.Card(
    model=spec.spec(vit.ViT, **fields),
    image_size=size,
    num_channels=3,
    transform=None,
    normalize=pytorch.normalize((0.5,), (0.5,)),
  )
  params = both.random_params(card)
  files.save(tmp_path, both.nested(params), card, format="transformers")
  config = json.loads((tmp_path / "config.json").read_text("utf-8"))
  model_class = getattr(transformers, config["architectures"][0])
  theirs, info = model_class.from_pretrained(tmp_path, output_loading_info=True)
  assert not any(info.values()), info
  image = both.images(size)
  expected = result(theirs.eval()(both.to_torch(image)))
  model = card.build_model()
  both.assert_close(run(model, both.nested(params), image), expected)
  # And back, without our card: what they are told tells us.
  (tmp_path / "card.json").unlink()
  again = files.read(tmp_path)
  assert dict(again.card.model) == dict(card.model)
  assert again.card.image_size == size
  for path, x in params.items():
    np.testing.assert_array_equal(again.params[path], x)


@pytest.mark.parametrize("case", WRITTEN)
def test_transformers_reads_ours_as_equal_output(case, tmp_path):
  fields = OURS | WRITTEN[case]
  size = (32, 32) if "layer_scale" in fields else (32, 48)
  check_written(tmp_path, size, **fields)


@pytest.mark.slow
def test_transformers_reads_our_b16_as_equal_logits(tmp_path):
  fields = {**vit.sizes("B/16"), "num_classes": 1000}
  check_written(tmp_path, (224, 224), **fields, activation="gelu_erf")


def test_a_class_token_without_a_position_is_one_at_zero(tmp_path):
  fields = OURS | HEAD | {"cls_posemb": False, "num_registers": 1}
  card = card_lib.Card(
    model=spec.spec(vit.ViT, **fields),
    image_size=(32, 32),
    num_channels=3,
    transform=None,
    normalize=pytorch.normalize((0.5,), (0.5,)),
  )
  params = both.random_params(card)
  files.save(tmp_path, both.nested(params), card, format="transformers")
  theirs = transformers.AutoModelForImageClassification.from_pretrained(
    tmp_path
  )
  image = both.images((32, 32))
  expected = theirs.eval()(both.to_torch(image)).logits
  model = card.build_model()
  both.assert_close(run(model, both.nested(params), image), expected)


@pytest.mark.parametrize("size", [(64, 80), (16, 24)])
def test_positions_resized_by_vit_are_those_of_the_method(size, tmp_path):
  theirs = make("ViTForImageClassification", SMALL)
  theirs.save_pretrained(tmp_path)
  image = both.images(size)
  expected = theirs(both.to_torch(image), interpolate_pos_encoding=True).logits
  model, params, _ = files.load(
    tmp_path, image_size=size, posemb_resize="transformers"
  )
  both.assert_close(run(model, params, image), expected)


@pytest.mark.parametrize("size", [(70, 98), (28, 28)])
@pytest.mark.parametrize(
  "name, method",
  [
    ("Dinov2ForImageClassification", "transformers"),
    # Antialiased, where PyTorch's cubic has a = -0.5.
    ("Dinov2WithRegistersForImageClassification", "timm"),
  ],
)
def test_positions_resized_by_dinov2(name, method, size, tmp_path):
  theirs = make(name, DINO)
  theirs.save_pretrained(tmp_path)
  image = both.images(size)
  expected = theirs(both.to_torch(image)).logits
  model, params, _ = files.load(tmp_path, image_size=size, posemb_resize=method)
  both.assert_close(run(model, params, image), expected)


@pytest.mark.parametrize(
  "name, arguments",
  [
    ("ViTImageProcessor", {}),
    (
      "BitImageProcessor",
      {"size": {"shortest_edge": 48}, "crop_size": {"height": 42, "width": 42}},
    ),
  ],
)
def test_pixels_are_prepared_as_by_their_processor(name, arguments, tmp_path):
  theirs = make("Dinov2Model", DINO)
  theirs.save_pretrained(tmp_path)
  processor = getattr(transformers, f"{name}Pil", None) or getattr(
    transformers, name
  )
  processor = processor(**{"size": {"height": 42, "width": 42}} | arguments)
  processor.save_pretrained(tmp_path)
  _, _, card = files.load(tmp_path)
  rng = np.random.default_rng(0)
  pixels = rng.integers(0, 256, (100, 50, 3), np.uint8)
  expected = processor(pixels, return_tensors="pt").pixel_values
  transform, normalize = spec.build(card.transform), spec.build(card.normalize)
  example = transform({"image": pixels, "label": 0, "id": "0"}, rng)
  ours = np.asarray(normalize(example["image"]))
  theirs_hwc = np.asarray(expected[0].permute(1, 2, 0))
  np.testing.assert_allclose(ours, theirs_hwc, atol=2e-6)
