"""Runs the commands in processes of their own, as people do."""

import json
import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
SMOKE = "--config=configs/smoke.py"


def run(cache, *arguments, code=0, module="vit_jax.main", **environment):
  """Returns what a command prints; fails if it ends with another code."""
  done = subprocess.run(
    [sys.executable, *target(module), *map(str, arguments)],
    cwd=ROOT,
    env=full_environment(cache, environment),
    capture_output=True,
    text=True,
    timeout=600,
  )
  assert done.returncode == code, done.stdout + done.stderr
  return done.stdout + done.stderr


def target(module):
  """Returns how Python starts a module or a script."""
  return ["-m", module] if module.startswith("vit_jax") else [module]


def full_environment(cache, extra):
  """Returns the environment of a command that keeps compiles in `cache`."""
  return {
    **os.environ,  # With conftest's flag for quick compilation.
    "JAX_PLATFORMS": "cpu",
    "JAX_COMPILATION_CACHE_DIR": str(cache),
    "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
    "PYTHONPATH": str(ROOT),
    "COLUMNS": "200",
    **extra,
  }


def recorded(ids):
  """Returns the arguments of `run` that record the ids of each step."""
  return {"module": "tests/recorded_main.py", "RECORD": str(ids)}


def records(workdir):
  """Returns the lines of metrics.jsonl."""
  lines = (workdir / "metrics.jsonl").read_text().splitlines()
  return [json.loads(line) for line in lines]
