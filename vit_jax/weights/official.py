"""The .npz of vision_transformer: its ViTs and hybrids, as published.

Source: vision_transformer, checkpoint.py, models_vit.py and models_resnet.py.
The published files are older than Linen, and so are the names that are
written; files with those of Linen are read too, and so are the group norms
[1, 1, 1, C] of the oldest. The positions have a row for the class token.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from vit_jax import spec
from vit_jax.models import hybrid, resnet, vit
from vit_jax.weights import google
from vit_jax.weights.card import Card
from vit_jax.weights.format import Files
from vit_jax.weights.layout import Rule, reshaped, same
from vit_jax.weights.tensors import Shape, Tensors

NAME = "npz"

_POSEMB = "Transformer/posembed_input/pos_embedding"
_NAMES = google.VIT | {
  r"trunk/root/conv/(.+)": r"conv_root/\1",
  r"trunk/root/norm/(.+)": r"gn_root/\1",
  r"trunk/stage(\d+)/(unit\d+)/(conv\d)/(.+)": r"block\1/\2/\3/\4",
  r"trunk/stage(\d+)/(unit\d+)/norm(\d)/(.+)": r"block\1/\2/gn\3/\4",
  r"trunk/stage(\d+)/(unit\d+)/conv_shortcut/(.+)": r"block\1/\2/conv_proj/\3",
  r"trunk/stage(\d+)/(unit\d+)/norm_shortcut/(.+)": r"block\1/\2/gn_proj/\3",
}


def recognises(tensors: Tensors, files: Files) -> bool:
  """Returns whether the arrays are those of vision_transformer's ViTs."""
  del files
  is_vit = tensors.keys() >= google.VIT_ARRAYS
  return is_vit and (_POSEMB in tensors or google.is_before_linen(tensors))


def describe(tensors: Tensors, files: Files, **hints: Any) -> Card:
  """Returns the card; see `format.Format`."""
  del files
  shapes = tensors.shapes
  fields = google.vit_fields(shapes)
  patch_size, model, first = fields["patch_size"], vit.ViT, "embedding/kernel"
  if "conv_root/kernel" in shapes:
    model, first = hybrid.Hybrid, "conv_root/kernel"
    fields["stages"] = google.stages(shapes)
    fields["width_factor"] = shapes[first][3] // 64
    stride = resnet.stride(fields["stages"])
    patch_size = (patch_size[0] * stride, patch_size[1] * stride)
  has_cls = "cls" in shapes
  num_patches = shapes[_POSEMB][1] - has_cls if _POSEMB in shapes else None
  fields |= {
    "pool": "cls" if has_cls else "gap",
    "posemb": "none" if num_patches is None else "learned",
  }
  return google.card(
    spec.spec(model, **fields),
    google.image_size(num_patches, patch_size, hints),
    num_channels=shapes[first][2],
  )


def rules(
  card: Card, shapes: Mapping[str, Shape], found: Mapping[str, Shape]
) -> Sequence[Rule]:
  """Returns the layout; see `format.Format`."""
  google.check_model(
    card,
    format=NAME,
    models=(vit.ViT, hybrid.Hybrid),
    fields={
      "pool": ("cls", "gap"),
      "norm_after_pool": (False,),
      "posemb": ("learned", "none"),
      "posemb_at": ("stem",),
    },
  )
  if not found:
    google.log_assumptions(
      card, format=NAME, activation="gelu_tanh", norm_epsilon=1e-6
    )
  paths = shapes.keys() - {"cls_posemb", "posemb"}
  names = google.names(sorted(paths), _NAMES, format=NAME)
  if google.is_before_linen(found) or not found:
    names = {path: google.before_linen(name) for path, name in names.items()}
  result = [_array(names[path], path, shapes[path], found) for path in names]
  if "posemb" in shapes:
    cls_posemb = "cls_posemb" in shapes
    result.append(
      google.positions(_POSEMB, cls_row="cls" in shapes, cls_posemb=cls_posemb)
    )
  return result


def sidecars(card: Card) -> dict[str, str]:
  """Returns nothing: the file is alone."""
  del card
  return {}


def _array(
  theirs: str, ours: str, shape: Shape, found: Mapping[str, Shape]
) -> Rule:
  old = (1, 1, 1, *shape)  # A group norm before 2021.
  if ours.startswith("trunk/") and found.get(theirs) == old:
    return reshaped(theirs, ours, old)
  return same(theirs, ours)
