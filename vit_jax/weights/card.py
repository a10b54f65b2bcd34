"""The model card: what one must know of weights to use them rightly."""

import dataclasses
from typing import Any

import flax.linen as nn

from vit_jax import spec


@dataclasses.dataclass(frozen=True)
class Card:
  """What travels with weights.

  Attributes:
    model: spec of the model, `num_classes` among its arguments: sizes, pool,
      activation, epsilon of the norms.
    image_size: (height, width) in pixels that the weights were trained at.
    num_channels: C of the images.
    transform: spec of what evaluation does to an image: resize, crop,
      interpolation; None if unknown.
    normalize: spec of how its pixels are scaled.
    class_names: by class id; None if unknown.
    origin: where the weights come from.
    history: one line for each thing that was done to fit them, such as the
      method by which position embeddings were resized.
  """

  model: spec.Spec
  image_size: tuple[int, int]
  num_channels: int
  transform: spec.Spec | None
  normalize: spec.Spec
  class_names: tuple[str, ...] | None = None
  origin: str = ""
  history: tuple[str, ...] = ()

  def __post_init__(self) -> None:
    for name in ("model", "transform", "normalize"):
      if (value := getattr(self, name)) is not None:
        object.__setattr__(self, name, spec.as_dict(value))

  def build_model(self, **runtime: Any) -> nn.Module:
    """Returns the model.

    Args:
      **runtime: what a card cannot hold, such as `constrain`.
    """
    return spec.build(self.model, **runtime)

  def to_json(self) -> str:
    """Returns the card as JSON."""
    fields = {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}
    return spec.to_json(fields)


def from_json(text: str, *, allow: tuple[str, ...] = ()) -> Card:
  """Returns the card that `to_json` wrote.

  Args:
    text: the JSON.
    allow: modules outside `vit_jax` that it may name.

  Raises:
    ValueError: if it is no card, or names functions outside `vit_jax`.
  """
  fields = spec.from_json(text, allow=allow)
  known = {f.name for f in dataclasses.fields(Card)}
  if not {"model", "image_size", "transform"} <= fields.keys() <= known:
    raise ValueError(
      f"card: got the fields {sorted(fields)}; expected {sorted(known)}. "
      "Restore the file, or remove it to describe the weights anew."
    )
  return Card(**fields)


def edit_model(card: Card, **fields: Any) -> Card:
  """Returns the card of the same model but for some arguments."""
  arguments = {k: v for k, v in card.model.items() if k != "fn"} | fields
  model = spec.spec(card.model["fn"], **arguments)
  return dataclasses.replace(card, model=model)


def at_size(card: Card, image_size: tuple[int, int]) -> Card:
  """Returns the card for images of another size.

  The transform makes them: one that crops resizes to a larger size in the same
  proportion as before.

  Args:
    card: that of the weights.
    image_size: (height, width) in pixels.
  """
  if card.transform is None or image_size == card.image_size:
    return dataclasses.replace(card, image_size=image_size)
  transform = dict(card.transform) | {"size": image_size}
  if "resize" in transform:
    transform["resize"] = tuple(
      round(new * r / old)
      for new, r, old in zip(image_size, transform["resize"], card.image_size)
    )
  return dataclasses.replace(card, image_size=image_size, transform=transform)


def with_channels(card: Card, num_channels: int) -> Card:
  """Returns the card for images of another number of channels.

  They are scaled by the average of the channels that the weights know.
  """
  if num_channels == card.num_channels:
    return card
  normalize = dict(card.normalize)
  for name in ("mean", "std"):
    normalize[name] = (sum(normalize[name]) / len(normalize[name]),)
  transform = card.transform
  if transform is not None:
    transform = dict(transform) | {"num_channels": num_channels}
  return dataclasses.replace(
    card,
    num_channels=num_channels,
    normalize=normalize,
    transform=transform,
  )
