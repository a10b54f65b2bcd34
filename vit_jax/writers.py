"""Where the numbers of a run go: JSON lines, TensorBoard, W&B, the console.

A metric is named `evaluator/.../metric` (`train/loss`, `val/accuracy`). The
console knows `train/loss`, `train/lr` and `train/images_per_second`; everything
else is written as it comes.
"""

import contextlib
import importlib
import io
import json
import logging as python_logging
import math
import operator
import os
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Protocol, Self

import rich.box
import rich.console
import rich.progress
import rich.table
import rich.text
from absl import logging
from etils import epath

from vit_jax import paths

PLAIN_LINE_SECONDS = 10.0  # Between two training lines in a log file.


class Writer(Protocol):
  """One destination of metrics."""

  def write(self, step: int, metrics: Mapping[str, float]) -> None:
    """Writes the `metrics` known after `step` optimizer updates."""
    ...

  def close(self) -> None:
    """Flushes and frees what the writer holds."""
    ...


class JsonLines:
  """Writes one JSON object a line: `{"step": 40, "train/loss": 0.41}`.

  A line is complete on disk when `write` returns. Non-finite numbers become
  null, because JSON has no word for them.
  """

  def __init__(self, path: epath.PathLike, *, step: int) -> None:
    """Opens the file and forgets what a run resumed at `step` will repeat.

    Args:
      path: the file; local (`~` is expanded) or of a scheme epath knows.
      step: the step the run starts from; later records are dropped.
    """
    self._path = paths.expand(path)
    records = [r for r in _read_records(self._path) if r["step"] <= step]
    self._lines = [_json_line(record) for record in records]
    self._path.parent.mkdir(parents=True, exist_ok=True)
    self._rewrite()

  def write(self, step: int, metrics: Mapping[str, float]) -> None:
    """Writes one line; a step may have several (see `read_history`)."""
    line = _json_line({"step": step, **metrics})
    if _is_remote(self._path):  # Object stores replace, they do not append.
      self._lines.append(line)
      self._rewrite()
    else:
      with self._path.open("a") as f:
        f.write(line)

  def close(self) -> None:
    """Does nothing: every line is already written."""

  def _rewrite(self) -> None:
    text = "".join(self._lines)
    if _is_remote(self._path):
      self._path.write_text(text)  # Atomic: an object appears when complete.
    else:
      temporary = self._path.with_name(self._path.name + ".tmp")
      temporary.write_text(text)
      temporary.replace(self._path)


def read_history(path: epath.PathLike) -> list[dict[str, float]]:
  """Returns the records of a `metrics.jsonl`, one a step, in step order.

  Lines of the same step are merged, later values win; null reads as nan. A
  torn last line (a run killed while writing) is skipped, and so is a file
  that does not exist: no history.

  Args:
    path: the file; local (`~` is expanded) or of a scheme epath knows.

  Raises:
    ValueError: if a line other than the last is not a record.
  """
  merged: dict[int, dict[str, float]] = {}
  for record in _read_records(paths.expand(path)):
    merged.setdefault(record["step"], {}).update(record)
  return [merged[step] for step in sorted(merged)]


class TensorBoard:
  """Writes TensorBoard events, without TensorFlow."""

  def __init__(self, logdir: epath.PathLike, *, step: int) -> None:
    """Opens a new event file; events after `step` are hidden (purged)."""
    import tensorboardX  # Half a second: not for `--help`.

    self._writer = tensorboardX.SummaryWriter(
      os.fspath(paths.expand(logdir)), purge_step=step + 1, flush_secs=5
    )

  def write(self, step: int, metrics: Mapping[str, float]) -> None:
    """Writes one scalar a metric; it is on disk a few seconds later."""
    for name, value in metrics.items():
      self._writer.add_scalar(name, float(value), global_step=step)

  def close(self) -> None:
    """Closes the event file."""
    self._writer.close()


