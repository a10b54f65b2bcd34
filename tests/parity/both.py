"""The two sides of a comparison: a model of PyTorch, and ours."""

import functools
import logging
import math
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import torch
from flax import traverse_util

from vit_jax.models import output
from vit_jax.weights import adapt, layout
from vit_jax.weights import card as card_lib

ATOL = 2e-6  # float32; of outputs of order one.


def images(
  size: tuple[int, int], *, batch: int = 2, channels: int = 3
) -> np.ndarray:
  """Returns [B, H, W, C] float32 in [-1, 1], different everywhere."""
  rng = np.random.default_rng(0)
  return rng.uniform(-1, 1, (batch, *size, channels)).astype(np.float32)


def randomise(module: torch.nn.Module, *, seed: int = 0) -> torch.nn.Module:
  """Draws every parameter anew, so that none is zero, one or symmetric."""
  generator = torch.Generator().manual_seed(seed)
  for name, p in module.named_parameters():
    x = torch.randn(p.shape, generator=generator)
    if p.ndim == 4 and "backbone" in name:
      pass  # Deviation 1: the epsilons of standardisation do not show.
    elif p.ndim > 1 and p.shape[0] > 1:
      x *= math.prod(p.shape[1:]) ** -0.5
    elif name.endswith("norm3.weight"):
      x *= 0.1  # As when trained: a residual adds a little.
    elif name.endswith(("weight", "gamma", "lambda1")):
      x = 1 + 0.3 * x
    else:
      x *= 0.3
    p.copy_(x)
  return module.eval()


def random_params(card: card_lib.Card, *, seed: int = 1) -> layout.Params:
  """Returns parameters of our model, by path, likewise."""
  rng = np.random.default_rng(seed)
  shapes = adapt.param_shapes(
    card.build_model(), (*card.image_size, card.num_channels)
  )
  params = {}
  for path, shape in shapes.items():
    x = rng.standard_normal(shape).astype(np.float32)
    if path.startswith("trunk") and path.endswith("kernel"):
      pass  # As above.
    elif path.endswith("kernel"):
      x *= _fan_in(path, shape) ** -0.5
    elif path.endswith("norm3/scale"):
      x *= np.float32(0.1)
    elif path.endswith(("scale", "layer_scale1", "layer_scale2")):
      x = 1 + np.float32(0.3) * x
    else:
      x *= np.float32(0.3)
    params[path] = x.astype(np.float32)
  return params


def _fan_in(path: str, shape: tuple[int, ...]) -> int:
  if path.startswith("encoder/blocks"):
    shape = shape[1:]
  if any(f"attention/{name}/" in path for name in ("query", "key", "value")):
    return shape[0]
  return math.prod(shape[:-1])


def to_torch(image: np.ndarray) -> torch.Tensor:
  """Returns [B, C, H, W] of [B, H, W, C]."""
  return torch.from_numpy(image).permute(0, 3, 1, 2).contiguous()


def apply(model: nn.Module, params: Any, image: Any) -> output.ModelOutput:
  """Returns the output of our model, as NumPy."""
  fn = jax.jit(functools.partial(model.apply, train=False))
  return jax.tree.map(np.asarray, fn({"params": params}, jnp.asarray(image)))


def nested(params: layout.Params) -> Any:
  """Returns parameters by path as a tree."""
  return traverse_util.unflatten_dict(params, sep="/")


def assert_close(ours: Any, theirs: Any, *, atol: float = ATOL) -> None:
  """Compares arrays element by element, scaled to a maximum of one."""
  theirs = np.asarray(theirs)
  assert ours.shape == theirs.shape
  scale = float(np.abs(theirs).max())
  assert 0.1 < scale < 10
  difference = float(np.abs(ours - theirs).max()) / scale
  logging.info("max difference %.1e", difference)  # --log-level=INFO -rP
  assert difference <= atol
