"""The types that the data path meets at; NumPy only, so workers stay light."""

from collections.abc import Callable
from typing import Protocol, TypedDict

import numpy as np


class Example(TypedDict):
  """One labelled image.

  Attributes:
    image: encoded bytes (JPEG, PNG, ...) or a [H, W, C] array of uint8 or
      uint16.
    label: [] int32 class id, or [T] int32 class ids padded with -1.
    id: stable name of the example, e.g. its path; used in messages.
  """

  image: bytes | np.ndarray
  label: np.ndarray
  id: str


class Batch(TypedDict):
  """B examples of one size on the host.

  Attributes:
    image: [B, H, W, C] uint8 or uint16.
    label: [B] int32 class ids, or [B, T] int32 padded with -1.
    mask: [B] float32; 1 for a real example, 0 for padding or a skipped one.
    index: [B] int64 position in the source, -1 for padding.
  """

  image: np.ndarray
  label: np.ndarray
  mask: np.ndarray
  index: np.ndarray


class Source(Protocol):
  """One split of a dataset: random access, no preprocessing."""

  @property
  def num_classes(self) -> int:
    """Number of classes K; labels are in [0, K)."""
    ...

  @property
  def class_names(self) -> tuple[str, ...]:
    """The K class names in label order."""
    ...

  def __len__(self) -> int:
    """Number of examples."""
    ...

  def __getitem__(self, index: int) -> Example:
    """Returns the example at `index`, 0 <= index < len(self)."""
    ...


# Pure: the generator comes from (seed, global position) and nothing else.
Transform = Callable[[Example, np.random.Generator], Example]
