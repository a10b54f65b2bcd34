"""From a source to batches: order, workers, processes, padding.

Which example, crop and flip stands at a row of the global batch of a step is a
function of (seed, step, row) and nothing else: the random transform comes
before the process's share is taken. So the only state of the data is the step
number, and neither workers, processes nor a restart change what a step sees.
The global batch is the shares of the processes one after the other.

With `num_workers=0` a few threads of this process prepare batches; with more,
that many worker processes, which re-import the main module, hold a copy of the
source each, and take turns batch by batch. At most `_THREADS` + 1, or three a
worker, prepared batches are in memory at a time. Call `close()` on an iterator
that is not read to its end: with workers, Python's exit is too late for it.
"""

import dataclasses
import functools
import itertools
import math
import multiprocessing
import os
import signal
import sys
import threading
from collections.abc import Generator, Iterator
from multiprocessing import resource_tracker
from typing import NamedTuple

import cv2
import grain
import numpy as np
from absl import flags, logging

from vit_jax.data import images
from vit_jax.data.example import Batch, Example, Source, Transform

_THREADS = 4  # OpenCV and file reads release the interpreter's lock.


class _Row(NamedTuple):
  """One example of a batch; `error` is set and `image` empty if it is bad."""

  image: np.ndarray  # [H, W, C] uint8 or uint16
  label: np.ndarray  # [] or [T] int32
  index: int
  error: str = ""


class _Errors(NamedTuple):
  """The bad examples of one batch: where they are and what is wrong."""

  indices: tuple[int, ...]
  messages: tuple[str, ...]


def train_batches(
  source: Source,
  transform: Transform,
  *,
  batch_size: int,
  seed: int,
  start_step: int = 0,
  process_index: int = 0,
  process_count: int = 1,
  num_workers: int = 0,
  max_bad: int = 0,
  bad: dict[int, str] | None = None,
) -> Generator[Batch, None, None]:
  """Returns this process's share of the batches from `start_step` on, forever.

  The source is shuffled as a whole, anew every epoch, and the epochs follow one
  another without a gap: a batch may hold the end of one and the start of the
  next, so any source that is not empty will do, also one smaller than a batch.

  Args:
    source: the training examples.
    transform: gives each example its size; its generator depends on (seed,
      position in the run) alone.
    batch_size: B of the global batch; this process gets B / process_count rows.
    seed: chooses order and draws, in [0, 2**32).
    start_step: the step of the first batch.
    process_index: which share, in [0, process_count).
    process_count: number of shares.
    num_workers: worker processes that prepare batches; 0 for none.
    max_bad: how many different examples of this process may turn out to be
      undecodable; they stay in the batch with mask 0 and a warning names them.
    bad: those known already, by position; what is found is added, in the order
      of the batches.

  Raises:
    ValueError: at the call, if an argument is out of range or the source is
      empty; while iterating, if a label is out of range or more than `max_bad`
      examples cannot be decoded.
  """
  rows = _check_arguments(
    source, batch_size, process_index, process_count, num_workers, max_bad
  )
  if not 0 <= seed < 2**32:
    raise ValueError(
      f"seed: got {seed}; must be in [0, 2**32). Use a small integer."
    )
  if start_step < 0:
    raise ValueError(
      f"start_step: got {start_step}; must be >= 0. Start from 0."
    )
  load = functools.partial(
    _load, source=source, transform=transform, skip_bad=max_bad > 0
  )
  examples = grain.MapDataset.range(len(source)).seed(seed)
  examples = examples.shuffle().repeat().random_map(load)
  first = start_step * batch_size + process_index * rows
  batches = _Batches(
    examples=examples,
    spec=_probe(source, transform, max_bad),
    rows=rows,
    first=first,
    stride=batch_size,
    num_batches=(sys.maxsize - first) // batch_size,
  )
  return _iterate(batches, num_workers, max_bad, {} if bad is None else bad)


def eval_batches(
  source: Source,
  transform: Transform,
  *,
  batch_size: int,
  process_index: int = 0,
  process_count: int = 1,
  num_workers: int = 0,
  max_bad: int = 0,
) -> Generator[Batch, None, None]:
  """Returns this process's share of one pass over a source, in its order.

  Every process gets ceil(N / B) batches and every example is in exactly one of
  them. Rows past the end have mask 0, index -1 and a black image; so they count
  for nothing on any batch size and number of processes.

  Args:
    source: the N examples.
    transform: gives each example its size; its generator depends on the index
      of the example alone.
    batch_size: B of the global batch; this process gets B / process_count rows.
    process_index: which share, in [0, process_count).
    process_count: number of shares.
    num_workers: worker processes that prepare batches; 0 for none. They take
      some seconds to start at every pass.
    max_bad: as in `train_batches`.

  Raises:
    ValueError: as in `train_batches`.
  """
  rows = _check_arguments(
    source, batch_size, process_index, process_count, num_workers, max_bad
  )
  load = functools.partial(
    _load_fixed, source=source, transform=transform, skip_bad=max_bad > 0
  )
  batches = _Batches(
    examples=grain.MapDataset.range(len(source)).map(load),
    spec=_probe(source, transform, max_bad),
    rows=rows,
    first=process_index * rows,
    stride=batch_size,
    num_batches=math.ceil(len(source) / batch_size),
  )
  return _iterate(batches, num_workers, max_bad, {})


