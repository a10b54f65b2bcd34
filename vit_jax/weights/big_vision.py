"""The .npz of big_vision: its ViTs.

Source: big_vision, models/vit.py and utils.py. Arrays lie under `params/`, or
under `params/img/` in a model of image and text, `opt/target/` in the oldest,
or at the top; whatever else a file has, such as the state of the optimizer, is
left aside. The blocks are one by one or stacked. The class token has no
position of its own.

Older files are read as big_vision reads them: positions elsewhere, with a row
for the class token; the parts of the MAP head at the top; the names of before
Linen.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from absl import logging

from vit_jax import spec
from vit_jax.models import vit
from vit_jax.weights import google, official
from vit_jax.weights.card import Card
from vit_jax.weights.format import Files
from vit_jax.weights.layout import Rule, ignored, same
from vit_jax.weights.tensors import Shape, Tensors

NAME = "big_vision"

_PREFIXES = ("params/", "params/img/", "opt/target/", "opt/target/img/", "")
_POSEMBS = (
  "pos_embedding",
  "Transformer/pos_embedding",
  "Transformer/posembed_input/pos_embedding",
)
_MAP = "MAPHead_0/"
_NAMES = google.VIT | {
  r"map_head/probe": _MAP + r"probe",
  r"map_head/attention/(.+)": _MAP + r"MultiHeadDotProductAttention_0/\1",
  r"map_head/norm/(.+)": _MAP + r"LayerNorm_0/\1",
  r"map_head/mlp/fc1/(.+)": _MAP + r"MlpBlock_0/Dense_0/\1",
  r"map_head/mlp/fc2/(.+)": _MAP + r"MlpBlock_0/Dense_1/\1",
}


def recognises(tensors: Tensors, files: Files) -> bool:
  """Returns whether the arrays are those of a ViT of big_vision."""
  has_prefix = _prefix(tensors.shapes) is not None
  return has_prefix and not official.recognises(tensors, files)


def describe(tensors: Tensors, files: Files, **hints: Any) -> Card:
  """Returns the card; see `format.Format`."""
  del files
  shapes = _without_prefix(tensors.shapes)
  fields = google.vit_fields(shapes)
  has_map = "probe" in shapes or _MAP + "probe" in shapes
  rows = next((shapes[p][1] for p in _POSEMBS if p in shapes), None)
  cls_row = _has_cls_row(rows)
  fields |= {
    "pool": "map" if has_map else "cls" if "cls" in shapes else "gap",
    "posemb": "sincos2d" if rows is None else "learned",
    "cls_posemb": cls_row and "cls" in shapes,
  }
  num_patches = None if rows is None else rows - cls_row
  return google.card(
    spec.spec(vit.ViT, **fields),
    google.image_size(num_patches, fields["patch_size"], hints),
    num_channels=shapes["embedding/kernel"][2],
  )


def rules(
  card: Card, shapes: Mapping[str, Shape], found: Mapping[str, Shape]
) -> Sequence[Rule]:
  """Returns the layout; see `format.Format`."""
  google.check_model(
    card,
    format=NAME,
    models=(vit.ViT,),
    fields={
      "pool": ("cls", "gap", "map"),
      "norm_after_pool": (False,),
      "posemb": ("learned", "sincos2d"),
      "posemb_at": ("stem",),
    },
  )
  if not found:
    _log_write(card, shapes)
  prefix = (_prefix(found) or "") if found else _PREFIXES[0]
  found_here = _without_prefix(found)
  paths = shapes.keys() - {"cls", "cls_posemb", "posemb"}
  names = google.names(sorted(paths), _NAMES, format=NAME)
  names = {path: _old(name, found_here) for path, name in names.items()}
  result = [same(name, path) for path, name in names.items()]
  result += _token_rules(shapes, found_here)
  outside = [name for name in found if not name.startswith(prefix)]
  if outside:
    logging.info(
      "%s: %d arrays are not under %r, such as %r; left aside",
      *(NAME, len(outside), prefix, outside[0]),
    )
  return [
    *(rule._replace(theirs=prefix + rule.theirs) for rule in result),
    *(ignored(name, found[name]) for name in outside),
  ]


def sidecars(card: Card) -> dict[str, str]:
  """Returns nothing: the file is alone."""
  del card
  return {}


def _prefix(shapes: Mapping[str, Shape]) -> str | None:
  """Returns what stands before the names of the model, or None without one."""
  for prefix in _PREFIXES:
    if {prefix + name for name in google.VIT_ARRAYS} <= shapes.keys():
      return prefix
  return None


def _without_prefix(shapes: Mapping[str, Shape]) -> dict[str, Shape]:
  prefix = _prefix(shapes) or ""
  return {
    name.removeprefix(prefix): shape
    for name, shape in shapes.items()
    if name.startswith(prefix)
  }


def _old(name: str, found: Mapping[str, Shape]) -> str:
  """Returns the name that a file has, given all that it has."""
  if "probe" in found:
    name = name.removeprefix(_MAP)
  if any(n.startswith("Transformer/encoderblock/") for n in found):
    name = name.replace("encoderblock_{block}", "encoderblock")
  return google.before_linen(name) if google.is_before_linen(found) else name


def _has_cls_row(rows: int | None) -> bool:
  """Returns whether positions count a square of patches and one token."""
  return rows is not None and math.isqrt(rows - 1) ** 2 == rows - 1 > 0


def _token_rules(
  shapes: Mapping[str, Shape], found: Mapping[str, Shape]
) -> list[Rule]:
  """Returns the rules for class token and positions."""
  posemb = next((name for name in _POSEMBS if name in found), _POSEMBS[0])
  cls, cls_posemb = "cls" in shapes, "cls_posemb" in shapes
  cls_row = False
  result = []
  if "posemb" in shapes:
    # A row for a token that there is not is left out, as in big_vision.
    rows = shapes["posemb"][1] + 1
    cls_row = rows == found.get(posemb, (1, 0))[1] and cls == cls_posemb
    result.append(
      google.positions(posemb, cls_row=cls_row, cls_posemb=cls_posemb)
    )
  if cls_posemb and not cls_row:
    result.append(
      Rule(
        *("cls", ("cls", "cls_posemb")),
        lambda xs: xs[0] + xs[1],
        lambda x, _: [x, np.zeros_like(x)],
      )
    )
  elif cls:
    result.append(same("cls", "cls"))
  return result


def _log_write(card: Card, shapes: Mapping[str, Shape]) -> None:
  google.log_assumptions(
    card, format=NAME, activation="gelu_tanh", norm_epsilon=1e-6
  )
  if "cls_posemb" in shapes:
    logging.info(
      "%s: the position of the class token is added to the token: other "
      "parameters, equal logits",
      NAME,
    )
