"""Position embeddings: one vector for each patch of the grid.

Grids are (rows, columns) pairs, never counts: 2x8 and 4x4 are different.
Prefix tokens (class token, registers) are not part of the grid.
"""

import math

import jax
import jax.numpy as jnp

Array = jax.Array

KINDS = ("learned", "sincos2d", "none")


def sincos2d(grid: tuple[int, int], width: int) -> Array:
  """Returns fixed 2-D sine-cosine position embeddings.

  Source: MoCo v3 (arXiv:2104.02057), as in big_vision. With the frequencies
  w_i = 10000^(-i / (D/4 - 1)), each row is [sin(x w), cos(x w), sin(y w),
  cos(y w)]: the first half of D encodes the column x, the second the row y.

  Args:
    grid: patches per side (rows, columns).
    width: D; a multiple of 4 (sin and cos of x and of y), at least 8.

  Returns:
    [1, rows * columns, D] float32 in [-1, 1], row-major, no class position.

  Raises:
    ValueError: if `width` is not such a multiple of 4.
  """
  if width % 4 or width < 8:
    raise ValueError(
      f"width: got {width}; sincos2d needs a multiple of 4, at least 8. "
      'Change the width or use posemb="learned".'
    )
  rows, columns = grid
  quarter = width // 4
  w = 10_000.0 ** (-jnp.arange(quarter, dtype=jnp.float32) / (quarter - 1))
  y, x = jnp.mgrid[:rows, :columns].astype(jnp.float32)
  x_angle = x.reshape(-1, 1) * w.reshape(1, -1)  # [N, D/4]
  y_angle = y.reshape(-1, 1) * w.reshape(1, -1)
  parts = (
    jnp.sin(x_angle),
    jnp.cos(x_angle),
    jnp.sin(y_angle),
    jnp.cos(y_angle),
  )
  return jnp.concatenate(parts, axis=-1)[None]  # [1, N, D]


def check_grid(
  posemb: Array | jax.ShapeDtypeStruct, grid: tuple[int, int]
) -> None:
  """Checks that trained position embeddings [1, N, D] fit the grid.

  Raises:
    ValueError: if N is not rows * columns.
  """
  rows, columns = grid
  positions = posemb.shape[1]
  if positions != rows * columns:
    side = math.isqrt(positions)
    square = f" ({side}x{side} if square)" if side**2 == positions else ""
    raise ValueError(
      f"posemb: got a grid of {rows}x{columns} = {rows * columns} patches; the "
      f"parameters were trained on {positions} positions{square}. Use images "
      "of the training size, or resample the position embeddings first."
    )
