"""The command as people use it: real processes, really killed."""

import json
import os
import random
import re
import subprocess
import sys
from pathlib import Path

import jax
import numpy as np
import orbax.checkpoint as ocp
import pytest

ROOT = Path(__file__).parents[1]
SMOKE = "--config=configs/smoke.py"


@pytest.fixture(scope="module")
def cache(tmp_path_factory):
  return tmp_path_factory.mktemp("compiled")


@pytest.fixture(scope="module")
def run(cache):
  """Returns a function that runs a command to its end."""

  def run(*arguments, code=0, module="vit_jax.main", **environment):
    command = [sys.executable, *_target(module), *map(str, arguments)]
    done = subprocess.run(
      command,
      cwd=ROOT,
      env=_environment(cache, environment),
      capture_output=True,
      text=True,
      timeout=300,
    )
    assert done.returncode == code, done.stdout + done.stderr
    return done.stdout + done.stderr

  return run


@pytest.fixture(scope="module")
def whole(run, tmp_path_factory):
  """Returns the workdir of a smoke run that was never interrupted."""
  path = tmp_path_factory.mktemp("whole")
  run(SMOKE, f"--workdir={path / 'run'}", **_recorded(path / "ids"))
  return path


def test_a_run_leaves_metrics_events_checkpoints_and_a_report(whole):
  workdir = whole / "run"
  records = _records(workdir)
  assert [r["step"] for r in records] == [4, 6, 8, 12, 12]
  assert records[1]["val/count"] == 37
  assert {"train/loss", "train/lr", "train/grad_norm"} <= records[0].keys()
  assert list((workdir / "tensorboard").glob("events*"))
  assert "class_3" in (workdir / "report.html").read_text()
  steps = {p.name for p in (workdir / "checkpoints").iterdir()}
  assert steps == {"8", "12"}


@pytest.mark.parametrize("step", [3, 7, 12])
def test_a_run_killed_at_any_step_ends_bit_identical(
  whole, run, tmp_path, step
):
  arguments = SMOKE, f"--workdir={tmp_path / 'run'}"
  recorded = _recorded(tmp_path / "ids")
  run(*arguments, code=-9, KILL_AT=str(step), **recorded)
  run(*arguments, **recorded)
  _assert_equal_runs(tmp_path, whole)


@pytest.mark.slow
def test_a_run_killed_at_random_moments_ends_bit_identical(
  whole, cache, tmp_path
):
  arguments = SMOKE, f"--workdir={tmp_path / 'run'}"
  environment = _environment(cache, _recorded(tmp_path / "ids"))
  delays = random.Random(0)
  kills = 0
  for _ in range(8):
    process = subprocess.Popen(
      [sys.executable, "tests/recorded_main.py", *arguments],
      cwd=ROOT,
      env=environment,
      stdout=subprocess.DEVNULL,
      stderr=subprocess.DEVNULL,
    )
    try:
      assert process.wait(timeout=delays.uniform(4, 12)) == 0
    except subprocess.TimeoutExpired:
      process.kill()
      process.wait()
      kills += 1
  assert kills > 0
  subprocess.run(
    [sys.executable, "tests/recorded_main.py", *arguments],
    cwd=ROOT,
    env=environment,
    check=True,
    timeout=300,
  )
  _assert_equal_runs(tmp_path, whole)


def test_sigterm_in_a_step_saves_that_step_and_exits_with_75(
  whole, run, tmp_path
):
  arguments = SMOKE, f"--workdir={tmp_path / 'run'}"
  recorded = _recorded(tmp_path / "ids")
  output = run(*arguments, code=75, TERM_AT="7", **recorded)
  assert "the state of step 7 is saved" in output
  assert (tmp_path / "run/checkpoints/7/params").exists()
  run(*arguments, **recorded)
  _assert_equal_runs(tmp_path, whole)


def test_sigterm_in_an_evaluation_saves_and_repeats_the_evaluation(
  whole, run, tmp_path
):
  arguments = SMOKE, f"--workdir={tmp_path / 'run'}"
  recorded = _recorded(tmp_path / "ids")
  output = run(*arguments, code=75, EVAL_TERM_AT="2", **recorded)
  assert "the state of step 6 is saved" in output
  run(*arguments, **recorded)
  _assert_equal_runs(tmp_path, whole)


def test_a_finished_run_evaluates_and_says_that_nothing_is_left(whole, run):
  output = run(SMOKE, f"--workdir={whole / 'run'}")
  assert "has trained all 12 steps" in output


def test_mode_eval_gives_the_metrics_of_the_run(whole, run):
  output = run(SMOKE, f"--workdir={whole / 'run'}", "--mode=eval")
  loss = _records(whole / "run")[-1]["val/loss"]
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
    *(good, bad, "missing.png", "--top=2"),
    module="vit_jax.predict",
    code=1,
  )
  assert len(re.findall(r"\d\.\d\d%  class_\d", output)) == 2
  assert "bad.jpg" in output and "missing.png" in output


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


def _target(module):
  return ["-m", module] if module.startswith("vit_jax") else [module]


def _recorded(ids):
  return {"module": "tests/recorded_main.py", "RECORD": str(ids)}


def _environment(cache, extra):
  kept = {k: v for k, v in os.environ.items() if k != "XLA_FLAGS"}
  return {
    **kept,
    "JAX_PLATFORMS": "cpu",
    "JAX_COMPILATION_CACHE_DIR": str(cache),
    "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
    "PYTHONPATH": str(ROOT),
    "COLUMNS": "200",
    **{k: v for k, v in extra.items() if k != "module"},
  }


def _assert_equal_runs(one, other):
  """Compares ids of each step, metrics, and every leaf of the last state."""
  assert _ids(one / "ids") == _ids(other / "ids")
  assert _metrics(one / "run") == _metrics(other / "run")
  for item in ("params", "ema_params", "opt_state"):
    leaves, others = (
      _leaves(path / "run/checkpoints/12" / item) for path in (one, other)
    )
    assert leaves.keys() == others.keys()
    for key, leaf in leaves.items():
      np.testing.assert_array_equal(leaf, others[key], err_msg=str(key))


def _leaves(folder):
  tree = ocp.StandardCheckpointer().restore(folder)
  return {
    jax.tree_util.keystr(path): np.asarray(leaf)
    for path, leaf in jax.tree_util.tree_leaves_with_path(tree)
  }


def _ids(path):
  """Returns the ids by step; a step that was repeated saw the same."""
  result = {}
  for line in path.read_text().splitlines():
    step, ids = json.loads(line)
    assert result.setdefault(step, ids) == ids
  return result


def _records(workdir):
  lines = (workdir / "metrics.jsonl").read_text().splitlines()
  return [json.loads(line) for line in lines]


def _metrics(workdir):
  result = {}
  for record in _records(workdir):
    result.setdefault(record["step"], {}).update(record)
  return result
