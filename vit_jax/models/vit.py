"""The Vision Transformer, from pixels to logits.

Source: "An Image is Worth 16x16 Words" (arXiv:2010.11929), Equations 1 to 4.

Parameters, with L blocks and R registers; every leaf under encoder/blocks is
stacked, its first axis is L:

  patch_embed/{kernel [Ph, Pw, C, D], bias}
  cls [1, 1, D], registers [1, R, D]
  cls_posemb [1, 1, D], posemb [1, N, D]; or what another kind has, and where
  encoder/blocks/{norm1, norm2}/{scale, bias}
  encoder/blocks/attention/{query, key, value, out}/{kernel, bias}
  encoder/blocks/attention/{query_norm, key_norm}/{scale, bias}
  encoder/blocks/mlp/{fc1, fc2, gate}/{kernel, bias}
  encoder/blocks/{layer_scale1, layer_scale2}
  encoder/norm/{scale, bias}
  map_head/{probe [1, 1, D], attention, norm, mlp}
  representation/{kernel, bias}, head/{kernel, bias}

The order of the tokens: cls, registers, then the grid, row by row.
"""

import difflib
import re
from collections.abc import Callable, Iterator
from typing import TypedDict

import flax.linen as nn
import jax
import jax.numpy as jnp

from vit_jax.models import check, encoder, map_head, output, patch_embed
from vit_jax.models import posemb as posemb_lib

Array = jax.Array

POOLS = ("cls", "gap", "map", "cls_gap")
ACTIVATIONS = ("gelu_tanh", "gelu_erf", "swiglu")


