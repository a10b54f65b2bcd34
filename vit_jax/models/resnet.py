"""ResNets with group norm and standardised convolutions, post-activation.

Source: vision_transformer, models_resnet.py, and big_vision, models/bit.py:
the trunk of the hybrids and, with a head, the convolutional baseline of
arXiv:2010.11929. The BiT models that were released differ: see `models.bit`.

Parameters of stage s and unit u, which count from 1:

  trunk/root/conv/kernel [7, 7, C, 64 w], trunk/root/norm/{scale, bias}
  trunk/stage{s}/unit{u}/{conv1, conv2, conv3}/kernel
  trunk/stage{s}/unit{u}/{norm1, norm2, norm3}/{scale, bias}
  trunk/stage{s}/unit1/conv_shortcut/kernel, .../norm_shortcut/{scale, bias}
  head/{kernel, bias}
"""

import difflib
import re
from collections.abc import Callable, Iterator
from typing import Any, TypedDict

import flax.linen as nn
import jax
import jax.numpy as jnp

from vit_jax.models import check, encoder, output, patch_embed

Array = jax.Array


class ResNet(nn.Module, kw_only=True):
  """A ResNet for images of any size.

  Attributes:
    num_classes: K; 0 for no head.
    stages: units of each stage; () for the stem alone.
    width_factor: multiplies all channels, which start at 64.
    norm_epsilon: of every group norm.
    head_bias_init: initial bias of the head, e.g. -10 for sigmoid losses.
    dtype: compute dtype. Parameters, their standardisation, norm statistics,
      representation and logits are float32 whatever it is.
    constrain: pins the sharding of [B, h, w, C] activations; a module-level
      function, because modules are compared by their fields.
  """

  num_classes: int
  stages: tuple[int, ...]
  width_factor: int = 1
  norm_epsilon: float = 1e-6
  head_bias_init: float = 0.0
  dtype: str = "float32"
  constrain: Callable[[Array], Array] = encoder.identity

  def __post_init__(self) -> None:
    check.raise_all(_problems(self))
    super().__post_init__()

  @nn.compact
  def __call__(
    self, image: Array, *, train: bool = False
  ) -> output.ModelOutput:
    """Returns logits, the mean of the feature map, and the map as tokens.

    Args:
      image: [B, H, W, C] float, in the range the model was trained for.
      train: changes nothing; other models drop in training.

    Raises:
      ValueError: for an image that the parameters do not fit.
    """
    del train
    x = self._trunk()(image)  # [B, h, w, R]
    b, h, w, r = x.shape
    tokens = x.reshape(b, h * w, r)
    representation = tokens.mean(axis=1, dtype=jnp.float32)  # [B, R]
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

  def _trunk(self) -> nn.Module:
    return Trunk(**self._trunk_fields())

  def _trunk_fields(self) -> dict[str, Any]:
    return {
      "stages": self.stages,
      "width_factor": self.width_factor,
      "norm_epsilon": self.norm_epsilon,
      "dtype": self.dtype,
      "constrain": self.constrain,
      "name": "trunk",
    }


class Trunk(nn.Module, kw_only=True):
  """From an image to the feature map of the last stage.

  Attributes are as in ResNet.
  """

  stages: tuple[int, ...]
  width_factor: int = 1
  norm_epsilon: float = 1e-6
  dtype: str = "float32"
  constrain: Callable[[Array], Array] = encoder.identity

  @nn.compact
  def __call__(self, image: Array) -> Array:
    """Returns [B, h, w, C] of [B, H, W, C']; `stride` relates the sizes."""
    return self._map(image, Root, Unit)

  def _map(
    self, image: Array, root: type[nn.Module], unit: type[nn.Module]
  ) -> Array:
    """Returns the map that a kind of root and a kind of units make."""
    trained = None
    if self.has_variable("params", "root"):
      kernel = self.get_variable("params", "root")["conv"]["kernel"]
      trained = kernel.shape[2]
    patch_embed.check_image(image, (1, 1), channels=trained)
    width = 64 * self.width_factor
    fields = {"norm_epsilon": self.norm_epsilon, "dtype": self.dtype}
    x = root(features=width, **fields, name="root")(image)
    for s, num_units in enumerate(self.stages):
      x = Stage(
        unit=unit,
        num_units=num_units,
        features=width * 2**s,
        stride=1 if s == 0 else 2,
        **fields,
        constrain=self.constrain,
        name=f"stage{s + 1}",
      )(x)
    return x


