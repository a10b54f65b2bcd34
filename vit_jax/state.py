"""The training state: what a checkpoint holds, and how it comes to be."""

import functools
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax
from flax import struct
from jax.sharding import Mesh

from vit_jax import optim, sharding

PyTree = Any


@struct.dataclass
class TrainState:
  """The state after `step` optimizer updates.

  It holds no random state: keys are folded from (seed, step).

  Attributes:
    step: [] int32.
    params: the model's parameters, float32.
    opt_state: the optimizer's moments and counters.
    ema_params: running average of `params`, or None.
  """

  step: jax.Array
  params: PyTree
  opt_state: PyTree
  ema_params: PyTree | None

  @property
  def eval_params(self) -> PyTree:
    """The parameters to evaluate: the running average if there is one."""
    return self.params if self.ema_params is None else self.ema_params


def init_params(
  model: nn.Module, seed: int, image_shape: tuple[int, int, int]
) -> PyTree:
  """Returns new parameters for images of [H, W, C]; trace it under `jit`."""
  image = jnp.zeros((1, *image_shape), jnp.float32)
  return model.init(jax.random.key(seed), image, train=False)["params"]


def param_shapes(model: nn.Module, image_shape: tuple[int, int, int]) -> PyTree:
  """Returns the parameters as ShapeDtypeStructs, without computing them."""
  return jax.eval_shape(lambda: init_params(model, 0, image_shape))


def init_state(
  model: nn.Module,
  tx: optax.GradientTransformation,
  *,
  seed: int,
  image_shape: tuple[int, int, int],
  ema: bool,
) -> TrainState:
  """Returns the state before the first step; trace it under `jit`."""
  params = init_params(model, seed, image_shape)
  return with_params(tx, params, ema=ema)


def with_params(
  tx: optax.GradientTransformation, params: PyTree, *, ema: bool
) -> TrainState:
  """Returns the state before the first step, starting from `params`."""
  return TrainState(
    step=jnp.zeros((), jnp.int32),
    params=params,
    opt_state=tx.init(params),
    # A copy: a donated state may not hold one buffer twice.
    ema_params=jax.tree.map(jnp.copy, params) if ema else None,
  )


def abstract_state(
  model: nn.Module,
  tx: optax.GradientTransformation,
  mesh: Mesh,
  *,
  image_shape: tuple[int, int, int],
  ema: bool,
  rule: sharding.Rule = sharding.fsdp,
) -> TrainState:
  """Returns the state as ShapeDtypeStructs that carry their shardings."""
  init = functools.partial(
    init_state, model, tx, seed=0, image_shape=image_shape, ema=ema
  )
  state = jax.eval_shape(init)
  params = sharding.tree_shardings(state.params, mesh, rule)
  everywhere = jax.NamedSharding(mesh, jax.P())
  shardings = state.replace(
    step=everywhere,
    params=params,
    opt_state=optim.opt_state_like(
      tx, state.opt_state, params, default=everywhere
    ),
    ema_params=params if ema else None,
  )
  return jax.tree.map(
    lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s),
    state,
    shardings,
  )


def shardings_of(tree: PyTree) -> PyTree:
  """Returns the sharding of each leaf."""
  return jax.tree.map(lambda x: x.sharding, tree)
