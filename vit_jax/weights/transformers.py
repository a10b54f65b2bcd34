"""The safetensors of Transformers: ViT, DINOv2, DINOv2 with registers.

Source: huggingface/transformers, modeling_vit.py, modeling_dinov2.py and
modeling_dinov2_with_registers.py. The names are those of the files, which
version 5 still writes and which differ from those in its memory. A model with
a head has its own name as a prefix, one without has none. The pooler of ViT,
dense and tanh, is the representation here. DINOv2's mask token, which only
pre-training used, is not read, and zero when written.
"""

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from vit_jax import spec
from vit_jax.models import check, vit
from vit_jax.weights import pytorch, transformers_config
from vit_jax.weights.card import Card
from vit_jax.weights.format import Files
from vit_jax.weights.layout import BLOCKS, Rule, same
from vit_jax.weights.tensors import Shape, Tensors

NAME = "transformers"

_REGISTERS = "embeddings.register_tokens"
_PATCH = "embeddings.patch_embeddings.projection"
_ACTIVATIONS = {
  "gelu": "gelu_erf",
  "gelu_new": "gelu_tanh",
  "gelu_fast": "gelu_tanh",
  "gelu_pytorch_tanh": "gelu_tanh",  # The last of a kind is written.
}
_MLP_RATIOS = range(1, 17)  # DINOv2's configs take whole numbers only.


class Family(NamedTuple):
  """One of their models.

  Attributes:
    name: `model_type`, and the prefix of the arrays of a model with a head.
    class_name: of their classes, without "Model" or "ForImageClassification".
    norm_epsilon: that of a config which does not say.
    norm1, norm2, fc1, fc2: layers of a block.
  """

  name: str
  class_name: str
  norm_epsilon: float
  norm1: str
  norm2: str
  fc1: str
  fc2: str


_DINOV2_BLOCK = ("norm1", "norm2", "mlp.fc1", "mlp.fc2")
VIT = Family(
  *("vit", "ViT", 1e-12, "layernorm_before", "layernorm_after"),
  *("intermediate.dense", "output.dense"),
)
DINOV2 = Family("dinov2", "Dinov2", 1e-6, *_DINOV2_BLOCK)
DINOV2_WITH_REGISTERS = Family(
  "dinov2_with_registers", "Dinov2WithRegisters", 1e-6, *_DINOV2_BLOCK
)
FAMILIES = {f.name: f for f in (VIT, DINOV2, DINOV2_WITH_REGISTERS)}


def recognises(tensors: Tensors, files: Files) -> bool:
  """Returns whether the arrays are those of an image model of Transformers."""
  del files
  return _prefix(tensors) is not None


def describe(tensors: Tensors, files: Files, **hints: Any) -> Card:
  """Returns the card; see `format.Format`."""
  del hints  # The config leaves nothing open.
  config = files.get("config.json", {})
  check.raise_all(_refusals(config))
  family, shapes = FAMILIES[config["model_type"]], tensors.shapes
  prefix = _prefix(tensors) or ""
  width, channels, *patch = shapes[f"{prefix}{_PATCH}.weight"]
  # Pixels beyond the last whole patch are not seen.
  height, length = transformers_config.pair(config["image_size"])
  image_size = height // patch[0] * patch[0], length // patch[1] * patch[1]
  num_classes = shapes.get("classifier.weight", (0,))[0]
  is_gated = config.get("use_swiglu_ffn", False)
  fc2 = "mlp.weights_out" if is_gated else family.fc2
  fc2 = f"{prefix}encoder.layer.{{block}}.{fc2}.weight"
  fields = {
    "num_classes": num_classes,
    "width": width,
    "depth": config["num_hidden_layers"],
    "num_heads": config["num_attention_heads"],
    "mlp_dim": pytorch.find_block(shapes, fc2)[1],
    "patch_size": tuple(patch),
    "num_registers": shapes.get(f"{prefix}{_REGISTERS}", (1, 0))[1],
    "activation": (
      "swiglu" if is_gated else _ACTIVATIONS[config.get("hidden_act", "gelu")]
    ),
    "norm_epsilon": config.get("layer_norm_eps", family.norm_epsilon),
  }
  if family is VIT and not num_classes:
    pooler = shapes.get(f"{prefix}pooler.dense.weight", (None,))
    fields["representation_size"] = pooler[0]
  if family is not VIT:
    fields["layer_scale"] = float(config.get("layerscale_value", 1.0))
    fields["pool"] = "cls_gap" if num_classes else "cls"
  images = files.get("preprocessor_config.json", {})
  return Card(
    model=spec.spec(vit.ViT, **fields),
    image_size=image_size,
    num_channels=channels,
    transform=transformers_config.transform(images, image_size),
    normalize=transformers_config.normalize(images),
    class_names=transformers_config.class_names(config, num_classes),
  )


