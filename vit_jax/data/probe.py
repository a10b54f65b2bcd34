"""What can be known of a source before a run: image shape and fingerprint."""

import hashlib

import numpy as np

from vit_jax.data import images
from vit_jax.data.example import Source, Transform

_TRIES = 16  # Examples that may be undecodable before we give up.


def image_shape(source: Source, transform: Transform) -> tuple[int, int, int]:
  """Returns [H, W, C] of what the transform makes of the source's images.

  Raises:
    ValueError: if the source is empty, or its first examples are all damaged.
  """
  if len(source) == 0:
    raise ValueError("source: got 0 examples; check its path and split.")
  for index in range(min(len(source), _TRIES)):
    try:
      example = transform(source[index], np.random.default_rng(index))
    except images.DecodeError:
      if index + 1 == min(len(source), _TRIES):
        raise
      continue
    height, width, channels = np.shape(example["image"])
    return height, width, channels
  raise AssertionError


def fingerprint(source: Source) -> str:
  """Returns a short hash of a source's size, classes and some of its ids.

  Two sources with one fingerprint hold, with near certainty, the same examples
  in the same order.
  """
  picked = np.unique(np.linspace(0, len(source) - 1, 16).astype(int))
  parts = [str(len(source)), *source.class_names]
  for index in picked.tolist():
    example = source[index]
    parts += [example["id"], str(np.asarray(example["label"]).tolist())]
  return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:16]