class Root(nn.Module, kw_only=True):
  """The stem: an image to a map of a quarter of its height and width.

  Attributes are as in Unit.
  """

  features: int
  norm_epsilon: float
  dtype: str = "float32"

  @nn.compact
  def __call__(self, image: Array) -> Array:
    """Returns [B, h, w, features] of [B, H, W, C']."""
    x = StdConv(
      features=self.features, size=7, stride=2, dtype=self.dtype, name="conv"
    )(image)
    x = nn.relu(group_norm(self.norm_epsilon, self.dtype, name="norm")(x))
    return nn.max_pool(x, window_shape=(3, 3), strides=(2, 2), padding="SAME")


class Stage(nn.Module, kw_only=True):
  """Units of one size, of which the first may have a stride.

  Attributes:
    unit: their class.
    num_units: how many there are.
    constrain: applied to the input of each; see ResNet.
    features, stride, norm_epsilon, dtype: as in Unit.
  """

  unit: type[nn.Module]
  num_units: int
  features: int
  stride: int
  norm_epsilon: float
  dtype: str = "float32"
  constrain: Callable[[Array], Array] = encoder.identity

  @nn.compact
  def __call__(self, x: Array) -> Array:
    """Returns [B, h, w, 4 features] of [B, h', w', C]."""
    for u in range(self.num_units):
      x = self.unit(
        features=self.features,
        stride=self.stride if u == 0 else 1,
        norm_epsilon=self.norm_epsilon,
        dtype=self.dtype,
        name=f"unit{u + 1}",
      )(self.constrain(x))
    return x


class Unit(nn.Module, kw_only=True):
  """A bottleneck: convolutions 1x1, 3x3 and 1x1, and a residual.

  Attributes:
    features: channels of the first two convolutions; the third has 4 times
      as many.
    stride: of the 3x3 convolution.
    norm_epsilon: of every group norm.
    dtype: compute dtype.
  """

  features: int
  stride: int
  norm_epsilon: float
  dtype: str = "float32"

  @nn.compact
  def __call__(self, x: Array) -> Array:
    """Returns [B, h / stride, w / stride, 4 features] of [B, h, w, C]."""
    n, stride = self.features, self.stride
    zeros = nn.initializers.zeros  # The residual starts as nothing.
    y = nn.relu(self._norm("norm1")(self._conv("conv1", n)(x)))
    y = self._conv("conv2", n, size=3, stride=stride)(y)
    y = nn.relu(self._norm("norm2")(y))
    y = self._norm("norm3", scale_init=zeros)(self._conv("conv3", 4 * n)(y))
    if stride != 1 or x.shape[-1] != 4 * n:
      x = self._conv("conv_shortcut", 4 * n, stride=stride)(x)
      x = self._norm("norm_shortcut")(x)
    return nn.relu(x + y)

  def _conv(self, name: str, features: int, **fields: Any) -> nn.Module:
    return StdConv(features=features, dtype=self.dtype, name=name, **fields)

  def _norm(self, name: str, **fields: Any) -> nn.Module:
    return group_norm(self.norm_epsilon, self.dtype, name=name, **fields)