def rules(
  card: Card, shapes: Mapping[str, Shape], found: Mapping[str, Shape]
) -> Sequence[Rule]:
  """Returns the layout; see `format.Format`."""
  del shapes
  model: Any = card.build_model()
  check.raise_all(_problems(model, card.image_size))
  family = _family(model)
  prefix = _prefix(found)
  if prefix is None:
    prefix = f"{family.name}." if model.num_classes else ""
  result = [
    same(f"{prefix}embeddings.cls_token", "cls"),
    pytorch.positions(
      f"{prefix}embeddings.position_embeddings",
      cls=model.has_cls_posemb,
      unplaced=0 if model.has_cls_posemb else 1,
    ),
    *pytorch.patch_embed(f"{prefix}{_PATCH}"),
    *_block_rules(model, family, f"{prefix}encoder.layer.{{block}}."),
    *pytorch.norm(f"{prefix}layernorm", "encoder/norm"),
  ]
  if model.num_registers:
    result.append(same(f"{prefix}{_REGISTERS}", "registers"))
  mask = f"{prefix}embeddings.mask_token"
  if mask in found or (family is not VIT and not found):
    zeros = np.zeros((1, model.width), np.float32)
    result.append(Rule(mask, (), lambda _: zeros, lambda *_: []))
  if model.representation_size is not None:
    result += pytorch.linear(f"{prefix}pooler.dense", "representation")
  if model.num_classes:
    result += pytorch.linear("classifier", "head")
  return result


def sidecars(card: Card) -> dict[str, str]:
  """Returns config.json and, if it can say it, preprocessor_config.json."""
  model: Any = card.build_model()
  check.raise_all(_problems(model, card.image_size))
  family = _family(model)
  kind = "ForImageClassification" if model.num_classes else "Model"
  names = {theirs: ours for ours, theirs in _ACTIVATIONS.items()}
  config = {
    "architectures": [f"{family.class_name}{kind}"],
    "model_type": family.name,
    "image_size": transformers_config.one_or_pair(card.image_size),
    "patch_size": transformers_config.one_or_pair(model.patch_size),
    "num_channels": card.num_channels,
    "hidden_size": model.width,
    "num_hidden_layers": model.depth,
    "num_attention_heads": model.num_heads,
    "qkv_bias": True,
    "hidden_act": names.get(model.activation, "gelu"),
    "layer_norm_eps": model.norm_epsilon,
  }
  if family is VIT:
    config["intermediate_size"] = model.mlp_dim
    if model.representation_size is not None:
      config["pooler_output_size"] = model.representation_size
  else:
    config["mlp_ratio"] = _mlp_ratio(model)
    config["use_swiglu_ffn"] = model.activation == "swiglu"
    config["layerscale_value"] = model.layer_scale
  if model.num_registers:
    config["num_register_tokens"] = model.num_registers
  if model.num_classes:
    labels = card.class_names or transformers_config.placeholders(
      model.num_classes
    )
    config["id2label"] = dict(enumerate(labels))
    config["label2id"] = {label: i for i, label in enumerate(labels)}
  result = {"config.json": config}
  images = transformers_config.preprocessor(card)
  if images is not None:
    result["preprocessor_config.json"] = images
  return {k: json.dumps(v, indent=2) + "\n" for k, v in result.items()}


def _prefix(names: Iterable[str]) -> str | None:
  """Returns what precedes the arrays of the encoder, or None for others."""
  ending = f"{_PATCH}.weight"
  for name in names:
    if name.endswith(ending):
      return name.removesuffix(ending)
  return None


