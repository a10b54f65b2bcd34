"""Losses per example, in float32 whatever the dtype of the logits."""

from collections.abc import Callable

import jax
import jax.numpy as jnp

Array = jax.Array
# logits [B, K], label [B, K] in [0, 1] -> [B] float32
LossFn = Callable[[Array, Array], Array]


def softmax_cross_entropy(*, label_smoothing: float = 0.0) -> LossFn:
  """Returns -sum_k label_k log softmax(logits)_k; labels sum to 1.

  Args:
    label_smoothing: share s of a label that is spread evenly over the classes,
      (1 - s) * label + s / K (arXiv:1512.00567), in [0, 1).
  """
  _check_smoothing(label_smoothing)

  def loss(logits: Array, label: Array) -> Array:
    label = _smooth(label, label_smoothing)  # [B, K]
    log_p = jax.nn.log_softmax(logits.astype(jnp.float32))
    # A class that has no share counts nothing, also where log_p overflows.
    return -jnp.where(label > 0, label * log_p, 0).sum(-1)

  return loss


def sigmoid_cross_entropy(*, label_smoothing: float = 0.0) -> LossFn:
  """Returns the binary cross-entropies of the K classes, summed over them.

  Source: arXiv:2006.07159; labels need not sum to 1.

  Args:
    label_smoothing: share s of the labels that is spread evenly over the
      classes, (1 - s) * label + s / K as for the softmax loss, in [0, 1).
  """
  _check_smoothing(label_smoothing)

  def loss(logits: Array, label: Array) -> Array:
    label = _smooth(label, label_smoothing)  # [B, K]
    logits = logits.astype(jnp.float32)
    positive = label * jax.nn.log_sigmoid(logits)
    negative = (1 - label) * jax.nn.log_sigmoid(-logits)
    return -(positive + negative).sum(-1)

  return loss


def one_hot(label: Array, num_classes: int) -> Array:
  """Returns [B, K] float32 in {0, 1} from [B] or [B, T] integer class ids.

  Args:
    label: class ids; -1 where there is none. An id given twice counts once.
    num_classes: K.

  Raises:
    ValueError: if `label` has another rank or is not an integer array.
  """
  if label.ndim not in (1, 2) or not jnp.issubdtype(label.dtype, jnp.integer):
    raise ValueError(
      f"label: got shape {label.shape} of {label.dtype}; must be [B] or [B, T] "
      "integer class ids. Pad ids with -1 to one length T."
    )
  ids = label if label.ndim == 2 else label[:, None]  # [B, T]
  hits = ids[:, :, None] == jnp.arange(num_classes)[None, None, :]
  return hits.any(axis=1).astype(jnp.float32)


def _smooth(label: Array, amount: float) -> Array:
  label = label.astype(jnp.float32)
  return (1 - amount) * label + amount / label.shape[-1] if amount else label


def _check_smoothing(label_smoothing: float) -> None:
  if not 0 <= label_smoothing < 1:
    raise ValueError(
      f"label_smoothing: got {label_smoothing!r}; must be in [0, 1). "
      "Use 0 for none."
    )
