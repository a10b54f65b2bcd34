"""The .npz of the MLP-Mixers, as published.

Source: vision_transformer, models_mixer.py.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from vit_jax import spec
from vit_jax.models import mixer
from vit_jax.weights import google
from vit_jax.weights.card import Card
from vit_jax.weights.format import Files
from vit_jax.weights.layout import BLOCKS, Rule, same
from vit_jax.weights.tensors import Shape, Tensors

NAME = "mixer"

_BLOCK = "MixerBlock_{block}/"
_NAMES = google.HEAD | {
  r"patch_embed/(.+)": r"stem/\1",
  BLOCKS + r"norm1/(.+)": _BLOCK + r"LayerNorm_0/\1",
  BLOCKS + r"norm2/(.+)": _BLOCK + r"LayerNorm_1/\1",
  BLOCKS + r"(token|channel)_mlp/fc1/(.+)": _BLOCK + r"\1_mixing/Dense_0/\2",
  BLOCKS + r"(token|channel)_mlp/fc2/(.+)": _BLOCK + r"\1_mixing/Dense_1/\2",
  r"encoder/norm/(.+)": r"pre_head_layer_norm/\1",
}


def recognises(tensors: Tensors, files: Files) -> bool:
  """Returns whether the arrays are those of a Mixer."""
  del files
  return {"stem/kernel", "pre_head_layer_norm/scale"} <= set(tensors)


def describe(tensors: Tensors, files: Files, **hints: Any) -> Card:
  """Returns the card; see `format.Format`."""
  del files
  shapes = tensors.shapes
  *patch_size, num_channels, width = shapes["stem/kernel"]
  tokens = google.find(shapes, r"MixerBlock_\d+/token_mixing/Dense_0/kernel")
  hidden = google.find(shapes, r"MixerBlock_\d+/channel_mixing/Dense_0/bias")
  model = spec.spec(
    mixer.Mixer,
    num_classes=shapes.get("head/bias", (0,))[0],
    width=width,
    depth=google.count(shapes, r"MixerBlock_(\d+)/") + 1,
    tokens_mlp_dim=tokens[1],
    channels_mlp_dim=hidden[0],
    patch_size=tuple(patch_size),
  )
  rows, columns = patch_size
  size = google.image_size(tokens[0], (rows, columns), hints)
  return google.card(model, size, num_channels=num_channels)


def rules(
  card: Card, shapes: Mapping[str, Shape], found: Mapping[str, Shape]
) -> Sequence[Rule]:
  """Returns the layout; see `format.Format`."""
  google.check_model(card, format=NAME, models=(mixer.Mixer,), fields={})
  if not found:
    google.log_assumptions(card, format=NAME, norm_epsilon=1e-6)
  names = google.names(sorted(shapes), _NAMES, format=NAME)
  return [same(name, path) for path, name in names.items()]


def sidecars(card: Card) -> dict[str, str]:
  """Returns nothing: the file is alone."""
  del card
  return {}
