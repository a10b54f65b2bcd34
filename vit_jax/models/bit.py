"""BiT: the pre-activation ResNets that were released as "Big Transfer".

Source: arXiv:1912.11370 and its code, big_transfer, bit_jax/models.py. What
differs from `models.resnet`: norm and relu come before each convolution and
once more at the end, none of them in the root; the shortcut has no norm; all
padding is the same on both sides, and that of the max-pool is zeros; the
epsilon of the standardisation is inside the root, that of the norms 1e-5.

Parameters of stage s and unit u, which count from 1:

  trunk/root/conv/kernel [7, 7, C, 64 w]
  trunk/stage{s}/unit{u}/{norm1, norm2, norm3}/{scale, bias}
  trunk/stage{s}/unit{u}/{conv1, conv2, conv3}/kernel
  trunk/stage{s}/unit1/conv_shortcut/kernel
  trunk/norm/{scale, bias}
  head/{kernel, bias}
"""

from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp

from vit_jax.models import resnet

Array = jax.Array


class BiT(resnet.ResNet, kw_only=True):
  """A BiT ResNet for images of any size; `resnet.sizes` serves here too.

  Attributes are as in ResNet.
  """

  norm_epsilon: float = 1e-5

  def _trunk(self) -> nn.Module:
    return Trunk(**self._trunk_fields())


class Trunk(resnet.Trunk, kw_only=True):
  """From an image to the normed feature map. Attributes as in BiT."""

  @nn.compact
  def __call__(self, image: Array) -> Array:
    """Returns [B, h, w, C] of [B, H, W, C']; `resnet.stride` relates them."""
    x = self._map(image, Root, Unit)
    norm = resnet.group_norm(self.norm_epsilon, self.dtype, name="norm")
    return nn.relu(norm(x))


class Root(resnet.Root, kw_only=True):
  """The stem, without a norm. Attributes as in Unit."""

  @nn.compact
  def __call__(self, image: Array) -> Array:
    """Returns [B, h, w, features] of [B, H, W, C']."""
    x = StdConv(
      features=self.features, size=7, stride=2, dtype=self.dtype, name="conv"
    )(image)
    # Zeros, and not -inf as usual: they can be the largest here.
    x = jnp.pad(x, ((0, 0), (1, 1), (1, 1), (0, 0)))
    return nn.max_pool(x, window_shape=(3, 3), strides=(2, 2), padding="VALID")


class Unit(resnet.Unit, kw_only=True):
  """A pre-activation bottleneck. Attributes are as in resnet.Unit."""

  @nn.compact
  def __call__(self, x: Array) -> Array:
    """Returns [B, h / stride, w / stride, 4 features] of [B, h, w, C]."""
    n, stride = self.features, self.stride
    y = nn.relu(self._norm("norm1")(x))
    if stride != 1 or x.shape[-1] != 4 * n:
      x = self._conv("conv_shortcut", 4 * n, stride=stride)(y)
    y = self._conv("conv1", n)(y)
    y = nn.relu(self._norm("norm2")(y))
    y = self._conv("conv2", n, size=3, stride=stride)(y)
    y = nn.relu(self._norm("norm3")(y))
    return x + self._conv("conv3", 4 * n)(y)

  def _conv(self, name: str, features: int, **fields: Any) -> nn.Module:
    return StdConv(features=features, dtype=self.dtype, name=name, **fields)


class StdConv(resnet.StdConv, kw_only=True):
  """As resnet.StdConv, but for its padding and its epsilon."""

  def _standardise(self, kernel: Array) -> Array:
    kernel = kernel - kernel.mean(axis=(0, 1, 2), keepdims=True)
    variance = (kernel**2).mean(axis=(0, 1, 2), keepdims=True)
    return kernel / jnp.sqrt(variance + 1e-10)

  def _padding(self) -> list[tuple[int, int]]:
    return [(self.size // 2, self.size // 2)] * 2
