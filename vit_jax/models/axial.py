"""Axial-ViT: a ViT that attends along rows, then along columns.

Source: arXiv:2010.11929, appendix D.6. The tokens stay on their 2-D grid, and
two axial blocks take the place of each Transformer block: self-attention
within each row and an MLP, then self-attention within each column and an MLP.
So `depth` counts pairs, and "B/16" has 24 MLPs.

Parameters are as in ViT, but those of a block, under

  encoder/blocks/{row, column}/{norm1, attention, norm2, mlp}/...

What the paper leaves open, and what is done here:

  pooling: a class token has no place on the grid; "gap", or "map".
  positions: as in ViT, learned and 1-D, added to the tokens before the first
    block. With `posemb_at` they are added before each pair.
  relative positions: one table for the offsets within a row, one for those
    within a column, in each block.
  stochastic depth: the rate grows from pair to pair; the four residuals of a
    pair are dropped independently.
"""

import dataclasses
from collections.abc import Iterator

import flax.linen as nn
import jax

from vit_jax.models import check, encoder, vit
from vit_jax.models import posemb as posemb_lib

Array = jax.Array


class AxialPair(encoder.Block, kw_only=True):
  """A block along rows, then one along columns.

  Attributes and arguments are as in Block.
  """

  @nn.compact
  def __call__(
    self,
    x: Array,
    rate: Array,
    train: bool,
    grid: tuple[int, int],
    positions: Array | None,
  ) -> tuple[Array, None]:
    """Returns the new [B, N, D], and None, as nn.scan wants it."""
    names = {field.name for field in dataclasses.fields(encoder.Block)}
    fields = {n: getattr(self, n) for n in names - {"parent", "name"}}
    h, w = grid
    row = RowBlock(**fields, name="row")
    x, _ = row(x, rate, train, (h, w), positions)
    x = transpose(x, (h, w))
    if self.posemb in posemb_lib.ADDED:
      fields["posemb"] = "none"  # Added once a pair.
    column = RowBlock(**fields, name="column")
    x, _ = column(x, rate, train, (w, h), None)
    x = transpose(x, (w, h))
    if not self.is_initializing():
      self.sow("blocks", "tokens", x)
    return x, None


class RowBlock(encoder.Block, kw_only=True):
  """A block whose tokens attend to those of their own row of the grid.

  Attributes are as in Block.
  """

  def _attend(self, y: Array, train: bool, grid: tuple[int, int]) -> Array:
    rows = y.reshape(-1, grid[1], y.shape[2])  # [B * h, w, D]
    return super()._attend(rows, train, grid).reshape(y.shape)


class AxialEncoder(encoder.Encoder, kw_only=True):
  """The pairs of axial blocks and the final norm. Attributes as in Encoder."""

  def block_class(self) -> type[encoder.Block]:
    """Returns the class that is stacked."""
    return AxialPair


class AxialViT(vit.ViT, kw_only=True):
  """A ViT of axial blocks.

  Attributes are as in ViT, of which `sizes` serves here too; `pool` is "gap"
  or "map", and there are no registers.
  """

  pool: str = "gap"

  encoder_class = AxialEncoder

  def __post_init__(self) -> None:
    check.raise_all(_problems(self))
    super().__post_init__()


def transpose(x: Array, grid: tuple[int, int]) -> Array:
  """Returns the tokens [B, N, D] of a grid (rows, columns) column by column."""
  b, n, d = x.shape
  return x.reshape(b, *grid, d).swapaxes(1, 2).reshape(b, n, d)


def _problems(m: AxialViT) -> Iterator[str]:
  """Yields one line for each field that only another ViT can have."""
  if m.pool in ("cls", "cls_gap"):
    yield (
      f"pool: got {m.pool!r}; an axial model has no class token, which would "
      'be in no row and no column. Use "gap" or "map".'
    )
  if m.num_registers:
    yield (
      f"num_registers: got {m.num_registers}; must be 0: a register would be "
      "in no row and no column."
    )