class WandB:
  """Writes to a Weights & Biases run, which a resumed run continues."""

  def __init__(
    self,
    *,
    project: str,
    name: str,
    config: Mapping[str, Any],
    workdir: epath.PathLike,
    step: int,
  ) -> None:
    """Starts a run, or continues the one of `workdir` when `step` > 0.

    W&B keeps the first value of a step, so the steps a resumed run repeats
    (with the same result) are ignored there.

    Args:
      project: W&B project; created there when new.
      name: display name of the run.
      config: what W&B shows as the run's configuration.
      workdir: its `wandb_id` file remembers the run.
      step: the step the run starts from.

    Raises:
      ModuleNotFoundError: if wandb is not installed.
    """
    try:
      wandb = importlib.import_module("wandb")
    except ModuleNotFoundError as error:
      raise ModuleNotFoundError(
        f"wandb_project: got {project!r}; the package wandb is not installed."
        ' Run `pip install -e ".[wandb]"`, or leave wandb_project empty.'
      ) from error
    workdir = paths.expand(workdir)
    workdir.mkdir(parents=True, exist_ok=True)
    id_file = workdir / "wandb_id"
    known = step > 0 and id_file.exists()
    self._run = wandb.init(
      project=project,
      name=name,
      config=dict(config),
      dir=None if _is_remote(workdir) else os.fspath(workdir),
      id=id_file.read_text().strip() if known else None,
      resume="allow" if known else None,
    )
    id_file.write_text(self._run.id)

  def write(self, step: int, metrics: Mapping[str, float]) -> None:
    """Logs the metrics; W&B joins the calls of one step."""
    self._run.log({k: float(v) for k, v in metrics.items()}, step=step)

  def close(self) -> None:
    """Uploads what is left."""
    self._run.finish()


class Progress:
  """Shows where the run is: a bar on a terminal, plain log lines elsewhere.

  The time left is that at the pace so far, evaluations included. It is unknown
  until the second write, as the first step compiles.
  """

  def __init__(
    self,
    *,
    total_steps: int,
    step: int,
    console: rich.console.Console | None = None,
  ) -> None:
    """Starts the display at `step` of `total_steps`.

    Args:
      total_steps: optimizer updates of the whole run.
      step: the step the run starts from.
      console: where to draw; standard error by default.
    """
    self._total_steps = total_steps
    self._first: tuple[int, float] | None = None  # (step, seconds)
    self._last_line = -math.inf
    self._closing = contextlib.ExitStack()
    console = console or rich.console.Console(stderr=True)
    self._bar = None
    if console.is_terminal:
      self._bar = rich.progress.Progress(
        rich.progress.TextColumn("step {task.completed}/{task.total}"),
        rich.progress.BarColumn(bar_width=None),
        rich.progress.TextColumn("{task.fields[facts]}", markup=False),
        console=console,
        expand=True,
        refresh_per_second=2,
      )
      self._closing.enter_context(self._bar)
      self._closing.enter_context(_log_through_standard_error())
      self._task = self._bar.add_task(
        "", total=total_steps, completed=step, facts="compiling"
      )

  def write(self, step: int, metrics: Mapping[str, float]) -> None:
    """Moves the bar; metrics of evaluations get a line of their own."""
    train = {k: v for k, v in metrics.items() if k.startswith("train/")}
    other = {k: v for k, v in metrics.items() if k not in train}
    if train:
      self._show(step, [*self._facts(train), *self._time_left(step)])
    if other:
      facts = ", ".join(f"{k} {_format(v)}" for k, v in other.items())
      logging.info("step %d/%d: %s", step, self._total_steps, facts)

  def advance(self, step: int) -> None:
    """Moves the bar alone."""
    if self._bar is not None:
      self._bar.update(self._task, completed=step)

  def close(self) -> None:
    """Leaves the bar as it is and gives the terminal back."""
    self._closing.close()

  def _facts(self, train: Mapping[str, float]) -> list[str]:
    shown = {
      "train/loss": "loss {}",
      "train/lr": "rate {}",
      "train/images_per_second": "{} images/s",
    }
    return [
      text.format(_format(train[name]))
      for name, text in shown.items()
      if name in train
    ]

  def _time_left(self, step: int) -> list[str]:
    now = time.monotonic()
    if self._first is None or step <= self._first[0]:
      self._first = self._first or (step, now)
      return []
    pace = (now - self._first[1]) / (step - self._first[0])
    return [f"{_clock(pace * max(self._total_steps - step, 0))} left"]

  def _show(self, step: int, facts: Sequence[str]) -> None:
    if self._bar is not None:
      self._bar.update(self._task, completed=step, facts="  ".join(facts))
      return
    now = time.monotonic()
    last = step >= self._total_steps
    if last or now - self._last_line >= PLAIN_LINE_SECONDS:
      self._last_line = now
      logging.info("step %d/%d: %s", step, self._total_steps, ", ".join(facts))


