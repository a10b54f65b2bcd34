"""Where a run starts from: a checkpoint, other weights, or a seed."""

import functools
from collections.abc import Callable, Mapping
from typing import Any

import jax
from absl import logging

from vit_jax import checkpoint, train_step
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
    init = functools.partial(
      state_lib.init_params, parts.model, experiment.seed, image_shape
    )
    params = _pretrained(
      experiment.init_from,
      target.params,
      init=jax.jit(init, out_shardings=shardings.params),
    )
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
  path: str, target: PyTree, *, init: Callable[[], PyTree]
) -> PyTree:
  """Returns the parameters at `path`; the head of `init` if classes differ."""
  folder = checkpoint.find_params(path)
  saved = checkpoint.saved_shapes(folder)
  other = {
    f"head/{name}": saved[f"head/{name}"]
    for name, leaf in target.get("head", {}).items()
    if saved.get(f"head/{name}", leaf.shape) != leaf.shape
  }
  if not other:
    return checkpoint.load_params(folder, target)
  everywhere = jax.tree.leaves(target)[0].sharding.mesh
  adapted = dict(target) | {
    "head": {
      name: jax.ShapeDtypeStruct(
        saved[f"head/{name}"],
        leaf.dtype,
        sharding=jax.NamedSharding(everywhere, jax.P()),
      )
      for name, leaf in target["head"].items()
    }
  }
  for name, shape in other.items():
    logging.info("%s is %s in %s; it starts anew", name, shape, folder)
  return {**checkpoint.load_params(folder, adapted), "head": init()["head"]}
