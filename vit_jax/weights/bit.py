"""The .npz of big_transfer: the BiT ResNets, as released.

Source: big_transfer, and big_vision, models/bit_paper.py, which reads them. The
three norms and convolutions of a unit are called a, b and c.
"""

import re
from collections.abc import Mapping, Sequence
from typing import Any

from vit_jax import spec
from vit_jax.models import bit
from vit_jax.weights import google
from vit_jax.weights.card import Card
from vit_jax.weights.format import Files
from vit_jax.weights.layout import Rule, reshaped, same
from vit_jax.weights.tensors import Shape, Tensors

NAME = "bit"

_ROOT = "resnet/root_block/standardized_conv2d/kernel"
_UNIT = r"trunk/stage(\d+)/unit(\d+)/"
# Here with the units and their parts as numbers; see `_theirs`.
_NAMES = {
  r"trunk/root/conv/kernel": _ROOT,
  _UNIT + r"conv(\d)/kernel": (
    r"resnet/block\1/unit\2/\3/standardized_conv2d/kernel"
  ),
  _UNIT + r"norm(\d)/(.+)": r"resnet/block\1/unit\2/\3/group_norm/\4",
  _UNIT + r"conv_shortcut/kernel": (
    r"resnet/block\1/unit\2/1/proj/standardized_conv2d/kernel"
  ),
  r"trunk/norm/(.+)": r"resnet/group_norm/\1",
  r"head/(.+)": r"resnet/head/conv2d/\1",
}
# That of the released pre-training; the file does not tell.
_IMAGE_SIZE = (224, 224)


def recognises(tensors: Tensors, files: Files) -> bool:
  """Returns whether the arrays are those of a released BiT."""
  del files
  return _ROOT in map(_without_number, tensors)


def describe(tensors: Tensors, files: Files, **hints: Any) -> Card:
  """Returns the card; see `format.Format`."""
  del files
  shapes = {_without_number(name): x for name, x in tensors.shapes.items()}
  _, _, num_channels, width = shapes[_ROOT]
  model = spec.spec(
    bit.BiT,
    num_classes=shapes.get("resnet/head/conv2d/bias", (0,))[0],
    stages=google.stages(shapes),
    width_factor=width // 64,
  )
  size = hints.get("image_size", _IMAGE_SIZE)
  return google.card(model, size, num_channels=num_channels)


def rules(
  card: Card, shapes: Mapping[str, Shape], found: Mapping[str, Shape]
) -> Sequence[Rule]:
  """Returns the layout; see `format.Format`."""
  google.check_model(card, format=NAME, models=(bit.BiT,), fields={})
  if not found:
    google.log_assumptions(card, format=NAME, norm_epsilon=1e-5)
  numbered = {_without_number(name): name for name in found}
  result = []
  for path, name in google.names(sorted(shapes), _NAMES, format=NAME).items():
    theirs = _theirs(name)
    theirs = numbered.get(theirs, theirs)
    if path == "head/kernel":  # A convolution there.
      result.append(reshaped(theirs, path, (1, 1, *shapes[path])))
    else:
      result.append(same(theirs, path))
  return result


def sidecars(card: Card) -> dict[str, str]:
  """Returns nothing: the file is alone."""
  del card
  return {}


def _theirs(name: str) -> str:
  """Returns a name with units in two digits, parts a to c, and TF's norms."""
  name = re.sub(
    r"/unit(\d+)/(\d)/",
    lambda m: f"/unit{int(m[1]):02d}/{' abc'[int(m[2])]}/",
    name,
  )
  for here, there in {"scale": "gamma", "bias": "beta"}.items():
    name = name.replace(f"group_norm/{here}", f"group_norm/{there}")
  return name


def _without_number(name: str) -> str:
  """Returns a name without the numbers that some files have."""
  return re.sub(r"/standardized_conv2d_\d+/", "/standardized_conv2d/", name)
