"""The writers: what is on disk, what survives a kill, what is refused."""

import io
import json
import logging as python_logging
import math
import pathlib
import sys
import types
from typing import Any

import numpy as np
import pytest
import rich.console
import tensorboardX.proto.event_pb2
from absl import logging

from tests import object_store
from vit_jax import writers


def read_lines(path: pathlib.Path) -> list[dict[str, float | None]]:
  return [json.loads(line) for line in path.read_text().splitlines()]


def test_a_line_is_one_json_object_with_its_step(tmp_path):
  writer = writers.JsonLines(tmp_path / "metrics.jsonl", step=0)
  writer.write(40, {"train/loss": 0.41, "val/count": 360})
  assert (tmp_path / "metrics.jsonl").read_text() == (
    '{"step": 40, "train/loss": 0.41, "val/count": 360}\n'
  )


def test_finite_numbers_survive_to_the_last_bit_and_others_become_null(
  tmp_path,
):
  path = tmp_path / "metrics.jsonl"
  values = {"a": 0.1 + 0.2, "b": 1e-300, "c": -0.0, "d": 2**53 + 1}
  strange = {"nan": math.nan, "inf": math.inf, "minus": -math.inf}
  writers.JsonLines(path, step=0).write(1, {**values, **strange})
  assert read_lines(path) == [
    {"step": 1, **values, "nan": None, "inf": None, "minus": None}
  ]
  (record,) = writers.read_history(path)
  assert all(math.isnan(record[name]) for name in strange)
  assert record["step"] == 1


def test_a_resumed_run_forgets_the_steps_it_repeats(tmp_path):
  path = tmp_path / "metrics.jsonl"
  first = writers.JsonLines(path, step=0)
  for step in (10, 20, 30):
    first.write(step, {"train/loss": step / 100})
  second = writers.JsonLines(path, step=20)
  assert [r["step"] for r in read_lines(path)] == [10, 20]
  second.write(30, {"train/loss": 0.7})
  assert [r["train/loss"] for r in read_lines(path)] == [0.1, 0.2, 0.7]
  assert [p.name for p in tmp_path.iterdir()] == ["metrics.jsonl"]


@pytest.mark.parametrize("torn", ['{"step": 20, "tr', '{"step": 2', "{", "12"])
def test_a_torn_last_line_is_skipped_and_removed_on_resume(tmp_path, torn):
  path = tmp_path / "metrics.jsonl"
  path.write_text('{"step": 10, "train/loss": 0.5}\n' + torn)
  assert writers.read_history(path) == [{"step": 10, "train/loss": 0.5}]
  writers.JsonLines(path, step=10).write(20, {"train/loss": 0.4})
  assert [r["step"] for r in read_lines(path)] == [10, 20]


def test_a_bad_line_in_the_middle_is_named(tmp_path):
  path = tmp_path / "metrics.jsonl"
  path.write_text('{"step": 1}\noops\n{"step": 2}\n')
  with pytest.raises(ValueError, match=r"got 'oops' in line 2; expected"):
    writers.read_history(path)


def test_history_is_merged_by_step_and_sorted(tmp_path):
  path = tmp_path / "metrics.jsonl"
  writer = writers.JsonLines(path, step=0)
  writer.write(20, {"train/loss": 0.2})
  writer.write(10, {"train/loss": 0.1})
  writer.write(20, {"val/accuracy": 0.9, "train/loss": 0.3})
  assert writers.read_history(path) == [
    {"step": 10, "train/loss": 0.1},
    {"step": 20, "train/loss": 0.3, "val/accuracy": 0.9},
  ]


def test_a_file_that_is_not_there_has_no_history(tmp_path):
  assert writers.read_history(tmp_path / "none.jsonl") == []


def test_a_tilde_is_the_home_directory(tmp_path, monkeypatch):
  monkeypatch.setenv("HOME", str(tmp_path))
  writers.JsonLines("~/run/metrics.jsonl", step=0).write(1, {"a": 1.0})
  assert (tmp_path / "run" / "metrics.jsonl").exists()
  assert writers.read_history("~/run/metrics.jsonl") == [{"step": 1, "a": 1.0}]


@pytest.mark.parametrize("line", [b"\xff\xfe", b'{"step": "x"}', b"[1]"])
def test_a_line_that_is_no_record_is_an_error_that_names_it(tmp_path, line):
  path = tmp_path / "metrics.jsonl"
  path.write_bytes(line + b'\n{"step": 2}\n')
  with pytest.raises(ValueError, match="in line 1; expected a JSON object"):
    writers.JsonLines(path, step=2)


