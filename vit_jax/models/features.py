"""What a model sees inside: attention weights and tokens of any block."""

from collections.abc import Sequence
from typing import Any, NamedTuple, cast

import flax.linen as nn
import jax

from vit_jax.models import output

Array = jax.Array


class Features(NamedTuple):
  """What a model makes of B images, and what it saw on the way.

  T tokens: class token if there is one, registers, then the N patches of the
  grid, row by row.

  Attributes:
    output: logits, representation and tokens, as without looking inside.
    attention: by block, [B, H, T, T] weights after the softmax: how much each
      query (third axis) takes from each key (last axis).
    blocks: by block, [B, T, D] its output; the final norm is not applied.
    pool_attention: [B, H, 1, N] of the "map" head; None for other pools, or if
      no attention was asked for.
  """

  output: output.ModelOutput
  attention: dict[int, Array]
  blocks: dict[int, Array]
  pool_attention: Array | None


def extract(
  model: nn.Module,
  params: Any,
  image: Array,
  *,
  attention: Sequence[int] = (),
  blocks: Sequence[int] = (),
) -> Features:
  """Returns the output of a model in evaluation, with what it saw inside.

  The logits are those of `model.apply`. Trace it under `jit`; the layers are
  static.

  Args:
    model: one with an encoder of self-attention.
    params: its parameters.
    image: [B, H, W, C] float, in the model's range.
    attention: blocks whose attention weights are wanted; 0 is the first, -1 the
      last, `range(model.depth)` all.
    blocks: blocks whose output tokens are wanted.

  Raises:
    ValueError: for a block that the model has not, or a model without such.
  """
  collections = {"attention": attention, "blocks": blocks}
  out, seen = model.apply(
    {"params": params},
    image,
    train=False,
    mutable=[name for name, wanted in collections.items() if wanted],
  )
  found: Any = seen
  in_blocks = found.get("attention", {}).get("encoder", {}).get("blocks", {})
  return Features(
    output=cast(output.ModelOutput, out),
    attention=_layers(
      *("attention", attention),
      stacked=in_blocks.get("attention", {}).get("weights"),
    ),
    blocks=_layers(
      *("blocks", blocks),
      stacked=found.get("blocks", {})
      .get("encoder", {})
      .get("blocks", {})
      .get("tokens"),
    ),
    pool_attention=found.get("attention", {})
    .get("map_head", {})
    .get("attention", {})
    .get("weights", (None,))[0],
  )


def _layers(
  name: str, wanted: Sequence[int], *, stacked: tuple[Array] | None
) -> dict[int, Array]:
  """Returns the layers [...] of [L, ...] by the numbers they were asked by."""
  if not wanted:
    return {}
  if stacked is None:
    raise ValueError(
      f"{name}: got {tuple(wanted)}; this model has no blocks of "
      "self-attention to look into. Use a ViT or a hybrid."
    )
  depth = len(stacked[0])
  for layer in wanted:
    if not -depth <= layer < depth:
      raise ValueError(
        f"{name}: got block {layer}; the model has {depth}. Use 0 to "
        f"{depth - 1}, or -1 for the last."
      )
  return {layer: stacked[0][layer] for layer in wanted}
