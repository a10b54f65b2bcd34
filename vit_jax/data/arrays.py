"""Sources over arrays in memory: any NumPy arrays, digits, .npz files."""

import zipfile
import zlib
from collections.abc import Sequence

import numpy as np
from etils import epath

from vit_jax import paths
from vit_jax.data.example import Example

# Fixes which digits are for testing; another number makes another data set.
_DIGITS_SPLIT_SEED = 0
# Beyond, a label is no class id but something else, such as a time.
_MAX_CLASSES = 1_000_000
# What NumPy raises for a file that is not what its name says.
_DAMAGED = (ValueError, TypeError, EOFError, zipfile.BadZipFile, zlib.error)


class ArraySource:
  """A source over images in memory.

  Each worker process holds its own copy of the arrays.
  """

  def __init__(
    self,
    images: np.ndarray,
    labels: np.ndarray,
    *,
    class_names: Sequence[str],
    ids: Sequence[str] | None = None,
  ) -> None:
    """Checks the arrays against each other.

    Args:
      images: [N, H, W] or [N, H, W, C] uint8 or uint16.
      labels: [N] class ids, or [N, T] class ids padded with -1 (multi-label).
      class_names: the K class names in label order.
      ids: N names of the examples; their positions if not given.

    Raises:
      ValueError: if shapes, types or labels do not fit.
    """
    labels = np.asarray(labels)
    ids = tuple(map(str, range(len(images)))) if ids is None else tuple(ids)
    _check_arrays(images, labels, ids)
    _check_labels(labels, len(class_names), ids)
    self._images = images
    self._labels = labels.astype(np.int32)
    self._ids = ids
    self.class_names = tuple(class_names)
    self.num_classes = len(self.class_names)

  def __len__(self) -> int:
    return len(self._images)

  def __getitem__(self, index: int) -> Example:
    return {
      "image": self._images[index],
      "label": self._labels[index],
      "id": self._ids[index],
    }

  def example_id(self, index: int) -> str:
    """Returns the id of the example at `index`."""
    return self._ids[index]


def digits(*, split: str) -> ArraySource:
  """Returns scikit-learn's handwritten digits: grey 8x8, ten classes.

  The package has 1,797 images and no split. Here each class is put into a fixed
  random order and every fifth example of the sequence is for testing: 1,437
  train and 360 test, every class within one example of a fifth. Pixel values
  0..16 become 0..255. The ids are positions in scikit-learn's order.

  Args:
    split: "train" or "test".

  Raises:
    ValueError: if there is no such split.
  """
  if split not in ("train", "test"):
    raise ValueError(
      f"split: got {split!r}; must be 'train' or 'test'. Use one of these."
    )
  from sklearn import datasets  # Takes 2 s; only this function needs it.

  pixels, labels = datasets.load_digits(return_X_y=True)
  images = pixels.reshape(-1, 8, 8)  # [N, H, W], values 0..16
  # RandomState, not Generator: NumPy promises that its stream never changes.
  order = np.random.RandomState(_DIGITS_SPLIT_SEED).permutation(len(labels))
  order = order[np.argsort(labels[order], kind="stable")]
  is_test = np.arange(len(order)) % 5 == 0
  chosen = np.sort(order[is_test if split == "test" else ~is_test])
  return ArraySource(
    np.round(images[chosen] * (255 / 16)).astype(np.uint8),
    labels[chosen],
    class_names=[str(i) for i in range(10)],
    ids=[f"digits/{i}" for i in chosen],
  )


