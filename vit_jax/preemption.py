"""Asking a run to stop: a signal sets a flag, the loop looks at it."""

import os
import signal
import threading
import types
from typing import Self

import jax
from jax.experimental import multihost_utils

EXIT_CODE = 75  # EX_TEMPFAIL of sysexits.h: saved its state; start it again.

_STOPPING = b"stopping after this step; Ctrl-C again gives up at once\n"
_PATIENCE = 3.0  # Seconds that Python has to end by itself when it gives up.


class Preempted(Exception):
  """The run was asked to stop and has left a checkpoint of `step`."""

  def __init__(self, step: int) -> None:
    super().__init__(f"stopped on request; the state of step {step} is saved")
    self.step = step


class StopSignal:
  """Remembers a SIGTERM or the first Ctrl-C while it is entered.

  A line on standard error answers at once, also while a compiler keeps Python
  from its signal handlers. A second Ctrl-C interrupts at once. With several
  processes the coordination service of `jax.distributed` listens for SIGTERM,
  and all agree on a step.
  """

  def __init__(self) -> None:
    self._asked = False
    self._previous = {}
    self._previous_fd = -1
    self._left = threading.Event()

  def __enter__(self) -> Self:
    signals = [signal.SIGINT, signal.SIGTERM]
    if jax.process_count() > 1:
      signals.remove(signal.SIGTERM)
    if threading.current_thread() is threading.main_thread():
      for number in signals:
        self._previous[number] = signal.signal(number, self._ask)
      self._listen()
    return self

  def __exit__(self, *unused: object) -> None:
    self._left.set()
    if self._previous:
      os.close(signal.set_wakeup_fd(self._previous_fd))
      self._thread.join()  # It has answered what came before.
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

  def _listen(self) -> None:
    """Starts a thread that learns of signals as the system delivers them."""
    reading, writing = os.pipe()
    os.set_blocking(writing, False)
    self._previous_fd = signal.set_wakeup_fd(writing)
    numbers = set(self._previous)
    self._thread = threading.Thread(
      target=self._answer, args=(reading, numbers), daemon=True
    )
    self._thread.start()

  def _answer(self, reading: int, numbers: set[int]) -> None:
    """Answers each signal, one byte in the pipe, until the pipe is closed."""
    answered = False
    with open(reading, "rb", buffering=0) as pipe:
      while received := pipe.read(1):
        if received[0] not in numbers:
          continue
        if not answered:
          # Below the "^C" of a terminal, above its progress bar.
          os.write(2, b"\n" * os.isatty(2) + _STOPPING)
          answered = True
        elif received[0] == signal.SIGINT and not self._left.wait(_PATIENCE):
          os._exit(130)
