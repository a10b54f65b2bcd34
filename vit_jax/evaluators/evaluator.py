"""What an evaluator is and what it is built with."""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, Protocol

import flax.linen as nn
from jax.sharding import Mesh

from vit_jax import losses, preprocess

PyTree = Any


class Stopped(Exception):
  """An evaluation was left early, because the run was asked to stop."""


@dataclasses.dataclass(frozen=True)
class Context:
  """What a run gives each of its evaluators: the argument `context`.

  Attributes:
    model: takes images of this range and classes.
    mesh: where the parameters and batches lie.
    normalize: maps uint8 images to the model's range.
    loss: per-example loss, as in training.
    class_names: the classes the model knows, in label order.
    batch_size: global, for evaluators that name none.
    check_stop: raises `Stopped` to leave early; called once a batch.
  """

  model: nn.Module
  mesh: Mesh
  normalize: preprocess.Normalize
  loss: losses.LossFn
  class_names: tuple[str, ...]
  batch_size: int
  check_stop: Callable[[], None]


class Evaluator(Protocol):
  """Measures parameters on data of its own."""

  def __call__(self, params: PyTree) -> Mapping[str, float]:
    """Returns metrics by name; `params` as the state holds them, sharded."""
    ...
