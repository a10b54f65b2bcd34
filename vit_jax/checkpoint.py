"""Checkpoints through Orbax: asynchronous, atomic, restorable onto any mesh."""

from typing import Any, NamedTuple

import jax
import numpy as np
import orbax.checkpoint as ocp
from absl import logging
from etils import epath
from jax.experimental import multihost_utils

from vit_jax import paths
from vit_jax import state as state_lib

PyTree = Any

# What Orbax raises for a truncated or missing file, and for another tree.
_UNREADABLE = (ValueError, OSError, KeyError, TypeError, AttributeError)


class Restored(NamedTuple):
  """What was read from one checkpoint.

  Attributes:
    state: placed as the abstract state asked.
    info: the JSON that was saved with it.
    path: the folder it came from.
  """

  state: state_lib.TrainState
  info: dict[str, Any]
  path: epath.Path


class Checkpointer:
  """The checkpoints of one directory, one folder a step.

  A checkpoint holds the items `params`, `ema_params` (if there is one),
  `opt_state` and `info`. A step exists once it was written whole: what a killed
  process leaves behind is ignored and removed.
  """

  def __init__(self, directory: epath.PathLike, *, keep: int = 1) -> None:
    self.directory = epath.Path(directory)
    self._manager = ocp.CheckpointManager(
      self.directory,
      options=ocp.CheckpointManagerOptions(
        max_to_keep=keep, cleanup_tmp_directories=True
      ),
    )

  def __enter__(self) -> "Checkpointer":
    return self

  def __exit__(self, *unused: object) -> None:
    self._manager.close()

  def steps(self) -> list[int]:
    """Returns the steps that are there, oldest first."""
    return sorted(self._manager.all_steps())

  def save(self, state: state_lib.TrainState, info: dict[str, Any]) -> None:
    """Starts writing the state; returns when it was copied off the devices.

    A step that is already there is not written again.

    Args:
      state: the state to save.
      info: what JSON can hold; the step is added to it.

    Raises:
      RuntimeError: if Orbax declines to save.
    """
    step = int(state.step)
    if step in self.steps():
      return
    self._set_aside([s for s in self.steps() if s > step], "superseded")
    items = {
      "params": ocp.args.StandardSave(state.params),
      "opt_state": ocp.args.StandardSave(state.opt_state),
      "info": ocp.args.JsonSave({**info, "step": step}),
    }
    if state.ema_params is not None:
      items["ema_params"] = ocp.args.StandardSave(state.ema_params)
    if not self._manager.save(step, args=ocp.args.Composite(**items)):
      raise RuntimeError(
        f"checkpoint: Orbax declined to save step {step} beside "
        f"{self.steps()} in {self.directory}."
      )

  def wait(self) -> None:
    """Returns when what was started is on disk."""
    self._manager.wait_until_finished()

  def restore(self, target: state_lib.TrainState) -> Restored | None:
    """Returns the newest state that can be read, or None if there is no step.

    Damaged steps that are newer are moved aside, so that saving goes on.

    Args:
      target: ShapeDtypeStructs with shardings: the topology of this run, not
        of the one that saved.

    Raises:
      ValueError: if there are checkpoints and none can be read; a run never
        silently starts again from nothing.
    """
    failures = {}
    for step in reversed(self.steps()):
      try:
        restored = restore_folder(self.directory / str(step), target)
      except _UNREADABLE as error:
        failures[step] = f"{type(error).__name__}: {str(error)[:1000]}"
        continue
      for damaged, reason in failures.items():
        logging.warning(
          "checkpoint of step %d cannot be read, going back to step %d: %s",
          *(damaged, step, reason),
        )
      self._set_aside(list(failures), "damaged")
      return restored
    if failures:
      reasons = "\n".join(f"  step {s}: {r}" for s, r in failures.items())
      raise ValueError(
        f"checkpoint: none of {list(failures)} in {self.directory} can be "
        f"read. Start in another workdir, or remove them.\n{reasons}"
      )
    return None

  def info(self, step: int) -> dict[str, Any]:
    """Returns the JSON that was saved with a step."""
    self.wait()
    return read_info(self.directory / str(step))

  def _set_aside(self, steps: list[int], why: str) -> None:
    """Renames steps, so that the manager no longer lists them."""
    if not steps:
      return
    self.wait()
    if jax.process_index() == 0:
      for step in steps:
        aside = self.directory / f"{why}-{step}"
        if aside.exists():
          aside.rmtree()
        (self.directory / str(step)).rename(aside)
    if jax.process_count() > 1:
      multihost_utils.sync_global_devices(f"set aside {steps}")
    self._manager.reload()


def find_params(path: epath.PathLike) -> epath.Path:
  """Returns the newest checkpoint folder under a workdir, or `path` itself.

  Args:
    path: a workdir, its `checkpoints` or `best` folder, or one step's folder.

  Raises:
    ValueError: if there is no checkpoint.
  """
  path = paths.expand(path)
  if "://" not in str(path):
    path = path.resolve()  # Orbax takes a relative one for missing.
  for folder in (path, path / "checkpoints"):
    if (folder / "params").exists():
      return folder
    steps = _steps(folder)
    if steps:
      return folder / str(steps[-1])
  raise ValueError(
    f"checkpoint: got {str(path)!r}; there is no checkpoint. Give a workdir "
    "that has trained, or the folder of one step."
  )


