"""The folder of a run: its config, its class names, where its files lie."""

import contextlib
import json
import os
from collections.abc import Iterator
from typing import Any

import jax
from absl import logging
from etils import epath
from jax.experimental import multihost_utils

from vit_jax import config as config_lib
from vit_jax import paths, spec

# What a process killed while it made the folder may have left there.
_LEFT_BEHIND = {"classes.json", "classes.json.tmp", "config.json.tmp"}


def resolve(path: epath.PathLike) -> epath.Path:
  """Returns the folder's full path; `~` expanded, `gs://` left as it is.

  Raises:
    ValueError: if it is empty, or on a storage that checkpoints do not reach.
  """
  if not str(path):
    raise ValueError(
      "workdir: got ''; expected a folder. Give --workdir=runs/NAME; it is "
      "made if it is not there."
    )
  folder = paths.expand(path)
  scheme = str(folder).partition("://")[0] if "://" in str(folder) else None
  if scheme not in (None, "gs"):  # Orbax takes others for a local folder.
    raise ValueError(
      f"workdir: got {str(path)!r}; must be a local folder or gs://. "
      f"Mount the {scheme} storage, and give the folder."
    )
  return folder if scheme else folder.resolve()


def prepare(
  path: epath.PathLike,
  experiment: config_lib.Experiment,
  *,
  class_names: tuple[str, ...],
  force: bool = False,
) -> None:
  """Checks the folder, and makes it if it is new.

  What a folder holds stays as it is: `write` changes it, once the checkpoints
  there have been found to fit.

  Args:
    path: the folder.
    experiment: the run.
    class_names: in label order.
    force: accept a folder of something else, or a changed config.

  Raises:
    ValueError: if the folder holds something else, or the run of another
      config: what would change the numbers is listed.
  """
  folder = epath.Path(path)
  there = {file.name for file in folder.iterdir()} if folder.is_dir() else set()
  if "config.json" in there:
    new = spec.to_json(experiment.model_dump())
    _check_changes(folder, json.loads(new), force)
    _check_class_names(folder, class_names, force)
    return
  if there - _LEFT_BEHIND and not force:
    raise ValueError(
      f"workdir: got {str(folder)!r}, which is not empty and not a run's. "
      "Choose another one, or use --force to share it."
    )
  if jax.process_count() > 1:  # All have looked before one writes.
    multihost_utils.sync_global_devices("workdir")
  write(folder, experiment, class_names=class_names)


def write(
  path: epath.PathLike,
  experiment: config_lib.Experiment,
  *,
  class_names: tuple[str, ...],
) -> None:
  """Writes `config.json` and `classes.json`, on the first process.

  Args:
    path: the folder.
    experiment: the run.
    class_names: in label order.

  Raises:
    ValueError: if the system does not let it.
  """
  if jax.process_index() != 0:
    return
  folder = epath.Path(path)
  try:
    folder.mkdir(parents=True, exist_ok=True)
    names = json.dumps(class_names, ensure_ascii=False, indent=0)
    _write(folder / "classes.json", names)
    _write(folder / "config.json", spec.to_json(experiment.model_dump()))
  except OSError as error:
    raise ValueError(
      f"workdir: got {str(folder)!r}; cannot write there ({error.strerror}). "
      "Choose another folder."
    ) from error


@contextlib.contextmanager
def held(path: epath.PathLike) -> Iterator[None]:
  """Keeps a second run out of the folder while it is entered.

  The system lets go of the folder however this process ends. Object stores and
  some network drives cannot be held.

  Args:
    path: the folder; it is there.

  Raises:
    ValueError: if another process holds it.
  """
  folder = os.fspath(path)
  if jax.process_index() != 0 or "://" in folder or os.name != "posix":
    yield
    return
  import fcntl  # Not on every system.

  descriptor = os.open(folder, os.O_RDONLY)
  try:
    fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
  except BlockingIOError:
    os.close(descriptor)
    raise ValueError(
      f"workdir: got {folder!r}; another process is training there. Wait "
      "for it, stop it, or choose another folder."
    ) from None
  except OSError as error:
    logging.info("%s cannot be held against a second run: %s", folder, error)
  try:
    yield
  finally:
    os.close(descriptor)


def read_config(
  path: epath.PathLike, *, allow: tuple[str, ...] = ()
) -> config_lib.Experiment:
  """Returns the config of a run.

  Args:
    path: its folder.
    allow: modules outside `vit_jax` that the config may name.

  Raises:
    ValueError: if there is none, or it names a function elsewhere.
  """
  file = epath.Path(path) / "config.json"
  if not file.exists():
    raise ValueError(
      f"workdir: got {str(path)!r}; it has no config.json. Give the folder of "
      "a run."
    )
  try:
    tree = spec.from_json(file.read_text("utf-8"), allow=allow)
  except ValueError as error:
    raise ValueError(f"{file}: {error}") from None
  # The mesh is that of the run; this process may have other devices.
  tree["mesh"] = {"data": 1, "fsdp": -1}
  return config_lib.parse(tree, name=str(file))


def read_class_names(path: epath.PathLike) -> tuple[str, ...] | None:
  """Returns the class names of a run in label order, None if it has none.

  Raises:
    ValueError: if the file is damaged.
  """
  file = epath.Path(path) / "classes.json"
  if not file.exists():
    return None
  try:
    return tuple(json.loads(file.read_text("utf-8")))
  except ValueError as error:
    raise ValueError(
      f"workdir: got {str(path)!r}; its classes.json is damaged ({error}). "
      "Remove that file and train on; it is written anew."
    ) from None


def _check_changes(
  folder: epath.Path, new: dict[str, Any], force: bool
) -> None:
  try:
    old = json.loads((folder / "config.json").read_text("utf-8"))
  except ValueError as error:
    raise ValueError(
      f"workdir: got {str(folder)!r}; its config.json is damaged ({error}). "
      "Remove that file and use --force to go on."
    ) from None
  changes = config_lib.changes(old, new)
  free = {k: v for k, v in changes.items() if config_lib.is_free_to_change(k)}
  for key, change in free.items():
    logging.info("config changed since this run started: %s: %s", key, change)
  fixed = {k: v for k, v in changes.items() if k not in free}
  lines = "\n".join(f"  {key}: {change}" for key, change in fixed.items())
  if fixed and not force:
    raise ValueError(
      f"workdir: got {str(folder)!r}, the run of another config:\n{lines}\n"
      "Choose another workdir, or use --force to go on with the new values."
    )
  if fixed:
    logging.warning("going on with a changed config:\n%s", lines)


def _check_class_names(
  folder: epath.Path, class_names: tuple[str, ...], force: bool
) -> None:
  old = read_class_names(folder)
  if old is None or old == class_names or force:
    return
  raise ValueError(
    f"workdir: got {str(folder)!r}, the run of the {len(old)} classes "
    f"{_some(old)}; the data now has the {len(class_names)} classes "
    f"{_some(class_names)}. Choose another workdir."
  )


def _some(names: tuple[str, ...]) -> str:
  return ", ".join(map(repr, names[:5])) + (", ..." if len(names) > 5 else "")


def _write(file: epath.Path, text: str) -> None:
  """Writes a file of which a killed process never leaves a half."""
  if "://" in str(file):  # An object appears when it is complete.
    file.write_text(text, "utf-8")
  else:
    temporary = file.with_name(f"{file.name}.tmp")
    temporary.write_text(text, "utf-8")
    temporary.replace(file)
