"""Fits position embeddings and patch kernels to other sizes.

Each method is one matrix [new, old] along one axis; a grid takes one for its
rows and one for its columns. So any two grids will do, 1x1 too.
"""

from collections.abc import Callable

import numpy as np

from vit_jax.models import check

Grid = tuple[int, int]  # (rows, columns)


def corner_linear(old: int, new: int) -> np.ndarray:
  """Returns the linear map that keeps the ends in place, [new, old].

  Source: vision_transformer, checkpoint.py, which takes scipy.ndimage.zoom of
  order 1: the way of the published weights. A single point is the first.
  """
  return _triangle(np.linspace(0, old - 1, new)[:, None] - np.arange(old))


def half_pixel_linear(old: int, new: int) -> np.ndarray:
  """Returns the linear map, antialiased, [new, old].

  Source: FlexiViT (arXiv:2212.08013), which takes jax.image.resize.
  """
  return _antialiased(_triangle, old, new)


def timm(old: int, new: int) -> np.ndarray:
  """Returns timm's map, bicubic with a = -0.5 and antialiased, [new, old]."""
  return _antialiased(lambda x: _cubic(x, -0.5), old, new)


def transformers(old: int, new: int) -> np.ndarray:
  """Returns the map of Transformers and DINOv2, [new, old].

  PyTorch's bicubic: a = -0.75, the edge repeated, not antialiased.
  """
  taps = np.arange(-2, old + 2)
  weights = _cubic(_centres(old, new)[:, None] - taps, -0.75)
  return weights @ (taps.clip(0, old - 1)[:, None] == np.arange(old))


METHODS: dict[str, Callable[[int, int], np.ndarray]] = {
  method.__name__: method
  for method in (corner_linear, half_pixel_linear, timm, transformers)
}


def resize_posemb(
  posemb: np.ndarray, old: Grid, new: Grid, *, method: str = "corner_linear"
) -> np.ndarray:
  """Returns the position embeddings of another grid, [..., h' w', D] float32.

  Args:
    posemb: [..., h w, D], row by row, without prefix tokens. Itself returned
      if the grids are equal.
    old: its grid (h, w), of any shape.
    new: the grid (h', w'). Never a ratio, which would have to be rounded.
    method: one of `METHODS`.

  Raises:
    ValueError: if the table is not of that grid, or for another method.
  """
  check.raise_all(check.choice("method", method, list(METHODS)))
  *batch, n, d = posemb.shape
  (h, w), (new_h, new_w) = old, new
  if n != h * w:
    raise ValueError(
      f"posemb: got shape {posemb.shape}; expected [..., {h * w}, D] for the "
      f"grid {h}x{w}. Give the grid of the training, and no prefix tokens."
    )
  if old == new:  # Grids, not counts: 2x8 and 4x4 differ.
    return posemb
  matrix = METHODS[method]
  grid = posemb.reshape(*batch, h, w, d)
  grid = _map_axes(grid, matrix(h, new_h), matrix(w, new_w))
  return grid.reshape(*batch, new_h * new_w, d)


def resize_kernel(kernel: np.ndarray, new: Grid) -> np.ndarray:
  """Returns a patch kernel for patches of another size, by pseudo-inverse.

  Patches that are enlarged bilinearly, each for itself, give the tokens that
  they gave before; those made smaller the nearest, by least squares.

  Source: FlexiViT (arXiv:2212.08013): w' = pinv(B^T) w, where B
  resizes the patches, without antialiasing as in its code.

  Args:
    kernel: [Ph, Pw, C, D]; itself returned if the size is the same.
    new: (Ph', Pw') in pixels.

  Returns:
    [Ph', Pw', C, D] float32.
  """
  ph, pw, c, d = kernel.shape
  if (ph, pw) == new:
    return kernel
  # The pseudo-inverse of both axes is the product of those of each.
  rows, columns = (
    np.linalg.pinv(_bilinear(a, b).T) for a, b in zip((ph, pw), new)
  )
  result = _map_axes(kernel.reshape(ph, pw, c * d), rows, columns)
  return result.reshape(*new, c, d)


def change_channels(kernel: np.ndarray, channels: int) -> np.ndarray:
  """Returns a patch kernel for images of another number of channels.

  The channels are taken in turn, R G B R G ..: with more here than there, each
  kernel is shared equally by those that take it; with fewer, theirs are summed.
  So images whose channels are all equal, grey ones, give equal tokens: from RGB
  to one channel is the sum, and back a third for each.

  Args:
    kernel: [Ph, Pw, C, D]; itself returned if C is the same.
    channels: C'.

  Returns:
    [Ph, Pw, C', D] float32.
  """
  old = kernel.shape[2]
  if old == channels:
    return kernel
  fewer = min(old, channels)
  here, there = np.arange(channels)[:, None], np.arange(old)
  takes = (here % fewer == there % fewer).astype(np.float64)  # [C', C]
  shares = takes / takes.sum(axis=0)
  result = np.einsum("kc,yxcd->yxkd", shares, kernel)
  return result.astype(np.float32)


def _map_axes(
  grid: np.ndarray, rows: np.ndarray, columns: np.ndarray
) -> np.ndarray:
  """Returns [..., h', w', D] float32 of [..., h, w, D]."""
  result = np.einsum("yh,xw,...hwd->...yxd", rows, columns, grid, optimize=True)
  return result.astype(np.float32)


def _centres(old: int, new: int) -> np.ndarray:
  """Returns where the centres of new pixels lie among the old, [new]."""
  return (np.arange(new) + 0.5) * old / new - 0.5


def _bilinear(old: int, new: int) -> np.ndarray:
  """Returns the linear map of images, not antialiased, [new, old]."""
  centres = _centres(old, new).clip(0, old - 1)
  return _triangle(centres[:, None] - np.arange(old))


def _antialiased(
  kernel: Callable[[np.ndarray], np.ndarray], old: int, new: int
) -> np.ndarray:
  """Returns a map whose kernel is widened where it shrinks, [new, old]."""
  distance = _centres(old, new)[:, None] - np.arange(old)
  weights = kernel(distance / max(old / new, 1))
  return weights / weights.sum(axis=1, keepdims=True)


def _triangle(x: np.ndarray) -> np.ndarray:
  return np.maximum(1 - np.abs(x), 0)


def _cubic(x: np.ndarray, a: float) -> np.ndarray:
  """Returns Keys' cubic convolution kernel."""
  x = np.abs(x)
  near = ((a + 2) * x - (a + 3)) * x**2 + 1
  far = a * (((x - 5) * x + 8) * x - 4)
  return np.where(x <= 1, near, np.where(x < 2, far, 0))
