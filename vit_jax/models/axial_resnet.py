"""AxialResNet: a ResNet with axial self-attention for its 3x3 convolutions.

Source: arXiv:2010.11929, appendix D.6, which ports Axial-DeepLab
(arXiv:2003.07853); what those leave open is as in scenic's axial_resnet.py.
AxialResNet-50 is `AxialResNet(**resnet.sizes("R50"))`.

Parameters are those of `resnet`, but those of unit u in stage s, with n = 64 w
2^(s - 1) channels and heads of d = n / 8 values, have instead of conv2 and
norm2, for each axis,

  trunk/stage{s}/unit{u}/{height, width}/qkv/kernel [n, 2 n]
  trunk/stage{s}/unit{u}/{height, width}/{norm_qkv, norm_out}/{scale, bias}
  trunk/stage{s}/unit{u}/{height, width}/relative_posemb [2 T - 1, 2 d]

where T is the size of the unit's input along that axis.
"""

import flax.linen as nn
import jax
import jax.numpy as jnp

from vit_jax.models import resnet

Array = jax.Array

NUM_HEADS = 8


class AxialResNet(resnet.ResNet, kw_only=True):
  """An AxialResNet for images of one size, that of its training.

  Attributes are as in ResNet.
  """

  norm_epsilon: float = 1e-4

  def _trunk(self) -> nn.Module:
    return Trunk(**self._trunk_fields())


class Trunk(resnet.Trunk, kw_only=True):
  """From an image to the feature map. Attributes as in AxialResNet."""

  @nn.compact
  def __call__(self, image: Array) -> Array:
    """Returns [B, h, w, C] of [B, H, W, C']; `resnet.stride` relates them."""
    return self._map(image, resnet.Root, Unit)


class Unit(resnet.Unit, kw_only=True):
  """A bottleneck with axial attention. Attributes are as in resnet.Unit."""

  @nn.compact
  def __call__(self, x: Array) -> Array:
    """Returns [B, h / stride, w / stride, 4 features] of [B, h, w, C]."""
    n, stride = self.features, self.stride
    y = nn.relu(self._norm("norm1")(self._conv("conv1", n)(x)))
    y = self._attend("height", y.swapaxes(1, 2)).swapaxes(1, 2)
    y = self._attend("width", y)
    if stride != 1:
      y = nn.avg_pool(
        *(y, (stride, stride)),
        strides=(stride, stride),
        padding="SAME",
        count_include_pad=False,
      )
    y = self._conv("conv3", 4 * n)(nn.relu(y))
    y = self._norm("norm3", scale_init=nn.initializers.zeros)(y)
    if stride != 1 or x.shape[-1] != 4 * n:
      x = self._conv("conv_shortcut", 4 * n, stride=stride)(x)
      x = self._norm("norm_shortcut")(x)
    return nn.relu(x + y)

  def _attend(self, name: str, x: Array) -> Array:
    """Returns [B, h, w, n]; each cell sees those of its row."""
    attention = LineAttention(
      norm_epsilon=self.norm_epsilon, dtype=self.dtype, name=name
    )
    return attention(x.reshape(-1, *x.shape[2:])).reshape(x.shape)


class LineAttention(nn.Module, kw_only=True):
  """Self-attention within lines, with relative positions.

  Source: Equation 4 of arXiv:2003.07853. In each head, the output at o is the
  sum over all p of the line of

    softmax_p(q_o . k_p + q_o . r^q_(p-o) + k_p . r^k_(p-o)) (v_p + r^v_(p-o)).

  Queries and keys have half the size of values. Nothing divides the logits by
  the root of that size: q, k and v, of a line together, go through a group
  norm, and so does the output. In scenic's port the third term has the key at
  o; here, as in the equation, the key at p.

  Attributes:
    norm_epsilon: of the group norms.
    dtype: compute dtype; the softmax is float32 whatever it is.
  """

  norm_epsilon: float
  dtype: str = "float32"

  @nn.compact
  def __call__(self, x: Array) -> Array:
    """Returns [M, T, n] of M lines [M, T, n].

    Raises:
      ValueError: if trained relative positions belong to another T.
    """
    m, t, n = x.shape
    d = n // NUM_HEADS
    parts = [d // 2, d]  # Query, key, and twice as much value.
    qkv = nn.Dense(
      2 * n,
      use_bias=False,
      kernel_init=nn.initializers.normal(1 / n),
      dtype=self.dtype,
      name="qkv",
    )(x)
    qkv = self._norm("norm_qkv")(qkv).reshape(m, t, NUM_HEADS, 2 * d)
    q, k, v = jnp.split(qkv, parts, axis=-1)  # [M, T, H, d / 2 or d]
    r = self._relative_posemb(t, 2 * d).astype(self.dtype)
    r_q, r_k, r_v = jnp.split(r, parts, axis=-1)  # [T, T, d / 2 or d]
    logits = (
      _float32_einsum("mohc,mphc->mhop", q, k)
      + _float32_einsum("mohc,opc->mhop", q, r_q)
      + _float32_einsum("mphc,opc->mhop", k, r_k)
    )
    weights = nn.softmax(logits).astype(self.dtype)  # [M, H, T, T]
    y = jnp.einsum("mhop,mphc->mohc", weights, v)
    y = y + jnp.einsum("mhop,opc->mohc", weights, r_v)
    return self._norm("norm_out")(y.reshape(m, t, n))

  def _norm(self, name: str) -> nn.Module:
    return resnet.group_norm(self.norm_epsilon, self.dtype, name=name)

  def _relative_posemb(self, t: int, width: int) -> Array:
    """Returns an embedding for each pair (o, p) of the line, [T, T, width]."""
    name, rows = "relative_posemb", 2 * t - 1
    if self.has_variable("params", name):
      trained = self.get_variable("params", name).shape[0]
      if trained != rows:
        raise ValueError(
          f"image: got a size that makes a feature map of {self.name} {t}; its "
          f"relative positions were trained on {(trained + 1) // 2}. Use "
          "images of the training size."
        )
    init = nn.initializers.normal(2 / width)
    table = self.param(name, init, (rows, width))
    index = jnp.arange(t)
    return table[index[None, :] - index[:, None] + t - 1]  # p - o


def _float32_einsum(terms: str, x: Array, y: Array) -> Array:
  return jnp.einsum(terms, x, y, preferred_element_type=jnp.float32)
