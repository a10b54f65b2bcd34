"""The stack of pre-norm blocks, Equations 2 and 3 of arXiv:2010.11929."""

import math
from collections.abc import Callable

import flax.linen as nn
import jax
import jax.numpy as jnp

from vit_jax.models import attention, norm
from vit_jax.models import posemb as posemb_lib

Array = jax.Array


def identity(x: Array) -> Array:
  """Returns `x`: the default of `constrain`."""
  return x


class Encoder(nn.Module, kw_only=True):
  """The blocks, Equations 2 and 3; `norm` is the final LayerNorm.

  The parameters of all blocks are stacked along a first axis L. Attributes
  are as in ViT; `posemb` is the kind that the blocks themselves need: one that
  each of them adds to its input, "relative", or "none".
  """

  depth: int
  num_heads: int
  mlp_dim: int
  posemb: str = "none"
  cls_posemb: bool = False
  dropout: float = 0.0
  attention_dropout: float = 0.0
  stochastic_depth: float = 0.0
  layer_scale: float | None = None
  qk_norm: bool = False
  activation: str = "gelu_tanh"
  norm_epsilon: float = 1e-6
  dtype: str = "float32"
  scan_unroll: int = 1
  constrain: Callable[[Array], Array] = identity

  def setup(self) -> None:  # noqa: D102
    stack = nn.scan(
      self.block_class(),
      variable_axes={"params": 0, "attention": 0, "blocks": 0},
      split_rngs={"params": True, "dropout": True},
      in_axes=(0, nn.broadcast, nn.broadcast, nn.broadcast),  # pyright: ignore[reportArgumentType]: tuples
      length=self.depth,
      # Drawing parameters in a loop of one compiles several times faster.
      unroll=1 if self.is_initializing() else self.scan_unroll,
      check_constancy_invariants=False,  # Halves the time to trace.
    )
    self.blocks = stack(
      num_heads=self.num_heads,
      mlp_dim=self.mlp_dim,
      posemb=self.posemb,
      cls_posemb=self.cls_posemb,
      dropout=self.dropout,
      attention_dropout=self.attention_dropout,
      stochastic_depth=self.stochastic_depth > 0,
      layer_scale=self.layer_scale,
      qk_norm=self.qk_norm,
      activation=self.activation,
      norm_epsilon=self.norm_epsilon,
      dtype=self.dtype,
      constrain=self.constrain,
    )
    self.norm = norm.layer_norm(self.norm_epsilon, self.dtype)

  def block_class(self) -> "type[Block]":
    """Returns the class that is stacked, for subclasses to change."""
    return Block

  def __call__(
    self,
    x: Array,
    *,
    train: bool,
    grid: tuple[int, int],
    positions: Array | None = None,
  ) -> Array:
    """Returns [B, T, D] after the last block, before the final norm.

    Args:
      x: [B, T, D] tokens: prefix, then the grid.
      train: turns on dropout and stochastic depth.
      grid: (rows, columns) of the patches among the tokens.
      positions: [1, T, D], added to the input of each block, or None.
    """
    rates = jnp.linspace(0.0, self.stochastic_depth, self.depth)
    # By position: nn.scan drops keyword arguments.
    x, _ = self.blocks(x, rates, train, grid, positions)
    return x


