import os
import signal
import threading

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
