import hashlib
import os
import signal
import subprocess
import sys
import threading
import time

import pytest

from vit_jax import preemption


def send(number):
  os.kill(os.getpid(), number)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_is_remembered_not_obeyed(number):
  with preemption.StopSignal() as stop:
    assert not stop.asked(0)
    assert not stop.asked_locally()
    send(number)
    assert stop.asked(1)
    assert stop.asked_locally()


def test_a_second_ctrl_c_interrupts():
  with preemption.StopSignal() as stop:
    send(signal.SIGINT)
    with pytest.raises(KeyboardInterrupt):
      send(signal.SIGINT)
    assert stop.asked(1)


def test_a_second_sigterm_changes_nothing():
  with preemption.StopSignal() as stop:
    send(signal.SIGTERM)
    send(signal.SIGTERM)
    assert stop.asked(1)


def read_line(capfd):
  """Returns what is on standard error once a line is there."""
  text, end = "", time.monotonic() + 10
  while not text.endswith("\n") and time.monotonic() < end:
    time.sleep(0.01)
    text += capfd.readouterr().err
  return text


def test_one_line_answers_the_first_signal(capfd):
  with preemption.StopSignal():
    send(signal.SIGTERM)
    assert read_line(capfd) == (
      "stopping after this step; Ctrl-C again gives up at once\n"
    )
    send(signal.SIGTERM)
  assert capfd.readouterr().err == ""


def test_the_line_is_there_while_a_compiler_keeps_python_from_its_handlers(
  capfd,
):
  seen = []

  def ask():
    time.sleep(0.1)  # Until the other thread is at work.
    send(signal.SIGTERM)
    seen.extend([read_line(capfd), stop.asked_locally()])

  with preemption.StopSignal() as stop:
    thread = threading.Thread(target=ask)
    thread.start()
    hashlib.pbkdf2_hmac("sha256", b"", b"", 2_000_000)  # Half a second in C.
    thread.join()
    assert stop.asked_locally()
  text, had_handled = seen
  assert text.startswith("stopping after this step")
  assert not had_handled


@pytest.mark.slow
def test_a_second_ctrl_c_ends_a_process_that_is_compiling():
  code = """
import hashlib
from vit_jax import preemption
with preemption.StopSignal():
  print("ready", flush=True)
  hashlib.pbkdf2_hmac("sha256", b"", b"", 2_000_000_000)
"""
  process = subprocess.Popen(
    [sys.executable, "-c", code],
    stdout=subprocess.PIPE,
    stderr=subprocess.PIPE,
    text=True,
  )
  assert process.stdout is not None and process.stderr is not None
  assert process.stdout.readline() == "ready\n"
  process.send_signal(signal.SIGINT)
  assert process.stderr.readline().startswith("stopping after this step")
  process.send_signal(signal.SIGINT)
  assert process.wait(timeout=30) == 130
  process.communicate()


def test_the_handlers_from_before_are_back_afterwards():
  before = [signal.getsignal(n) for n in (signal.SIGINT, signal.SIGTERM)]
  with preemption.StopSignal():
    assert signal.getsignal(signal.SIGTERM) not in before
  with pytest.raises(RuntimeError), preemption.StopSignal():
    raise RuntimeError
  after = [signal.getsignal(n) for n in (signal.SIGINT, signal.SIGTERM)]
  assert before == after


def test_outside_the_main_thread_it_leaves_signals_alone():
  handlers = []

  def enter():
    with preemption.StopSignal() as stop:
      handlers.append(signal.getsignal(signal.SIGTERM))
      assert not stop.asked(0)

  before = signal.getsignal(signal.SIGTERM)
  thread = threading.Thread(target=enter)
  thread.start()
  thread.join()
  assert handlers == [before]


def test_preempted_says_which_step_is_saved():
  error = preemption.Preempted(40)
  assert error.step == 40
  assert "the state of step 40 is saved" in str(error)


def test_the_exit_code_is_none_that_python_uses():
  assert preemption.EXIT_CODE == 75
