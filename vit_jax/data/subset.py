"""A held-out part of a source, for data without a validation split."""

import hashlib
from typing import Protocol

import numpy as np

from vit_jax.data.example import Example, Source

# Part of every hash: another salt makes another split of the same data.
_SALT = "vit_jax.holdout.1"


class _NamedSource(Source, Protocol):
  """A source that knows the ids of its examples without reading them."""

  def example_id(self, index: int) -> str: ...


class Holdout:
  """The training or the validation part of a source.

  An example belongs to "val" if the hash of its id, as a number in [0, 1), is
  below `fraction`. So the split is the same in every process, run and machine,
  needs no seed, and no example moves when others are added or removed.
  """

  def __init__(
    self, *, source: _NamedSource, fraction: float, part: str
  ) -> None:
    """Hashes all ids.

    Args:
      source: the examples to split.
      fraction: expected share of "val", in (0, 1).
      part: "train" or "val".

    Raises:
      ValueError: if an argument is out of range or the part is empty.
    """
    if not 0 < fraction < 1:
      raise ValueError(
        f"fraction: got {fraction!r}; must be in (0, 1). Use 0.1 to hold out a "
        "tenth."
      )
    if part not in ("train", "val"):
      raise ValueError(
        f"part: got {part!r}; must be 'train' or 'val'. Use one of these."
      )
    position = np.array(
      [_position(source.example_id(i)) for i in range(len(source))]
    )  # [N] in [0, 1)
    held_out = position < fraction
    self._indices = np.flatnonzero(held_out if part == "val" else ~held_out)
    if self._indices.size == 0:
      raise ValueError(
        f"fraction: got {fraction!r}; leaves no example of {len(source)} for "
        f"part {part!r}. Choose another fraction."
      )
    self._source = source
    self.class_names = source.class_names
    self.num_classes = source.num_classes

  def __len__(self) -> int:
    return len(self._indices)

  def __getitem__(self, index: int) -> Example:
    return self._source[int(self._indices[index])]

  def example_id(self, index: int) -> str:
    """Returns the id of the example at `index`."""
    return self._source.example_id(int(self._indices[index]))


def _position(example_id: str) -> float:
  digest = hashlib.sha256(f"{_SALT}/{example_id}".encode()).digest()
  return int.from_bytes(digest[:6], "big") / 2**48
