"""A run small enough for tests: a two-block ViT on made-up images."""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, Mesh

from vit_jax import config as config_lib
from vit_jax import optim, sharding, spec, train_step
from vit_jax import state as state_lib
from vit_jax.config import Experiment
from vit_jax.data import fake, transforms
from vit_jax.models import vit

IMAGE_SHAPE = (16, 16, 3)
NUM_CLASSES = 10
BATCH_SIZE = 32


class Run(NamedTuple):
  """What a train step needs, made as the training loop makes it."""

  experiment: Experiment
  parts: train_step.Parts
  mesh: Mesh
  target: state_lib.TrainState
  step: Any  # jitted

  def place(self, params: Any) -> state_lib.TrainState:
    """Returns the state before the first step from parameters on the host."""
    ema = self.experiment.ema_decay is not None
    shardings = state_lib.shardings_of(self.target)
    make = functools.partial(state_lib.with_params, self.parts.tx, ema=ema)
    placed = jax.device_put(params, shardings.params)
    return jax.jit(make, out_shardings=shardings)(placed)

  def put(self, batch: Any) -> Any:
    """Returns the batch on the devices."""
    return sharding.to_global(batch, self.mesh)


def experiment(
  *,
  model: dict[str, Any] | None = None,
  num_classes: int = NUM_CLASSES,
  **changes: Any,
) -> Experiment:
  """Returns a run; `model` and `changes` override fields.

  The MLP kernels have just enough elements for fsdp to split them.
  """
  config = config_lib.base_config()
  fields = {
    "width": 32,
    "depth": 2,
    "num_heads": 2,
    "mlp_dim": 256,
    "patch_size": (8, 8),
  }
  config.model = spec.spec(vit.ViT, **{**fields, **(model or {})})
  config.batch_size = BATCH_SIZE
  config.total_steps = 100
  config.schedule = spec.spec(optim.constant, lr=1e-3)
  config.data.source = spec.spec(
    fake.FakeSource, num_examples=64, size=(16, 16), num_classes=num_classes
  )
  config.data.transform = spec.spec(transforms.resize, size=(16, 16))
  return config_lib.parse({**config.to_dict(), **changes}, num_devices=8)


def mesh(data: int = 8, fsdp: int = 1) -> Mesh:
  """Returns a mesh over the first data * fsdp devices."""
  return jax.make_mesh(
    (data, fsdp),
    sharding.AXES,
    axis_types=(AxisType.Auto,) * 2,
    devices=jax.devices()[: data * fsdp],
  )


def run(experiment: Experiment, mesh: Mesh) -> Run:
  """Returns the parts of a run and its step; call it under `jax.set_mesh`."""
  num_classes = experiment.data.source["num_classes"]
  parts = train_step.make_parts(experiment, num_classes, IMAGE_SHAPE)
  target = state_lib.abstract_state(
    parts.model,
    parts.tx,
    mesh,
    image_shape=IMAGE_SHAPE,
    ema=experiment.ema_decay is not None,
  )
  step = train_step.jit_train_step(experiment, parts, target)
  return Run(experiment, parts, mesh, target, step)


def random_params(seed: int = 0, *, num_classes: int = NUM_CLASSES) -> Any:
  """Returns parameters of the model on the host; no leaf is all zeros."""
  model = spec.build(experiment().model, num_classes=num_classes)
  shapes = state_lib.param_shapes(model, IMAGE_SHAPE)
  rng = np.random.default_rng(seed)

  def draw(path: Any, x: jax.ShapeDtypeStruct) -> np.ndarray:
    around = float("scale" in optim.path_str(path))
    return (around + 0.1 * rng.normal(size=x.shape)).astype(x.dtype)

  return jax.tree_util.tree_map_with_path(draw, shapes)


def batch(seed: int = 0, *, masked: tuple[int, ...] = ()) -> dict[str, Any]:
  """Returns a batch on the host; the rows `masked` count for nothing."""
  rng = np.random.default_rng(seed)
  mask = np.ones(BATCH_SIZE, np.float32)
  mask[list(masked)] = 0
  return {
    "image": rng.integers(0, 256, (BATCH_SIZE, *IMAGE_SHAPE), np.uint8),
    "label": rng.integers(0, NUM_CLASSES, BATCH_SIZE, np.int32),
    "mask": mask,
    "index": rng.permutation(1000)[:BATCH_SIZE],
  }


def flat(tree: Any) -> dict[str, np.ndarray]:
  """Returns the leaves on the host by their slashed paths."""
  leaves = jax.tree_util.tree_leaves_with_path(jax.device_get(tree))
  return {optim.path_str(path): np.asarray(leaf) for path, leaf in leaves}


def copy(tree: Any) -> Any:
  """Returns the tree in buffers of its own: a step consumes its state."""
  return jax.tree.map(jnp.copy, tree)