class StdConv(nn.Module, kw_only=True):
  """A convolution without bias, whose kernel is standardised before use.

  Source: "Weight Standardization" (arXiv:1903.10520).

  Attributes:
    features: channels of the result.
    size: of the kernel, in pixels.
    stride: in pixels.
    dtype: compute dtype.
  """

  features: int
  size: int = 1
  stride: int = 1
  dtype: str = "float32"

  @nn.compact
  def __call__(self, x: Array) -> Array:
    """Returns [B, h / stride, w / stride, features] of [B, h, w, C]."""
    kernel = self.param(
      "kernel",
      nn.initializers.lecun_normal(),
      (self.size, self.size, x.shape[-1], self.features),
    )
    return jax.lax.conv_general_dilated(
      x.astype(self.dtype),
      self._standardise(kernel).astype(self.dtype),
      window_strides=(self.stride, self.stride),
      padding=self._padding(),
      dimension_numbers=("NHWC", "HWIO", "NHWC"),
    )

  def _standardise(self, kernel: Array) -> Array:
    """Returns float32 of mean 0 and deviation 1 for each output channel."""
    kernel = kernel - kernel.mean(axis=(0, 1, 2), keepdims=True)
    variance = (kernel**2).mean(axis=(0, 1, 2), keepdims=True)
    # The floor, far below 1e-5, is for the gradient of equal weights.
    return kernel / (jnp.sqrt(jnp.maximum(variance, 1e-20)) + 1e-5)

  def _padding(self) -> str | list[tuple[int, int]]:
    return "SAME"


def group_norm(
  epsilon: float, dtype: str, *, name: str, **fields: Any
) -> nn.GroupNorm:
  """Returns a norm over 32 groups of channels, with float32 statistics.

  Args:
    epsilon: added to the variance.
    dtype: compute dtype of the result.
    name: of its parameters, scale and bias.
    **fields: others of nn.GroupNorm.
  """
  return nn.GroupNorm(
    num_groups=32,
    epsilon=epsilon,
    use_fast_variance=False,
    dtype=dtype,
    name=name,
    **fields,
  )


def stride(stages: tuple[int, ...]) -> int:
  """Returns pixels per cell of the map of such stages, along each side.

  An image of H pixels gives ceil(H / stride) cells.
  """
  return 4 * 2 ** max(len(stages) - 1, 0)


class Sizes(TypedDict):
  """The arguments of ResNet that a variant's name stands for."""

  stages: tuple[int, ...]
  width_factor: int


VARIANTS = {
  "R26": (2, 2, 2, 2),
  "R50": (3, 4, 6, 3),
  "R101": (3, 4, 23, 3),
  "R152": (3, 8, 36, 3),
  "R200": (3, 24, 36, 3),
}


def sizes(variant: str) -> Sizes:
  """Returns the sizes of a variant, as arguments of ResNet or BiT.

  Args:
    variant: name and width factor, "R152x4"; "R50" is "R50x1".

  Raises:
    ValueError: for another name; lists the names and the closest match.
  """
  match = re.fullmatch(r"(R\d+)(?:x([1-9]\d*))?", variant)
  if match is None or match[1] not in VARIANTS:
    close = difflib.get_close_matches(variant.split("x")[0], VARIANTS, 1, 0.3)
    hint = f" Did you mean {close[0]!r}?" if close else ""
    raise ValueError(
      f"variant: got {variant!r}; must be NAME or NAMExWIDTH with a NAME of "
      f"{list(VARIANTS)} and a WIDTH factor of at least 1.{hint}"
    )
  return Sizes(stages=VARIANTS[match[1]], width_factor=int(match[2] or 1))


def stage_problems(m: Any) -> Iterator[str]:
  """Yields one line for each field of the trunk that makes none."""
  yield from check.at_least(1, {"width_factor": m.width_factor})
  if min(m.stages, default=1) < 1:
    yield (
      f"stages: got {m.stages}; each must have at least 1 unit. Use e.g. "
      "(3, 4, 6, 3), or () for the stem alone."
    )


def _problems(m: ResNet) -> Iterator[str]:
  """Yields one line for each field that makes no model."""
  yield from stage_problems(m)
  yield from check.at_least(0, {"num_classes": m.num_classes})
  yield from check.choice("dtype", m.dtype, check.DTYPES)
  if m.norm_epsilon <= 0:
    yield f"norm_epsilon: got {m.norm_epsilon}; must be > 0. Use 1e-6."
