"""Weights: anyone's in, this project's out.

`load` builds the model that a file describes; `load_params` fits a file's
weights to a model that is there; `save` writes any of the formats.
"""

from vit_jax.weights.card import Card
from vit_jax.weights.files import (
  FORMAT_NAMES,
  Loaded,
  Weights,
  load,
  load_params,
  read,
  save,
)

__all__ = [
  "FORMAT_NAMES",
  "Card",
  "Loaded",
  "Weights",
  "load",
  "load_params",
  "read",
  "save",
]
