"""Schedules, preconditioners, and which parameter gets what by its path.

A rule is a regular expression, searched for (`re.search`) in the slashed path
of a leaf, e.g. `encoder/blocks/attention/query/kernel`: `kernel$` is every
kernel, `^head/` the head alone, `^(?!head/)` everything else. Leaves under
`encoder/blocks` are stacked over the depth L, so what differs by block is an
array [L, 1, ...] over their first axis.
"""

import math
import re
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.typing import ArrayLike

Array = jax.Array
PyTree = Any
Schedule = Callable[[ArrayLike], Array]  # update 0, 1, ... -> [] float32

BLOCKS = re.compile(r"^encoder/blocks/")
# What comes before the first block: layer 0 of the layer-wise decay.
EMBED = re.compile(r"^(patch_embed|cls|cls_posemb|posemb|registers)(/|$)")


def constant(*, lr: float, warmup_steps: int = 0, total_steps: int) -> Schedule:
  """Returns a warm-up to `lr`, which then stays.

  Args:
    lr: peak rate, above 0.
    warmup_steps: updates below the peak before it, in [0, total_steps); the
      rate grows linearly, is above 0 at once and `lr` at update `warmup_steps`
      (counted from 0). Every schedule here warms up in this way.
    total_steps: updates of the run.

  Raises:
    ValueError: if the arguments leave no update at the peak.
  """
  _check_schedule(lr, warmup_steps, 0.0, total_steps)
  return lambda step: lr * _warmup(step, warmup_steps)


def linear(
  *, lr: float, warmup_steps: int = 0, end_lr: float = 0.0, total_steps: int
) -> Schedule:
  """Returns a linear decay from `lr` to `end_lr` at the last update.

  Source: the paper's Table 3; the published code has `end_lr=1e-5`.

  Args:
    lr: peak rate, above 0; reached once, at update `warmup_steps`.
    warmup_steps: updates before the peak, in [0, total_steps).
    end_lr: rate of update `total_steps - 1`, in [0, lr].
    total_steps: updates of the run.

  Raises:
    ValueError: if the arguments leave no update at the peak.
  """
  _check_schedule(lr, warmup_steps, end_lr, total_steps)

  def schedule(step: ArrayLike) -> Array:
    left = 1 - _progress(step, warmup_steps, total_steps)
    return (end_lr + (lr - end_lr) * left) * _warmup(step, warmup_steps)

  return schedule


def cosine(
  *, lr: float, warmup_steps: int = 0, end_lr: float = 0.0, total_steps: int
) -> Schedule:
  """Returns half a cosine from `lr` to `end_lr`; arguments as in `linear`."""
  _check_schedule(lr, warmup_steps, end_lr, total_steps)

  def schedule(step: ArrayLike) -> Array:
    progress = _progress(step, warmup_steps, total_steps)
    left = 0.5 * (1 + jnp.cos(jnp.pi * progress))
    return (end_lr + (lr - end_lr) * left) * _warmup(step, warmup_steps)

  return schedule


