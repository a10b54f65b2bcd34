"""Starting up: the processes of a run find each other; compiles are kept."""

import os
from pathlib import Path

import jax
from absl import logging


def start() -> None:
  """Connects the processes and turns on the compilation cache.

  Call it before anything touches a device. With several processes, each gets
  JAX_COORDINATOR_ADDRESS=HOST:PORT, JAX_NUM_PROCESSES and JAX_PROCESS_ID. The
  cache lies in JAX_COMPILATION_CACHE_DIR, by default under ~/.cache.

  Raises:
    ValueError: if only some of the three variables are set.
  """
  names = "JAX_COORDINATOR_ADDRESS", "JAX_NUM_PROCESSES", "JAX_PROCESS_ID"
  address, number, index = (os.environ.get(name) for name in names)
  if address and number and index:
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.distributed.initialize(address, int(number), int(index))
  elif address or number or index:
    raise ValueError(
      f"processes: got {address}, {number}, {index} for {names}; set all three "
      "or none."
    )
  if not os.environ.get("JAX_COMPILATION_CACHE_DIR"):
    cache = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    folder = Path(cache) / "vit_jax" / "compiled"
    jax.config.update("jax_compilation_cache_dir", str(folder))
  if jax.process_index() != 0:
    logging.set_verbosity(logging.WARNING)
