"""Exact classification metrics: every example of a split counts once."""

import functools
import heapq
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from clu import metrics as clu_metrics

from vit_jax import losses, metrics, sharding
from vit_jax.data import pipeline
from vit_jax.data.example import Source, Transform
from vit_jax.evaluators.evaluator import Context
from vit_jax.models import output

Array = jax.Array
PyTree = Any


class Prediction(NamedTuple):
  """What the model said of one example.

  Attributes:
    loss: of this example.
    index: position in the source.
    label: the class ids it has.
    predicted: the class with the highest score.
    probability: of that class.
  """

  loss: float
  index: int
  label: tuple[int, ...]
  predicted: int
  probability: float


class Inspection(NamedTuple):
  """Metrics, and what a person looks at next.

  Attributes:
    metrics: as `ClassificationEvaluator` returns them.
    accuracy: [K] per class, nan for a class without an example.
    count: [K] examples of each class.
    worst: the examples of the highest loss, worst first.
  """

  metrics: Mapping[str, float]
  accuracy: np.ndarray
  count: np.ndarray
  worst: tuple[Prediction, ...]


class _Sums(NamedTuple):
  """Of a global batch: sums and counts, and the values of each example."""

  averages: dict[str, clu_metrics.Average]
  hits: Array  # [K] int32
  counts: Array  # [K] int32
  mask: Array  # [B]
  index: Array  # [B] int32
  loss: Array  # [B] float32
  predicted: Array  # [B] int32
  probability: Array  # [B] float32
  label: Array  # [B] or [B, T] int32
  logits: Array  # [B, K] float32 for multi-label data; [B, 0] elsewhere