class Writers:
  """Fans out to several writers, and refuses two values for one metric."""

  def __init__(
    self, writers: Sequence[Writer], *, progress: Progress | None = None
  ) -> None:
    self._writers = (*writers, *([progress] if progress else []))
    self._progress = progress
    self._written: dict[str, tuple[int, float]] = {}  # By metric.

  def write(self, step: int, metrics: Mapping[str, float]) -> None:
    """Writes to all.

    Args:
      step: optimizer updates so far.
      metrics: by name; a number or a scalar array.

    Raises:
      ValueError: if a metric already has another value at this step (two
        evaluators of one name), or is called "step".
    """
    values = {name: _number(value) for name, value in metrics.items()}
    for name, value in values.items():
      if name == "step":
        raise ValueError(
          "metrics: got a metric named 'step'; it names the step itself."
          " Rename the metric, e.g. 'train/step'."
        )
      old_step, old = self._written.get(name, (None, value))
      if old_step == step and not _same(old, value):
        raise ValueError(
          f"{name}: got {value!r} at step {step}; it is already {old!r} there."
          " Give each evaluator a name of its own."
        )
    self._written.update({name: (step, v) for name, v in values.items()})
    for writer in self._writers:
      writer.write(step, values)

  def advance(self, step: int) -> None:
    """Shows that a step is done, without metrics."""
    if self._progress is not None:
      self._progress.advance(step)

  def close(self) -> None:
    """Closes all, the last first, even if one fails."""
    with contextlib.ExitStack() as stack:
      for writer in self._writers:
        stack.callback(writer.close)

  def __enter__(self) -> Self:
    """Returns itself; leaving the block closes it."""
    return self

  def __exit__(self, *exception: object) -> None:
    """Closes all."""
    self.close()


def make_writers(
  workdir: epath.PathLike,
  *,
  step: int,
  total_steps: int,
  primary: bool,
  tensorboard: bool,
  wandb_project: str | None,
  config: Mapping[str, Any],
) -> Writers:
  """Returns the writers of a run; those of other processes write nothing.

  Args:
    workdir: gets `metrics.jsonl`, `tensorboard/` and `wandb_id`.
    step: the step the run starts from; later records are dropped.
    total_steps: optimizer updates of the whole run.
    primary: whether this is the first process.
    tensorboard: whether to write TensorBoard events.
    wandb_project: W&B project, or None for no W&B.
    config: what W&B shows as the run's configuration.
  """
  if not primary:
    return Writers(())
  workdir = paths.expand(workdir)
  writers: list[Writer] = [JsonLines(workdir / "metrics.jsonl", step=step)]
  if tensorboard:
    writers.append(TensorBoard(workdir / "tensorboard", step=step))
  if wandb_project:
    writers.append(
      WandB(
        project=wandb_project,
        name=workdir.name,
        config=config,
        workdir=workdir,
        step=step,
      )
    )
  progress = Progress(total_steps=total_steps, step=step)
  return Writers(writers, progress=progress)


