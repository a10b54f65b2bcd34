"""Your own images: a folder for each class."""

import os
import re
from collections.abc import Iterator

import numpy as np
from absl import logging
from etils import epath

from vit_jax import paths
from vit_jax.data.example import Example

# A file counts as an image by its suffix, in any case.
IMAGE_SUFFIXES = frozenset(
  (
    *(".bmp", ".gif", ".jfif", ".jpe", ".jpeg", ".jpg", ".pgm", ".png"),
    *(".pnm", ".ppm", ".tif", ".tiff", ".webp"),
  )
)


class FolderSource:
  """The images in `root/{split}/{class}/`, at any depth below the class.

  The classes are the folders of one split, sorted by name, and the same for all
  splits; a class without images keeps its place. Hidden files and folders
  (with a leading dot) and files without an image suffix are left out; of these,
  the number and the first are logged. Symbolic links are followed. Examples are
  sorted by path; their ids are paths relative to `root`. Images are read when
  asked for.
  """

  def __init__(
    self, *, root: str, split: str, classes_from: str = "train"
  ) -> None:
    """Lists the files.

    Args:
      root: the folder above the splits; `~` and remote paths are understood.
      split: the folder with the images.
      classes_from: the split whose folders are the classes.

    Raises:
      FileNotFoundError: if a split is not there.
      ValueError: if there are no images, a class that `classes_from` lacks, or
        a name that is not UTF-8.
    """
    self._root = paths.expand(root)
    self.class_names = tuple(_folders(self._root, classes_from))
    self.num_classes = len(self.class_names)
    present = _folders(self._root, split)
    _check_known(present, self.class_names, self._root, split, classes_from)
    _note_numeric(self.class_names)
    self._paths: list[str] = []  # Relative to the root, with "/".
    labels: list[int] = []
    skipped: list[str] = []
    for name in present:
      for path in _files(self._root / split / name):
        if path.suffix.lower() in IMAGE_SUFFIXES:
          self._paths.append(path.relative_to(self._root).as_posix())
          labels.append(self.class_names.index(name))
        else:
          skipped.append(path.relative_to(self._root).as_posix())
    _check_names([*self.class_names, *self._paths])
    self._labels = np.array(labels, np.int32)
    if skipped:
      logging.info(
        "%s: left out %d files without an image suffix; the first is %r",
        *(split, len(skipped), skipped[0]),
      )
    if not self._paths:
      raise ValueError(
        f"split: got {split!r}; there are no images in the {len(present)} "
        f"class folders of {self._root / split}. Expected "
        f"{self._root / split}/CLASS/IMAGE with a suffix out of "
        f"{', '.join(sorted(IMAGE_SUFFIXES))}."
      )

  def __len__(self) -> int:
    return len(self._paths)

  def __getitem__(self, index: int) -> Example:
    return {
      "image": (self._root / self._paths[index]).read_bytes(),
      "label": self._labels[index],
      "id": self._paths[index],
    }

  def example_id(self, index: int) -> str:
    """Returns the id of the example at `index`: its path below the root."""
    return self._paths[index]


def splits(root: str) -> tuple[str, ...]:
  """Returns the sorted names of the split folders under `root`, if any."""
  folder = paths.expand(root)
  if not folder.is_dir():
    return ()
  visible = (x for x in folder.iterdir() if not x.name.startswith("."))
  return tuple(sorted(x.name for x in visible if x.is_dir()))


def _folders(root: epath.Path, split: str) -> list[str]:
  """Returns the sorted names of the class folders of a split."""
  folder = root / split
  if not folder.is_dir():
    there = sorted(x.name for x in root.iterdir()) if root.is_dir() else []
    raise FileNotFoundError(
      f"split: got {split!r}; there is no folder {folder}. "
      + (f"{root} has {_some(there)}." if there else f"Nor is there {root}.")
      + f" Expected {root}/{split}/CLASS/IMAGE.{_flat_advice(root, split)}"
    )
  names = sorted(
    x.name
    for x in folder.iterdir()
    if not x.name.startswith(".") and x.is_dir()
  )
  if not names:
    raise ValueError(
      f"split: got {split!r}; {folder} has no class folders. Expected "
      "root/split/class/image."
    )
  return names


def _flat_advice(root: epath.Path, split: str) -> str:
  """Returns what to do with classes that lie in the root itself, or ""."""
  if not any(_holds_images(root / name) for name in splits(str(root))):
    return ""
  return f" Move the class folders into {root / split}."


def _holds_images(folder: epath.Path) -> bool:
  return any(x.suffix.lower() in IMAGE_SUFFIXES for x in folder.iterdir())


def _files(
  folder: epath.Path, above: tuple[str, ...] = ()
) -> Iterator[epath.Path]:
  """Yields all visible files below a folder, sorted.

  Args:
    folder: where to look.
    above: real paths of the folders it was reached through; a link that leads
      back to one of them holds nothing new.
  """
  above = (*above, os.path.realpath(folder))
  if above[-1] in above[:-1]:
    return
  for path in sorted(folder.iterdir()):
    if path.name.startswith("."):
      continue
    # A call to the file system each, so not for what is an image by its name.
    if path.suffix.lower() not in IMAGE_SUFFIXES and path.is_dir():
      yield from _files(path, above)
    else:
      yield path


def _check_known(
  present: list[str],
  class_names: tuple[str, ...],
  root: epath.Path,
  split: str,
  classes_from: str,
) -> None:
  unknown = sorted(set(present) - set(class_names))
  if unknown:
    raise ValueError(
      f"split: got {split!r} with the classes {_some(unknown)}; split "
      f"{classes_from!r} has only {_some(list(class_names))}. Rename the "
      f"folders, or make empty ones in {root / classes_from}."
    )


def _check_names(names: list[str]) -> None:
  """Raises for a name that reports and logs cannot hold."""
  for name in names:
    try:
      name.encode()
    except UnicodeEncodeError:
      raise ValueError(
        f"root: got a file or folder {os.fsencode(name)!r}; its name is not "
        "UTF-8. Rename it."
      ) from None


def _note_numeric(class_names: tuple[str, ...]) -> None:
  """Logs when class folders are numbers whose order is not the labels'."""
  if not all(re.fullmatch(r"[0-9]+", name) for name in class_names):
    return
  if sorted(class_names, key=int) != list(class_names):
    logging.info(
      "The classes are numbers, but sorted as text: labels 0, 1, 2, ... are "
      "%s. Pad the names with zeros to sort them as numbers.",
      _some(list(class_names)),
    )


def _some(names: list[str]) -> str:
  """Returns the first names as text, and how many more there are."""
  shown = ", ".join(repr(name) for name in names[:20])
  return shown + (f" and {len(names) - 20} more" if len(names) > 20 else "")
