"""Vision Transformers in JAX: train, fine-tune, evaluate and look inside.

`vit_jax.load(name)` returns a published model with its weights.
"""

from typing import Any


def __getattr__(name: str) -> Any:
  """Imports `load` when it is asked for: `import vit_jax` alone stays light."""
  if name == "load":
    from vit_jax.weights import files

    return files.load
  raise AttributeError(f"module 'vit_jax' has no attribute {name!r}")
