"""The published files that are known by name; the table is catalog.csv.

Each row says where it has its facts from. A cell is empty where no public
source was found, rather than guessed.
"""

import csv
import dataclasses
import difflib
import fnmatch
from pathlib import Path


@dataclasses.dataclass(frozen=True)
class Entry:
  """One published file, or one repository of a hub.

  Attributes:
    name: by which `resolve.resolve` knows it.
    where: its address, as `resolve.resolve` takes it too.
    format: of the arrays; a name of `--format`.
    model: such as "B/16".
    resolution: pixels a side that it was trained or fine-tuned at last.
    classes: of its head; 0 for none.
    expected_top1: accuracy on the 50,000 validation images of ImageNet, in %.
    top1_source: who measured that.
    sha256: of the file.
    preprocessing: of images, in words.
    source: of the other facts.
  """

  name: str
  where: str
  format: str
  model: str
  resolution: int | None
  classes: int
  expected_top1: float | None
  top1_source: str
  sha256: str
  preprocessing: str
  source: str


def entries() -> tuple[Entry, ...]:
  """Returns all of the catalog, in the order of the table."""
  text = Path(__file__).with_name("catalog.csv").read_text("utf-8")
  return tuple(_entry(row) for row in csv.DictReader(text.splitlines()))


def find(pattern: str) -> tuple[Entry, ...]:
  """Returns the entries whose name or address matches, whatever the case.

  Args:
    pattern: as of file names: `*`, `?` and `[...]`.
  """
  pattern = pattern.lower()
  return tuple(
    entry
    for entry in entries()
    if fnmatch.fnmatchcase(entry.name.lower(), pattern)
    or fnmatch.fnmatchcase(entry.where.lower(), pattern)
  )


def closest(name: str) -> str:
  """Returns " Did you mean ...?" with up to three names, or ""."""
  name = name.lower()
  names = {entry.name.lower(): entry.name for entry in entries()}
  close = [x for x in names if name in x][:3]
  close = close or difflib.get_close_matches(name, names, 3)
  return f" Did you mean {' or '.join(names[x] for x in close)}?" * bool(close)


def _entry(row: dict[str, str]) -> Entry:
  resolution, top1 = row.pop("resolution"), row.pop("expected_top1")
  return Entry(
    resolution=int(resolution) if resolution else None,
    classes=int(row.pop("classes")),
    expected_top1=float(top1) if top1 else None,
    **row,
  )
