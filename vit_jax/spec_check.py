"""Whether a spec can be built: each problem as one line, before anything runs.

A config may come from a file that someone else wrote, and reading it builds its
cheap parts. So these checks also see to it that a function stands only where
what it makes is wanted: a data source does not pass for a loss.
"""

import collections.abc
import inspect
import typing
from collections.abc import Mapping
from typing import Any

import pydantic

from vit_jax import spec as spec_lib

_PAIRS = (tuple[int, int], tuple[float, float])


def check(
  path: str, value: Any, *, makes: Any = Any, runtime: tuple[str, ...] = ()
) -> list[str]:
  """Returns the problems of a spec; makes pairs of `(n,)` in it.

  What is unknown or not the spec's to give is taken out: a second call tells
  whether there is more.

  Args:
    path: where the spec stands in the config.
    value: the spec, a dict; changed in place.
    makes: annotation of what calling it must give.
    runtime: arguments that the run gives, and the spec may not.
  """
  if not spec_lib.is_spec(value) or not callable(value["fn"]):
    return [f"{path}: got {value!r}; expected spec(function, ...)."]
  name = spec_lib.reference(value["fn"])
  if not _fits(value["fn"], makes):
    return [f"{path}: got {name}; it must make a {_word(makes)}. Use another."]
  parameters = spec_lib.arguments(value["fn"])
  open_to = [key for key in parameters if key not in runtime]
  problems = []
  for key in value.keys() - {"fn"} - set(open_to):
    del value[key]
    problems.append(
      f"{path}.{key}: given by the run. Leave it out."
      if key in runtime
      else f"{path}.{key}: unknown; {name} takes {open_to}."
      + spec_lib.closest(key, open_to)
    )
  for key, parameter in parameters.items():
    hint = parameter.annotation
    if key in value and key not in runtime:
      value[key] = _pair(value[key]) if hint in _PAIRS else value[key]
      problems += _check_value(f"{path}.{key}", value[key], hint)
    elif parameter.default is inspect.Parameter.empty and key not in runtime:
      problems.append(f"{path}.{key}: missing; {name} needs it.")
  for key in runtime:
    if key not in parameters:
      problems.append(f"{path}: got {name}; it must take {key!r}, of the run.")
  return sorted(problems)


def _pair(value: Any) -> Any:
  """Returns (n, n) for n or (n,): what `--config.x.size=n` leaves behind."""
  value = (value,) if isinstance(value, int | float) else value
  return value * 2 if isinstance(value, tuple) and len(value) == 1 else value


def _check_value(path: str, value: Any, hint: Any) -> list[str]:
  if isinstance(value, tuple) and any(spec_lib.is_spec(v) for v in value):
    member, *_ = [*typing.get_args(hint), Any]  # X of tuple[X, ...].
    return [
      problem
      for i, v in enumerate(value)
      for problem in _check_value(f"{path}[{i}]", v, member)
    ]
  if spec_lib.is_spec(value) and not spec_lib.scalar(hint):
    return check(path, value, makes=hint)
  try:
    adapter = pydantic.TypeAdapter(
      hint, config=pydantic.ConfigDict(strict=True, allow_inf_nan=False)
    )
  except pydantic.errors.PydanticUserError:
    return []  # A Protocol or the like: the function itself checks.
  try:
    adapter.validate_python(value)
  except pydantic.ValidationError as error:
    return [f"{path}: got {value!r}; {explain(error.errors()[0])}."]
  return []


def explain(error: Mapping[str, Any]) -> str:
  """Returns what pydantic found, as the second half of our form."""
  return error["msg"].replace("Input should", "it should")


def _fits(fn: Any, makes: Any) -> bool:
  """Returns whether a call of `fn` gives what `makes` annotates."""
  made = fn
  if not inspect.isclass(fn):
    made = inspect.signature(fn, eval_str=True).return_annotation
  if makes is Any or made in (Any, inspect.Signature.empty):
    return True  # Unannotated is not ours: all of this package is annotated.
  if typing.get_origin(makes) is collections.abc.Callable:
    return typing.get_origin(made) is collections.abc.Callable or any(
      "__call__" in vars(c) for c in inspect.getmro(made)
    )
  if inspect.isclass(makes) and not getattr(makes, "_is_protocol", False):
    return inspect.isclass(made) and issubclass(made, makes)
  return True


def _word(makes: Any) -> str:
  return "function" if not inspect.isclass(makes) else makes.__name__
