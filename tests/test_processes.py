"""Several processes on one machine make one run."""

import socket
import subprocess
import sys

import pytest

from tests import commands
from tests.commands import ROOT, SMOKE
from vit_jax import processes


def test_half_a_setting_is_refused(monkeypatch):
  monkeypatch.setenv("JAX_NUM_PROCESSES", "2")
  with pytest.raises(ValueError, match="set all three or none"):
    processes.start()


@pytest.mark.slow
def test_two_processes_train_and_evaluate_as_one(tmp_path):
  cache = tmp_path / "compiled"
  commands.run(cache, SMOKE, f"--workdir={tmp_path / 'one'}")
  with socket.socket() as free:
    free.bind(("127.0.0.1", 0))
    address = f"127.0.0.1:{free.getsockname()[1]}"
  started = [
    subprocess.Popen(
      [
        *(sys.executable, "-m", "vit_jax.main", SMOKE),
        f"--workdir={tmp_path / 'two'}",
      ],
      cwd=ROOT,
      env=commands.full_environment(
        cache,
        {
          "JAX_COORDINATOR_ADDRESS": address,
          "JAX_NUM_PROCESSES": "2",
          "JAX_PROCESS_ID": str(rank),
        },
      ),
      stdout=subprocess.PIPE,
      stderr=subprocess.STDOUT,
      text=True,
    )
    for rank in range(2)
  ]
  try:
    for process in started:
      output, _ = process.communicate(timeout=300)
      assert process.returncode == 0, output
  finally:
    for process in started:
      process.kill()
  one, two = (commands.records(tmp_path / name) for name in ("one", "two"))
  assert [r["step"] for r in one] == [r["step"] for r in two]
  for a, b in zip(one, two):
    for record in (a, b):
      record.pop("train/images_per_second", None)
    assert a == pytest.approx(b, rel=1e-4)  # Sums in another order.
  assert two[-1]["val/count"] == 37