class ClassificationEvaluator:
  """Top-1, top-5, mean-per-class, loss and count; mAP for multi-label data.

  The sums do not depend on the batch size, the devices or the processes.
  """

  def __init__(
    self,
    *,
    source: Source,
    transform: Transform,
    context: Context,
    batch_size: int | None = None,
    num_workers: int = 0,
    max_bad: int = 0,
  ) -> None:
    """Checks that the data fits the model.

    Args:
      source: the split.
      transform: its preprocessing; gives every image one size.
      context: the run's model, mesh and classes.
      batch_size: global; the run's own if None. It is rounded up to a multiple
        of the devices; the results do not depend on it.
      num_workers: reader subprocesses; 0 for threads.
      max_bad: undecodable examples to leave out before giving up; `skipped`
        tells how many there were.

    Raises:
      ValueError: if the classes are not those of the model, or a number is out
        of range.
    """
    batch_size = context.batch_size if batch_size is None else batch_size
    if batch_size < 1 or min(num_workers, max_bad) < 0:
      raise ValueError(
        f"batch_size, num_workers, max_bad: got {batch_size}, {num_workers}, "
        f"{max_bad}; must be >= 1, >= 0, >= 0. Leave them out."
      )
    if source.class_names != context.class_names:
      raise ValueError(
        f"source: got {source.num_classes} classes "
        f"{_some(source.class_names)}; the model knows "
        f"{len(context.class_names)}: {_some(context.class_names)}. Evaluate "
        "on data with the same classes in the same order."
      )
    self.source = source
    self.transform = transform
    self._context = context
    size = context.mesh.size
    self._batch_size = -(-batch_size // size) * size
    self._num_workers = num_workers
    self._max_bad = max_bad
    self._sums = jax.jit(
      functools.partial(_sums, context),
      out_shardings=jax.NamedSharding(context.mesh, jax.P()),
    )

  def __call__(self, params: PyTree) -> Mapping[str, float]:
    """Returns the metrics by name.

    `count` is the number of images. Single-label data: `accuracy`, `top5` (for
    more than five classes), `mean_per_class` in [0, 1] and `loss`. Multi-label
    data: `mAP`, `accuracy` (the highest score is one of the labels; over images
    that have a label) and `loss`.
    """
    return self.inspect(params, num_worst=0).metrics

  def inspect(self, params: PyTree, *, num_worst: int = 32) -> Inspection:
    """Returns the metrics with accuracies per class and the worst examples."""
    k = self.source.num_classes
    totals = {}
    hits, counts = np.zeros(k, np.int64), np.zeros(k, np.int64)
    worst: list[Prediction] = []
    scores, labels = [], []
    for sums in self._batches(params):
      averages = metrics.to_host(sums.averages)
      for name, average in averages.items():
        totals[name] = (
          totals[name].merge(average) if name in totals else average
        )
      hits += sums.hits
      counts += sums.counts
      worst = heapq.nlargest(num_worst, worst + _predictions(sums))
      if sums.label.ndim == 2:
        real = sums.mask > 0
        scores.append(sums.logits[real])
        labels.append(_multi_hot(np.asarray(sums.label[real]), k))
    result = {name: float(total.compute()) for name, total in totals.items()}
    result["count"] = int(totals["loss"].count)
    if scores:
      result["mAP"] = metrics.mean_average_precision(
        np.concatenate(scores), np.concatenate(labels)
      )
    else:
      result["mean_per_class"] = metrics.mean_per_class(hits, counts)
    if result["count"] < len(self.source):
      result["skipped"] = len(self.source) - result["count"]
    accuracy = np.where(counts > 0, hits / np.maximum(counts, 1), np.nan)
    return Inspection(result, accuracy, counts, tuple(worst))

  def _batches(self, params: PyTree) -> Iterator[_Sums]:
    """Yields what the device makes of each global batch, as NumPy arrays."""
    context = self._context
    batches = pipeline.eval_batches(
      self.source,
      self.transform,
      batch_size=self._batch_size,
      process_index=jax.process_index(),
      process_count=jax.process_count(),
      num_workers=self._num_workers,
      max_bad=self._max_bad,
    )
    previous = None
    for batch in batches:
      context.check_stop()
      current = self._sums(params, sharding.to_global(batch, context.mesh))
      if previous is not None:  # The device computes one while we read another.
        yield jax.device_get(previous)
      previous = current
    if previous is not None:
      yield jax.device_get(previous)


def _sums(context: Context, params: PyTree, batch: dict[str, Array]) -> _Sums:
  k = len(context.class_names)
  mask = batch["mask"]
  image = context.normalize(batch["image"])
  logits = output.apply(context.model, params, image).logits  # [B, K]
  logits = logits.astype(jnp.float32)
  label = losses.one_hot(batch["label"], k)  # [B, K]
  loss = context.loss(logits, label)  # [B]
  correct = metrics.top_k(logits, label, k=1)  # [B]
  labelled = mask * (label.max(-1) > 0)
  averages = {"accuracy": metrics.average(correct, labelled)}
  multi_label = batch["label"].ndim == 2
  if k > 5 and not multi_label:
    top5 = metrics.top_k(logits, label, k=5)
    averages["top5"] = metrics.average(top5, labelled)
  averages["loss"] = metrics.average(loss, mask)
  hits, counts = metrics.per_class(correct, label, mask=mask)
  scores = jax.nn.sigmoid(logits) if multi_label else jax.nn.softmax(logits)
  return _Sums(
    averages=averages,
    hits=hits,
    counts=counts,
    mask=mask,
    index=batch["index"],
    loss=loss,
    predicted=logits.argmax(-1),
    probability=scores.max(-1),
    label=batch["label"],
    logits=logits if multi_label else logits[:, :0],
  )


def _predictions(sums: _Sums) -> list[Prediction]:
  return [
    Prediction(
      loss=float(sums.loss[i]),
      index=int(sums.index[i]),
      label=tuple(c for c in np.atleast_1d(sums.label[i]).tolist() if c >= 0),
      predicted=int(sums.predicted[i]),
      probability=float(sums.probability[i]),
    )
    for i in np.flatnonzero(sums.mask > 0)
  ]


def _multi_hot(label: np.ndarray, num_classes: int) -> np.ndarray:
  """Returns [B, K] 0/1 from [B, T] ids padded with -1."""
  result = np.zeros((len(label), num_classes + 1), np.int8)
  np.put_along_axis(result, label, 1, axis=1)  # -1 falls into the last column.
  return result[:, :num_classes]


def _some(names: tuple[str, ...]) -> str:
  shown = ", ".join(repr(name) for name in names[:5])
  return f"({shown}, ...)" if len(names) > 5 else f"({shown})"