@dataclasses.dataclass(frozen=True)
class _Batches:
  """Random access to the batches of one process.

  Attributes:
    examples: rows by global position; its length is where padding starts.
    spec: a row that tells the shapes of image and label.
    rows: rows of a batch of this process.
    first: global position of the first row of batch 0.
    stride: global positions from a batch to the next.
    num_batches: how many batches there are.
  """

  examples: grain.MapDataset[_Row]
  spec: _Row
  rows: int
  first: int
  stride: int
  num_batches: int

  def __len__(self) -> int:
    return self.num_batches

  def __getitem__(self, index: int) -> tuple[Batch, _Errors]:
    batch = _empty_batch(self.spec, self.rows)
    bad: list[tuple[int, str]] = []
    start = self.first + index * self.stride
    for r in range(min(self.rows, max(0, len(self.examples) - start))):
      row = self.examples[start + r]
      assert row is not None  # Grain's word for filtered; nothing filters here.
      _check_shape(row, self.spec)
      batch["label"][r] = row.label
      batch["index"][r] = row.index
      if row.error:
        bad.append((row.index, row.error))
      else:
        batch["image"][r] = row.image
        batch["mask"][r] = 1.0
    return batch, _Errors(*zip(*bad)) if bad else _Errors((), ())


def _iterate(
  batches: _Batches, num_workers: int, max_bad: int, bad: dict[int, str]
) -> Generator[Batch, None, None]:
  """Yields the batches in order; adds to `bad`."""
  threads = 1 if num_workers else _THREADS
  dataset = grain.MapDataset.source(batches).to_iter_dataset(
    # The default keeps 500 batches ready.
    grain.ReadOptions(num_threads=threads, prefetch_buffer_size=threads)
  )
  if num_workers:
    if not flags.FLAGS.is_parsed():  # Grain's workers refuse otherwise.
      flags.FLAGS.mark_as_parsed()
    options = grain.MultiprocessingOptions(
      num_workers=min(num_workers, len(batches)), per_worker_buffer_size=1
    )
    dataset = dataset.mp_prefetch(options, worker_init_fn=_init_worker)
  iterator = iter(dataset)
  try:
    if num_workers:
      first = _start_workers(iterator)
      remaining = itertools.chain([first], iterator)
    else:
      remaining = iterator
    for batch, errors in remaining:
      for index, message in zip(*errors):
        if index not in bad:
          bad[index] = message
          logging.warning("Skipped a bad example: %s", message)
      if len(bad) > max_bad:
        raise _too_many(list(bad.values()), max_bad)
      yield _copy(batch) if num_workers else batch
  finally:
    iterator.close()


def _start_workers(
  iterator: Iterator[tuple[Batch, _Errors]],
) -> tuple[Batch, _Errors]:
  """Returns the first element; its workers will not see SIGTERM and SIGINT.

  A launcher sends SIGTERM, and a terminal Ctrl-C, to the workers too, but it is
  the parent's to finish its step first. A process that is started while the
  signals are blocked has them blocked; the parent gets them afterwards.
  """
  resource_tracker.ensure_running()  # Starting this would unblock them.
  signals = {signal.SIGTERM, signal.SIGINT}
  before = signal.pthread_sigmask(signal.SIG_BLOCK, signals)
  try:
    return next(iterator)
  finally:
    signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _copy(batch: Batch) -> Batch:
  """Returns the batch out of the memory that a worker shares.

  That memory must be given back before the interpreter ends; a batch that is
  kept, for a report say, must not depend on it.
  """
  return {
    "image": np.array(batch["image"]),
    "label": np.array(batch["label"]),
    "mask": np.array(batch["mask"]),
    "index": np.array(batch["index"]),
  }


def _init_worker(worker_index: int, worker_count: int) -> None:
  """Makes a worker end with its parent.

  A parent that was killed cannot tell the workers to stop, and Grain's would
  wait for it forever.
  """
  del worker_index, worker_count
  threading.Thread(target=_exit_after_parent, daemon=True).start()
  cv2.setNumThreads(1)  # The workers are the parallelism.


def _exit_after_parent() -> None:
  parent = multiprocessing.parent_process()
  assert parent is not None
  parent.join()
  os._exit(1)