class ViT(nn.Module, kw_only=True):
  """A Vision Transformer for images of any size that the patches divide.

  Attributes:
    num_classes: K; 0 for no head.
    width: D, the size of a token.
    depth: number of blocks.
    num_heads: attention heads; must divide `width`.
    mlp_dim: hidden size of the MLP of each block.
    patch_size: pixels (height, width).
    posemb: "learned" (1-D), "learned_2d", "sincos2d" (fixed), "relative" (1-D,
      in the attention of each block) or "none", as `models.posemb` says.
    posemb_at: adds it at the "stem", at "every_layer" (a table for each block)
      or at "every_layer_shared" (one table, added again at each block).
    pool: "cls" reads the class token, "gap" averages the grid, "map" attends
      to it with a learned probe, "cls_gap" concatenates the first two (DINOv2's
      classifier). "gap" and "map" have no class token.
    norm_after_pool: for "gap", averages before the final norm, not after it.
    cls_posemb: gives the class token a position of its own, the last term of
      Equation 1 (big_vision and DeiT-III have none). There is none in any case
      with posemb="none" or "relative".
    representation_size: size of the tanh layer before the head; None for none.
    num_registers: learned tokens without a position (arXiv:2309.16588).
    dropout: rate after the position embeddings and after each dense layer of
      a block but query, key and value (paper, B.1), in [0, 1).
    attention_dropout: rate for the attention weights, in [0, 1).
    stochastic_depth: rate at which the last block's residuals are dropped, per
      example; it grows linearly from 0 at the first block.
    layer_scale: initial value of the learned scale of each residual channel
      (arXiv:2103.17239); None for no scale.
    qk_norm: normalises each head's query and key (arXiv:2302.05442).
    activation: of the MLPs: "gelu_tanh" (the approximation; JAX checkpoints),
      "gelu_erf" (PyTorch ones) or "swiglu" (DINOv2-g).
    norm_epsilon: of every LayerNorm.
    head_bias_init: initial bias of the head, e.g. -10 for sigmoid losses.
    dtype: compute dtype. Parameters, softmax, norm statistics, representation
      and logits are float32 whatever it is.
    scan_unroll: blocks unrolled per step of the scan over depth: faster steps,
      slower compilation. Never changes the parameters.
    constrain: pins the sharding of [B, N, D] activations; a module-level
      function, because modules are compared by their fields.
  """

  num_classes: int
  width: int
  depth: int
  num_heads: int
  mlp_dim: int
  patch_size: tuple[int, int] = (16, 16)
  posemb: str = "learned"
  posemb_at: str = "stem"
  pool: str = "cls"
  norm_after_pool: bool = False
  cls_posemb: bool = True
  representation_size: int | None = None
  num_registers: int = 0
  dropout: float = 0.0
  attention_dropout: float = 0.0
  stochastic_depth: float = 0.0
  layer_scale: float | None = None
  qk_norm: bool = False
  activation: str = "gelu_tanh"
  norm_epsilon: float = 1e-6
  head_bias_init: float = 0.0
  dtype: str = "float32"
  scan_unroll: int = 1
  constrain: Callable[[Array], Array] = encoder.identity

  encoder_class = encoder.Encoder  # Not a field: for subclasses to change.

  def __post_init__(self) -> None:
    check.raise_all(_problems(self))
    super().__post_init__()

  @property
  def has_cls(self) -> bool:
    """Whether the first token is a class token."""
    return self.pool in ("cls", "cls_gap")

  @property
  def has_cls_posemb(self) -> bool:
    """Whether that token has a position of its own."""
    added = self.posemb in posemb_lib.ADDED
    return self.has_cls and self.cls_posemb and added

  @property
  def num_prefix(self) -> int:
    """Number of tokens before the grid."""
    return self.has_cls + self.num_registers

  def grid(self, image_size: tuple[int, int]) -> tuple[int, int]:
    """Returns the (rows, columns) of patches in an image, sizes in pixels."""
    height, width = image_size
    return height // self.patch_size[0], width // self.patch_size[1]

  @nn.compact
  def __call__(
    self, image: Array, *, train: bool = False
  ) -> output.ModelOutput:
    """Returns logits, the pooled representation and the tokens of the grid.

    Args:
      image: [B, H, W, C] float, in the range the model was trained for.
      train: turns on dropout and stochastic depth (rng stream "dropout").

    Raises:
      ValueError: for an image that the patches or the parameters do not fit.
    """
    x = self._embed(image)  # [B, h, w, D]
    b, h, w, d = x.shape
    x = self.constrain(x.reshape(b, h * w, d))  # [B, N, D]
    x = self._add_prefix(x)  # [B, T, D]
    positions = self._positions((h, w))
    if positions is not None and self.posemb_at == "stem":
      x = x + positions.astype(x.dtype)
    x = nn.Dropout(self.dropout)(x, deterministic=not train)
    blocks = self._encoder()
    x = blocks(
      x,
      train=train,
      grid=(h, w),
      positions=None if self.posemb_at == "stem" else positions,
    )
    pooled, tokens = self._pool(x, blocks.norm)
    logits, representation = self._classify(pooled)
    return output.ModelOutput(logits, representation, tokens)

  def _embed(self, image: Array) -> Array:
    """Returns [B, h, w, D], one token for each patch."""
    return patch_embed.PatchEmbed(
      patch_size=self.patch_size,
      width=self.width,
      dtype=self.dtype,
      name="patch_embed",
    )(image)

  def _add_prefix(self, x: Array) -> Array:
    """Returns [B, (1) + R + N, D]: class token, registers, grid."""
    prefix = []
    if self.has_cls:
      shape = (1, 1, self.width)
      prefix.append(self.param("cls", nn.initializers.zeros, shape))
    if self.num_registers:
      shape = (1, self.num_registers, self.width)
      init = nn.initializers.normal(1e-6)
      prefix.append(self.param("registers", init, shape))
    tiled = [
      jnp.broadcast_to(p, (x.shape[0], *p.shape[1:])).astype(x.dtype)
      for p in prefix
    ]
    return jnp.concatenate([*tiled, x], axis=1)

  def _positions(self, grid: tuple[int, int]) -> Array | None:
    """Returns [1, T, D], or None where the blocks see to positions."""
    if self.posemb not in posemb_lib.ADDED or self.posemb_at == "every_layer":
      return None
    return posemb_lib.table(
      *(self, self.posemb, grid),
      width=self.width,
      cls=self.has_cls_posemb,
      num_unplaced=self.num_prefix - self.has_cls_posemb,
    )

  def _encoder(self) -> encoder.Encoder:
    in_blocks = self.posemb == "relative" or self.posemb_at == "every_layer"
    return self.encoder_class(
      depth=self.depth,
      num_heads=self.num_heads,
      mlp_dim=self.mlp_dim,
      posemb=self.posemb if in_blocks else "none",
      cls_posemb=self.has_cls_posemb,
      dropout=self.dropout,
      attention_dropout=self.attention_dropout,
      stochastic_depth=self.stochastic_depth,
      layer_scale=self.layer_scale,
      qk_norm=self.qk_norm,
      activation=self.activation,
      norm_epsilon=self.norm_epsilon,
      dtype=self.dtype,
      scan_unroll=self.scan_unroll,
      constrain=self.constrain,
      name="encoder",
    )

  def _pool(self, x: Array, norm: nn.Module) -> tuple[Array, Array]:
    """Returns the pooled vector [B, D] and the normed grid [B, N, D]."""
    normed = norm(x)
    tokens = normed[:, self.num_prefix :]  # [B, N, D]
    if self.pool == "cls":
      return normed[:, 0], tokens
    if self.pool == "map":
      pooled = map_head.MapHead(
        num_heads=self.num_heads,
        mlp_dim=self.mlp_dim,
        activation=self.activation,
        norm_epsilon=self.norm_epsilon,
        dtype=self.dtype,
        name="map_head",
      )(tokens)
      return pooled, tokens
    if self.norm_after_pool:
      grid = x[:, self.num_prefix :]
      return norm(grid.mean(axis=1, dtype=jnp.float32)), tokens
    mean = tokens.mean(axis=1, dtype=jnp.float32)
    if self.pool == "gap":
      return mean, tokens
    cls = normed[:, 0].astype(jnp.float32)
    return jnp.concatenate([cls, mean], axis=-1), tokens  # [B, 2 D]

  def _classify(self, pooled: Array) -> tuple[Array, Array]:
    """Returns float32 logits [B, K] and representation [B, R] of [B, D]."""
    representation = pooled.astype(jnp.float32)
    if self.representation_size is not None:
      dense = nn.Dense(self.representation_size, name="representation")
      representation = nn.tanh(dense(representation))
    if self.num_classes == 0:
      return jnp.zeros((pooled.shape[0], 0), jnp.float32), representation
    logits = nn.Dense(
      self.num_classes,
      kernel_init=nn.initializers.zeros,
      bias_init=nn.initializers.constant(self.head_bias_init),
      name="head",
    )(representation)
    return logits, representation


