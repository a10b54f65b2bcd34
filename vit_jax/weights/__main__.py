"""Lists the published files that are known by name.

  python -m vit_jax.weights list            all of them
  python -m vit_jax.weights list 'vit_b*'   those whose name or address matches
  python -m vit_jax.weights list --json     with addresses and sources

The exit code is 1 if nothing matches.
"""

import argparse
import dataclasses
import json
import sys
from collections.abc import Sequence

import rich.box
import rich.console
import rich.table
import rich.text

from vit_jax import command
from vit_jax.weights import catalog

_BESIDE_NAME = 48  # Columns that the rest of the table takes.


def main(argv: Sequence[str] | None = None) -> int:
  """Runs the command; returns its exit code."""
  parser = argparse.ArgumentParser(
    "python -m vit_jax.weights", description="Published weights, by name."
  )
  commands = parser.add_subparsers(required=True, metavar="list")
  listing = commands.add_parser("list", help="list the files known by name")
  listing.add_argument(
    "pattern", nargs="?", default="*", help="of names or addresses: 'vit_b*'"
  )
  listing.add_argument("--json", action="store_true", help="for machines")
  options = parser.parse_args(argv)

  found = catalog.find(options.pattern)
  if options.json:
    rows = [dataclasses.asdict(entry) for entry in found]
    sys.stdout.write(json.dumps(rows, indent=2) + "\n")
  elif found:
    _print(found)
  if not found:
    sys.stderr.write(
      f"pattern: got {options.pattern!r}; no published file matches."
      f"{catalog.closest(options.pattern.strip('*'))}\n"
    )
  return 0 if found else 1


def _print(found: Sequence[catalog.Entry]) -> None:
  table = rich.table.Table(
    box=rich.box.ROUNDED,
    caption="top-1: % on ImageNet, as published. --json has the sources.",
  )
  table.add_column("name", no_wrap=True)
  table.add_column("model")
  for column in ("pixels", "classes", "top-1"):
    table.add_column(column, justify="right")
  for entry in found:
    cells = (
      *(entry.name, entry.model, str(entry.resolution or "-")),
      *(f"{entry.classes:,}", str(entry.expected_top1 or "-")),
    )
    table.add_row(*map(rich.text.Text, cells))
  console = rich.console.Console(highlight=False)
  longest = max(len(entry.name) for entry in found)
  # Names are there to be copied: they never break.
  console.width = max(console.width, longest + _BESIDE_NAME)
  console.print(table)


if __name__ == "__main__":
  command.run(main)