def rsqrt(
  *,
  lr: float,
  warmup_steps: int = 0,
  timescale: int = 10_000,
  cooldown_steps: int | None = None,
  end_lr: float = 0.0,
  total_steps: int,
) -> Schedule:
  """Returns lr / sqrt(1 + (step - warmup_steps) / timescale), cooled down.

  Source: arXiv:2106.04560. The rate before the cooldown does not depend on
  `total_steps`, so a run can be continued from there.

  Args:
    lr: peak rate, above 0; reached once, at update `warmup_steps`.
    warmup_steps: updates before the peak, in [0, total_steps).
    timescale: updates after the peak at which the rate is lr / sqrt(2).
    cooldown_steps: last updates, over which the rate also falls linearly to
      `end_lr`; 0 for none, None for a fifth of the run (arXiv:2405.18392).
    end_lr: lowest rate, that of update `total_steps - 1` after a cooldown, in
      [0, lr].
    total_steps: updates of the run.

  Raises:
    ValueError: if the arguments leave no update at the peak.
  """
  _check_schedule(lr, warmup_steps, end_lr, total_steps)
  after_peak = total_steps - 1 - warmup_steps
  if cooldown_steps is None:
    cooldown_steps = min(math.ceil(total_steps / 5), after_peak)
  _require(timescale >= 1, "timescale", timescale, "must be >= 1. Use 10000.")
  _require(
    0 <= cooldown_steps <= after_peak,
    "cooldown_steps",
    cooldown_steps,
    f"must be in [0, {after_peak}], the updates after the peak (warmup_steps = "
    f"{warmup_steps}, total_steps = {total_steps}). Cool down for fewer.",
  )

  def schedule(step: ArrayLike) -> Array:
    after = jnp.maximum(jnp.asarray(step, jnp.float32) - warmup_steps, 0)
    rate = jnp.maximum(lr / jnp.sqrt(1 + after / timescale), end_lr)
    if cooldown_steps:
      start = total_steps - 1 - cooldown_steps
      left = 1 - _progress(step, start, total_steps)
      rate = end_lr + (rate - end_lr) * left
    return rate * _warmup(step, warmup_steps)

  return schedule


def adamw(
  *,
  b1: float = 0.9,
  b2: float = 0.999,
  eps: float = 1e-8,
  mu_dtype: str = "float32",
) -> optax.GradientTransformation:
  """Returns Adam's preconditioner; `make_tx` adds the rate and the decay.

  Args:
    b1: decay of the first moment.
    b2: decay of the second moment, which is float32.
    eps: added to the square root of the second moment.
    mu_dtype: storage of the first moment, "float32" or "bfloat16".
  """
  return optax.scale_by_adam(
    b1=b1, b2=b2, eps=eps, mu_dtype=_dtype("mu_dtype", mu_dtype)
  )


def sgd(
  *,
  momentum: float = 0.9,
  nesterov: bool = False,
  accumulator_dtype: str = "float32",
) -> optax.GradientTransformation:
  """Returns the momentum trace m = g + momentum * m; see `make_tx`.

  Args:
    momentum: 0 for none, which then takes no memory.
    nesterov: whether the update looks ahead, g + momentum * m.
    accumulator_dtype: storage of the trace, "float32" or "bfloat16".
  """
  dtype = _dtype("accumulator_dtype", accumulator_dtype)
  if momentum == 0:
    return optax.identity()
  return optax.trace(decay=momentum, nesterov=nesterov, accumulator_dtype=dtype)


