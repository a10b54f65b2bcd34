"""What the .npz files of Google Research share: names, sizes, preprocessing.

They are those of vision_transformer, big_vision and big_transfer. Their arrays
are as the parameters here, but for the names and some axes of size 1.
"""

import math
import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import numpy as np
from absl import logging

from vit_jax import preprocess, spec
from vit_jax.data import transforms
from vit_jax.models import check
from vit_jax.weights import layout
from vit_jax.weights.card import Card
from vit_jax.weights.tensors import Shape

_BLOCK = "Transformer/encoderblock_{block}/"

# For a pattern of a path here, the name there. This is how Linen numbers.
HEAD = {r"head/(.+)": r"head/\1"}
VIT = HEAD | {
  r"patch_embed/(.+)": r"embedding/\1",
  r"cls": r"cls",
  layout.BLOCKS + r"norm1/(.+)": _BLOCK + r"LayerNorm_0/\1",
  layout.BLOCKS + r"attention/((query|key|value|out)/.+)": (
    _BLOCK + r"MultiHeadDotProductAttention_0/\1"
  ),
  layout.BLOCKS + r"norm2/(.+)": _BLOCK + r"LayerNorm_1/\1",
  layout.BLOCKS + r"mlp/fc1/(.+)": _BLOCK + r"MlpBlock_0/Dense_0/\1",
  layout.BLOCKS + r"mlp/fc2/(.+)": _BLOCK + r"MlpBlock_0/Dense_1/\1",
  r"encoder/norm/(.+)": r"Transformer/encoder_norm/\1",
  r"representation/(.+)": r"pre_logits/\1",
}
# By these one knows a ViT.
VIT_ARRAYS = {"embedding/kernel", "Transformer/encoder_norm/scale"}
# What came before Linen numbered all layers of a block together.
_PRE_LINEN = {
  "MultiHeadDotProductAttention_0": "MultiHeadDotProductAttention_1",
  "LayerNorm_1": "LayerNorm_2",
  "MlpBlock_0": "MlpBlock_3",
}


def names(
  paths: Iterable[str], patterns: Mapping[str, str], *, format: str
) -> dict[str, str]:
  """Returns the name there by path here.

  Args:
    paths: of parameters.
    patterns: for a regular expression of a whole path, the name, as
      `re.Match.expand` takes it.
    format: name of the format.

  Raises:
    ValueError: listing the paths that have none.
  """
  result, unnamed = {}, []
  for path in paths:
    for pattern, name in patterns.items():
      if match := re.fullmatch(pattern, path):
        result[path] = match.expand(name)
        break
    else:
      unnamed.append(path)
  if unnamed:
    raise ValueError(
      f"format: got {format!r} for a model with {unnamed}; it has no place for "
      "these. Use another format."
    )
  return result


def before_linen(name: str) -> str:
  """Returns what Linen's name of an array of a block was before Linen."""
  if name.startswith("Transformer/encoderblock"):
    for new, old in _PRE_LINEN.items():
      name = name.replace(f"/{new}/", f"/{old}/")
  return name


def is_before_linen(found: Iterable[str]) -> bool:
  """Returns whether the names of a file are from before Linen."""
  old = r"encoderblock.*/MultiHeadDotProductAttention_1/"
  return any(re.search(old, name) for name in found)


def positions(theirs: str, *, cls_row: bool, cls_posemb: bool) -> layout.Rule:
  """Returns the rule for the positions, of the class token first.

  Args:
    theirs: name of the array there.
    cls_row: whether it has a row for that token.
    cls_posemb: whether the model has one; zeros are written if it has none.
  """
  if cls_row and cls_posemb:
    return layout.Rule(
      *(theirs, ("cls_posemb", "posemb")),
      lambda xs: np.concatenate(xs, axis=1),
      lambda x, _: [x[:, :1], x[:, 1:]],
    )
  if cls_row:
    return layout.Rule(
      *(theirs, ("posemb",)),
      lambda xs: np.pad(xs[0], ((0, 0), (1, 0), (0, 0))),
      lambda x, _: [x[:, 1:]],
    )
  return layout.same(theirs, "posemb")