def test_a_bucket_that_cannot_append_holds_the_same_lines(monkeypatch):
  object_store.install(monkeypatch)
  path = "s3://bucket/run/metrics.jsonl"
  writer = writers.JsonLines(path, step=0)
  writer.write(10, {"a": 0.1})
  writer.write(20, {"a": 0.2})
  assert [r["step"] for r in writers.read_history(path)] == [10, 20]
  writers.JsonLines(path, step=10).write(20, {"a": 0.3})
  assert writers.read_history(path)[-1] == {"step": 20, "a": 0.3}


def test_tensorboard_hides_the_steps_after_a_resume(tmp_path):
  writer = writers.TensorBoard(tmp_path, step=20)
  writer.write(30, {"train/loss": 0.25})
  writer.close()
  (file,) = tmp_path.iterdir()
  events = read_events(file)
  scalars = [
    (e.step, v.tag, v.simple_value) for e in events for v in e.summary.value
  ]
  assert scalars == [(30, "train/loss", 0.25)]
  starts = [e.step for e in events if e.HasField("session_log")]
  assert starts == [21]  # TensorBoard drops older events from this step on.


def read_events(path: pathlib.Path) -> list[Any]:
  """Returns the events: 8-byte length, 4-byte crc, data, 4-byte crc."""
  parse: Any = vars(tensorboardX.proto.event_pb2)["Event"].FromString
  data, events, at = path.read_bytes(), [], 0
  while at < len(data):
    size = int.from_bytes(data[at : at + 8], "little")
    events.append(parse(data[at + 12 : at + 12 + size]))
    at += 16 + size
  return events


class FakeWandB(types.ModuleType):
  """Records what would be sent."""

  def __init__(self):
    super().__init__("wandb")
    self.inits, self.logs, self.finished = [], [], 0
    self.id = "run1"

  def init(self, **kwargs):
    self.inits.append(kwargs)
    return self

  def log(self, metrics, *, step):
    self.logs.append((step, metrics))

  def finish(self):
    self.finished += 1


def test_wandb_gets_every_write_and_a_resume_continues_the_run(
  tmp_path, monkeypatch
):
  wandb = FakeWandB()
  monkeypatch.setitem(sys.modules, "wandb", wandb)
  for step in (0, 10, 0):
    writer = writers.WandB(
      project="p", name="n", config={"lr": 0.1}, workdir=tmp_path, step=step
    )
    writer.write(step + 10, {"a": 0.5})
    writer.close()
  assert [(i["id"], i["resume"]) for i in wandb.inits] == [
    (None, None),
    ("run1", "allow"),
    (None, None),  # From scratch again: another run.
  ]
  assert wandb.inits[0]["config"] == {"lr": 0.1}
  assert wandb.inits[0]["dir"] == str(tmp_path)
  assert wandb.logs == [(10, {"a": 0.5}), (20, {"a": 0.5}), (10, {"a": 0.5})]
  assert wandb.finished == 3


def test_missing_wandb_says_how_to_install_it(tmp_path, monkeypatch):
  monkeypatch.setitem(sys.modules, "wandb", None)
  with pytest.raises(
    ModuleNotFoundError, match=r'Run `pip install -e "\.\[wandb\]"`'
  ):
    writers.WandB(project="p", name="n", config={}, workdir=tmp_path, step=0)


@pytest.fixture
def clock(monkeypatch):
  """A clock the test moves: a list with the time in seconds."""
  now = [100.0]
  monkeypatch.setattr(
    writers, "time", types.SimpleNamespace(monotonic=lambda: now[0])
  )
  return now


@pytest.fixture
def log(caplog):
  logging.use_absl_handler()
  caplog.set_level(python_logging.INFO, logger="absl")
  return lambda: [record.getMessage() for record in caplog.records]


def progress(**kwargs) -> writers.Progress:
  console = rich.console.Console(file=io.StringIO())
  return writers.Progress(
    **{"total_steps": 100, "step": 0, "console": console} | kwargs
  )


def test_without_a_terminal_lines_come_at_most_every_ten_seconds(log, clock):
  bar = progress()
  for step in range(1, 101):
    clock[0] += 0.5
    speed = {"train/images_per_second": 128.0}
    bar.write(step, {"train/loss": 2.5, "train/lr": 1e-3, **speed})
  bar.close()
  steps = [int(line.split()[1].split("/")[0]) for line in log()]
  assert steps == [1, 21, 41, 61, 81, 100]
  assert log()[1] == (
    "step 21/100: loss 2.5, rate 0.001, 128 images/s, 0:00:40 left"
  )


def test_images_per_second_leave_out_evaluation_but_time_left_does_not(
  log, clock
):
  bar, speed = progress(), writers.Speed(batch_size=64)
  bar.write(10, {"train/loss": 1.0, **speed.update(10)})
  clock[0] += 20  # An evaluation at step 10.
  bar.write(10, {"val/accuracy": 0.5})
  assert speed.update(10) == {}
  clock[0] += 10
  bar.write(20, {"train/loss": 1.0, **speed.update(20)})
  bar.close()
  assert log()[1:] == [
    "step 10/100: val/accuracy 0.5",
    "step 20/100: loss 1, 64 images/s, 0:04:00 left",  # 8 times 30 s.
  ]


