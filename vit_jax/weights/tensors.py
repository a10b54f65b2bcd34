"""Files of named arrays: read one array at a time, never run code."""

import contextlib
import json
import struct
import zipfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import ml_dtypes
import numpy as np
import safetensors
import safetensors.numpy
from etils import epath

Shape = tuple[int, ...]


class Tensors(Mapping[str, np.ndarray]):
  """The arrays of one or more files by name; each is read when asked for.

  Attributes:
    shapes: of every array, known without reading it.
    metadata: strings that the file keeps beside them.
  """

  def __init__(
    self,
    shapes: Mapping[str, Shape],
    read: Callable[[str], np.ndarray],
    metadata: Mapping[str, str] | None = None,
  ) -> None:
    self.shapes = dict(shapes)
    self.metadata = dict(metadata or {})
    self._read = read

  def __getitem__(self, name: str) -> np.ndarray:
    """Returns one array; two-byte voids, NumPy's bfloat16, as bfloat16."""
    if name not in self.shapes:
      raise KeyError(name)
    array = self._read(name)
    if array.dtype.kind == "V" and array.dtype.itemsize == 2:
      return array.view(ml_dtypes.bfloat16)
    return array

  def __iter__(self) -> Iterator[str]:
    return iter(self.shapes)

  def __len__(self) -> int:
    return len(self.shapes)

  def renamed(self, names: Mapping[str, str]) -> "Tensors":
    """Returns the same arrays by the new names that `names` gives them.

    Args:
      names: old name by new name; arrays that it leaves out are left out.
    """
    shapes = {new: self.shapes[old] for new, old in names.items()}
    return Tensors(shapes, lambda new: self._read(names[new]), self.metadata)


def from_arrays(arrays: Mapping[str, np.ndarray]) -> Tensors:
  """Returns arrays in memory as Tensors."""
  shapes = {name: tuple(x.shape) for name, x in arrays.items()}
  return Tensors(shapes, lambda name: arrays[name])


def open_npz(path: epath.PathLike) -> Tensors:
  """Returns the arrays of an .npz file.

  Raises:
    ValueError: if it is damaged, or holds Python objects (which could run
      code, so they are never read).
  """
  with _clear_errors(path):
    shapes = {}
    with zipfile.ZipFile(path) as archive:
      for entry in archive.namelist():
        with archive.open(entry) as file:
          shapes[entry.removesuffix(".npy")] = _npy_shape(file)
    npz = np.load(path, allow_pickle=False)

  def read(name: str) -> np.ndarray:
    with _clear_errors(path):
      return npz[name]

  return Tensors(shapes, read)


def open_safetensors(paths: Sequence[epath.PathLike]) -> Tensors:
  """Returns the arrays of a safetensors file, or of all parts of one.

  Raises:
    ValueError: if a file is damaged.
  """
  files: dict[str, epath.PathLike] = {}
  shapes: dict[str, Shape] = {}
  metadata: dict[str, str] = {}
  for path in paths:
    with _clear_errors(path), _open(path) as file:
      metadata |= file.metadata() or {}
      for name in file.offset_keys():
        files[name] = path
        shapes[name] = tuple(file.get_slice(name).get_shape())

  def read(name: str) -> np.ndarray:
    # Opened anew, because an open file keeps all that was read in memory.
    with _clear_errors(files[name]), _open(files[name]) as file:
      return file.get_tensor(name)

  return Tensors(shapes, read, metadata)


def write_npz(path: epath.PathLike, arrays: Mapping[str, np.ndarray]) -> None:
  """Writes an .npz file."""
  with epath.Path(path).open("wb") as file:
    np.savez(file, **arrays)  # pyright: ignore[reportArgumentType]: names


def write_safetensors(
  path: epath.PathLike, arrays: Mapping[str, np.ndarray]
) -> None:
  """Writes a safetensors file, marked as PyTorch's readers want it."""
  contiguous = {name: np.asarray(x, order="C") for name, x in arrays.items()}
  safetensors.numpy.save_file(contiguous, str(path), {"format": "pt"})


def _open(path: epath.PathLike) -> Any:
  return safetensors.safe_open(str(path), framework="numpy")


def _npy_shape(file: Any) -> Shape:
  """Returns the shape in the header of an .npy file."""
  version = np.lib.format.read_magic(file)
  read = (
    np.lib.format.read_array_header_1_0
    if version == (1, 0)
    else np.lib.format.read_array_header_2_0
  )
  shape, _, dtype = read(file)
  if dtype.hasobject:
    raise ValueError("it holds Python objects, which are not read")
  return shape


@contextlib.contextmanager
def _clear_errors(path: epath.PathLike) -> Iterator[None]:
  """Turns what the readers raise on a damaged file into one line."""
  damage = (
    *(zipfile.BadZipFile, ValueError, EOFError, struct.error),
    *(safetensors.SafetensorError, json.JSONDecodeError, NotImplementedError),
  )
  try:
    yield
  except damage as error:
    raise ValueError(
      f"weights: got {str(path)!r}; the file is damaged or of another kind "
      f"({error}). Get it again."
    ) from error
