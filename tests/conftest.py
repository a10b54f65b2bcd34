"""One test session: eight fake CPU devices, no silent rank promotion."""

import os

os.environ.setdefault("JAX_PLATFORMS", "cpu")
# Tests compile much and run little; this takes a third of the time to compile.
os.environ.setdefault("XLA_FLAGS", "--xla_backend_optimization_level=0")

import jax
import pytest

jax.config.update("jax_num_cpu_devices", 8)
jax.config.update("jax_numpy_rank_promotion", "raise")


def pytest_addoption(parser: pytest.Parser) -> None:
  parser.addoption(
    "--update_golden",
    action="store_true",
    help="rewrite the files under tests/golden with what the code makes now",
  )
