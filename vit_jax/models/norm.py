"""The normalisation of the tokens."""

import flax.linen as nn


def layer_norm(
  epsilon: float, dtype: str, *, name: str | None = None
) -> nn.LayerNorm:
  """Returns a LayerNorm with float32 statistics, computed in two passes.

  Args:
    epsilon: added to the variance.
    dtype: compute dtype of the result.
    name: of its parameters, scale and bias.
  """
  return nn.LayerNorm(
    epsilon=epsilon, use_fast_variance=False, dtype=dtype, name=name
  )
