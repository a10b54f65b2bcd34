"""What every model of this package returns."""

from typing import Any, NamedTuple, cast

import flax.linen as nn
import jax


class ModelOutput(NamedTuple):
  """The output of a model for a batch of B images.

  Attributes:
    logits: [B, K] float32 class scores; K = 0 for a model without a head.
    representation: [B, R] pooled vector that few-shot and linear probes use.
    tokens: [B, N, D] after the final norm, prefix tokens excluded.
  """

  logits: jax.Array
  representation: jax.Array
  tokens: jax.Array


def apply(
  model: nn.Module,
  params: Any,
  image: jax.Array,
  *,
  train: bool = False,
  rngs: dict[str, jax.Array] | None = None,
) -> ModelOutput:
  """Returns what a model makes of images.

  Args:
    model: any model of this package.
    params: its parameters.
    image: [B, H, W, C] float, in the model's range.
    train: turns on dropout; it then needs `rngs`.
    rngs: keys by stream; {"dropout": key}.
  """
  output = model.apply({"params": params}, image, train=train, rngs=rngs)
  return cast(ModelOutput, output)