def check_model(
  card: Card,
  *,
  format: str,
  models: tuple[type, ...],
  fields: Mapping[str, tuple[Any, ...]],
) -> None:
  """Checks what the shapes of the parameters do not tell of a model.

  Args:
    card: that of the weights.
    format: name of the format.
    models: the classes that it can hold.
    fields: the values that it can hold, by field.

  Raises:
    ValueError: listing what it cannot hold.
  """

  def problems() -> Iterator[str]:
    fn: Any = card.model["fn"]
    if fn not in models:
      yield (
        f"format: got {format!r} for {fn.__name__}; it holds "
        f"{[m.__name__ for m in models]}. Use another format."
      )
      return
    for name, values in fields.items():
      if card.model[name] not in values:
        yield (
          f"format: got {format!r} for {name}={card.model[name]!r}; it holds "
          f"{list(values)}. Use another format."
        )

  check.raise_all(problems())


def log_assumptions(card: Card, *, format: str, **fields: Any) -> None:
  """Logs what other readers of the format will take to be otherwise.

  Args:
    card: that of the weights that are to be written.
    format: name of the format.
    **fields: of the model, as those readers assume them.
  """
  for name, assumed in fields.items():
    if card.model[name] != assumed:
      logging.warning(
        "%s: the model has %s=%r; the file does not tell, and its other "
        "readers assume %r. The card beside it tells.",
        *(format, name, card.model[name], assumed),
      )


def find(shapes: Mapping[str, Shape], pattern: str) -> Shape:
  """Returns the shape of the first array whose whole name matches.

  Raises:
    ValueError: if there is none.
  """
  for name, shape in shapes.items():
    if re.fullmatch(pattern, name):
      return shape
  raise ValueError(
    f"weights: got {len(shapes)} arrays; none of them has a name like "
    f"{pattern!r}, which the model needs. Get the file again."
  )


def count(shapes: Mapping[str, Shape], pattern: str) -> int:
  """Returns how far a number in the names of arrays goes.

  Args:
    shapes: by name.
    pattern: regular expression of how names start; its group is the number.
  """
  found = [re.match(pattern, name) for name in shapes]
  return max((int(match[1]) for match in found if match), default=0)


def stages(shapes: Mapping[str, Shape]) -> tuple[int, ...]:
  """Returns how many units each stage of a ResNet has."""
  num_stages = count(shapes, r"(?:resnet/)?block(\d+)/")
  return tuple(
    count(shapes, rf"(?:resnet/)?block{s + 1}/unit(\d+)/")
    for s in range(num_stages)
  )


def vit_fields(shapes: Mapping[str, Shape]) -> dict[str, Any]:
  """Returns what the arrays of a ViT tell of its fields, but for positions.

  Args:
    shapes: of its arrays, by name without a prefix.
  """
  block = r"Transformer/encoderblock(_\d+)?/"
  query = find(shapes, block + r"MultiHeadDotProductAttention_\d/query/bias")
  hidden = find(shapes, block + r"MlpBlock_\d/Dense_0/bias")
  norm = find(shapes, "Transformer/encoder_norm/scale")
  patch = find(shapes, "embedding/kernel")
  depth = count(shapes, r"Transformer/encoderblock_(\d+)/") + 1
  return {
    "num_classes": shapes.get("head/bias", (0,))[0],
    "width": norm[0],
    "depth": depth if len(query) == 2 else query[0],  # Stacked, or not.
    "num_heads": query[-2],
    "mlp_dim": hidden[-1],
    "patch_size": patch[:2],
    "representation_size": shapes.get("pre_logits/bias", (None,))[0],
  }


def image_size(
  num_patches: int | None,
  patch_size: tuple[int, int],
  hints: Mapping[str, Any],
) -> tuple[int, int]:
  """Returns (height, width) in pixels of the images of the training.

  Args:
    num_patches: what the file tells of it; None for nothing.
    patch_size: pixels (height, width).
    hints: with `image_size`, for a grid that is no square.

  Raises:
    ValueError: if neither tells.
  """
  side = math.isqrt(num_patches or 0)
  if num_patches and side**2 == num_patches:
    return side * patch_size[0], side * patch_size[1]
  if "image_size" not in hints:
    raise ValueError(
      f"image_size: got weights for {num_patches or 'any number of'} patches, "
      "which make no square. Give the image_size in pixels, (height, width)."
    )
  return hints["image_size"]


def card(
  model: spec.Spec,
  size: tuple[int, int],
  *,
  num_channels: int,
) -> Card:
  """Returns the card of published weights: plain resize, pixels in [-1, 1].

  Args:
    model: spec of the model.
    size: (height, width) in pixels.
    num_channels: C.
  """
  return Card(
    model=model,
    image_size=size,
    num_channels=num_channels,
    transform=spec.spec(transforms.resize, size=size),
    normalize=spec.spec(preprocess.Normalize),
  )
