"""Where a run starts from: a checkpoint, other weights, or a seed."""

import functools
from collections.abc import Mapping
from typing import Any

import flax.linen as nn
import jax
import numpy as np
from absl import logging

from vit_jax import checkpoint, sharding, spec, train_step, weights
from vit_jax import state as state_lib
from vit_jax.config import Experiment
from vit_jax.data import probe
from vit_jax.data.example import Source

PyTree = Any


def start(
  experiment: Experiment,
  parts: train_step.Parts,
  target: state_lib.TrainState,
  *,
  image_shape: tuple[int, int, int],
  checkpoints: checkpoint.Checkpointer,
  data: Mapping[str, Any],
) -> tuple[state_lib.TrainState, int]:
  """Returns the state to start from, and the last step that was evaluated.

  The newest checkpoint of the workdir comes before `resume_from`, that before
  `init_from`, and that before new parameters.

  Args:
    experiment: the run.
    parts: its model and optimizer.
    target: its state as ShapeDtypeStructs with shardings.
    image_shape: [H, W, C].
    checkpoints: those of the workdir.
    data: from `describe_data`; a continued run must have the same.

  Raises:
    ValueError: if what is there does not fit the run.
  """
  restored = checkpoints.restore(target)
  if restored is None and experiment.resume_from:
    folder = checkpoint.find_params(experiment.resume_from)
    restored = checkpoint.restore_folder(folder, target)
  if restored is not None:
    _check_restored(restored, data, experiment.total_steps)
    logging.info("resumed from %s", restored.path)
    return restored.state, restored.info["evaluated"]
  ema = experiment.ema_decay is not None
  shardings = state_lib.shardings_of(target)
  if experiment.init_from:
    params = _pretrained(experiment, parts.model, target.params, image_shape)
    make = functools.partial(state_lib.with_params, parts.tx, ema=ema)
    logging.info("initialised parameters from %s", experiment.init_from)
    return jax.jit(make, out_shardings=shardings)(params), 0
  logging.info("initialised parameters from seed %d", experiment.seed)
  make = functools.partial(
    state_lib.init_state,
    parts.model,
    parts.tx,
    seed=experiment.seed,
    image_shape=image_shape,
    ema=ema,
  )
  return jax.jit(make, out_shardings=shardings)(), 0


def describe_data(experiment: Experiment, source: Source) -> dict[str, Any]:
  """Returns what the order of examples depends on, to keep beside a state."""
  return {
    "seed": experiment.seed,
    "batch_size": experiment.batch_size,
    "examples": len(source),
    "fingerprint": probe.fingerprint(source),
  }


def _check_restored(
  restored: checkpoint.Restored, data: Mapping[str, Any], total_steps: int
) -> None:
  for key, value in data.items():
    saved = restored.info.get(key)
    if saved != value:
      raise ValueError(
        f"data.{key}: got {value!r}; {restored.path} was trained with "
        f"{saved!r}, and with another the same steps would see other examples. "
        "Restore the data, or start in another workdir with --config.init_from."
      )
  step = int(restored.state.step)
  if step > total_steps:
    raise ValueError(
      f"total_steps: got {total_steps}; {restored.path} has already trained "
      f"{step} steps. Ask for more steps, or for its parameters alone with "
      "--config.init_from in another workdir."
    )
  if step == total_steps:
    logging.warning(
      "%s has trained all %d steps; nothing is left but to evaluate it. To "
      "train on from its parameters use --config.init_from in another workdir.",
      *(restored.path, total_steps),
    )


def _pretrained(
  experiment: Experiment,
  model: nn.Module,
  target: PyTree,
  image_shape: tuple[int, int, int],
) -> PyTree:
  """Returns the parameters of `init_from`, fitted to the model."""
  assert experiment.init_from
  params, card = weights.load_params(
    experiment.init_from,
    model,
    image_shape=image_shape,
    posemb_resize=experiment.init_posemb_resize,
    allow=spec.modules(experiment.model_dump()),
  )
  _warn_of_differences(experiment, card, image_shape)
  return sharding.place(params, target)


def _warn_of_differences(
  experiment: Experiment, card: weights.Card, image_shape: tuple[int, int, int]
) -> None:
  """Says where images reach the model otherwise than the weights know them."""
  if image_shape[:2] != tuple(card.image_size):
    logging.warning(
      "image size: this run has %s pixels; the weights were trained at %s",
      *(image_shape[:2], tuple(card.image_size)),
    )
  if any(
    np.any(np.subtract(experiment.normalize[name], card.normalize[name]))
    for name in ("mean", "std")
  ):
    logging.warning(
      "normalize: this run has %s; the weights were trained with %s. Set "
      "config.normalize to that.",
      *(_words(experiment.normalize), _words(card.normalize)),
    )
  for name, one in experiment.evals.items():
    if card.transform and _words(one["transform"]) != _words(card.transform):
      logging.warning(
        "evals.%s.transform: this run has %s; the weights were trained for %s",
        *(name, _words(one["transform"]), _words(card.transform)),
      )


def _words(tree: Mapping[str, Any]) -> str:
  """Returns a spec in one line, without the size that is told apart."""
  text = {k: v for k, v in tree.items() if k != "size"}
  return " ".join(spec.to_json(text).split())
