"""What the commands say when something is wrong."""

import io
import os
import signal
import sys

import pytest
from absl import flags

from vit_jax import command


def fail(error):
  def main():
    raise error

  return main


def test_a_file_that_the_system_refuses_is_one_line(tmp_path):
  file = tmp_path / "none"
  with pytest.raises(SystemExit, match=r"error: .*No such file.*none'"):
    command.run(lambda: int(file.read_text()))


def test_an_error_of_no_file_keeps_its_traceback():
  with pytest.raises(OSError, match="no file"):
    command.run(fail(OSError("no file")))
  with pytest.raises(ValueError, match="not ours"):
    command.run(fail(ValueError("not ours")))


def test_output_that_nobody_reads_ends_quietly(monkeypatch):
  reading, writing = os.pipe()
  monkeypatch.setattr(sys, "stdout", os.fdopen(writing, "w"))
  os.close(reading)
  with pytest.raises(SystemExit) as caught:
    command.run(lambda: sys.stdout.write("ten classes") and 0)
  assert caught.value.code == 1
  sys.stdout.close()


def test_text_is_shown_as_it_is(capsys):
  command.show("a [bold]name[/] :smile: " + 30 * "of many words ")
  shown = capsys.readouterr().out
  assert shown == "a [bold]name[/] :smile: " + 30 * "of many words " + "\n"


def test_a_terminal_without_a_letter_shows_its_number(monkeypatch):
  buffer = io.BytesIO()
  monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(buffer, "ascii"))
  with pytest.raises(SystemExit):
    command.run(lambda: print("Müll") or 0)  # noqa: T201
  assert buffer.getvalue() == b"M\\xfcll\n"


@pytest.mark.parametrize(
  "before, after",
  [
    (signal.default_int_handler, signal.SIG_DFL),
    (signal.SIG_IGN, signal.SIG_IGN),  # As nohup and a shell's & ask for.
  ],
)
def test_ctrl_c_before_a_run_ends_the_process(monkeypatch, before, after):
  monkeypatch.setattr(flags, "FLAGS", flags.FlagValues())
  old = signal.signal(signal.SIGINT, before)
  try:
    command.parse_flags(["main"])
    assert signal.getsignal(signal.SIGINT) == after
  finally:
    signal.signal(signal.SIGINT, old)
