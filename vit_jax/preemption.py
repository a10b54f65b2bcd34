"""Asking a run to stop: a signal sets a flag, the loop looks at it."""

import signal
import threading
import types
from typing import Self

import jax
from jax.experimental import multihost_utils

EXIT_CODE = 75  # EX_TEMPFAIL of sysexits.h: saved its state; start it again.


class Preempted(Exception):
  """The run was asked to stop and has left a checkpoint of `step`."""

  def __init__(self, step: int) -> None:
    super().__init__(f"stopped on request; the state of step {step} is saved")
    self.step = step


class StopSignal:
  """Remembers a SIGTERM or the first Ctrl-C while it is entered.

  A second Ctrl-C interrupts at once. With several processes the coordination
  service of `jax.distributed` listens for SIGTERM, and all agree on a step.
  """

  def __init__(self) -> None:
    self._asked = False
    self._previous = {}

  def __enter__(self) -> Self:
    signals = [signal.SIGINT, signal.SIGTERM]
    if jax.process_count() > 1:
      signals.remove(signal.SIGTERM)
    if threading.current_thread() is threading.main_thread():
      for number in signals:
        self._previous[number] = signal.signal(number, self._ask)
    return self

  def __exit__(self, *unused: object) -> None:
    for number, handler in self._previous.items():
      signal.signal(number, handler)

  def asked_locally(self) -> bool:
    """Returns whether this process has received a signal."""
    return self._asked

  def asked(self, step: int) -> bool:
    """Returns whether to stop after `step`: the same answer on all processes.

    Call it once a step on every process.
    """
    if jax.process_count() == 1:
      return self._asked
    return multihost_utils.reached_preemption_sync_point(step)

  def _ask(self, number: int, frame: types.FrameType | None) -> None:
    if self._asked and number == signal.SIGINT:
      raise KeyboardInterrupt
    self._asked = True
