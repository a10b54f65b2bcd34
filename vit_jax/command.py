"""What the commands share: one line for a user's mistake, no traceback."""

import logging as std_logging
import re
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

from absl import flags, logging

_PACKAGE = str(Path(__file__).parent)


def run(main: Callable[[], int]) -> NoReturn:
  """Exits with the code of `main`, or with a message and 1 on bad input.

  Only errors that this package raises itself are taken for bad input; others
  keep their traceback.
  """
  if not flags.FLAGS.is_parsed():
    flags.FLAGS.mark_as_parsed()  # Or each log line says that it is not.
  logging.use_absl_handler()
  logging.set_verbosity(max(logging.get_verbosity(), logging.INFO))
  logging.get_absl_handler().addFilter(_is_for_people)
  try:
    sys.exit(main())
  except (FloatingPointError, ImportError, OSError, ValueError) as error:
    last = traceback.extract_tb(error.__traceback__)[-1]
    if not last.filename.startswith(_PACKAGE):
      raise
    sys.exit(f"error: {error}")
  except KeyboardInterrupt:
    sys.exit(130)


def _is_for_people(record: std_logging.LogRecord) -> bool:
  """Returns whether a log line is ours, or a warning of a library.

  Orbax warns of what is as it should be; its failures are exceptions.
  """
  orbax = "/orbax/" in record.pathname.replace("\\", "/")
  lowest = std_logging.ERROR if orbax else std_logging.WARNING
  return record.pathname.startswith(_PACKAGE) or record.levelno >= lowest


def parse_flags(argv: list[str]) -> list[str]:
  """Returns the arguments that are not flags; a bad flag gets one line."""
  try:
    rest = flags.FLAGS(argv)
    if "config" in flags.FLAGS:  # A missing file raises only when it is used.
      hasattr(flags.FLAGS["config"].value, "items")
  except SystemExit:  # From --help, which absl ends with 1.
    sys.exit(0)
  except flags.Error as error:
    sys.exit(f"error: {_explain(str(error))}\nSee --help.")
  except (AttributeError, KeyError, OSError, TypeError, ValueError) as error:
    # From a config file, or for an override that the config does not take.
    last = traceback.extract_tb(error.__traceback__)[-1]
    if "ml_collections" not in last.filename:
      raise
    cause = error.__cause__ or error
    while cause.args and isinstance(cause.args[0], Exception):
      cause = cause.args[0]
    message = cause.args[0] if isinstance(cause, KeyError) else cause
    sys.exit(f"error: --config: {' '.join(str(message).split())}")
  return rest


def _explain(message: str) -> str:
  """Returns what is wrong with a flag.

  Of an error inside a config file absl gives the traceback; if the error is for
  the user, the traceback is left out.
  """
  if message.endswith("'None'"):
    message += ". Set None in the config file; here it cannot be given."
  kinds = r"ValueError: |FileNotFoundError: |TypeError: (?=get_config\()"
  found = re.search(rf"^({kinds})(.*)", message, re.MULTILINE | re.DOTALL)
  return f"--config: {found[2].strip()}" if found else message
