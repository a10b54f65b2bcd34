"""A small ViT with its card, and random weights to save."""

import functools
from typing import Any

import jax
import numpy as np
from flax import traverse_util

from vit_jax import preprocess, spec, weights
from vit_jax.data import transforms
from vit_jax.models import output, vit
from vit_jax.weights import adapt, card

FIELDS: dict[str, Any] = {
  "num_classes": 5,
  "width": 12,
  "depth": 3,
  "num_heads": 3,
  "mlp_dim": 20,
  "patch_size": (4, 4),
}
CARD = weights.Card(
  model=spec.spec(vit.ViT, **FIELDS),
  image_size=(12, 12),
  num_channels=3,
  transform=spec.spec(
    transforms.resize_center_crop, resize=(16, 16), size=(12, 12)
  ),
  normalize=spec.spec(preprocess.Normalize, mean=(1.0, 2.0, 3.0)),
  class_names=("a", "b", "c", "d", "e"),
  origin="the test",
)
IMAGE = np.random.default_rng(7).normal(size=(2, 12, 12, 3)).astype(np.float32)
FORMATS = ("npz", "big_vision", "timm", "transformers")


@functools.cache
def random_flat(**fields):
  model = card.edit_model(CARD, **fields).build_model()
  rng = np.random.default_rng(0)
  return {
    path: rng.normal(0.1, 0.4, shape).astype(np.float32)
    for path, shape in adapt.param_shapes(model, (12, 12, 3)).items()
  }


def random_params(**fields):
  return traverse_util.unflatten_dict(random_flat(**fields), sep="/")


def logits(model, params, image=IMAGE):
  quick = {"xla_backend_optimization_level": 0}
  apply = functools.partial(output.apply, model)
  return np.asarray(
    jax.jit(apply, compiler_options=quick)(params, image).logits
  )


def save(tmp_path, format, **fields):
  """Saves the model with these fields; returns the path of its arrays."""
  c = card.edit_model(CARD, **fields)
  return weights.save(tmp_path / "w", random_params(**fields), c, format=format)