def _refusals(config: Mapping[str, Any]) -> Iterator[str]:
  """Yields what the config lacks, or has that no model here has."""
  needed = ("image_size", "num_hidden_layers", "num_attention_heads")
  if missing := [key for key in needed if key not in config]:
    yield (
      f"config.json: got none of {missing}; the arrays do not tell. Get the "
      "whole folder."
    )
  name = config.get("model_type")
  yield from check.choice("model_type", name, list(FAMILIES))
  act = config.get("hidden_act", "gelu")
  yield from check.choice("hidden_act", act, list(_ACTIVATIONS))
  if not config.get("qkv_bias", True):
    yield (
      "qkv_bias: got false; the models here have a bias. Use other weights."
    )
  pooler_act = config.get("pooler_act", "tanh")
  yield from check.choice("pooler_act", pooler_act, ["tanh"])


def _family(model: vit.ViT) -> Family:
  if model.layer_scale is None:
    return VIT
  return DINOV2_WITH_REGISTERS if model.num_registers else DINOV2


def _problems(model: Any, image_size: tuple[int, int]) -> Iterator[str]:
  """Yields what a model has that theirs have not."""
  if type(model) is not vit.ViT:
    yield (
      f"model: got {type(model).__name__}; this format holds ViT alone. Use "
      "another format."
    )
    return
  is_vit = _family(model) is VIT
  has_head = model.num_classes > 0
  pool = "cls" if is_vit or not has_head else "cls_gap"
  if model.pool != pool:
    which = "ViT" if is_vit else "DINOv2"
    yield (
      f"pool: got {model.pool!r}; in Transformers {which} "
      f"{'with' if has_head else 'without'} a head has {pool!r}. Use another "
      "format."
    )
  yield from check.choice("posemb", model.posemb, ["learned"])
  yield from check.choice("posemb_at", model.posemb_at, ["stem"])
  if model.qk_norm:
    yield "qk_norm: got True; Transformers has none. Use another format."
  if model.representation_size is not None and (has_head or not is_vit):
    yield (
      f"representation_size: got {model.representation_size}; in Transformers "
      "only ViT without a head has a pooler. Drop the head, or use another "
      "format."
    )
  if is_vit and (model.num_registers or model.activation == "swiglu"):
    yield (
      f"num_registers, activation: got {model.num_registers} and "
      f"{model.activation!r}; Transformers has registers and SwiGLU in DINOv2 "
      "alone, with layer_scale. Use another format."
    )
  if not is_vit and (len({*image_size}) > 1 or len({*model.patch_size}) > 1):
    yield (
      f"image_size: got {image_size} in patches of {model.patch_size}; DINOv2 "
      "in Transformers takes squares. Load it for such a size first, or use "
      "another format."
    )
  if not is_vit and _mlp_ratio(model) is None:
    yield (
      f"mlp_dim: got {model.mlp_dim} with width {model.width}; DINOv2 in "
      "Transformers has whole multiples. Use another format."
    )


def _mlp_ratio(model: vit.ViT) -> int | None:
  """Returns the ratio that a DINOv2 config makes this mlp_dim of, or None."""
  for ratio in _MLP_RATIOS:
    hidden = model.width * ratio
    if model.activation == "swiglu":  # Two thirds, as multiples of 8.
      hidden = (int(hidden * 2 / 3) + 7) // 8 * 8
    if hidden == model.mlp_dim:
      return ratio
  return None


def _block_rules(model: vit.ViT, family: Family, block: str) -> list[Rule]:
  attention, mlp = f"{BLOCKS}attention/", f"{BLOCKS}mlp/"
  result = [
    *pytorch.norm(f"{block}{family.norm1}", f"{BLOCKS}norm1"),
    *pytorch.linear(
      f"{block}attention.output.dense", f"{attention}out", inputs=2
    ),
    *pytorch.norm(f"{block}{family.norm2}", f"{BLOCKS}norm2"),
  ]
  for name in ("query", "key", "value"):
    theirs = f"{block}attention.attention.{name}"
    result += pytorch.linear(theirs, f"{attention}{name}")
  if model.activation == "swiglu":
    both = f"{mlp}gate", f"{mlp}fc1"
    result += pytorch.linear(f"{block}mlp.weights_in", *both)
    result += pytorch.linear(f"{block}mlp.weights_out", f"{mlp}fc2")
  else:
    result += pytorch.linear(f"{block}{family.fc1}", f"{mlp}fc1")
    result += pytorch.linear(f"{block}{family.fc2}", f"{mlp}fc2")
  if model.layer_scale is not None:
    for i in (1, 2):
      theirs = f"{block}layer_scale{i}.lambda1"
      result.append(same(theirs, f"{BLOCKS}layer_scale{i}"))
  return result
