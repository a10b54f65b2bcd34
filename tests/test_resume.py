"""Runs that are killed or stopped, in real processes."""

import functools
import json
import random
import subprocess
import sys

import jax
import numpy as np
import orbax.checkpoint as ocp
import pytest

from tests import commands
from tests.commands import ROOT, SMOKE


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


@pytest.mark.parametrize(
  "step",
  [7, *(pytest.param(n, marks=pytest.mark.slow) for n in (3, 12))],
)
def test_a_run_killed_at_any_step_ends_bit_identical(
  whole, run, tmp_path, step
):
  arguments = SMOKE, f"--workdir={tmp_path / 'run'}"
  recording = commands.recorded(tmp_path / "ids")
  run(*arguments, code=-9, KILL_AT=str(step), **recording)
  run(*arguments, **recording)
  _assert_equal_runs(tmp_path, whole)


@pytest.mark.slow
def test_a_run_killed_at_random_moments_ends_bit_identical(
  whole, cache, tmp_path
):
  arguments = SMOKE, f"--workdir={tmp_path / 'run'}"
  environment = commands.full_environment(
    cache, {"RECORD": str(tmp_path / "ids")}
  )
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


@pytest.mark.slow
def test_sigterm_in_a_step_saves_that_step_and_exits_with_75(
  whole, run, tmp_path
):
  arguments = SMOKE, f"--workdir={tmp_path / 'run'}"
  recording = commands.recorded(tmp_path / "ids")
  output = run(*arguments, code=75, TERM_AT="7", **recording)
  assert "the state of step 7 is saved" in output
  assert (tmp_path / "run/checkpoints/7/params").exists()
  run(*arguments, **recording)
  _assert_equal_runs(tmp_path, whole)


@pytest.mark.slow
def test_sigterm_in_an_evaluation_saves_and_repeats_the_evaluation(
  whole, run, tmp_path
):
  arguments = SMOKE, f"--workdir={tmp_path / 'run'}"
  recording = commands.recorded(tmp_path / "ids")
  output = run(*arguments, code=75, EVAL_TERM_AT="2", **recording)
  assert "the state of step 6 is saved" in output
  run(*arguments, **recording)
  _assert_equal_runs(tmp_path, whole)


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


def _metrics(workdir):
  result = {}
  for record in commands.records(workdir):
    record.pop("train/images_per_second", None)
    result.setdefault(record["step"], {}).update(record)
  return result
