"""`vit_jax.main` that records what it trains on, and can kill itself.

RECORD names a file that gets a line for each step: the step and the ids of its
examples. KILL_AT=N sends SIGKILL just before step N is given to the device,
TERM_AT=N a SIGTERM, EVAL_TERM_AT=N a SIGTERM in the N-th evaluation batch.
"""

import json
import os
import signal
from collections.abc import Iterator
from typing import Any

from absl import app

from vit_jax import command, main
from vit_jax.data import pipeline

_train_batches, _eval_batches = pipeline.train_batches, pipeline.eval_batches


def _signal_at(variable: str, number: int, now: int) -> None:
  if os.environ.get(variable) == str(now):
    os.kill(os.getpid(), number)


def _recorded_train_batches(*args: Any, **kwargs: Any) -> Iterator[Any]:
  step = kwargs.get("start_step", 0)
  for batch in _train_batches(*args, **kwargs):
    step += 1
    _signal_at("KILL_AT", signal.SIGKILL, step)
    _signal_at("TERM_AT", signal.SIGTERM, step)
    with open(os.environ["RECORD"], "a") as file:
      file.write(json.dumps([step, batch["index"].tolist()]) + "\n")
    yield batch


_seen = 0


def _recorded_eval_batches(*args: Any, **kwargs: Any) -> Iterator[Any]:
  global _seen
  for batch in _eval_batches(*args, **kwargs):
    _seen += 1
    _signal_at("EVAL_TERM_AT", signal.SIGTERM, _seen)
    yield batch


if __name__ == "__main__":
  pipeline.train_batches = _recorded_train_batches
  pipeline.eval_batches = _recorded_eval_batches
  main.define_flags()
  app.run(
    lambda argv: command.run(lambda: main.main(argv)),
    flags_parser=command.parse_flags,
  )
