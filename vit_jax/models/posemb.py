"""Position embeddings: one vector for each patch of the grid.

Grids are (rows, columns) pairs, never counts: 2x8 and 4x4 are different.
Prefix tokens (class token, registers) are not part of the grid.

Source: arXiv:2010.11929, appendix D.4 and Table 8, which compares the kinds
and the places where they are added.
"""

import math
from collections.abc import Callable

import flax.linen as nn
import jax
import jax.numpy as jnp

Array = jax.Array
Declare = Callable[..., Array]  # `param` of a module

KINDS = ("learned", "learned_2d", "sincos2d", "relative", "none")
PLACES = ("stem", "every_layer", "every_layer_shared")
ADDED = ("learned", "learned_2d", "sincos2d")  # To the tokens.

_INIT = nn.initializers.normal(0.02)  # As BERT.


def table(
  module: nn.Module,
  kind: str,
  grid: tuple[int, int],
  *,
  width: int,
  cls: bool,
  num_unplaced: int,
) -> Array:
  """Returns one position embedding a token, [1, T, D] float32.

  Declares in `module` what the kind learns: `posemb` [1, N, D] for "learned";
  `posemb_rows` [1, h, D / 2] and `posemb_columns` [1, w, D / 2] for
  "learned_2d", whose halves of D are column and row; and `cls_posemb`
  [1, 1, D], the last term of Equation 1.

  Args:
    module: the module that calls this within its compact method.
    kind: one of `ADDED`.
    grid: patches per side (rows, columns).
    width: D.
    cls: whether the class token has a position of its own.
    num_unplaced: prefix tokens without a position; they follow the class
      token if that has one.

  Raises:
    ValueError: if trained parameters belong to another grid.
  """
  prefix = jnp.zeros((1, num_unplaced, width))
  if cls:
    row = module.param("cls_posemb", _INIT, (1, 1, width))
    prefix = jnp.concatenate([row, prefix], axis=1)
  if kind == "sincos2d":
    positions = sincos2d(grid, width)
  elif kind == "learned_2d":
    positions = _learned_2d(module, grid, width)
  else:
    check_trained(module, "posemb", grid, axis_length=math.prod(grid))
    positions = module.param("posemb", _INIT, (1, math.prod(grid), width))
  return jnp.concatenate([prefix, positions], axis=1)


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


def relative(module: nn.Module, num_tokens: int, width: int) -> Array:
  """Returns one embedding for each pair of query and key, [T, T, d].

  The paper's 1-D relative attention: the offset of the key from the query in
  the sequence, prefix tokens included, selects a row of a learned table,
  declared in `module` as `relative_posemb` [2 T - 1, d]. Heads share it; the
  blocks of an encoder do not.

  Args:
    module: the module that calls this within its compact method.
    num_tokens: T.
    width: d, the size of a head.

  Raises:
    ValueError: if a trained table belongs to another number of tokens.
  """
  name, rows = "relative_posemb", 2 * num_tokens - 1
  if module.has_variable("params", name):
    trained = module.get_variable("params", name).shape[0]
    if trained != rows:
      raise ValueError(
        f"posemb: got {num_tokens} tokens; the relative position embeddings "
        f"were trained on {(trained + 1) // 2}. Use images of the training "
        "size; offsets in another grid mean other places."
      )
  offsets = jnp.arange(num_tokens)
  index = offsets[None, :] - offsets[:, None] + num_tokens - 1  # key - query
  return module.param(name, _INIT, (rows, width))[index]


def check_trained(
  module: nn.Module, name: str, grid: tuple[int, int], *, axis_length: int
) -> None:
  """Checks that a trained table [1, length, D] of `module` fits the grid.

  Raises:
    ValueError: if its length is not `axis_length`.
  """
  if not module.has_variable("params", name):
    return
  trained = module.get_variable("params", name).shape[1]
  if trained != axis_length:
    side = math.isqrt(trained)
    square = f" ({side}x{side} if square)" if side**2 == trained else ""
    rows, columns = grid
    raise ValueError(
      f"{name}: got a grid of {rows}x{columns} patches, which needs "
      f"{axis_length} positions; the parameters were trained on {trained}"
      f"{square}. Use images of the training size, or resample the position "
      "embeddings first."
    )


def _learned_2d(module: nn.Module, grid: tuple[int, int], width: int) -> Array:
  rows, columns = grid
  check_trained(module, "posemb_rows", grid, axis_length=rows)
  check_trained(module, "posemb_columns", grid, axis_length=columns)
  y = module.param("posemb_rows", _INIT, (1, rows, width // 2))
  x = module.param("posemb_columns", _INIT, (1, columns, width // 2))
  y = jnp.broadcast_to(y[:, :, None], (1, rows, columns, width // 2))
  x = jnp.broadcast_to(x[:, None], (1, rows, columns, width // 2))
  both = jnp.concatenate([x, y], axis=-1)  # As sincos2d, the column first.
  return both.reshape(1, rows * columns, width)
