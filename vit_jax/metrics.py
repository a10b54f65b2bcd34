"""Sums and counts of an evaluation, divided once at the end.

On the device: values per example, sums in float32, counts in int32. On the
host: float64 sums over batches, and the metrics that need every score.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from clu import metrics as clu_metrics
from jax.typing import ArrayLike

Array = jax.Array
PyTree = Any


def average(values: Array, mask: Array) -> clu_metrics.Average:
  """Returns the float32 sum of the real values and their int32 count.

  Args:
    values: [B], any float dtype; what is masked may be nan.
    mask: [B], 1 for a real example and 0 for padding.
  """
  return clu_metrics.Average.from_model_output(
    values=values.astype(jnp.float32), mask=mask
  )


def to_host(tree: PyTree) -> PyTree:
  """Returns the tree with float64 and int64 NumPy leaves.

  Merge batches in this form: a float32 sum of ones stops at 2**24.

  Args:
    tree: e.g. an Average, or a dict of them.
  """

  def widen(x: Array) -> np.ndarray:
    host = np.asarray(x)
    integer = np.issubdtype(host.dtype, np.integer)
    return host.astype(np.int64 if integer else np.float64)

  return jax.tree.map(widen, tree)


def top_k(logits: Array, label: Array, *, k: int) -> Array:
  """Returns 1 for each example with a label among its k highest classes.

  Among equal logits the lower class comes first, as in argmax.

  Args:
    logits: [B, K].
    label: [B, K], above 0 for each class that the example has.
    k: at least 1; any k >= K takes all classes.

  Returns:
    [B] float32 in {0, 1}.

  Raises:
    ValueError: if `k` is below 1.
  """
  if k < 1:
    raise ValueError(f"k: got {k!r}; must be >= 1. Use 1 for accuracy.")
  _, classes = jax.lax.top_k(
    logits.astype(jnp.float32), min(k, logits.shape[-1])
  )  # [B, k]
  hits = jnp.take_along_axis(label, classes, axis=-1) > 0
  return hits.any(axis=-1).astype(jnp.float32)


def per_class(
  correct: Array, label: Array, *, mask: Array
) -> tuple[Array, Array]:
  """Returns how many examples of each class were correct, and how many are.

  Args:
    correct: [B], above 0 for an example that was right.
    label: [B, K], above 0 for each class that the example has.
    mask: [B], 1 for a real example and 0 for padding.

  Returns:
    hits and counts, [K] int32 each.
  """
  real = (label > 0) & (mask > 0)[:, None]  # [B, K]
  hits = real & (correct > 0)[:, None]
  return hits.sum(0, dtype=jnp.int32), real.sum(0, dtype=jnp.int32)


def mean_per_class(hits: ArrayLike, counts: ArrayLike) -> float:
  """Returns the mean accuracy of the classes that occur; nan if none does.

  Args:
    hits: [K] correct examples of each class.
    counts: [K] examples of each class.
  """
  hits, counts = np.asarray(hits), np.asarray(counts)
  occurs = counts > 0
  if not occurs.any():
    return float("nan")
  return float(np.mean(hits[occurs] / counts[occurs]))


def average_precision(scores: ArrayLike, labels: ArrayLike) -> np.ndarray:
  """Returns the average precision of each class, as scikit-learn defines it.

  The sum of (R_n - R_n-1) * P_n over the thresholds n, one for each distinct
  score, without interpolation.

  Args:
    scores: [N, K] of all examples, padding removed.
    labels: [N, K], 1 for each class that the example has and 0 otherwise.

  Returns:
    [K] float64 in [0, 1]; nan for a class without examples.

  Raises:
    ValueError: if the shapes differ or a score is nan.
  """
  scores, labels = np.asarray(scores), np.asarray(labels)
  if scores.ndim != 2 or scores.shape != labels.shape:
    raise ValueError(
      f"scores: got shape {scores.shape} with labels {labels.shape}; both must "
      "be [N, K]. Make the labels multi-hot."
    )
  result = np.full(scores.shape[1], np.nan)
  for k in range(scores.shape[1]):
    score = scores[:, k].astype(np.float64)
    if np.isnan(score).any():
      raise ValueError(
        f"scores: got nan for class {k}; scores must be comparable. "
        "Check the checkpoint: the model's output is not finite."
      )
    order = np.argsort(-score, kind="stable")
    score, hit = score[order], labels[order, k] > 0
    if not hit.any():
      continue
    # The last example at each threshold: equal scores are taken together.
    last = np.append(np.flatnonzero(np.diff(score)), len(score) - 1)
    found = np.cumsum(hit)[last]
    recall = np.diff(found / found[-1], prepend=0.0)
    result[k] = np.sum(recall * (found / (last + 1)))
  return result


def mean_average_precision(scores: ArrayLike, labels: ArrayLike) -> float:
  """Returns the mean of `average_precision` over the classes that occur."""
  precision = average_precision(scores, labels)
  precision = precision[~np.isnan(precision)]
  return float(precision.mean()) if len(precision) else float("nan")
