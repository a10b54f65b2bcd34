"""Paths as people write them: `~`, and storages by their scheme."""

import os

from etils import epath


def expand(path: epath.PathLike) -> epath.Path:
  """Returns the path with `~` expanded.

  Raises:
    ValueError: if it has a scheme that is not known, such as https://.
  """
  try:
    return epath.Path(path).expanduser()
  except KeyError:
    raise ValueError(
      f"path: got {os.fspath(path)!r}; must be local, or begin with gs:// or "
      "another storage that epath knows. Copy the file, and give its path."
    ) from None
