"""The commands as people use them."""

import functools
import re

import pytest

from tests import commands
from tests.commands import SMOKE


@pytest.fixture(scope="module")
def cache(tmp_path_factory):
  return tmp_path_factory.mktemp("compiled")


@pytest.fixture(scope="module")
def run(cache):
  return functools.partial(commands.run, cache)


@pytest.fixture(scope="module")
def whole(run, tmp_path_factory):
  """Returns the folder of a smoke run that was never interrupted."""
  path = tmp_path_factory.mktemp("whole")
  run(SMOKE, f"--workdir={path / 'run'}", **commands.recorded(path / "ids"))
  return path


def test_a_run_leaves_metrics_events_checkpoints_and_a_report(whole):
  workdir = whole / "run"
  records = commands.records(workdir)
  assert [r["step"] for r in records] == [4, 6, 8, 12, 12]
  assert records[1]["val/count"] == 37
  assert {"train/loss", "train/lr", "train/grad_norm"} <= records[0].keys()
  assert list((workdir / "tensorboard").glob("events*"))
  assert "class_3" in (workdir / "report.html").read_text()
  steps = {p.name for p in (workdir / "checkpoints").iterdir()}
  assert steps == {"8", "12"}


def test_a_finished_run_evaluates_and_says_that_nothing_is_left(whole, run):
  output = run(SMOKE, f"--workdir={whole / 'run'}")
  assert "has trained all 12 steps" in output


def test_mode_eval_gives_the_metrics_of_the_run(whole, run):
  output = run(SMOKE, f"--workdir={whole / 'run'}", "--mode=eval")
  loss = commands.records(whole / "run")[-1]["val/loss"]
  assert re.search(rf"loss\s+│\s+{loss:.4g}", output), output


def test_another_config_in_the_same_workdir_is_refused(whole, run):
  output = run(
    SMOKE, f"--workdir={whole / 'run'}", "--config.batch_size=32", code=1
  )
  assert "batch_size: 16 -> 32" in output
  assert "Traceback" not in output


@pytest.mark.parametrize(
  ("argument", "message"),
  [
    ("--config.batch_sise=8", "batch_size"),
    ("--config.total_steps=1e3", "total_steps"),
    ("--config.schedule.warmup_steps=99", "must be >= 0 and < total_steps"),
    ("--config=configs/none.py", "configs/none.py"),
    ("--workdr=x", "workdr"),
  ],
)
def test_a_mistake_gets_a_line_and_no_traceback(
  run, tmp_path, argument, message
):
  output = run(SMOKE, f"--workdir={tmp_path / 'run'}", argument, code=1)
  assert message in output
  assert "Traceback" not in output
  assert not (tmp_path / "run").exists()


def test_predict_names_images_and_goes_on_past_a_bad_file(whole, run, tmp_path):
  from PIL import Image

  good, bad = tmp_path / "good.png", tmp_path / "bad.jpg"
  Image.new("RGBA", (50, 40), (200, 30, 30, 128)).save(good)
  bad.write_bytes(b"not an image")
  output = run(
    f"--workdir={whole / 'run'}",
    *(good, bad, "missing.png", ".", "--top=2"),
    module="vit_jax.predict",
    code=1,
  )
  assert len(re.findall(r"\d\.\d\d%  class_\d", output)) == 2
  assert "bad.jpg" in output
  assert "image: got 'missing.png'; there is no such file." in output
  assert "image: got '.'; it is a folder." in output


@pytest.mark.slow
@pytest.mark.parametrize("name", ["vit_b16", "vit_l16"])
def test_the_imagenet_recipes_train_two_steps(run, tmp_path, name):
  output = run(
    f"--config=tests/imagenet_on_fake.py:{name}",
    f"--workdir={tmp_path / 'run'}",
    "--config.model.depth=1",
    "--config.batch_size=8",
    "--config.total_steps=2",
    "--config.schedule.warmup_steps=1",
    "--config.data.num_workers=0",
    "--config.evals.val.num_workers=0",
  )
  assert "step 2/2" in output
  assert re.search(r"count\s+│\s+12\b", output), output


def test_help_of_the_commands_answers(run):
  assert "--workdir" in run("--help")
  assert "--workdir" in run("--help", module="vit_jax.predict")
  assert "doctor" in run("--help", module="vit_jax.doctor")


def test_a_second_start_compiles_from_the_cache(whole, run, cache, tmp_path):
  before = {p.name for p in cache.iterdir()}
  assert any(name.startswith("jit_step_fn") for name in before)
  run(SMOKE, f"--workdir={tmp_path / 'run'}")
  after = {p.name for p in cache.iterdir() if "step_fn" in p.name}
  assert after <= before