class Speed:
  """A clock over the steps of a run."""

  def __init__(self, batch_size: int) -> None:
    """Starts at the first update, as the first step compiles.

    Args:
      batch_size: images a step, over all devices and processes.
    """
    self._batch_size = batch_size
    self._last: tuple[int, float] | None = None  # (step, seconds)

  def update(self, step: int) -> dict[str, float]:
    """Returns the images/s since the last update, once there is one, as metric.

    An update after an evaluation leaves it out.

    Args:
      step: optimizer updates so far.
    """
    now, last = time.monotonic(), self._last
    self._last = (step, now)
    if last is None or step <= last[0] or now <= last[1]:
      return {}
    steps, seconds = step - last[0], now - last[1]
    return {"train/images_per_second": steps * self._batch_size / seconds}


def results_table(results: Mapping[str, float]) -> str:
  """Returns a plain-text table of `results`, a section an evaluator."""
  table = rich.table.Table(box=rich.box.ROUNDED)
  table.add_column("evaluator")
  table.add_column("metric")
  table.add_column("value", justify="right")
  previous = None
  for name, value in results.items():
    evaluator, _, metric = name.rpartition("/")
    if evaluator != previous and previous is not None:
      table.add_section()
    shown = evaluator if evaluator != previous else ""
    # Text, not str: a name may hold [brackets], which rich reads as style.
    cells = (shown, metric, _format(value))
    table.add_row(*map(rich.text.Text, cells))
    previous = evaluator
  console = rich.console.Console(file=io.StringIO(), width=100)
  with console.capture() as capture:
    console.print(table)
  return capture.get().rstrip("\n")


@contextlib.contextmanager
def _log_through_standard_error() -> Iterator[None]:
  """Sends log lines to today's `sys.stderr`, which a bar has replaced.

  The handlers hold the terminal as it was when they were made, and would
  write through the bar instead of above it.
  """
  handlers = [
    handler
    for handler in (
      logging.get_absl_handler().python_handler,
      *python_logging.getLogger().handlers,
    )
    if isinstance(handler, python_logging.StreamHandler)
    and handler.stream is sys.__stderr__
  ]
  old = [handler.setStream(sys.stderr) for handler in handlers]
  try:
    yield
  finally:
    for handler, stream in zip(handlers, old, strict=True):
      if stream is not None:
        handler.setStream(stream)


def _is_remote(path: epath.Path) -> bool:
  return "://" in os.fspath(path)


def _json_line(record: Mapping[str, float]) -> str:
  finite = {k: v if math.isfinite(v) else None for k, v in record.items()}
  return json.dumps(finite, allow_nan=False) + "\n"


def _read_records(path: epath.Path) -> list[dict[str, Any]]:
  """Returns the lines of the file as they are, null as nan."""
  if not path.exists():
    return []
  lines = path.read_bytes().decode("utf-8", "replace").splitlines()
  records = []
  for number, line in enumerate(lines, start=1):
    try:
      record = json.loads(line)
      step = operator.index(record["step"])
    except (json.JSONDecodeError, TypeError, KeyError) as error:
      if number == len(lines):
        break  # Torn by a kill; the step is repeated on resume.
      raise ValueError(
        f"{path}: got {line!r} in line {number}; expected a JSON object with"
        ' a "step". Mend the line or remove it.'
      ) from error
    values = {k: math.nan if v is None else v for k, v in record.items()}
    records.append({**values, "step": step})
  return records


def _number(value: float) -> float:
  """Returns a Python number; a scalar array is fetched from its device."""
  return value if isinstance(value, int) else float(value)


def _same(a: float, b: float) -> bool:
  return a == b or (math.isnan(a) and math.isnan(b))


def _format(value: float) -> str:
  """Returns four digits, or a whole number where that is enough."""
  if math.isfinite(value) and (value == int(value) or abs(value) >= 1_000):
    return f"{value:,.0f}"
  return f"{value:.4g}"


def _clock(seconds: float) -> str:
  minutes, seconds = divmod(round(seconds), 60)
  hours, minutes = divmod(minutes, 60)
  return f"{hours}:{minutes:02d}:{seconds:02d}"