def make_tx(
  optimizer: optax.GradientTransformation,
  schedule: Schedule,
  params: PyTree,
  *,
  weight_decay: float,
  grad_clip_norm: float | None,
  decay: Sequence[str],
  freeze: Sequence[str],
  freeze_blocks: int,
  layer_decay: float,
  lr_multipliers: Sequence[tuple[str, float]],
) -> optax.GradientTransformation:
  """Returns the whole update rule of a run.

  p -= lr_t * multiplier * (optimizer(clip(gradient)) + weight_decay * p), all
  in float32. The decay is AdamW's: multiplied by the scheduled rate. A leaf
  that is frozen as a whole takes no optimizer memory; frozen leaves and blocks
  get an update of zero and do not count in the clipping norm.

  Args:
    optimizer: `adamw` or `sgd`.
    schedule: rate of update 0, 1, ...
    params: leaves with a shape and a dtype; no values are read.
    weight_decay: 0 for none.
    grad_clip_norm: largest global norm of the gradient, or None.
    decay: rules of the leaves that decay.
    freeze: rules of the leaves that stay as they are.
    freeze_blocks: number of first encoder blocks that stay as they are.
    layer_decay: rate factor from each layer to the one below, in (0, 1]. The
      L + 2 layers are what comes before the blocks, the blocks, and the rest
      (arXiv:2106.08254).
    lr_multipliers: (rule, rate factor); a leaf gets the product of all that
      match it and of its layer's factor.

  Raises:
    ValueError: for a rule that matches no leaf or a number out of range.
  """
  rules = leaf_rules(
    params,
    decay=decay,
    freeze=freeze,
    freeze_blocks=freeze_blocks,
    layer_decay=layer_decay,
    lr_multipliers=lr_multipliers,
  )
  _require(
    weight_decay >= 0, "weight_decay", weight_decay, "must be >= 0. Use 0."
  )
  clip = optax.identity()
  if grad_clip_norm is not None:
    clip = optax.clip_by_global_norm(grad_clip_norm)
    advice = "must be > 0. Use None for no clipping."
    _require(grad_clip_norm > 0, "grad_clip_norm", grad_clip_norm, advice)
  treedef = jax.tree.structure(params)
  groups = ["frozen" if rule.frozen else "trained" for rule in rules]
  decayed = [rule.decay and not rule.frozen for rule in rules]
  multipliers = treedef.unflatten([rule.lr_multiplier for rule in rules])
  return _float32_state(
    optax.chain(
      _zero_frozen_blocks(multipliers),
      optax.partition(
        {
          "trained": optax.chain(clip, optimizer),
          "frozen": optax.set_to_zero(),
        },
        treedef.unflatten(groups),
      ),
      optax.add_decayed_weights(weight_decay, treedef.unflatten(decayed)),
      _multiply(multipliers),
      optax.scale_by_learning_rate(schedule),
    )
  )


class LeafRule(NamedTuple):
  """What happens to one leaf of the parameters.

  Attributes:
    path: slashed path.
    shape: shape of the leaf.
    decay: whether weight decay applies.
    frozen: whether the whole leaf stays as it is.
    lr_multiplier: [] or [L, 1, ...] float32; 0 for a frozen leaf or block.
  """

  path: str
  shape: tuple[int, ...]
  decay: bool
  frozen: bool
  lr_multiplier: np.ndarray


def leaf_rules(
  params: PyTree,
  *,
  decay: Sequence[str],
  freeze: Sequence[str],
  freeze_blocks: int,
  layer_decay: float,
  lr_multipliers: Sequence[tuple[str, float]],
) -> list[LeafRule]:
  """Returns the rule of each leaf in tree order; arguments as in `make_tx`."""
  leaves = jax.tree_util.tree_leaves_with_path(params)
  shapes = {path_str(path): tuple(leaf.shape) for path, leaf in leaves}
  _check_rules("decay", decay, shapes)
  _check_rules("freeze", freeze, shapes)
  _check_rules("lr_multipliers", [rule for rule, _ in lr_multipliers], shapes)
  for item in lr_multipliers:
    advice = "the factor must be > 0. Use freeze for what stays as it is."
    _require(item[1] > 0, "lr_multipliers", item, advice)
  depth = _check_blocks(shapes, freeze_blocks, layer_decay)
  result = []
  for path, shape in shapes.items():
    rate = _layer_rate(path, shape, depth, layer_decay)
    for rule, factor in lr_multipliers:
      if re.search(rule, path):
        rate = rate * factor
    frozen = _matches(freeze, path)
    if BLOCKS.search(path) and freeze_blocks:
      frozen = frozen or freeze_blocks == depth
      rows = np.arange(depth) >= freeze_blocks
      rate = rate * rows.reshape(depth, *[1] * (len(shape) - 1))
    rate = np.asarray(0.0 if frozen else rate, np.float32)
    decays = _matches(decay, path) and not frozen
    result.append(LeafRule(path, shape, decays, frozen, rate))
  _require(
    not all(rule.frozen for rule in result),
    "freeze",
    tuple(freeze),
    f"with freeze_blocks = {freeze_blocks} it leaves nothing to train. "
    "Freeze fewer.",
  )
  return result


