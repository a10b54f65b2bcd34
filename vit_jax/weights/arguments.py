"""Command-line arguments of all commands that read weights to write others."""

import argparse
from typing import Any

from vit_jax.weights import resample


def add(parser: argparse.ArgumentParser) -> None:
  """Adds `source` and what `files.load` can be told about it."""
  parser.add_argument("source", help="path, URL, hub name, or workdir of a run")
  parser.add_argument("--num_classes", type=int, help="0 drops the head")
  parser.add_argument(
    "--image_size",
    type=int,
    nargs="+",
    help="pixels: one side, or height width",
  )
  parser.add_argument(
    "--posemb_resize",
    default="corner_linear",
    choices=list(resample.METHODS),
    help="how position embeddings are resized",
  )
  parser.add_argument(
    "--allow",
    action="append",
    default=[],
    help="module that a run's config may use besides vit_jax",
  )


def load_options(options: argparse.Namespace) -> dict[str, Any]:
  """Returns the keyword arguments of `files.load` that were given.

  Raises:
    ValueError: if an image has more than two sides.
  """
  size = options.image_size
  if size is not None and len(size) > 2:
    raise ValueError(
      f"image_size: got {size}; give one side, or height and width."
    )
  return {
    "num_classes": options.num_classes,
    "image_size": (size[0], size[-1]) if size else None,
    "posemb_resize": options.posemb_resize,
    "allow": tuple(options.allow),
  }