def npz(*, path: str, split: str) -> ArraySource:
  """Returns a split of a NumPy archive.

  The archive holds `{split}_images` and `{split}_labels` for each split, as in
  MedMNIST, and perhaps `class_names`, K strings. Without these the classes are
  0 to the largest label of `train_labels` (of this split, if there is no train
  split). Labels are [N], or [N, T] padded with -1; [N, 1] counts as [N].

  Args:
    path: the .npz file; `~` and remote paths are understood.
    split: prefix of the arrays, such as "train".

  Raises:
    FileNotFoundError: if there is no such file.
    ValueError: if arrays are missing or do not fit.
  """
  file = paths.expand(path)
  if not file.is_file():
    raise FileNotFoundError(
      f"path: got {path!r}; there is no such file. Give the path of a .npz."
    )
  names = ("class_names", f"{split}_images", f"{split}_labels", "train_labels")
  there, found = _read(file, names)
  missing = {f"{split}_images", f"{split}_labels"} - found.keys()
  if missing:
    raise ValueError(
      f"split: got {split!r}; {path} has no {', '.join(sorted(missing))}, "
      f"only {', '.join(there)}. Save images and labels as {{split}}_images "
      "and {split}_labels."
    )
  images = found[f"{split}_images"]
  labels = _squeeze(found[f"{split}_labels"])
  if "class_names" in found:
    class_names = [str(name) for name in found["class_names"]]
  else:
    class_names = _numbers(_squeeze(found.get("train_labels", labels)))
  ids = [f"{split}/{i}" for i in range(len(images))]
  return ArraySource(images, labels, class_names=class_names, ids=ids)


def _read(
  file: epath.Path, names: Sequence[str]
) -> tuple[list[str], dict[str, np.ndarray]]:
  """Returns what an archive has, and those of its arrays that are named.

  Raises:
    ValueError: if it is damaged or no archive of plain arrays.
  """
  try:
    with file.open("rb") as f, np.load(f, allow_pickle=False) as archive:
      there = sorted(archive.files)
      return there, {name: archive[name] for name in names if name in there}
  except _DAMAGED as error:
    raise ValueError(
      f"path: got {str(file)!r}; cannot be read as a .npz of plain arrays "
      f"({error}). Write it with np.savez."
    ) from error


def _numbers(labels: np.ndarray) -> list[str]:
  """Returns the names of the classes 0 to the largest label.

  Raises:
    ValueError: if the labels are no class ids.
  """
  largest = labels.max(initial=-1) if labels.dtype.kind in "iu" else None
  if largest is None or largest >= _MAX_CLASSES:
    raise ValueError(
      f"labels: got {labels.dtype} up to {largest}; must be class ids below "
      f"{_MAX_CLASSES:,}. Number the classes from 0."
    )
  return [str(i) for i in range(int(largest) + 1)]


def _squeeze(labels: np.ndarray) -> np.ndarray:
  is_column = labels.ndim == 2 and labels.shape[1] == 1
  return labels[:, 0] if is_column else labels


def _check_arrays(
  images: np.ndarray, labels: np.ndarray, ids: tuple[str, ...]
) -> None:
  if images.dtype not in (np.uint8, np.uint16) or images.ndim not in (3, 4):
    raise ValueError(
      f"images: got shape {images.shape} of {images.dtype}; must be [N, H, W] "
      "or [N, H, W, C] of uint8 or uint16. Scale and round values first."
    )
  if labels.ndim not in (1, 2) or not np.issubdtype(labels.dtype, np.integer):
    raise ValueError(
      f"labels: got shape {labels.shape} of {labels.dtype}; must be [N] class "
      "ids, or [N, T] class ids padded with -1, of an integer type. Convert "
      "one-hot labels by argmax(-1)."
    )
  if not len(images) == len(labels) == len(ids):
    raise ValueError(
      f"labels: got {len(labels)} for {len(images)} images and {len(ids)} "
      "ids; the counts must be equal. Give one label and id an image."
    )


def _check_labels(
  labels: np.ndarray, num_classes: int, ids: tuple[str, ...]
) -> None:
  lowest = 0 if labels.ndim == 1 else -1
  bad = (labels < lowest) | (labels >= num_classes)
  if bad.any():
    row = int(np.argwhere(bad)[0][0])
    raise ValueError(
      f"labels: got {labels[row].tolist()} for example {ids[row]!r}; must be "
      f"in [{lowest}, {num_classes}) for {num_classes} classes. Correct the "
      "label or the class names."
    )
