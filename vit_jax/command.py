"""What the commands share: one line for a user's mistake, no traceback."""

import io
import logging as std_logging
import os
import re
import signal
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

from absl import flags, logging

from vit_jax import spec

_PACKAGE = str(Path(__file__).parent)


def run(main: Callable[[], int]) -> NoReturn:
  """Exits with the code of `main`, or with a message and 1 on bad input.

  Bad input is what this package complains of itself, and a file that the system
  cannot open or write; other errors keep their traceback.
  """
  if not flags.FLAGS.is_parsed():
    flags.FLAGS.mark_as_parsed()  # Or each log line says that it is not.
  logging.use_absl_handler()
  logging.set_verbosity(max(logging.get_verbosity(), logging.INFO))
  handler = logging.get_absl_handler()
  handler.addFilter(_is_for_people)
  handler.addFilter(_News())
  handler.setFormatter(
    std_logging.Formatter("%(levelname).1s %(asctime)s %(message)s", "%H:%M:%S")
  )
  if isinstance(sys.stdout, io.TextIOWrapper):  # Not every terminal has "ü".
    sys.stdout.reconfigure(errors="backslashreplace")
  try:
    code = main()
    _flush()
    sys.exit(code)
  except (FloatingPointError, ImportError, OSError, ValueError) as error:
    if _nobody_reads():
      os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
      sys.exit(1)
    if not _is_for_people_to_mend(error):
      raise
    logging.debug("The error comes from:", exc_info=True)
    sys.exit(f"error: {error}")
  except KeyboardInterrupt:
    sys.exit(130)


def _nobody_reads() -> bool:
  """Returns whether standard output is a pipe that was closed, as by `head`."""
  try:
    _flush()
  except OSError as error:
    return isinstance(error, BrokenPipeError)
  return False


def _flush() -> None:
  if sys.stdout is not None:  # It may have been closed at the start.
    sys.stdout.flush()


def _is_for_people_to_mend(error: Exception) -> bool:
  if isinstance(error, OSError) and error.filename is not None:
    return True
  last = traceback.extract_tb(error.__traceback__)[-1].filename
  # fsspec names the package that a storage needs.
  return last.startswith(_PACKAGE) or last.endswith("/fsspec/registry.py")


def _is_for_people(record: std_logging.LogRecord) -> bool:
  """Returns whether a log line is ours, or a warning of a library.

  Orbax warns of what is as it should be; its failures are exceptions.
  """
  orbax = "/orbax/" in record.pathname.replace("\\", "/")
  lowest = std_logging.ERROR if orbax else std_logging.WARNING
  return record.pathname.startswith(_PACKAGE) or record.levelno >= lowest


class _News(std_logging.Filter):
  """Leaves out a line that was there before, as of a source built twice."""

  def __init__(self) -> None:
    super().__init__()
    self._said: set[str] = set()

  def filter(self, record: std_logging.LogRecord) -> bool:
    line = record.getMessage()
    is_new = line not in self._said
    self._said.add(line)
    return is_new


def show(line: str, *, style: str = "") -> None:
  """Prints text as it is: brackets are no markup, long lines are not broken."""
  import rich
  import rich.text

  rich.get_console().print(rich.text.Text(line, style), soft_wrap=True)


def parse_flags(argv: list[str]) -> list[str]:
  """Returns the arguments that are not flags; a bad flag gets one line.

  Nothing is lost by a Ctrl-C from here until a run listens for it, so that the
  system may end the process: Python's exception gets lost in some imports.
  """
  if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
    signal.signal(signal.SIGINT, signal.SIG_DFL)
  try:
    rest = _parse_all(argv)
    if "config" in flags.FLAGS:  # A missing file raises only when it is used.
      hasattr(flags.FLAGS["config"].value, "items")
  except SyntaxError as error:  # In a config file: where, without our frames.
    lines = traceback.format_exception_only(error)
    sys.exit(f"error: --config: {''.join(lines).strip()}")
  except (AttributeError, KeyError, OSError, TypeError, ValueError) as error:
    # From a config file, or for an override that the config does not take.
    last = traceback.extract_tb(error.__traceback__)[-1]
    if "ml_collections" not in last.filename:
      raise
    sys.exit(f"error: --config: {_explain_config(error)}")
  return rest


def _parse_all(argv: list[str]) -> list[str]:
  """Returns the arguments that are not flags; exits with all bad flags."""
  problems = []
  while True:
    try:
      rest = flags.FLAGS(argv)
      break
    except SystemExit:  # From --help, which absl ends with 1.
      sys.exit(0)
    except flags.Error as error:
      problems.append(_explain(str(error)))
      found = re.search(r"flag (?:--|')([^'=]+)", str(error))
      others = [a for a in argv if not found or _name(a) != found[1]]
    # Again without the bad one, and without what --config has defined.
    if others == argv:
      break
    argv = others
    for name in list(flags.FLAGS):
      if name.startswith("config."):
        delattr(flags.FLAGS, name)
  if problems:
    lead = "these flags are wrong:\n  " if problems[1:] else ""
    sys.exit(f"error: {lead}" + "\n  ".join(problems) + "\nSee --help.")
  return rest


def _name(argument: str) -> str:
  return argument.lstrip("-").split("=")[0]


def _explain_config(error: Exception) -> str:
  """Returns what is wrong with a config file, or with an entry of it."""
  missing = re.search(r"No such file or directory: '(.*)'", str(error))
  if missing:
    file = Path(missing[1])
    there = sorted(str(x) for x in file.parent.glob("*.py"))
    return (
      f"got {str(file)!r}; there is no such file."
      f"{spec.closest(str(file), there)} {file.parent} has {there}."
    )
  cause = error.__cause__ or error
  while cause.args and isinstance(cause.args[0], Exception):
    cause = cause.args[0]
  message = cause.args[0] if isinstance(cause, KeyError) else cause
  line = " ".join(str(message).split())
  if re.fullmatch(r"'?\w*'?", line):
    line = f"got {line}; there is no such entry. Look into the config file."
  return line


def _explain(message: str) -> str:
  """Returns what is wrong with a flag.

  Of an error inside a config file absl gives the traceback; if the error is for
  the user, the traceback is left out.
  """
  number = re.fullmatch(
    r"flag (\S+?)=.*(integer|int\(\)|float).*: ('.*')", message, re.DOTALL
  )
  if number:
    name, kind, value = number.groups()
    kind = "a number" if kind == "float" else "a whole number"
    line = f"{name}: got {value}; must be {kind}, in digits."
    if value == "'None'":
      line += " Set None in the config file; here it cannot be given."
    return line
  kinds = r"ValueError: |FileNotFoundError: |TypeError: (?=get_config\()"
  found = re.search(rf"^({kinds})(.*)", message, re.MULTILINE | re.DOTALL)
  if found:
    return f"--config: {found[2].strip()}"
  value = re.fullmatch(r"flag (--\S+?)=(.*?): (.*)", message, re.DOTALL)
  return f"{value[1]}: got {value[2]!r}; {value[3]}." if value else message
