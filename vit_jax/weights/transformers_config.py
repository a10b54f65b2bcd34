"""What the JSON of Transformers says of images and classes.

A preprocessor_config.json either resizes to a size, or resizes the short side
and crops. Pillow's filters are numbers in it.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from vit_jax import spec
from vit_jax.data import transforms
from vit_jax.weights import pytorch
from vit_jax.weights.card import Card

_FILTERS = {2: "bilinear", 3: "bicubic"}


def transform(images: Mapping[str, Any], image_size: tuple[int, int]) -> Any:
  """Returns the spec of the evaluation transform, or None if unknown.

  The result has the size that the position embeddings are for: DINOv2's are
  for 518 pixels where its preprocessor crops 224 of 256, so 518 of 592.
  """
  size = images.get("size")
  if not images.get("do_resize", True) or size is None:
    return None
  kind = _FILTERS.get(images.get("resample", 2))
  if kind is None:
    return None
  interpolation = pytorch.INTERPOLATIONS[kind]
  edge = size.get("shortest_edge") if isinstance(size, Mapping) else None
  if edge is None:
    return spec.spec(
      transforms.resize, size=image_size, interpolation=interpolation
    )
  if not images.get("do_center_crop"):
    return None
  crop = pair(images["crop_size"])
  return spec.spec(
    transforms.resize_center_crop,
    resize=tuple(round(s * edge / c) for s, c in zip(image_size, crop)),
    size=image_size,
    interpolation=interpolation,
  )


def normalize(images: Mapping[str, Any]) -> Any:
  """Returns the spec of Normalize; by default to [-1, 1]."""
  rescales = images.get("do_rescale", True)
  scale = images.get("rescale_factor", 1 / 255) if rescales else 1.0
  mean, std = images.get("image_mean", (0.5,)), images.get("image_std", (0.5,))
  if not images.get("do_normalize", True):
    mean, std = (0.0,), (1.0,)
  return pytorch.normalize(mean, std, scale=scale)


def preprocessor(card: Card) -> dict[str, Any] | None:
  """Returns the preprocessor_config.json, or None if it cannot say it all."""
  images, numbers = card.transform or {}, {v: k for k, v in _FILTERS.items()}
  fn = images.get("fn")
  if fn not in (transforms.resize, transforms.resize_center_crop):
    return None
  mean, std = pytorch.mean_and_std(card.normalize, card.num_channels)
  result = {
    "image_processor_type": "ViTImageProcessor",
    "do_resize": True,
    "size": _sides(images["size"]),
    "resample": numbers[pytorch.filter_name(images["interpolation"])],
    "do_rescale": True,
    "rescale_factor": 1 / 255,
    "do_normalize": True,
    "image_mean": mean,
    "image_std": std,
  }
  if fn is transforms.resize_center_crop:
    result |= {
      "image_processor_type": "BitImageProcessor",
      "size": {"shortest_edge": min(images["resize"])},
      "do_center_crop": True,
      "crop_size": _sides(images["size"]),
    }
  return result


def class_names(
  config: Mapping[str, Any], num_classes: int
) -> tuple[str, ...] | None:
  """Returns the names of the classes, or None for placeholders."""
  labels = {int(k): v for k, v in config.get("id2label", {}).items()}
  names = tuple(str(labels.get(i)) for i in range(num_classes))
  known = num_classes > 0 and len(labels) == num_classes
  return names if known and names != placeholders(num_classes) else None


def placeholders(num_classes: int) -> tuple[str, ...]:
  """Returns the names that Transformers gives to classes without one."""
  return tuple(f"LABEL_{i}" for i in range(num_classes))


def _sides(size: Sequence[int]) -> dict[str, int]:
  return {"height": size[0], "width": size[1]}


def pair(size: Any) -> tuple[int, int]:
  """Returns (height, width) of any way that Transformers writes a size."""
  if isinstance(size, Mapping):
    return size["height"], size["width"]
  return (size, size) if isinstance(size, int) else (size[0], size[1])


def one_or_pair(size: Sequence[int]) -> int | list[int]:
  """Returns one number for a square, which Transformers takes for ViT alone."""
  return size[0] if size[0] == size[1] else list(size)
