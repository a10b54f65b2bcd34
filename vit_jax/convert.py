"""Converts weights from one format to another, and proves it.

  python -m vit_jax.convert SRC DST --format=timm

SRC is a path, a URL, a name of a hub or a run of this project. What was
written is read again, and must give the same logits.
"""

import argparse
from typing import Any

import jax
import numpy as np
from etils import epath

from vit_jax import command, processes, weights
from vit_jax.models import output
from vit_jax.weights import arguments

PyTree = Any
_IMAGES = 2
# f32: logits of two copies of one model, sums in another order at most.
_TOLERANCE = 1e-5


def convert(
  source: str,
  destination: str,
  *,
  format: str,
  num_classes: int | None = None,
  image_size: tuple[int, int] | None = None,
  posemb_resize: str = "corner_linear",
  allow: tuple[str, ...] = (),
) -> tuple[epath.Path, float]:
  """Converts weights; returns where they are, and how much the logits differ.

  Args:
    source: as `weights.load` takes it.
    destination: file of an .npz format, folder of a safetensors one.
    format: as `weights.save` takes it.
    num_classes: K; another than the file's is a new head. The file's if None.
    image_size: (height, width) in pixels; the file's if None.
    posemb_resize: method by which position embeddings are resized.
    allow: modules outside `vit_jax` that a run's config may name.

  Raises:
    ValueError: if they cannot be read or held, if there is something at the
      destination, or the logits differ.
  """
  for there in (destination, f"{destination}.npz"):
    if epath.Path(there).expanduser().exists():
      raise ValueError(
        f"destination: got {destination!r}; {there} is there already. Remove "
        "it, or choose another name."
      )
  model, params, card = weights.load(
    source,
    num_classes=num_classes,
    image_size=image_size,
    posemb_resize=posemb_resize,
    allow=allow,
  )
  path = weights.save(destination, params, card, format=format)
  again = weights.load(path, allow=allow)
  shape = (_IMAGES, *card.image_size, card.num_channels)
  image = np.random.default_rng(0).uniform(-1, 1, shape).astype(np.float32)
  before = _outputs(model, params, image)
  after = _outputs(again.model, again.params, image)
  worst = max(float(np.abs(a - b).max()) for a, b in zip(before, after))
  scale = max(1.0, *(float(np.abs(a).max()) for a in before))
  if not worst <= _TOLERANCE * scale:
    raise ValueError(
      f"convert: {path} gives other logits than {source}: they differ by "
      f"{worst:.2g}. Do not use it."
    )
  return path, worst


def _outputs(
  model: Any, params: PyTree, image: np.ndarray
) -> tuple[np.ndarray, ...]:
  """Returns what there is to compare: logits if any, and the representation."""
  out = jax.jit(lambda p, x: output.apply(model, p, x))(params, image)
  both = np.asarray(out.logits), np.asarray(out.representation)
  return both if both[0].size else both[1:]


def main() -> int:
  """Runs the command; returns its exit code."""
  parser = argparse.ArgumentParser(
    "python -m vit_jax.convert",
    description="Converts weights, and checks that the logits agree.",
  )
  arguments.add(parser)
  parser.add_argument("destination", help=".npz file, or folder of safetensors")
  parser.add_argument(
    "--format", required=True, choices=weights.FORMAT_NAMES, help="to write"
  )
  options = parser.parse_args()
  processes.start()
  path, worst = convert(
    options.source,
    options.destination,
    format=options.format,
    **arguments.load_options(options),
  )
  command.show(f"{path}: written and read again; logits differ by {worst:.1g}")
  return 0


if __name__ == "__main__":
  command.run(main)
