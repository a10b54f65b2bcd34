"""Pooling by attention."""

import flax.linen as nn
import jax
import jax.numpy as jnp

from vit_jax.models import attention, encoder, norm

Array = jax.Array


class MapHead(nn.Module, kw_only=True):
  """Multi-head attention pooling: one learned probe asks all tokens.

  Source: big_vision, models/vit.py; "Scaling Vision Transformers"
  (arXiv:2106.04560). Attributes are as in ViT.
  """

  num_heads: int
  mlp_dim: int
  activation: str = "gelu_tanh"
  norm_epsilon: float = 1e-6
  dtype: str = "float32"

  @nn.compact
  def __call__(self, x: Array) -> Array:
    """Returns [B, D] of [B, N, D]."""
    b, _, d = x.shape
    probe = self.param("probe", nn.initializers.xavier_uniform(), (1, 1, d))
    probe = jnp.broadcast_to(probe.astype(x.dtype), (b, 1, d))
    x = attention.Attention(
      num_heads=self.num_heads, dtype=self.dtype, name="attention"
    )(probe, x, train=False)  # [B, 1, D]
    y = norm.layer_norm(self.norm_epsilon, self.dtype, name="norm")(x)
    y = encoder.Mlp(
      mlp_dim=self.mlp_dim,
      activation=self.activation,
      dtype=self.dtype,
      name="mlp",
    )(y, train=False)
    return (x + y)[:, 0]
