"""What timm says of a model outside its arrays: architecture, preprocessing.

Source: pytorch-image-models, whose hub folders have a config.json. Without one
a size that was published tells the number of heads.
"""

import json
import math
import re
from collections.abc import Mapping, Sequence
from typing import Any

from vit_jax import spec
from vit_jax.data import transforms
from vit_jax.models import hybrid, vit
from vit_jax.weights import pytorch
from vit_jax.weights.card import Card

Config = Mapping[str, Any]

POOLS = {"token": "cls", "avg": "gap", "map": "map"}
EPSILON = 1e-6  # Of all norms; no config changes it.

_ACTIVATIONS = {"gelu": "gelu_erf", "gelu_tanh": "gelu_tanh"}
# The architectures whose GELU is the approximation.
_TANH = re.compile(
  r"(base_patch32|so400m_patch16|giantopt_patch16)_siglip"
  r"|large_patch16_siglip(_gap)?_512"
)
# num_heads by (width, mlp_dim): the sizes of `vit`, and timm's own.
_HEADS = {
  **{(width, mlp): heads for width, _, mlp, heads in vit.VARIANTS.values()},
  (64, 192): 2,  # test_vit
  (96, 192): 3,
  (256, 1280): 4,  # wee
  (320, 1792): 5,  # little
  (640, 2560): 10,  # betwixt
  (832, 2176): 13,  # so150m2
  (896, 3584): 14,  # base_plus
  (896, 2304): 14,  # so150m
  (1536, 4096): 24,  # DINOv2-g
}
_HEADS_BY_NAME = {"vit_base_patch16_gap_224": 16}
# The architecture that `model_args` start from.
_HYBRIDS = {
  (): "vit_tiny_r_s16_p8_224",
  (2, 2, 2, 2): "vit_small_r26_s32_224",
  (3, 4, 9): "vit_base_r50_s16_224",
  (3, 4, 6, 3): "vit_large_r50_s32_224",
}
STAGES = tuple(_HYBRIDS)


def architecture(config: Config) -> str:
  """Returns the name of the architecture, or ""."""
  return str(config.get("architecture", ""))


def arguments(config: Config) -> Config:
  """Returns the arguments by which a model differs from its architecture."""
  return config.get("model_args") or {}


def preprocessing(config: Config) -> Config:
  """Returns the part of the config on images and classes."""
  return config.get("pretrained_cfg") or config  # Old ones have no parts.


def num_heads(
  width: int, mlp_dim: int, *, config: Config, hints: Mapping[str, Any]
) -> int:
  """Returns the number of attention heads.

  Args:
    width: D.
    mlp_dim: hidden size of the MLPs.
    config: of the model.
    hints: may have `num_heads`.

  Raises:
    ValueError: if nothing tells.
  """
  found = (
    arguments(config).get("num_heads"),
    hints.get("num_heads"),
    _HEADS_BY_NAME.get(architecture(config)),
    _HEADS.get((width, mlp_dim)),
  )
  for heads in found:
    if heads is not None:
      return heads
  raise ValueError(
    f"num_heads: got none for width {width} and mlp_dim {mlp_dim}, which no "
    "published model has, and the arrays do not tell. Give num_heads."
  )


def activation(config: Config) -> str:
  """Returns the activation of a model without SwiGLU.

  Raises:
    ValueError: for one that is not here.
  """
  is_tanh = _TANH.search(architecture(config))
  name = arguments(config).get("act_layer", "gelu_tanh" if is_tanh else "gelu")
  if name not in _ACTIVATIONS:
    raise ValueError(
      f"act_layer: got {name!r}; must be one of {list(_ACTIVATIONS)}. Use "
      "other weights."
    )
  return _ACTIVATIONS[name]


def image_sizes(config: Config) -> list[tuple[int, int]]:
  """Returns what may be the (height, width) in pixels, the likely first."""
  found = (
    arguments(config).get("img_size"),
    preprocessing(config).get("input_size", (0, None, None))[1:],
  )
  pairs = [(x, x) if isinstance(x, int) else tuple(x or ()) for x in found]
  return [(h, w) for h, w in (p for p in pairs if len(p) == 2) if h and w]


def class_names(config: Config, num_classes: int) -> tuple[str, ...] | None:
  """Returns the names of the classes, if the config has them."""
  key = "label_names"
  names = config.get(key) or preprocessing(config).get(key) or ()
  return tuple(names) if names and len(names) == num_classes else None


