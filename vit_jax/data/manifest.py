"""Your own images: a table of files and labels."""

import csv
import io
from collections import defaultdict
from typing import NamedTuple

import numpy as np
from etils import epath

from vit_jax import paths
from vit_jax.data.example import Example

_MAX_LISTED = 20


class _Entry(NamedTuple):
  line: int
  image: str
  labels: tuple[str, ...]
  split: str | None


class ManifestSource:
  """The images that a CSV or TSV file lists.

  The first line names the columns: `image`, `label` and, if one file is for
  several splits, `split`; others are ignored. A name that ends in .tsv or .tab
  is read with tabs, any other with commas, both as UTF-8. Images are paths
  relative to `root`, or absolute; they are also the ids of the examples. An
  image may have several rows of a split, if they have the same labels.

  The classes are the labels of one split, or of the file if it has no split
  column, or of another manifest, sorted. An unknown one in any row is an error.
  With `label_separator` a cell holds any number of labels, also none: labels
  become [T] class ids padded with -1, T being the longest cell of the file.
  """

  def __init__(
    self,
    *,
    path: str,
    root: str | None = None,
    split: str | None = None,
    classes_from: str = "train",
    classes_path: str | None = None,
    label_separator: str | None = None,
  ) -> None:
    """Reads the table and looks for the images.

    Args:
      path: the manifest; `~` and remote paths are understood.
      root: folder of the images; the manifest's own if not given.
      split: which rows; needed just if there is a split column.
      classes_from: the split whose labels are the classes, if there is a split
        column.
      classes_path: another manifest whose labels are the classes: with a file
        for each split, the one for training.
      label_separator: text between several labels of a cell, such as "|".

    Raises:
      FileNotFoundError: if a manifest or an image is not there.
      ValueError: if columns or rows are wrong; up to 20 of them are listed.
    """
    if label_separator == "":
      raise ValueError(
        "label_separator: got ''; must be None or some text. Use '|'."
      )
    file = paths.expand(path)
    entries = _read(file, label_separator)
    _check_split(entries, split, file)
    known = entries
    if classes_path is not None:
      known = _read(paths.expand(classes_path), label_separator)
    self.class_names = _class_names(known, classes_from)
    self.num_classes = len(self.class_names)
    width = max(1, *(len(entry.labels) for entry in entries))  # T
    entries = [entry for entry in entries if entry.split == split]
    labels = _label_ids(entries, self.class_names, width, file)  # [N, T]
    self._labels = labels[:, 0] if label_separator is None else labels
    self._root = paths.expand(root) if root else file.parent
    self._images = [entry.image for entry in entries]
    _check_files(self._root, entries, file)

  def __len__(self) -> int:
    return len(self._images)

  def __getitem__(self, index: int) -> Example:
    image = self._images[index]
    return {
      "image": (self._root / image).read_bytes(),
      "label": self._labels[index],
      "id": image,
    }

  def example_id(self, index: int) -> str:
    """Returns the id of the example at `index`: its path in the manifest."""
    return self._images[index]


def splits(path: str) -> tuple[str, ...]:
  """Returns the sorted names of the splits; () if there is no such column.

  Raises:
    FileNotFoundError: if the file is not there.
    ValueError: if it is no manifest.
  """
  entries = _read(paths.expand(path), None)
  return tuple(sorted({x.split for x in entries if x.split is not None}))


def _read(file: epath.Path, label_separator: str | None) -> list[_Entry]:
  """Returns all rows of a manifest.

  Raises:
    FileNotFoundError: if the file is not there.
    ValueError: if a column is missing or rows are incomplete.
  """
  if not file.is_file():
    raise FileNotFoundError(
      f"path: got {str(file)!r}; there is no such file. Give the path of a CSV "
      "or TSV file."
    )
  delimiter = "\t" if file.suffix.lower() in (".tsv", ".tab") else ","
  lines = io.StringIO(_text(file), newline="")
  reader = csv.DictReader(lines, delimiter=delimiter, strict=True)
  columns = list(reader.fieldnames or [])
  counts = [columns.count(name) for name in ("image", "label", "split")]
  if counts[:2] != [1, 1] or counts[2] > 1:
    raise ValueError(
      f"path: got {str(file)!r} with the columns {columns}, separated by "
      f"{delimiter!r}; needs one 'image' and one 'label'. Name them in the "
      "first line; files with tabs end in .tsv."
    )
  entries, problems = [], []
  try:
    for row in reader:
      entry = _Entry(
        line=reader.line_num,
        image=row["image"] or "",
        labels=_split_labels(row["label"] or "", label_separator),
        split=row["split"] if "split" in columns else None,
      )
      problem = _problem(row, entry, label_separator)
      if problem:
        problems.append(f"line {entry.line}: {problem}")
      entries.append(entry)
  except csv.Error as error:
    problems.append(f"after line {reader.line_num}: {error}")
  problems += _contradictions(entries)
  _raise_all(problems, "rows", file)
  if not entries:
    raise ValueError(
      f"path: got {str(file)!r} without rows; needs at least one image. Add "
      "lines below the header."
    )
  return entries


