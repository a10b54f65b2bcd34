"""Multi-head attention with separate query, key and value projections."""

import flax.linen as nn
import jax
import jax.numpy as jnp

from vit_jax.models import norm, posemb

Array = jax.Array


class Attention(nn.Module, kw_only=True):
  """Multi-head dot-product attention, Equations 5 to 8 of the paper.

  Source: arXiv:2010.11929, appendix A. Parameters: query, key and value with
  kernel [D, H, d] and bias [H, d]; out with kernel [H, d, D] and bias [D],
  where d = D / H; query_norm and key_norm over d, and relative_posemb
  [2 T - 1, d], on request. Kernels start as xavier_uniform over D x D (the
  fan-out is all heads together), biases as zeros.

  The weights after the softmax, before dropout, are sown as `weights` into the
  collection "attention" when that is mutable.

  Attributes:
    num_heads: H; must divide the width D of the queries.
    dropout: rate at which attention weights are dropped, in [0, 1).
    qk_norm: normalises each head's query and key (arXiv:2302.05442).
    relative: adds 1-D relative position embeddings to the keys, as `posemb`
      documents; for self-attention.
    norm_epsilon: of the two norms.
    dtype: compute dtype; the softmax is float32 whatever it is.
  """

  num_heads: int
  dropout: float = 0.0
  qk_norm: bool = False
  relative: bool = False
  norm_epsilon: float = 1e-6
  dtype: str = "float32"

  @nn.compact
  def __call__(self, x: Array, context: Array, *, train: bool) -> Array:
    """Returns what each token of `x` gathers from `context`.

    Args:
      x: [B, N, D] tokens that ask.
      context: [B, M, D] tokens that answer; `x` itself for self-attention.
      train: drops attention weights, from the rng stream "dropout".

    Returns:
      [B, N, D] in the compute dtype.
    """
    width = x.shape[-1]
    query = self._heads("query", x)  # [B, H, N, d]
    key = self._heads("key", context)  # [B, H, M, d]
    value = self._heads("value", context)
    if self.qk_norm:
      query = self._norm("query_norm")(query)
      key = self._norm("key_norm")(key)
    query = query / (width // self.num_heads) ** 0.5
    logits = jnp.einsum(
      "bhnd,bhmd->bhnm", query, key, preferred_element_type=jnp.float32
    )
    if self.relative:
      offsets = posemb.relative(self, x.shape[1], query.shape[-1])  # [N, N, d]
      logits += jnp.einsum(
        *("bhnd,nmd->bhnm", query, offsets.astype(self.dtype)),
        preferred_element_type=jnp.float32,
      )
    weights = nn.softmax(logits).astype(self.dtype)  # [B, H, N, M]
    if not self.is_initializing():
      self.sow("attention", "weights", weights)
    weights = nn.Dropout(self.dropout)(weights, deterministic=not train)
    y = jnp.einsum("bhnm,bhmd->bhnd", weights, value)
    return nn.DenseGeneral(
      width,
      axis=(-2, -1),
      kernel_init=nn.initializers.xavier_uniform(),
      dtype=self.dtype,
      name="out",
    )(y.transpose(0, 2, 1, 3))  # [B, N, D]

  def _heads(self, name: str, x: Array) -> Array:
    """Returns [B, H, N, d]: heads before tokens, faster on CPUs."""
    heads = nn.DenseGeneral(
      (self.num_heads, x.shape[-1] // self.num_heads),
      kernel_init=nn.initializers.xavier_uniform(),
      dtype=self.dtype,
      name=name,
    )(x)  # [B, N, H, d]
    return heads.transpose(0, 2, 1, 3)

  def _norm(self, name: str) -> nn.Module:
    return norm.layer_norm(self.norm_epsilon, self.dtype, name=name)