def describe(
  params: PyTree,
  *,
  decay: Sequence[str],
  freeze: Sequence[str],
  freeze_blocks: int,
  layer_decay: float,
  lr_multipliers: Sequence[tuple[str, float]],
) -> str:
  """Returns a table of what happens to each leaf; arguments as in `make_tx`."""
  rules = leaf_rules(
    params,
    decay=decay,
    freeze=freeze,
    freeze_blocks=freeze_blocks,
    layer_decay=layer_decay,
    lr_multipliers=lr_multipliers,
  )
  rows = [("parameter", "shape", "decay", "rate", "frozen")]
  rows += [_describe_leaf(rule) for rule in rules]
  widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
  lines = [
    "  ".join(cell.ljust(width) for cell, width in zip(row, widths)).rstrip()
    for row in rows
  ]
  total = sum(math.prod(rule.shape) for rule in rules)
  trained = sum(
    int(np.count_nonzero(np.broadcast_to(rule.lr_multiplier, rule.shape)))
    for rule in rules
  )
  return "\n".join([*lines, f"{trained:,} of {total:,} parameters trained"])


def opt_state_like(
  tx: optax.GradientTransformation,
  opt_state: PyTree,
  tree: PyTree,
  *,
  default: Any,
) -> PyTree:
  """Returns `opt_state` with each moment replaced by its parameter's entry.

  Args:
    tx: from `make_tx`.
    opt_state: its state, or `jax.eval_shape(tx.init, params)`.
    tree: what goes to the moments, e.g. shardings, shaped as the parameters.
    default: what goes to everything else, e.g. the counters.
  """

  def entry(moment: Any, value: Any) -> Any:
    return moment if isinstance(moment, optax.MaskedNode) else value

  return optax.tree.map_params(
    tx,
    entry,
    opt_state,
    tree,
    transform_non_params=lambda _: default,
    is_leaf=lambda node: isinstance(node, optax.MaskedNode),
  )


def path_str(path: Any) -> str:
  """Returns a key path of a tree as `encoder/blocks/norm1/scale`."""
  return jax.tree_util.keystr(path, simple=True, separator="/")


def _warmup(step: ArrayLike, warmup_steps: int) -> Array:
  """Returns the factor of the warm-up, in (0, 1], [] float32."""
  step = jnp.asarray(step, jnp.float32)
  return jnp.minimum((step + 1) / (warmup_steps + 1), 1)


def _progress(step: ArrayLike, start: int, total_steps: int) -> Array:
  """Returns how far `step` is from `start` (0) to the last update (1)."""
  step = jnp.asarray(step, jnp.float32)
  end = max(total_steps - 1, start + 1)
  progress = jnp.clip((step - start) / (end - start), 0, 1)
  # Exact at the end, where XLA's product with the reciprocal is not.
  return jnp.where(step < end, progress, 1)


def _require(
  ok: bool, name: str, value: Any, constraint_and_advice: str
) -> None:
  if not ok:
    raise ValueError(f"{name}: got {value!r}; {constraint_and_advice}")


def _check_schedule(
  lr: float, warmup_steps: int, end_lr: float, total_steps: int
) -> None:
  _require(lr > 0, "lr", lr, "must be > 0. Set the peak rate.")
  _require(
    0 <= end_lr <= lr,
    "end_lr",
    end_lr,
    f"must be in [0, lr = {lr!r}]. Lower it.",
  )
  _require(
    total_steps >= 1, "total_steps", total_steps, "must be >= 1. Train longer."
  )
  _require(
    0 <= warmup_steps < total_steps,
    "warmup_steps",
    warmup_steps,
    f"must be >= 0 and < total_steps = {total_steps}. Warm up for fewer "
    "updates or train longer.",
  )


def _dtype(name: str, value: str) -> jnp.dtype:
  known = ("float32", "bfloat16")
  advice = f"must be one of {known}. Use 'float32' unless memory is short."
  _require(value in known, name, value, advice)
  return jnp.dtype(value)