def choose(workdir: epath.PathLike, name: epath.PathLike) -> epath.PathLike:
  """Returns the checkpoint of a workdir that `name` stands for.

  Args:
    workdir: of a run.
    name: "best", or the number of a step; all else is returned as it is.

  Raises:
    ValueError: if the run has no such checkpoint.
  """
  folder = paths.expand(workdir)
  if str(name) == "best":
    candidates = [folder / "best"]
  elif str(name).isdigit():
    candidates = [folder / part / str(name) for part in ("checkpoints", "best")]
  else:
    return name
  for candidate in candidates:
    if _steps(candidate) or (candidate / "params").exists():
      return candidate
  steps, best = _steps(folder / "checkpoints"), _steps(folder / "best")
  raise ValueError(
    f"checkpoint: got {str(name)!r}; {folder} has the steps {steps}, and as "
    f"its best {best}. Name one of these."
  )


def _steps(folder: epath.Path) -> list[int]:
  """Returns the steps that have a folder there, oldest first."""
  if not folder.is_dir():
    return []
  return sorted(int(p.name) for p in folder.iterdir() if p.name.isdigit())


def restore_folder(
  folder: epath.Path, target: state_lib.TrainState
) -> Restored:
  """Returns the state of one checkpoint.

  Args:
    folder: of one step.
    target: ShapeDtypeStructs with shardings.

  Raises:
    ValueError: naming every missing, unexpected and mis-shaped parameter; for
      damage, that or what else Orbax raises.
  """
  info = read_info(folder)
  if target.ema_params is not None and not (folder / "ema_params").exists():
    raise ValueError(
      f"ema_decay: got a value; {folder} has no running average. Set it to "
      "None, or start in another workdir with --config.init_from."
    )
  check_tree(saved_shapes(folder), target.params, source=str(folder))
  read = {
    name: _read_arrays(folder / name, getattr(target, name))
    for name in ("params", "opt_state", "ema_params")
    if getattr(target, name) is not None
  }
  step = jax.device_put(np.int32(info["step"]), target.step.sharding)
  state = state_lib.TrainState(
    step=step,
    params=read["params"],
    opt_state=read["opt_state"],
    ema_params=read.get("ema_params"),
  )
  return Restored(state, info, folder)


def read_params(folder: epath.Path) -> dict[str, np.ndarray]:
  """Returns parameters by slashed path, their running average if one was saved.

  Args:
    folder: of one step.

  Raises:
    ValueError: if they are damaged.
  """
  item = "ema_params" if (folder / "ema_params").exists() else "params"
  target = jax.tree.map(
    lambda leaf: np.empty(leaf.shape, leaf.dtype), _saved_tree(folder)
  )
  leaves = jax.tree_util.tree_leaves_with_path(
    _read_arrays(folder / item, target)
  )
  return {_path(path): np.asarray(leaf) for path, leaf in leaves}


def saved_shapes(folder: epath.Path) -> dict[str, tuple[int, ...]]:
  """Returns the shape of each saved parameter by its slashed path."""
  leaves = jax.tree_util.tree_leaves_with_path(_saved_tree(folder))
  return {_path(path): tuple(leaf.shape) for path, leaf in leaves}


def check_tree(
  saved: dict[str, tuple[int, ...]], target: PyTree, *, source: str
) -> None:
  """Compares saved shapes with a target tree.

  Raises:
    ValueError: naming every missing, unexpected and mis-shaped parameter.
  """
  leaves = jax.tree_util.tree_leaves_with_path(target)
  wanted = {_path(path): tuple(leaf.shape) for path, leaf in leaves}
  problems = [f"missing: {k} {wanted[k]}" for k in wanted if k not in saved]
  problems += [f"unexpected: {k} {saved[k]}" for k in saved if k not in wanted]
  problems += [
    f"shape: {k} is {saved[k]}, the model wants {wanted[k]}"
    for k in wanted
    if k in saved and saved[k] != wanted[k]
  ]
  if problems:
    lines = "\n  ".join(problems)
    raise ValueError(f"{source} does not fit the model:\n  {lines}")


def _saved_tree(folder: epath.Path) -> PyTree:
  """Returns what was saved of each parameter: shape and dtype."""
  with ocp.StandardCheckpointer() as checkpointer:
    found = checkpointer.metadata(folder / "params").item_metadata
  if found is None:
    raise ValueError(
      f"checkpoint: got {str(folder)!r}; the list of its parameters is missing "
      "or damaged. Use another step."
    )
  return found.tree


def _read_arrays(folder: epath.Path, target: PyTree) -> PyTree:
  """Returns the arrays of one item.

  Raises:
    ValueError: if one is damaged.
  """
  with ocp.StandardCheckpointer() as checkpointer:
    try:
      return checkpointer.restore(folder, target)
    except Exception as error:
      # Orbax wraps what it cannot read in an Exception of no kind.
      if type(error) is not Exception:
        raise
      raise ValueError(f"{folder}: {error.__cause__}") from error


def read_info(folder: epath.Path) -> dict[str, Any]:
  """Returns the JSON that was saved in the folder of one step."""
  with ocp.Checkpointer(ocp.JsonCheckpointHandler()) as checkpointer:
    return checkpointer.restore(folder / "info")


def _path(path: Any) -> str:
  return jax.tree_util.keystr(path, simple=True, separator="/")