class Sizes(TypedDict):
  """The arguments of ViT that a variant's name stands for."""

  patch_size: tuple[int, int]
  width: int
  depth: int
  mlp_dim: int
  num_heads: int


# (width, depth, mlp_dim, num_heads). B, L, H: Table 1 of the paper; Ti, S:
# arXiv:2106.10270; g, G, e: arXiv:2106.04560; the others: big_vision.
VARIANTS = {
  "mu": (32, 1, 128, 2),
  "Ti": (192, 12, 768, 3),
  "S": (384, 12, 1536, 6),
  "M": (512, 12, 2048, 8),
  "B": (768, 12, 3072, 12),
  "L": (1024, 24, 4096, 16),
  "So400m": (1152, 27, 4304, 16),
  "H": (1280, 32, 5120, 16),
  "g": (1408, 40, 6144, 16),
  "g-opt": (1536, 40, 6144, 16),
  "G": (1664, 48, 8192, 16),
  "G-opt": (1536, 48, 8192, 16),
  "e": (1792, 56, 15360, 16),
}


def sizes(variant: str) -> Sizes:
  """Returns the sizes of a published variant, as arguments of ViT.

  Args:
    variant: name and patch size in pixels: "B/16", or "B/16x8" for patches of
      16 rows and 8 columns. Names differ by case: "g" is not "G".

  Raises:
    ValueError: for another name; lists the names and the closest match.
  """
  match = re.fullmatch(r"(.+)/([1-9]\d*)(?:x([1-9]\d*))?", variant)
  if match is None or match[1] not in VARIANTS:
    name = match[1] if match else variant.split("/")[0]
    same = [v for v in VARIANTS if v.lower() == name.lower()]
    close = same or difflib.get_close_matches(name, VARIANTS, 1, 0.3)
    patch = variant[len(name) :] if match else "/16"
    hint = f" Did you mean {close[0] + patch!r}?" if close else ""
    raise ValueError(
      f"variant: got {variant!r}; must be NAME/PATCH or NAME/HEIGHTxWIDTH with "
      f"a NAME of {list(VARIANTS)}.{hint}"
    )
  width, depth, mlp_dim, num_heads = VARIANTS[match[1]]
  patch_size = (int(match[2]), int(match[3] or match[2]))
  return Sizes(
    patch_size=patch_size,
    width=width,
    depth=depth,
    mlp_dim=mlp_dim,
    num_heads=num_heads,
  )


def _problems(m: ViT) -> Iterator[str]:
  """Yields one line for each field, or pair of fields, that makes no model."""
  sizes = ("width", "depth", "num_heads", "mlp_dim", "scan_unroll")
  yield from check.at_least(1, {name: getattr(m, name) for name in sizes})
  counts = ("num_classes", "num_registers")
  yield from check.at_least(0, {name: getattr(m, name) for name in counts})
  rates = ("dropout", "attention_dropout", "stochastic_depth")
  yield from check.rates({name: getattr(m, name) for name in rates})
  yield from check.choice("posemb", m.posemb, posemb_lib.KINDS)
  yield from check.choice("posemb_at", m.posemb_at, posemb_lib.PLACES)
  yield from check.choice("pool", m.pool, POOLS)
  yield from check.choice("activation", m.activation, ACTIVATIONS)
  yield from check.choice("dtype", m.dtype, check.DTYPES)
  yield from check.patch_size(m.patch_size)
  yield from check.num_heads(m.num_heads, m.width)
  if m.posemb == "sincos2d" and (m.width % 4 or m.width < 8):
    yield (
      f'posemb: got "sincos2d" with width {m.width}; needs a multiple of 4, at '
      'least 8. Use "learned", or another width.'
    )
  if m.posemb == "learned_2d" and m.width % 2:
    yield (
      f'posemb: got "learned_2d" with width {m.width}; needs a multiple of 2. '
      'Use "learned", or another width.'
    )
  if m.posemb not in posemb_lib.ADDED and m.posemb_at != "stem":
    yield (
      f"posemb_at: got {m.posemb_at!r} with posemb {m.posemb!r}, which adds "
      'nothing to the tokens. Leave it at "stem".'
    )
  if m.norm_after_pool and m.pool != "gap":
    yield (
      f'norm_after_pool: got True with pool {m.pool!r}; only "gap" averages. '
      'Set it to False, or pool="gap".'
    )
  if m.norm_epsilon <= 0:
    yield f"norm_epsilon: got {m.norm_epsilon}; must be > 0. Use 1e-6."
  size = m.representation_size
  if size is not None and size < 1:
    yield (
      f"representation_size: got {size}; must be at least 1, or None for no "
      "such layer."
    )
