"""Names what is in images.

  python -m vit_jax.predict --workdir=runs/quickstart IMAGE [IMAGE ...]

Images are prepared as in the evaluation of the run.
"""

import argparse
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import flax.linen as nn
import jax
import numpy as np
from etils import epath

from vit_jax import (
  checkpoint,
  command,
  preprocess,
  processes,
  sharding,
  spec,
  state,
  workdir,
)
from vit_jax.data import images
from vit_jax.data.example import Example, Transform
from vit_jax.models import output

_BATCH_SIZE = 32


class Predictor(NamedTuple):
  """A trained run, ready to name what is in images."""

  model: nn.Module
  transform: Transform
  normalize: preprocess.Normalize
  class_names: tuple[str, ...]
  folder: epath.Path  # of the checkpoint
  num_channels: int


def load(
  path: epath.PathLike,
  *,
  checkpoint_path: epath.PathLike | None = None,
  allow: tuple[str, ...] = (),
) -> Predictor:
  """Returns the predictor of a run.

  Args:
    path: workdir of the run.
    checkpoint_path: one of its checkpoints; the newest if None.
    allow: modules outside `vit_jax` that its config may use.

  Raises:
    ValueError: if the folder is not that of a trained run.
  """
  path = workdir.resolve(path)
  experiment = workdir.read_config(path, allow=allow)
  class_names = workdir.read_class_names(path)
  if class_names is None:
    raise ValueError(f"workdir: got {str(path)!r}; it has no classes.json.")
  transforms = [
    evaluator["transform"]
    for evaluator in experiment.evals.values()
    if spec.is_spec(evaluator.get("transform"))
  ]
  if not transforms:
    raise ValueError(
      f"workdir: got {str(path)!r}; its config evaluates nothing, so how to "
      "prepare an image is not known. Add an evaluator to `evals`."
    )
  model = spec.build(
    experiment.model,
    num_classes=len(class_names),
    constrain=sharding.constrain_batch,
  )
  folder = checkpoint.find_params(checkpoint_path or path)
  return Predictor(
    model=model,
    transform=spec.build(transforms[0]),
    normalize=spec.build(experiment.normalize),
    class_names=class_names,
    folder=folder,
    num_channels=checkpoint.read_info(folder)["image_shape"][-1],
  )


def predict(
  predictor: Predictor, paths: Sequence[str]
) -> Iterator[tuple[str, list[tuple[str, float]] | str]]:
  """Yields for each path its classes with probabilities, the likeliest first.

  A file that is missing or no image yields what is wrong with it instead.
  """
  loaded = [_load_image(predictor, path) for path in paths]
  good = [image for image in loaded if isinstance(image, np.ndarray)]
  rows = iter(_probabilities(predictor, good))
  for path, image in zip(paths, loaded):
    if isinstance(image, str):
      yield path, image
      continue
    row = next(rows)
    order = np.argsort(-row, kind="stable")
    yield path, [(predictor.class_names[k], float(row[k])) for k in order]


def _load_image(predictor: Predictor, path: str) -> np.ndarray | str:
  try:
    data = epath.Path(path).expanduser().read_bytes()
    example = Example(image=data, label=np.zeros((), np.int32), id=path)
    image = predictor.transform(example, np.random.default_rng(0))["image"]
    return images.with_channels(np.asarray(image), predictor.num_channels)
  except (OSError, images.DecodeError) as error:
    return str(error)


def _probabilities(
  predictor: Predictor, loaded: Sequence[np.ndarray]
) -> Iterator[np.ndarray]:
  """Yields [K] for each image; softmax of the logits."""
  if not loaded:
    return
  device = jax.sharding.SingleDeviceSharding(jax.local_devices()[0])
  shapes = state.param_shapes(predictor.model, loaded[0].shape)
  target = jax.tree.map(
    lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=device), shapes
  )
  params = checkpoint.load_params(predictor.folder, target)

  @jax.jit
  def apply(batch: jax.Array) -> jax.Array:
    image = predictor.normalize(batch)
    return jax.nn.softmax(output.apply(predictor.model, params, image).logits)

  rows = min(_BATCH_SIZE, len(loaded))
  for first in range(0, len(loaded), rows):
    part = np.stack(loaded[first : first + rows])  # [b, H, W, C]
    padding = [(0, rows - len(part))] + [(0, 0)] * 3
    yield from np.asarray(apply(np.pad(part, padding)))[: len(part)]


def main() -> int:
  """Runs the command; returns its exit code."""
  parser = argparse.ArgumentParser(
    "python -m vit_jax.predict",
    description="Names what is in images, as a trained run sees them.",
  )
  parser.add_argument("images", nargs="+", help="image files")
  parser.add_argument("--workdir", required=True, help="folder of the run")
  parser.add_argument("--checkpoint", help="one that is not the newest")
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
  import rich
  import rich.markup

  processes.start()
  predictor = load(
    options.workdir,
    checkpoint_path=options.checkpoint,
    allow=tuple(options.allow),
  )
  failed = False
  for path, found in predict(predictor, options.images):
    rich.print(f"[bold]{rich.markup.escape(path)}[/]")
    if isinstance(found, str):
      failed = True
      rich.print(f"  [red]{rich.markup.escape(found)}[/]")
      continue
    for name, probability in found[: options.top]:
      rich.print(f"  {probability:7.2%}  {rich.markup.escape(name)}")
  return int(failed)


if __name__ == "__main__":
  command.run(main)
