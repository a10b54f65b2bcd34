"""What the commands say when something is wrong."""

import io
import logging as std_logging
import os
import re
import signal
import sys
from pathlib import Path

import pytest
from absl import flags, logging
from ml_collections import config_flags

from vit_jax import command

ROOT = Path(__file__).parents[1]
LOADS_A_CONFIG = pytest.mark.filterwarnings(
  "ignore:the load_module:DeprecationWarning"  # ml_collections.
)


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


def test_log_lines_are_short_and_said_once(monkeypatch, capfd):
  handler = logging.get_absl_handler()
  monkeypatch.setattr(handler, "filters", [])
  before = handler.python_handler.formatter
  stream = handler.python_handler.setStream(sys.stderr)

  def main():
    for name in ("a.png", "b.png", "a.png"):
      record = std_logging.LogRecord(
        *(
          "absl",
          std_logging.INFO,
          command.__file__,
          1,
          "left out %s",
          (name,),
        ),
        None,
      )
      if handler.filter(record):
        handler.emit(record)
    return 0

  try:
    with pytest.raises(SystemExit):
      command.run(main)
  finally:
    handler.setFormatter(before)
    handler.python_handler.setStream(stream)
  lines = capfd.readouterr().err.splitlines()
  assert [line.split(" ", 2)[2] for line in lines] == [
    *("left out a.png", "left out b.png")
  ]
  assert all(re.match(r"I \d\d:\d\d:\d\d left", line) for line in lines)


def parse(monkeypatch, *arguments):
  """Returns what `main` says of flags that are wrong."""
  monkeypatch.setattr(flags, "FLAGS", flags.FlagValues())
  monkeypatch.setattr(sys, "argv", ["main", *arguments])
  flags.DEFINE_integer("number", 1, "", flag_values=flags.FLAGS)
  config_flags.DEFINE_config_file("config", flag_values=flags.FLAGS)
  handler = signal.getsignal(signal.SIGINT)
  try:
    with pytest.raises(SystemExit) as caught:
      command.parse_flags(sys.argv)
  finally:
    signal.signal(signal.SIGINT, handler)
  return str(caught.value)


@LOADS_A_CONFIG
def test_all_bad_flags_are_named_at_once(monkeypatch):
  said = parse(
    monkeypatch,
    f"--config={ROOT}/configs/quickstart.py",
    "--config.total_steps=many",
    "--config.batch_size=1.5",
    *("--number=x", "--numbr=3"),
  )
  assert said == (
    "error: these flags are wrong:\n"
    "  --config.total_steps: got 'many'; must be a whole number, in digits.\n"
    "  --config.batch_size: got '1.5'; must be a whole number, in digits.\n"
    "  --number: got 'x'; must be a whole number, in digits.\n"
    "  Unknown command line flag 'numbr'. Did you mean: number ?\n"
    "See --help."
  )


@LOADS_A_CONFIG
def test_a_config_file_that_is_not_there_is_told_from_those_that_are(
  monkeypatch,
):
  monkeypatch.chdir(ROOT)
  said = parse(monkeypatch, "--config=configs/quikstart.py")
  assert "got 'configs/quikstart.py'; there is no such file." in said
  assert "Did you mean 'configs/quickstart.py'? configs has [" in said


@LOADS_A_CONFIG
def test_a_recipe_without_the_folder_it_needs_says_how_to_give_it(monkeypatch):
  said = parse(monkeypatch, f"--config={ROOT}/configs/folder.py")
  assert said.startswith("error: --config: root: got '';")
  assert "--config=configs/folder.py:ROOT." in said


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
