"""MLP-Mixer: a model that mixes patches by an MLP instead of by attention.

Source: "MLP-Mixer: An all-MLP Architecture for Vision" (arXiv:2105.01601) and
its code in vision_transformer.

Parameters, with L blocks of N patches; every leaf under encoder/blocks is
stacked, its first axis is L:

  patch_embed/{kernel [Ph, Pw, C, D], bias}
  encoder/blocks/{norm1, norm2}/{scale, bias}
  encoder/blocks/token_mlp/{fc1 [N, T], fc2 [T, N]}/{kernel, bias}
  encoder/blocks/channel_mlp/{fc1, fc2}/{kernel, bias}
  encoder/norm/{scale, bias}
  head/{kernel, bias}
"""

import re
from collections.abc import Callable, Iterator
from typing import TypedDict

import flax.linen as nn
import jax
import jax.numpy as jnp

from vit_jax.models import check, encoder, norm, output, patch_embed

Array = jax.Array


class Mixer(nn.Module, kw_only=True):
  """An MLP-Mixer for images of one grid of patches, that of its training.

  Attributes:
    num_classes: K; 0 for no head.
    width: D, the size of a token.
    depth: number of blocks.
    tokens_mlp_dim: hidden size of the MLP over the patches.
    channels_mlp_dim: hidden size of the MLP over the channels.
    patch_size: pixels (height, width).
    stochastic_depth: rate at which the last block's residuals are dropped, per
      example; it grows linearly from 0 at the first block.
    norm_epsilon: of every LayerNorm.
    head_bias_init: initial bias of the head, e.g. -10 for sigmoid losses.
    dtype: compute dtype. Parameters, norm statistics, representation and
      logits are float32 whatever it is.
    scan_unroll: blocks unrolled per step of the scan over depth.
    constrain: pins the sharding of [B, N, D] activations; a module-level
      function, because modules are compared by their fields.
  """

  num_classes: int
  width: int
  depth: int
  tokens_mlp_dim: int
  channels_mlp_dim: int
  patch_size: tuple[int, int] = (16, 16)
  stochastic_depth: float = 0.0
  norm_epsilon: float = 1e-6
  head_bias_init: float = 0.0
  dtype: str = "float32"
  scan_unroll: int = 1
  constrain: Callable[[Array], Array] = encoder.identity

  def __post_init__(self) -> None:
    check.raise_all(_problems(self))
    super().__post_init__()

  @nn.compact
  def __call__(
    self, image: Array, *, train: bool = False
  ) -> output.ModelOutput:
    """Returns logits, the mean of the tokens and the tokens of the grid.

    Args:
      image: [B, H, W, C] float, in the range the model was trained for.
      train: turns on stochastic depth (rng stream "dropout").

    Raises:
      ValueError: for an image that the patches or the parameters do not fit.
    """
    x = patch_embed.PatchEmbed(
      patch_size=self.patch_size,
      width=self.width,
      dtype=self.dtype,
      name="patch_embed",
    )(image)
    b, h, w, d = x.shape
    self._check_trained((h, w))
    x = self.constrain(x.reshape(b, h * w, d))  # [B, N, D]
    tokens = MixerEncoder(
      depth=self.depth,
      tokens_mlp_dim=self.tokens_mlp_dim,
      channels_mlp_dim=self.channels_mlp_dim,
      stochastic_depth=self.stochastic_depth,
      norm_epsilon=self.norm_epsilon,
      dtype=self.dtype,
      scan_unroll=self.scan_unroll,
      constrain=self.constrain,
      name="encoder",
    )(x, train=train)
    representation = tokens.mean(axis=1, dtype=jnp.float32)  # [B, D]
    if self.num_classes == 0:
      logits = jnp.zeros((b, 0), jnp.float32)
    else:
      logits = nn.Dense(
        self.num_classes,
        kernel_init=nn.initializers.zeros,
        bias_init=nn.initializers.constant(self.head_bias_init),
        name="head",
      )(representation)
    return output.ModelOutput(logits, representation, tokens)

  def _check_trained(self, grid: tuple[int, int]) -> None:
    """Checks the number of patches; their layout leaves no trace."""
    if self.is_initializing():
      return
    blocks = self.variables["params"]["encoder"]["blocks"]
    trained = blocks["token_mlp"]["fc1"]["kernel"].shape[1]
    rows, columns = grid
    if rows * columns != trained:
      raise ValueError(
        f"image: got a grid of {rows}x{columns} patches, {rows * columns} in "
        f"all; the MLPs over the patches were trained on {trained}. Use images "
        "of the training size: a Mixer has weights for each patch."
      )


class MixerEncoder(nn.Module, kw_only=True):
  """The blocks and the final norm. Attributes are as in Mixer."""

  depth: int
  tokens_mlp_dim: int
  channels_mlp_dim: int
  stochastic_depth: float = 0.0
  norm_epsilon: float = 1e-6
  dtype: str = "float32"
  scan_unroll: int = 1
  constrain: Callable[[Array], Array] = encoder.identity

  @nn.compact
  def __call__(self, x: Array, *, train: bool) -> Array:
    """Returns [B, N, D] of [B, N, D]."""
    stack = nn.scan(
      MixerBlock,
      variable_axes={"params": 0, "blocks": 0},
      split_rngs={"params": True, "dropout": True},
      in_axes=(0, nn.broadcast),  # pyright: ignore[reportArgumentType]: tuples
      length=self.depth,
      # Drawing parameters in a loop of one compiles several times faster.
      unroll=1 if self.is_initializing() else self.scan_unroll,
      check_constancy_invariants=False,  # Halves the time to trace.
    )
    blocks = stack(
      tokens_mlp_dim=self.tokens_mlp_dim,
      channels_mlp_dim=self.channels_mlp_dim,
      stochastic_depth=self.stochastic_depth > 0,
      norm_epsilon=self.norm_epsilon,
      dtype=self.dtype,
      constrain=self.constrain,
      name="blocks",
    )
    rates = jnp.linspace(0.0, self.stochastic_depth, self.depth)
    x, _ = blocks(x, rates, train)  # By position: nn.scan drops keywords.
    return norm.layer_norm(self.norm_epsilon, self.dtype, name="norm")(x)