def _load(
  index: int,
  rng: np.random.Generator,
  *,
  source: Source,
  transform: Transform,
  skip_bad: bool,
) -> _Row:
  """Reads, checks and transforms one example.

  Raises:
    ValueError: if the label is out of range; if the image cannot be decoded
      and `skip_bad` is not set.
  """
  index = int(index)
  example = source[index]
  label = _check_label(example, source.num_classes)
  try:
    image = transform(example, rng)["image"]
  except images.DecodeError as error:
    message = f"{example['id']}: {error}"
    if not skip_bad:
      raise images.DecodeError(message) from error
    return _Row(np.zeros((0, 0, 0), np.uint8), label, index, message)
  except ValueError as error:
    raise ValueError(f"{example['id']}: {error}") from error
  assert isinstance(image, np.ndarray)
  return _Row(image, label, index)


def _load_fixed(
  index: int, *, source: Source, transform: Transform, skip_bad: bool
) -> _Row:
  """As `_load`, with a generator that depends on the index alone."""
  rng = np.random.default_rng(int(index))
  return _load(
    index, rng, source=source, transform=transform, skip_bad=skip_bad
  )


def _probe(source: Source, transform: Transform, max_bad: int) -> _Row:
  """Returns the first good row: the shapes that all others must have."""
  messages = []
  for index in range(min(len(source), max_bad + 1)):
    row = _load_fixed(
      index, source=source, transform=transform, skip_bad=max_bad > 0
    )
    if not row.error:
      return row
    messages.append(row.error)
  raise _too_many(messages, max_bad)


def _too_many(messages: list[str], max_bad: int) -> ValueError:
  return ValueError(
    f"max_bad: got {len(messages)} bad examples with max_bad={max_bad}; "
    "repair or remove the files, or raise max_bad. They are:\n  "
    + "\n  ".join(messages)
  )


def _empty_batch(spec: _Row, rows: int) -> Batch:
  """Returns a batch of padding; a padded multi-label row has no class."""
  padding = -1 if spec.label.ndim else 0
  return {
    "image": np.zeros((rows, *spec.image.shape), spec.image.dtype),
    "label": np.full((rows, *spec.label.shape), padding, np.int32),
    "mask": np.zeros(rows, np.float32),
    "index": np.full(rows, -1, np.int64),
  }


def _check_label(example: Example, num_classes: int) -> np.ndarray:
  """Returns the label as [] or [T] int32, all in range."""
  label = np.asarray(example["label"])
  if label.ndim > 1 or not np.issubdtype(label.dtype, np.integer):
    raise ValueError(
      f"label: got shape {label.shape} of {label.dtype} for example "
      f"{example['id']!r}; must be one integer class id, or [T] of them. "
      "Correct the source."
    )
  lowest = -1 if label.ndim else 0  # Only several labels need padding.
  if ((label < lowest) | (label >= num_classes)).any():
    raise ValueError(
      f"label: got {label.tolist()} for example {example['id']!r}; must be in "
      f"[{lowest}, {num_classes}) for {num_classes} classes. Correct the label "
      "or the class list."
    )
  return label.astype(np.int32)


def _check_shape(row: _Row, spec: _Row) -> None:
  image = spec.image if row.error else row.image
  got = image.shape, row.label.shape, image.dtype.name
  expected = spec.image.shape, spec.label.shape, spec.image.dtype.name
  if got != expected or image.dtype not in (np.uint8, np.uint16):
    raise ValueError(
      f"transform: got image and label of {got} for example {row.index}; must "
      f"be of uint8 or uint16, all alike; example {spec.index} is {expected}. "
      "Use a transform that gives all images one size and type."
    )


def _check_arguments(
  source: Source,
  batch_size: int,
  process_index: int,
  process_count: int,
  num_workers: int,
  max_bad: int,
) -> int:
  """Returns the rows of each process's share of the batch."""
  if len(source) == 0:
    raise ValueError(
      f"source: got 0 examples (batch_size {batch_size}, {process_count} "
      "processes); needs at least 1. Check the path and the split."
    )
  if batch_size < 1 or process_count < 1 or batch_size % process_count:
    raise ValueError(
      f"batch_size: got {batch_size}; must be positive and divisible by "
      f"{process_count} processes. Try "
      f"{max(1, math.ceil(batch_size / process_count)) * process_count}."
    )
  if not 0 <= process_index < process_count:
    raise ValueError(
      f"process_index: got {process_index}; must be in [0, {process_count}). "
      "Use jax.process_index()."
    )
  if num_workers < 0 or max_bad < 0:
    raise ValueError(
      f"num_workers, max_bad: got {num_workers}, {max_bad}; must be >= 0. "
      "Use 0 for none."
    )
  return batch_size // process_count
