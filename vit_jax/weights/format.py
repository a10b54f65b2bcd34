"""What each outside format says of itself; one module of this package each."""

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from vit_jax.weights.card import Card
from vit_jax.weights.layout import Rule
from vit_jax.weights.tensors import Shape, Tensors

# The JSON files that lie beside the arrays, by file name.
Files = Mapping[str, Mapping[str, Any]]


class Format(Protocol):
  """A module that knows one format."""

  @property
  def NAME(self) -> str:
    """As in `--format`."""
    ...

  def recognises(self, tensors: Tensors, files: Files) -> bool:
    """Returns whether a file is of this format, by what it contains."""
    ...

  def describe(self, tensors: Tensors, files: Files, **hints: Any) -> Card:
    """Returns the card of the weights, read from the file itself.

    Args:
      tensors: its arrays.
      files: the JSON beside it.
      **hints: `image_size` and `num_heads`, for what the file leaves open.

    Raises:
      ValueError: if something is not in the file and there is no hint.
    """
    ...

  def rules(
    self, card: Card, shapes: Mapping[str, Shape], found: Mapping[str, Shape]
  ) -> Sequence[Rule]:
    """Returns the layout.

    Args:
      card: what the weights are.
      shapes: of the parameters here, by path.
      found: of the arrays there, where older files of the format differ from
        newer ones; empty to write the newest.

    Raises:
      ValueError: if the format cannot hold such a model.
    """
    ...

  def sidecars(self, card: Card) -> dict[str, str]:
    """Returns the text of the files that go beside the arrays, by name."""
    ...