def _matches(rules: Sequence[str], path: str) -> bool:
  return any(re.search(rule, path) for rule in rules)


def _check_rules(
  name: str, rules: Sequence[str], paths: dict[str, tuple[int, ...]]
) -> None:
  for rule in rules:
    try:
      found = any(re.search(rule, path) for path in paths)
    except re.error as error:
      raise ValueError(
        f"{name}: got {rule!r}; must be a regular expression ({error}). "
        "Escape what is meant literally."
      ) from error
    listed = "\n  ".join(paths)
    advice = f"must match a parameter. Choose among:\n  {listed}"
    _require(found, name, rule, advice)


def _check_blocks(
  shapes: dict[str, tuple[int, ...]], freeze_blocks: int, layer_decay: float
) -> int:
  """Returns the depth L, 0 where there are no blocks."""
  depth = next((s[0] for p, s in shapes.items() if BLOCKS.search(p)), 0)
  advice = f"must be in [0, {depth}], the depth of the model. Freeze fewer."
  _require(0 <= freeze_blocks <= depth, "freeze_blocks", freeze_blocks, advice)
  advice = "must be in (0, 1]. Use 1 for none."
  _require(0 < layer_decay <= 1, "layer_decay", layer_decay, advice)
  advice = "must be 1 without encoder/blocks. Use lr_multipliers."
  _require(layer_decay == 1 or depth > 0, "layer_decay", layer_decay, advice)
  return depth


def _layer_rate(
  path: str, shape: tuple[int, ...], depth: int, layer_decay: float
) -> np.ndarray:
  """Returns the rate factor of the leaf's layers, [] or [L, 1, ...]."""
  if BLOCKS.search(path):
    if layer_decay == 1:
      return np.ones([])
    below_top = np.arange(depth, 0, -1)  # The first block is layer 1 of L + 1.
    return (layer_decay**below_top).reshape(depth, *[1] * (len(shape) - 1))
  return np.asarray(layer_decay ** (depth + 1 if EMBED.search(path) else 0))


def _describe_leaf(rule: LeafRule) -> tuple[str, ...]:
  rates = [f"{r:.3g}" for r in np.ravel(rule.lr_multiplier) if r]
  if rule.frozen:
    frozen, rate = "yes", "-"
  else:
    rows = int(np.count_nonzero(rule.lr_multiplier == 0))
    frozen = f"first {rows}" if rows else "no"
    rate = rates[0] if len(set(rates)) == 1 else f"{rates[0]}..{rates[-1]}"
  decay = "yes" if rule.decay else "no"
  return rule.path, str(rule.shape), decay, rate, frozen


def _float32_state(
  inner: optax.GradientTransformation,
) -> optax.GradientTransformation:
  """Makes moments float32 whatever the dtype in which parameters are stored."""

  def cast(tree: PyTree) -> PyTree:
    return jax.tree.map(lambda x: x.astype(jnp.float32), tree)

  def init(params: PyTree) -> PyTree:
    return inner.init(cast(params))

  def update(
    updates: PyTree, state: PyTree, params: PyTree | None = None
  ) -> tuple[PyTree, PyTree]:
    return inner.update(cast(updates), state, cast(params))

  return optax.GradientTransformation(init, update)


def _zero_frozen_blocks(multipliers: PyTree) -> optax.GradientTransformation:
  # Not a product: a frozen block's gradient may be inf or nan.
  return optax.stateless(
    lambda updates, _: jax.tree.map(
      lambda g, m: g if np.all(m) else jnp.where(m > 0, g, 0),
      updates,
      multipliers,
    )
  )


def _multiply(multipliers: PyTree) -> optax.GradientTransformation:
  return optax.stateless(
    lambda updates, _: jax.tree.map(
      lambda u, m: u if np.all(m == 1) else u * m, updates, multipliers
    )
  )