class Block(nn.Module, kw_only=True):
  """One pre-norm block: attention, then MLP, each with a residual.

  Attributes are as in Encoder; `stochastic_depth` only says whether there is
  any, as the rate differs from block to block. The output is sown as `tokens`
  into the collection "blocks" when that is mutable.
  """

  num_heads: int
  mlp_dim: int
  posemb: str = "none"
  cls_posemb: bool = False
  dropout: float = 0.0
  attention_dropout: float = 0.0
  stochastic_depth: bool = False
  layer_scale: float | None = None
  qk_norm: bool = False
  activation: str = "gelu_tanh"
  norm_epsilon: float = 1e-6
  dtype: str = "float32"
  constrain: Callable[[Array], Array] = identity

  @nn.compact
  def __call__(
    self,
    x: Array,
    rate: Array,
    train: bool,
    grid: tuple[int, int],
    positions: Array | None,
  ) -> tuple[Array, None]:
    """Returns the new [B, T, D], and None, as nn.scan wants it.

    Args:
      x: [B, T, D].
      rate: [] stochastic-depth rate of this block.
      train: turns on dropout and stochastic depth.
      grid: (rows, columns) of the patches among the tokens.
      positions: [1, T, D] to add to `x`, or None.
    """
    x = self.constrain(x)
    if self.posemb in posemb_lib.ADDED:
      positions = posemb_lib.table(
        *(self, self.posemb, grid),
        width=x.shape[2],
        cls=self.cls_posemb,
        num_unplaced=x.shape[1] - math.prod(grid) - self.cls_posemb,
      )
    if positions is not None:
      x = x + positions.astype(x.dtype)
    y = self._attend(self._norm("norm1")(x), train, grid)
    y = nn.Dropout(self.dropout)(y, deterministic=not train)
    x = x + self._residual("layer_scale1", y, rate, train)
    y = self._norm("norm2")(x)
    y = Mlp(
      mlp_dim=self.mlp_dim,
      dropout=self.dropout,
      activation=self.activation,
      dtype=self.dtype,
      name="mlp",
    )(y, train=train)
    x = x + self._residual("layer_scale2", y, rate, train)
    if not self.is_initializing():
      self.sow("blocks", "tokens", x)
    return x, None

  def _attend(self, y: Array, train: bool, grid: tuple[int, int]) -> Array:
    """Returns what each token gathers, for subclasses to narrow."""
    del grid
    return attention.Attention(
      num_heads=self.num_heads,
      dropout=self.attention_dropout,
      qk_norm=self.qk_norm,
      relative=self.posemb == "relative",
      norm_epsilon=self.norm_epsilon,
      dtype=self.dtype,
      name="attention",
    )(y, y, train=train)

  def _norm(self, name: str) -> nn.Module:
    return norm.layer_norm(self.norm_epsilon, self.dtype, name=name)

  def _residual(self, name: str, y: Array, rate: Array, train: bool) -> Array:
    """Returns `y`, scaled and, in training, dropped for some examples."""
    if self.layer_scale is not None:
      init = nn.initializers.constant(self.layer_scale)
      scale = self.param(name, init, y.shape[-1:]).astype(y.dtype)
      y = y * scale[None, None]
    if not (train and self.stochastic_depth):
      return y
    keep = 1.0 - rate
    shape = (len(y), 1, 1)
    kept = jax.random.bernoulli(self.make_rng("dropout"), keep, shape)
    return jnp.where(kept, y / keep.astype(y.dtype), jnp.zeros_like(y))


class Mlp(nn.Module, kw_only=True):
  """Two dense layers, fc1 and fc2, with a GELU between them.

  For "swiglu" it is fc2(silu(gate(x)) * fc1(x)), Equation 6 of
  arXiv:2002.05202, as in DINOv2-g. Attributes are as in ViT.
  """

  mlp_dim: int
  dropout: float = 0.0
  activation: str = "gelu_tanh"
  dtype: str = "float32"

  @nn.compact
  def __call__(self, x: Array, *, train: bool) -> Array:
    """Returns [B, N, D] of [B, N, D]."""
    flat = x.reshape(-1, x.shape[-1])  # [B * N, D]: faster on CPUs.
    y = self._dense(self.mlp_dim, "fc1")(flat)
    if self.activation == "swiglu":
      y = nn.silu(self._dense(self.mlp_dim, "gate")(flat)) * y
    else:
      y = nn.gelu(y, approximate=self.activation == "gelu_tanh")
    y = nn.Dropout(self.dropout)(y, deterministic=not train)
    y = self._dense(x.shape[-1], "fc2")(y)
    y = nn.Dropout(self.dropout)(y, deterministic=not train)
    return y.reshape(x.shape)

  def _dense(self, features: int, name: str) -> nn.Dense:
    return nn.Dense(
      features,
      kernel_init=nn.initializers.xavier_uniform(),
      bias_init=nn.initializers.normal(1e-6),
      dtype=self.dtype,
      name=name,
    )