def test_on_a_terminal_log_lines_go_above_the_bar_and_stderr_comes_back(
  monkeypatch,
):
  screen = io.StringIO()
  monkeypatch.setattr(sys, "__stderr__", sys.stderr)
  handler = python_logging.StreamHandler(sys.stderr)
  root = python_logging.getLogger()
  monkeypatch.setattr(root, "handlers", [handler])
  before = sys.stderr
  console = rich.console.Console(
    file=screen, force_terminal=True, width=100, color_system=None
  )
  bar = progress(console=console)
  bar.write(50, {"train/loss": 0.125})
  handler.emit(python_logging.makeLogRecord({"msg": "saved [step] 50"}))
  bar.close()
  assert sys.stderr is before and handler.stream is before
  text = screen.getvalue()
  assert "saved [step] 50\n" in text.replace("\r", "")
  assert "step 50/100" in text and "loss 0.125" in text


class Recorder:
  def __init__(self):
    self.written, self.closed = [], 0

  def write(self, step, metrics):
    self.written.append((step, dict(metrics)))

  def close(self):
    self.closed += 1


def test_the_bar_moves_between_two_writes():
  screen = io.StringIO()
  console = rich.console.Console(file=screen, force_terminal=True, width=100)
  with writers.Writers([], progress=progress(console=console)) as all_writers:
    all_writers.advance(37)
  assert "step 37/100" in screen.getvalue()
  writers.Writers([]).advance(37)  # Of a process that shows nothing.


def test_writers_fan_out_python_numbers_and_close_all():
  a, b = Recorder(), Recorder()
  with writers.Writers([a, b]) as both:
    both.write(1, {"loss": np.float32(0.5), "count": 3})  # pyright: ignore
  assert a.written == b.written == [(1, {"loss": 0.5, "count": 3})]
  assert type(a.written[0][1]["loss"]) is float
  assert (a.closed, b.closed) == (1, 1)


def test_all_writers_are_closed_when_one_fails():
  class Failing(Recorder):
    def close(self):
      raise OSError("disk full")

  first, last = Recorder(), Recorder()
  with pytest.raises(OSError, match="disk full"):
    writers.Writers([first, Failing(), last]).close()
  assert (first.closed, last.closed) == (1, 1)


def test_two_values_of_one_metric_at_one_step_are_refused():
  all_writers = writers.Writers([])
  all_writers.write(1, {"val/accuracy": 0.5, "val/map": math.nan})
  all_writers.write(1, {"val/accuracy": 0.5, "val/map": math.nan})
  with pytest.raises(ValueError, match=r"val/accuracy: got 0\.6 at step 1"):
    all_writers.write(1, {"val/accuracy": 0.6})
  all_writers.write(2, {"val/accuracy": 0.6})


def test_a_metric_named_step_is_refused():
  with pytest.raises(ValueError, match="got a metric named 'step'"):
    writers.Writers([]).write(1, {"step": 2.0})


def run_writers(workdir, *, primary):
  with writers.make_writers(
    workdir,
    step=0,
    total_steps=10,
    primary=primary,
    tensorboard=True,
    wandb_project="p",
    config={"a": 1},
  ) as all_writers:
    all_writers.write(10, {"train/loss": 0.5})


def test_only_the_first_process_writes(tmp_path, monkeypatch):
  wandb = FakeWandB()
  monkeypatch.setitem(sys.modules, "wandb", wandb)
  run_writers(tmp_path / "other", primary=False)
  assert not (tmp_path / "other").exists() and not wandb.inits
  run_writers(tmp_path / "first", primary=True)
  assert sorted(p.name for p in (tmp_path / "first").iterdir()) == [
    "metrics.jsonl",
    "tensorboard",
    "wandb_id",
  ]
  assert wandb.inits[0]["name"] == "first"
  assert wandb.logs == [(10, {"train/loss": 0.5})]


def test_the_results_table_shows_every_value_once():
  table = writers.results_table(
    {
      "val/accuracy": 0.97222,
      "val/count": 10_000,
      "test [a]/loss": 0.0312,
      "test [a]/map": math.nan,
    }
  )
  rows = [
    [cell.strip() for cell in line.strip("│").split("│")]
    for line in table.splitlines()
    if line.startswith("│")
  ]
  assert rows == [
    ["evaluator", "metric", "value"],
    ["val", "accuracy", "0.9722"],
    ["", "count", "10,000"],
    ["test [a]", "loss", "0.0312"],
    ["", "map", "nan"],
  ]
