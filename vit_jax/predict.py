"""Names what is in images.

  python -m vit_jax.predict --workdir=runs/quickstart IMAGE [IMAGE ...]
  python -m vit_jax.predict --workdir=runs/quickstart --checkpoint=best IMAGE
  python -m vit_jax.predict --checkpoint=WEIGHTS IMAGE [IMAGE ...]

Images are prepared as in the evaluation of the run, or as the weights' card
says.
"""

import argparse
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import numpy as np
from etils import epath

from vit_jax import (
  checkpoint,
  command,
  paths,
  preprocess,
  processes,
  spec,
  weights,
)
from vit_jax.data import images
from vit_jax.data.example import Example, Transform
from vit_jax.models import output

_BATCH_SIZE = 32


class Predictor(NamedTuple):
  """A model with its weights that names what is in images."""

  model: nn.Module
  params: Any
  transform: Transform
  normalize: preprocess.Normalize
  class_names: tuple[str, ...]
  num_channels: int


def load(name: epath.PathLike, *, allow: tuple[str, ...] = ()) -> Predictor:
  """Returns the predictor of a run, or of anyone's weights.

  Args:
    name: workdir of the run, one of its checkpoints, or what `weights.load`
      takes.
    allow: modules outside `vit_jax` that its config may use.

  Raises:
    ValueError: if there are no weights, or how to prepare images for them is
      not known.
  """
  model, params, card = weights.load(name, allow=allow)
  if card.transform is None:
    raise ValueError(
      f"weights: got {str(name)!r}; its config evaluates nothing, so how to "
      "prepare an image is not known. Add an evaluator to `evals`."
    )
  num_classes = card.model["num_classes"]
  if num_classes == 0:
    raise ValueError(
      f"weights: got {str(name)!r}; they have no head, so there are no classes "
      "to name. Fine-tune them first, with --config.init_from."
    )
  class_names = card.class_names or tuple(
    f"class {k}" for k in range(num_classes)
  )
  return Predictor(
    model=model,
    params=params,
    transform=spec.build(card.transform),
    normalize=spec.build(card.normalize),
    class_names=class_names,
    num_channels=card.num_channels,
  )


def predict(
  predictor: Predictor, files: Sequence[str]
) -> Iterator[tuple[str, list[tuple[str, float]] | str]]:
  """Yields for each path its classes with probabilities, the likeliest first.

  A file that is missing or no image yields what is wrong with it instead.
  """
  loaded = [_load_image(predictor, path) for path in files]
  good = [image for image in loaded if isinstance(image, np.ndarray)]
  rows = iter(_probabilities(predictor, good))
  for path, image in zip(files, loaded):
    if isinstance(image, str):
      yield path, image
      continue
    row = next(rows)
    order = np.argsort(-row, kind="stable")
    yield path, [(predictor.class_names[k], float(row[k])) for k in order]


def _load_image(predictor: Predictor, path: str) -> np.ndarray | str:
  try:
    file = paths.expand(path)
    if not file.is_file():
      what = "it is a folder" if file.is_dir() else "there is no such file"
      return f"image: got {path!r}; {what}. Give the path of an image."
    data = file.read_bytes()
    example = Example(image=data, label=np.zeros((), np.int32), id=path)
    image = predictor.transform(example, np.random.default_rng(0))["image"]
    return images.with_channels(np.asarray(image), predictor.num_channels)
  except (ImportError, OSError, ValueError) as error:
    return str(error)


def _probabilities(
  predictor: Predictor, loaded: Sequence[np.ndarray]
) -> Iterator[np.ndarray]:
  """Yields [K] for each image; softmax of the logits."""
  if not loaded:
    return

  @jax.jit
  def apply(params: Any, batch: jax.Array) -> jax.Array:
    image = predictor.normalize(batch)
    return jax.nn.softmax(output.apply(predictor.model, params, image).logits)

  rows = min(_BATCH_SIZE, len(loaded))
  for first in range(0, len(loaded), rows):
    part = np.stack(loaded[first : first + rows])  # [b, H, W, C]
    padding = [(0, rows - len(part))] + [(0, 0)] * 3
    batch = np.pad(part, padding)
    yield from np.asarray(apply(predictor.params, batch))[: len(part)]


def main() -> int:
  """Runs the command; returns its exit code."""
  parser = argparse.ArgumentParser(
    "python -m vit_jax.predict",
    description="Names what is in images, as a trained run sees them.",
  )
  parser.add_argument("images", nargs="+", help="image files")
  parser.add_argument("--workdir", help="folder of the run")
  parser.add_argument(
    "--checkpoint",
    help="instead of its newest step: best, or a step such as 800; or weights "
    "of any format, by path or name, which need no --workdir",
  )
  parser.add_argument("--top", type=int, default=5, help="classes to print")
  parser.add_argument(
    "--allow",
    action="append",
    default=[],
    help="module that the run's config may use besides vit_jax",
  )
  options = parser.parse_args()
  if options.top < 1:
    raise ValueError(f"top: got {options.top}; must be >= 1. Use 5.")
  name = options.checkpoint or options.workdir
  if options.workdir and options.checkpoint:
    name = checkpoint.choose(options.workdir, options.checkpoint)
  if not name:
    raise ValueError(
      "predict: needs --workdir=DIR, or --checkpoint=WEIGHTS. See --help."
    )
  processes.start()
  predictor = load(name, allow=tuple(options.allow))
  failed = False
  for path, found in predict(predictor, options.images):
    command.show(path, style="bold")
    if isinstance(found, str):
      failed = True
      command.show(f"  {found}", style="red")
      continue
    for name, probability in found[: options.top]:
      command.show(f"  {probability:7.2%}  {name}")
  return int(failed)


if __name__ == "__main__":
  command.run(main)
