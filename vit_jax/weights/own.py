"""This project's own checkpoints, read as weights."""

from etils import epath

from vit_jax import checkpoint, spec, workdir
from vit_jax.weights.card import Card
from vit_jax.weights.layout import Params


def is_checkpoint(path: epath.Path) -> bool:
  """Returns whether a folder is a workdir with a checkpoint, or one of them."""
  try:
    checkpoint.find_params(path)
  except ValueError:
    return False
  return True


def read(
  path: epath.Path, *, allow: tuple[str, ...] = ()
) -> tuple[Params, Card]:
  """Returns the parameters of a run, averaged if it averages, and their card.

  Args:
    path: a workdir, or one of its checkpoints.
    allow: modules outside `vit_jax` that the run's config may name.

  Raises:
    ValueError: if the run's config is not there, or the checkpoint is damaged.
  """
  folder = checkpoint.find_params(path)
  run = next(
    (p for p in (path, *folder.parents) if (p / "config.json").exists()), path
  )
  experiment = workdir.read_config(run, allow=allow)
  class_names = workdir.read_class_names(run)
  if class_names is None:
    raise ValueError(
      f"workdir: got {str(run)!r}; it has no classes.json. Give the folder of "
      "a run."
    )
  height, width, channels = checkpoint.read_info(folder)["image_shape"]
  transforms = [
    evaluator["transform"]
    for evaluator in experiment.evals.values()
    if spec.is_spec(evaluator.get("transform"))
  ]
  card = Card(
    model=dict(experiment.model) | {"num_classes": len(class_names)},
    image_size=(height, width),
    num_channels=channels,
    transform=transforms[0] if transforms else None,
    normalize=experiment.normalize,
    class_names=class_names,
    origin=str(folder),
  )
  return checkpoint.read_params(folder), card