def _text(file: epath.Path) -> str:
  try:
    return file.read_bytes().decode("utf-8-sig")  # Spreadsheets write a BOM.
  except UnicodeDecodeError as error:
    raise ValueError(
      f"path: got {str(file)!r}; it is not UTF-8 ({error}). Save it as UTF-8."
    ) from error


def _split_labels(cell: str, separator: str | None) -> tuple[str, ...]:
  if separator is None:
    return (cell.strip(),)
  labels = (label.strip() for label in cell.split(separator))
  return tuple(label for label in labels if label)


def _problem(
  row: dict[str | None, str], entry: _Entry, label_separator: str | None
) -> str | None:
  """Returns what is wrong with a row: `csv` fills short rows with None."""
  if None in row:
    return "more cells than columns; quote a cell that holds the separator"
  if None in row.values():
    return "fewer cells than columns"
  if not entry.image:
    return "image is empty"
  if label_separator is None and not entry.labels[0]:
    return "label is empty"
  if len(set(entry.labels)) < len(entry.labels):
    return f"a label is there twice: {entry.labels}"
  return None


def _contradictions(entries: list[_Entry]) -> list[str]:
  """Returns the rows that give an image of their split other labels."""
  first: dict[tuple[str | None, str], _Entry] = {}
  return [
    f"line {entry.line}: {entry.image!r} has other labels in line {seen.line}"
    for entry in entries
    if (seen := first.setdefault((entry.split, entry.image), entry)).labels
    != entry.labels
  ]


def _check_split(
  entries: list[_Entry], split: str | None, file: epath.Path
) -> None:
  there = {entry.split for entry in entries}
  if split in there:
    return
  if None in there:
    raise ValueError(
      f"split: got {split!r}; {file} has no column 'split'. Leave split out, "
      "or add the column."
    )
  names = ", ".join(repr(x) for x in sorted(x for x in there if x is not None))
  raise ValueError(
    f"split: got {split!r}; the splits in {file} are {names}. Choose one."
  )


def _class_names(entries: list[_Entry], classes_from: str) -> tuple[str, ...]:
  if entries[0].split is not None:  # There is a split column.
    entries = [entry for entry in entries if entry.split == classes_from]
  names = {label for entry in entries for label in entry.labels}
  if not names:
    raise ValueError(
      f"classes_from: got {classes_from!r}; there are no rows of this split "
      "with a label. Name the split that has all classes."
    )
  return tuple(sorted(names))


def _label_ids(
  entries: list[_Entry],
  class_names: tuple[str, ...],
  width: int,
  file: epath.Path,
) -> np.ndarray:
  """Returns [N, T] int32 class ids, padded with -1."""
  ids = {name: i for i, name in enumerate(class_names)}
  labels = np.full((len(entries), width), -1, np.int32)
  problems = []
  for row, entry in zip(labels, entries):
    unknown = [label for label in entry.labels if label not in ids]
    if unknown:
      problems.append(f"line {entry.line}: unknown label {unknown[0]!r}")
    row[: len(entry.labels)] = [ids.get(label, -1) for label in entry.labels]
  shown = ", ".join(repr(name) for name in class_names[:_MAX_LISTED])
  _raise_all(problems, f"labels; known are {shown}", file)
  return labels


def _check_files(
  root: epath.Path, entries: list[_Entry], file: epath.Path
) -> None:
  """Raises if images are missing; lists folders, as that is one call each."""
  folders: dict[epath.Path, list[tuple[str, _Entry]]] = defaultdict(list)
  for entry in entries:
    path = root / entry.image
    folders[path.parent].append((path.name, entry))
  missing = []
  for folder, named in folders.items():
    there = {x.name for x in folder.iterdir()} if folder.is_dir() else set()
    missing += [entry for name, entry in named if name not in there]
  if missing:
    listed = sorted(missing)[:_MAX_LISTED]
    lines = [f"line {entry.line}: {root / entry.image}" for entry in listed]
    raise FileNotFoundError(
      f"path: got {str(file)!r}; {len(missing)} of {len(entries)} images are "
      f"not there. Correct the paths or give root. The first are:\n  "
      + "\n  ".join(lines)
    )


def _raise_all(problems: list[str], what: str, file: epath.Path) -> None:
  if problems:
    raise ValueError(
      f"path: got {str(file)!r} with {len(problems)} wrong {what}. Correct "
      "them. The first are:\n  " + "\n  ".join(problems[:_MAX_LISTED])
    )