def transform(config: Config, image_size: tuple[int, int]) -> Any:
  """Returns the spec of the evaluation transform, or None if unknown.

  Args:
    config: of the model.
    image_size: (height, width) in pixels that it makes.
  """
  images = preprocessing(config)
  interpolation = pytorch.INTERPOLATIONS.get(images.get("interpolation", ""))
  crop, mode = images.get("crop_pct"), images.get("crop_mode") or "center"
  if not interpolation or not crop:
    return None
  resize = tuple(math.floor(x / crop) for x in image_size)
  if mode == "center":
    return spec.spec(
      transforms.resize_center_crop,
      resize=resize,
      size=image_size,
      interpolation=interpolation,
    )
  if mode == "squash" and resize == image_size:
    return spec.spec(
      transforms.resize, size=image_size, interpolation=interpolation
    )
  return None


def normalize(config: Config) -> Any:
  """Returns the spec of Normalize; by default to [-1, 1]."""
  images = preprocessing(config)
  return pytorch.normalize(
    images.get("mean", (0.5,)), images.get("std", (0.5,))
  )


def to_json(card: Card, model: vit.ViT) -> str:
  """Returns the config.json of a model that timm can build."""
  pools = {ours: theirs for theirs, ours in POOLS.items()}
  mean, std = pytorch.mean_and_std(card.normalize, card.num_channels)
  config = {
    "architecture": _base(model),
    "num_classes": model.num_classes,
    "num_features": model.width,
    "global_pool": pools[model.pool],
    "model_args": {
      "img_size": list(card.image_size),
      "in_chans": card.num_channels,
      "num_classes": model.num_classes,
      "global_pool": pools[model.pool],
      **_model_args(model),
    },
    "pretrained_cfg": {
      "num_classes": model.num_classes,
      "input_size": [card.num_channels, *card.image_size],
      "fixed_input_size": True,
      "mean": mean,
      "std": std,
      "classifier": "head",
      **_crop(card),
    },
  }
  if card.class_names:
    config["label_names"] = list(card.class_names)
  return json.dumps(config, indent=2) + "\n"


def _base(model: vit.ViT) -> str:
  """Returns the architecture whose arguments the model only changes."""
  if isinstance(model, hybrid.Hybrid):
    return _HYBRIDS[model.stages]
  if model.activation == "swiglu":
    return "vit_giant_patch14_dinov2"  # No argument of JSON gives a SwiGLU.
  return "vit_base_patch16_224"


def _model_args(model: vit.ViT) -> dict[str, Any]:
  hidden, args = model.mlp_dim, {}
  if model.activation == "swiglu":
    hidden *= 2  # Both halves.
  else:
    names = {ours: theirs for theirs, ours in _ACTIVATIONS.items()}
    args["act_layer"] = names[model.activation]
  ratio = hidden / model.width
  if int(model.width * ratio) < hidden:  # timm rounds down.
    ratio = math.nextafter(ratio, math.inf)
  return args | {
    "patch_size": list(model.patch_size),
    "embed_dim": model.width,
    "depth": model.depth,
    "num_heads": model.num_heads,
    "mlp_ratio": ratio,
    "qk_norm": model.qk_norm,
    "init_values": model.layer_scale,
    "class_token": model.has_cls,
    "no_embed_class": not model.has_cls_posemb,
    "pos_embed": "none" if model.posemb == "none" else "learn",
    "reg_tokens": model.num_registers,
    "fc_norm": model.norm_after_pool,
  }


def _crop(card: Card) -> dict[str, Any]:
  """Returns how images are resized and cropped, as far as timm can say."""
  images = card.transform or {}
  modes = {
    transforms.resize: "squash",
    transforms.resize_center_crop: "center",
  }
  if images.get("fn") not in modes:
    return {}
  return {
    "interpolation": pytorch.filter_name(images["interpolation"]),
    "crop_mode": modes[images["fn"]],
    "crop_pct": _crop_pct(images["size"], images.get("resize", images["size"])),
  }


def _crop_pct(size: Sequence[int], resize: Sequence[int]) -> float:
  """Returns the shortest fraction that makes timm resize to `resize`."""
  for digits in range(1, 9):
    fraction = round(size[0] / resize[0], digits)
    if all(math.floor(s / fraction) == r for s, r in zip(size, resize)):
      return fraction
  return size[0] / resize[0]