class MixerBlock(nn.Module, kw_only=True):
  """One block: an MLP over the patches, then one over the channels.

  Attributes are as in Mixer; `stochastic_depth` only says whether there is
  any. A residual that is kept is divided by the rate of keeping, as in ViT;
  big_vision's Mixer does not. The output is sown as `tokens` into the
  collection "blocks" when that is mutable.
  """

  tokens_mlp_dim: int
  channels_mlp_dim: int
  stochastic_depth: bool = False
  norm_epsilon: float = 1e-6
  dtype: str = "float32"
  constrain: Callable[[Array], Array] = encoder.identity

  @nn.compact
  def __call__(self, x: Array, rate: Array, train: bool) -> tuple[Array, None]:
    """Returns the new [B, N, D], and None, as nn.scan wants it.

    Args:
      x: [B, N, D].
      rate: [] stochastic-depth rate of this block.
      train: turns on stochastic depth.
    """
    x = self.constrain(x)
    y = norm.layer_norm(self.norm_epsilon, self.dtype, name="norm1")(x)
    y = y.swapaxes(1, 2)  # [B, D, N]
    y = Mlp(mlp_dim=self.tokens_mlp_dim, dtype=self.dtype, name="token_mlp")(y)
    x = x + self._residual(y.swapaxes(1, 2), rate, train)
    y = norm.layer_norm(self.norm_epsilon, self.dtype, name="norm2")(x)
    y = Mlp(
      mlp_dim=self.channels_mlp_dim, dtype=self.dtype, name="channel_mlp"
    )(y)
    x = x + self._residual(y, rate, train)
    if not self.is_initializing():
      self.sow("blocks", "tokens", x)
    return x, None

  def _residual(self, y: Array, rate: Array, train: bool) -> Array:
    """Returns `y`, in training dropped for some examples."""
    if not (train and self.stochastic_depth):
      return y
    keep = 1.0 - rate
    kept = jax.random.bernoulli(self.make_rng("dropout"), keep, (len(y), 1, 1))
    return jnp.where(kept, y / keep.astype(y.dtype), jnp.zeros_like(y))


class Mlp(nn.Module, kw_only=True):
  """Two dense layers with a GELU between them, over the last axis.

  Kernels start as lecun_normal and biases as zeros, as in the published code:
  not as in the MLP of ViT.
  """

  mlp_dim: int
  dtype: str = "float32"

  @nn.compact
  def __call__(self, x: Array) -> Array:
    """Returns [B, M, N] of [B, M, N]."""
    y = x.reshape(-1, x.shape[-1])  # [B * M, N]: faster on CPUs.
    y = self._dense(self.mlp_dim, "fc1")(y)
    y = nn.gelu(y, approximate=True)
    return self._dense(x.shape[-1], "fc2")(y).reshape(x.shape)

  def _dense(self, features: int, name: str) -> nn.Dense:
    return nn.Dense(
      features,
      kernel_init=nn.initializers.lecun_normal(),
      bias_init=nn.initializers.zeros,
      dtype=self.dtype,
      name=name,
    )


class Sizes(TypedDict):
  """The arguments of Mixer that a variant's name stands for."""

  patch_size: tuple[int, int]
  width: int
  depth: int
  tokens_mlp_dim: int
  channels_mlp_dim: int


# (width, depth, tokens_mlp_dim, channels_mlp_dim): Table 1 of the paper.
VARIANTS = {
  "S": (512, 8, 256, 2048),
  "B": (768, 12, 384, 3072),
  "L": (1024, 24, 512, 4096),
  "H": (1280, 32, 640, 5120),
}


def sizes(variant: str) -> Sizes:
  """Returns the sizes of a published variant, as arguments of Mixer.

  Args:
    variant: name and patch size in pixels, such as "B/16".

  Raises:
    ValueError: for another name.
  """
  match = re.fullmatch(r"(.+)/([1-9]\d*)", variant)
  if match is None or match[1] not in VARIANTS:
    raise ValueError(
      f"variant: got {variant!r}; must be NAME/PATCH with a NAME of "
      f"{list(VARIANTS)}. Use e.g. 'B/16'."
    )
  width, depth, tokens_mlp_dim, channels_mlp_dim = VARIANTS[match[1]]
  return Sizes(
    patch_size=(int(match[2]), int(match[2])),
    width=width,
    depth=depth,
    tokens_mlp_dim=tokens_mlp_dim,
    channels_mlp_dim=channels_mlp_dim,
  )


def _problems(m: Mixer) -> Iterator[str]:
  """Yields one line for each field that makes no model."""
  sizes = (
    *("width", "depth", "tokens_mlp_dim", "channels_mlp_dim"),
    "scan_unroll",
  )
  yield from check.at_least(1, {name: getattr(m, name) for name in sizes})
  yield from check.at_least(0, {"num_classes": m.num_classes})
  yield from check.rates({"stochastic_depth": m.stochastic_depth})
  yield from check.choice("dtype", m.dtype, check.DTYPES)
  yield from check.patch_size(m.patch_size)
  if m.norm_epsilon <= 0:
    yield f"norm_epsilon: got {m.norm_epsilon}; must be > 0. Use 1e-6."
