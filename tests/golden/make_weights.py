"""Writes tests/golden/weights: small models of timm and Transformers.

Each folder has a model as its library saves it, from random weights, and in
expected.npz an image [B, H, W, C] and the output that the library gives for it:
logits, or the representation of a model without a head. Run it from the root
of the repository, with the extra `parity` and timm installed:

  python -m tests.golden.make_weights
"""

import json
import pathlib
from typing import Any

import numpy as np
import torch
import transformers

from tests.parity import both, conftest, test_parity_timm

FOLDER = pathlib.Path(__file__).with_name("weights")
SIZE = (16, 24)

TIMM_SIZES = {"img_size": SIZE, "patch_size": 4, "embed_dim": 24, "depth": 2}
TIMM_SIZES |= {"num_heads": 3, "mlp_ratio": 1.5, "num_classes": 5}
TIMM = {
  "timm_vit": ("vit_base_patch16_224", {"act_layer": "gelu_tanh"}),
  "timm_deit3": ("deit3_small_patch16_224", {}),
  "timm_dinov2": (
    "vit_giant_patch14_reg4_dinov2",
    {"mlp_ratio": 3.0, "num_classes": 0},
  ),
  "timm_map": (
    "vit_base_patch16_224",
    {"class_token": False, "global_pool": "map", "qk_norm": True},
  ),
  "timm_gap": (
    "vit_base_patch16_224",
    {"class_token": False, "global_pool": "avg", "in_chans": 1},
  ),
  "timm_hybrid": (
    "vit_tiny_r_s16_p8_224",
    {"patch_size": 2, "depth": 1, "global_pool": "avg", "fc_norm": False}
    | {"class_token": False},
  ),
}
SIZES = {"hidden_size": 24, "num_hidden_layers": 2, "num_attention_heads": 3}
SIZES |= {"image_size": SIZE, "patch_size": 4, "num_labels": 5}
SQUARE = {"image_size": (16, 16)}  # DINOv2 takes no other.
TRANSFORMERS = {
  "transformers_vit": ("ViTForImageClassification", {"intermediate_size": 36}),
  "transformers_pooler": (
    "ViTModel",
    {"intermediate_size": 36, "hidden_act": "gelu_pytorch_tanh"},
  ),
  "transformers_dinov2": (
    "Dinov2ForImageClassification",
    {"use_swiglu_ffn": True, "mlp_ratio": 2} | SQUARE,
  ),
  "transformers_registers": (
    "Dinov2WithRegistersModel",
    {"mlp_ratio": 2, "num_register_tokens": 2} | SQUARE,
  ),
}


def save_expected(folder: pathlib.Path, image: np.ndarray, output: Any) -> None:
  np.savez(folder / "expected.npz", image=image, output=output.numpy())


def write_timm(name: str, architecture: str, arguments: Any) -> None:
  folder = FOLDER / name
  folder.mkdir(parents=True, exist_ok=True)
  model = conftest.timm.create_model(architecture, **TIMM_SIZES | arguments)
  test_parity_timm.save_theirs(folder, both.randomise(model))
  image = both.images(SIZE, channels=model.in_chans)
  save_expected(folder, image, model(both.to_torch(image)))


def write_transformers(name: str, class_name: str, arguments: Any) -> None:
  folder = FOLDER / name
  model_class = getattr(transformers, class_name)
  config = model_class.config_class(**SIZES | arguments)
  model = both.randomise(model_class(config))
  model.save_pretrained(folder)
  image = both.images(tuple(model.config.image_size))
  outputs = model(both.to_torch(image))
  output = outputs.logits if "logits" in outputs else outputs.pooler_output
  save_expected(folder, image, output)


def write_shapes() -> None:
  """Writes the shapes of hybrids, which are too large to be kept."""
  result = {}
  for architecture in ("vit_small_r26_s32_224", "vit_base_r50_s16_384"):
    with torch.device("meta"):
      model = conftest.timm.create_model(architecture, depth=1)
    state = model.state_dict()
    result[architecture] = {k: list(x.shape) for k, x in state.items()}
  text = json.dumps(result, indent=0)
  (FOLDER / "timm_hybrid_shapes.json").write_text(text + "\n", "utf-8")


if __name__ == "__main__":
  with torch.no_grad():
    for name, (architecture, arguments) in TIMM.items():
      write_timm(name, architecture, arguments)
    for name, (class_name, arguments) in TRANSFORMERS.items():
      write_transformers(name, class_name, arguments)
  write_shapes()
