"""Checks of a model's fields, all problems in one error."""

import difflib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

DTYPES = ("float32", "bfloat16", "float16")


def raise_all(problems: Iterable[str]) -> None:
  """Raises one ValueError that lists the problems, if there are any."""
  lines = list(problems)
  if lines:
    raise ValueError("\n".join(lines))


def at_least(minimum: int, fields: Mapping[str, int]) -> Iterator[str]:
  """Yields a problem for each field below the minimum."""
  for name, value in fields.items():
    if value < minimum:
      yield f"{name}: got {value}; must be at least {minimum}."


def rates(fields: Mapping[str, float]) -> Iterator[str]:
  """Yields a problem for each field outside [0, 1)."""
  for name, value in fields.items():
    if not 0 <= value < 1:
      yield f"{name}: got {value}; must be in [0, 1)."


def choice(name: str, value: Any, allowed: Sequence[str]) -> Iterator[str]:
  """Yields a problem if the value is not among those allowed."""
  if value not in allowed:
    close = difflib.get_close_matches(str(value), allowed, 1)
    hint = f" Did you mean {close[0]!r}?" if close else ""
    yield f"{name}: got {value!r}; must be one of {list(allowed)}.{hint}"


def patch_size(value: tuple[int, ...]) -> Iterator[str]:
  """Yields a problem if the value is no (height, width)."""
  if len(value) != 2 or min(value) < 1:
    yield (
      f"patch_size: got {value!r}; must be (height, width) in pixels, at least "
      "1. Use e.g. (16, 16)."
    )


def num_heads(value: int, width: int) -> Iterator[str]:
  """Yields a problem if the heads do not divide the width."""
  if width % max(value, 1):
    yield (
      f"num_heads: got {value}; must divide width {width}. Use one of "
      f"{[h for h in range(1, 33) if width % h == 0]}."
    )
