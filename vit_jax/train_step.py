"""One optimizer update: what it is made of, and what it tells of itself."""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax
from clu import metrics as clu_metrics
from jax.sharding import PartitionSpec

from vit_jax import losses, metrics, mixup, optim, preprocess, sharding, spec
from vit_jax import state as state_lib
from vit_jax.config import Experiment
from vit_jax.models import output

Array = jax.Array
PyTree = Any
Batch = dict[str, Array]  # As the pipeline's, on the devices.


class Parts(NamedTuple):
  """What a train step is made of."""

  model: nn.Module
  tx: optax.GradientTransformation
  schedule: optim.Schedule
  normalize: preprocess.Normalize
  mix: mixup.MixFn
  loss: losses.LossFn
  num_classes: int
  frozen: PyTree  # of bool, as params: leaves that need no gradient


class StepReport(NamedTuple):
  """What a step tells of itself; the host looks at it later.

  Attributes:
    loss: over the global batch.
    grad_norm: [] global norm before clipping.
    finite: [leaves of params] whether each gradient is finite.
    culprit: [] int32, position in the source of the first example whose loss
      is not finite; -1 for none.
  """

  loss: clu_metrics.Average
  grad_norm: Array
  finite: Array
  culprit: Array


TrainStep = Callable[
  [state_lib.TrainState, Batch], tuple[state_lib.TrainState, StepReport]
]


def make_parts(
  experiment: Experiment,
  num_classes: int,
  image_shape: tuple[int, int, int],
) -> Parts:
  """Returns what the train step of a run is made of.

  Raises:
    ValueError: if a rule of the config names no parameter.
  """
  model = spec.build(
    experiment.model,
    num_classes=num_classes,
    constrain=sharding.constrain_batch,
  )
  schedule = spec.build(experiment.schedule, total_steps=experiment.total_steps)
  shapes = state_lib.param_shapes(model, image_shape)
  rules = experiment.rules.model_dump()
  tx = optim.make_tx(
    spec.build(experiment.optimizer),
    schedule,
    shapes,
    weight_decay=experiment.weight_decay,
    grad_clip_norm=experiment.grad_clip_norm,
    **rules,
  )
  frozen = [rule.frozen for rule in optim.leaf_rules(shapes, **rules)]
  return Parts(
    model=model,
    tx=tx,
    schedule=schedule,
    normalize=spec.build(experiment.normalize),
    mix=spec.build(experiment.mix),
    loss=spec.build(experiment.loss),
    num_classes=num_classes,
    frozen=jax.tree.structure(shapes).unflatten(frozen),
  )


def jit_train_step(
  experiment: Experiment, parts: Parts, target: state_lib.TrainState
) -> TrainStep:
  """Returns the compiled step; it consumes the state that it is given.

  Args:
    experiment: the run.
    parts: its parts.
    target: the state as ShapeDtypeStructs with shardings; it stays so placed.
  """
  everywhere = target.step.sharding
  return jax.jit(
    make_train_step(
      parts,
      seed=experiment.seed,
      accum_steps=experiment.accum_steps,
      ema_decay=experiment.ema_decay,
    ),
    donate_argnums=0,
    out_shardings=(state_lib.shardings_of(target), everywhere),
  )


def make_train_step(
  parts: Parts,
  *,
  seed: int,
  accum_steps: int = 1,
  ema_decay: float | None = None,
) -> TrainStep:
  """Returns the function of one optimizer update, to be jitted.

  Args:
    parts: model, optimizer, loss and batch transforms.
    seed: with the step, the only source of randomness.
    accum_steps: parts in which the gradient of the batch is computed, one
      after the other; without dropout their number does not change it.
    ema_decay: d of ema = d * ema + (1 - d) * params, or None.
  """

  def loss_sum(
    params: PyTree, part: dict[str, Array], count: Array, key: Array
  ) -> tuple[Array, Array]:
    params = jax.tree.map(
      lambda x, frozen: jax.lax.stop_gradient(x) if frozen else x,
      *(params, parts.frozen),
    )
    # What stands in a masked row reaches neither the loss nor, as nan times 0,
    # a gradient.
    real = part["mask"] > 0
    image = parts.normalize(part["image"])
    image = jnp.where(real[:, None, None, None], image, 0.0)
    logits = output.apply(
      parts.model, params, image, train=True, rngs={"dropout": key}
    ).logits
    each = parts.loss(logits, part["label"])  # [b]
    each = jnp.where(real, each, 0.0)
    return each.sum() / count, each

  def step_fn(
    state: state_lib.TrainState, batch: Batch
  ) -> tuple[state_lib.TrainState, StepReport]:
    key = jax.random.fold_in(jax.random.key(seed), state.step)
    mixed = mix_batch(parts, batch, key)
    count = jnp.maximum(batch["mask"].sum(), 1)
    value_and_grad = jax.value_and_grad(loss_sum, has_aux=True)

    def accumulate(grads: PyTree, xs: Any) -> tuple[PyTree, Array]:
      part, part_key = xs
      (_, each), new = value_and_grad(state.params, part, count, part_key)
      return jax.tree.map(jnp.add, grads, new), each

    keys = jax.random.split(jax.random.fold_in(key, 1), accum_steps)
    if accum_steps == 1:
      (_, each), grads = value_and_grad(state.params, mixed, count, keys[0])
    else:
      zeros = jax.tree.map(jnp.zeros_like, state.params)
      xs = jax.tree.map(lambda x: split_batch(x, accum_steps), mixed), keys
      grads, each = jax.lax.scan(accumulate, zeros, xs)
      each = each.swapaxes(0, 1).reshape(-1)  # [B], in the batch's order
    updates, opt_state = parts.tx.update(grads, state.opt_state, state.params)
    params = optax.apply_updates(state.params, updates)
    ema_params = state.ema_params
    if ema_decay is not None and ema_params is not None:
      ema_params = optax.incremental_update(
        params, ema_params, step_size=1 - ema_decay
      )
    new_state = state_lib.TrainState(
      step=state.step + 1,
      params=params,
      opt_state=opt_state,
      ema_params=ema_params,
    )
    bad = ~jnp.isfinite(each)
    step_report = StepReport(
      loss=metrics.average(each, batch["mask"]),
      grad_norm=optax.tree.norm(grads),
      finite=jnp.stack([jnp.isfinite(g).all() for g in jax.tree.leaves(grads)]),
      culprit=jnp.where(bad.any(), batch["index"][bad.argmax()], -1),
    )
    return new_state, step_report

  return step_fn


def mix_batch(
  parts: Parts, batch: Mapping[str, Any], key: Array
) -> dict[str, Array]:
  """Returns image [B, H, W, C] in 0..255, label [B, K] and mask, mixed."""
  label = losses.one_hot(batch["label"], parts.num_classes)
  image, label = parts.mix(
    jax.random.fold_in(key, 0), batch["image"], label, batch["mask"]
  )
  return {"image": image, "label": label, "mask": batch["mask"]}


def split_batch(x: Array, accum_steps: int) -> Array:
  """Returns [A, B / A, ...] from [B, ...]; part a has the rows a, a + A, ...

  With this stride each device keeps its rows; contiguous parts would gather
  the batch.
  """
  x = x.reshape(-1, accum_steps, *x.shape[1:]).swapaxes(0, 1)
  if jax.sharding.get_abstract_mesh().empty:
    return x
  return jax.lax.with_sharding_constraint(x, PartitionSpec(None, sharding.AXES))
