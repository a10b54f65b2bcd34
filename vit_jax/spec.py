"""A function reference as data: `spec` writes it, `build` calls it.

A spec is a dict with the key `fn` (a function or class) and that function's
arguments. Arguments that JSON can hold live in the spec; what it cannot hold
(a mesh, a model, a class count found in the data) is a runtime argument, given
to `build`.
"""

import copy
import difflib
import importlib
import inspect
import json
import math
import re
import types
import typing
from collections.abc import Callable, Iterable, Mapping
from typing import Annotated, Any

from ml_collections import ConfigDict, config_dict

# Saved specs resolve to functions defined in these packages and nowhere else.
TRUSTED = (
  *("vit_jax.models", "vit_jax.data", "vit_jax.evaluators", "vit_jax.optim"),
  *("vit_jax.losses", "vit_jax.mixup", "vit_jax.preprocess"),
)
Spec = Any  # A mapping, or a ConfigDict, which is none to a type checker.
_SCALARS = (bool, int, float, str, tuple)


def spec(fn: Callable[..., Any], /, **kwargs: Any) -> ConfigDict:
  """Returns `fn` and its arguments as a ConfigDict, every default filled in.

  Args:
    fn: a function or class at the top level of an importable module.
    **kwargs: arguments that JSON can hold: finite numbers, strings, booleans,
      None, tuples of these, nested specs.

  Returns:
    `fn` and its arguments, typed as they are annotated: the command line can
    override a float given as 1 by 0.5, and a None of `int | None` by 3.

  Raises:
    ValueError: for an unknown argument, or a value that JSON cannot hold.
  """
  if "." in fn.__qualname__ or "<" in fn.__qualname__:
    raise ValueError(
      f"spec: got {fn.__qualname__}; expected a function or class at the top "
      "level of a module, so that a saved config can name it. Move it there."
    )
  parameters = arguments(fn)
  for name, value in kwargs.items():
    if name not in parameters:
      raise ValueError(
        f"{reference(fn)}: got argument {name!r}; it takes "
        f"{list(parameters)}.{closest(name, parameters)}"
      )
    if not _is_data(value):
      raise ValueError(
        f"{reference(fn)}: got {name}={value!r}; a config holds finite "
        "numbers, strings, booleans, tuples and specs. Give it to build()."
      )
  result = ConfigDict({"fn": fn})
  for name, parameter in parameters.items():
    value = kwargs.get(name, parameter.default)
    kind = scalar(parameter.annotation)
    if name in kwargs or (_is_data(value) and (value is not None or kind)):
      result[name] = _field(value, kind)  # All others: runtime arguments.
  return result


def build(tree: Mapping[str, Any] | ConfigDict, **runtime: Any) -> Any:
  """Returns `fn(...)` of a spec; nested specs are built first.

  Args:
    tree: a spec.
    **runtime: arguments of the outermost function that the spec leaves open.
  """
  kwargs = {k: _build_value(v) for k, v in tree.items()}
  fn: Any = kwargs.pop("fn")
  return fn(**kwargs, **runtime)


def arguments(fn: Callable[..., Any]) -> dict[str, inspect.Parameter]:
  """Returns the parameters of `fn` by name; of a Flax module its own fields."""
  parameters = inspect.signature(fn, eval_str=True).parameters
  flax = {"parent", "name"}  # Every Flax module has these two.
  hidden = flax if flax <= parameters.keys() else set()
  return {k: v for k, v in parameters.items() if k not in hidden}


def scalar(hint: Any) -> type | None:
  """Returns `int` for the annotations `int` and `int | None`.

  So for bool, float, str and tuple; None for all else.
  """
  if typing.get_origin(hint) in (types.UnionType, typing.Union):
    members = [h for h in typing.get_args(hint) if h is not type(None)]
    hint = members[0] if len(members) == 1 else None
  if typing.get_origin(hint) is Annotated:
    hint = typing.get_args(hint)[0]
  kind = typing.get_origin(hint) or hint
  return kind if kind in _SCALARS else None


def is_spec(value: Any) -> bool:
  """Returns whether `value` is a spec."""
  return isinstance(value, Mapping | ConfigDict) and "fn" in value


def as_dict(tree: Spec) -> dict[str, Any]:
  """Returns a spec as plain dicts."""
  return tree.to_dict() if isinstance(tree, ConfigDict) else dict(tree)


def reference(fn: Callable[..., Any]) -> str:
  """Returns the name under which `fn` is saved: `module:name`."""
  return f"{fn.__module__}:{fn.__qualname__}"


def modules(tree: Any) -> tuple[str, ...]:
  """Returns the modules of all functions that a config names, sorted."""
  if isinstance(tree, Mapping | ConfigDict):
    found = {m for v in tree.values() for m in modules(v)}
  elif isinstance(tree, tuple | list):
    found = {m for v in tree for m in modules(v)}
  else:
    found = {tree.__module__} if callable(tree) else set()
  return tuple(sorted(found))


def closest(name: str, known: Iterable[str]) -> str:
  """Returns " Did you mean ...?", or "" if nothing is near."""
  close = difflib.get_close_matches(name, list(known), 1)
  return f" Did you mean {close[0]!r}?" if close else ""


def to_json(config: Mapping[str, Any] | ConfigDict) -> str:
  """Returns a config as JSON; functions become `module:name`."""
  return json.dumps(_plain(config), indent=2, sort_keys=True) + "\n"


def from_json(text: str, *, allow: tuple[str, ...] = ()) -> dict[str, Any]:
  """Returns the config that `to_json` wrote, functions resolved.

  Args:
    text: the JSON.
    allow: further modules or packages, by name, whose functions may be used.

  Raises:
    ValueError: if it is no config, or names anything but a public function or
      class that a module of `TRUSTED` or `allow` defines. A config file from
      elsewhere must not be able to run code.
  """
  try:
    tree = _resolve_all(json.loads(text), TRUSTED + allow)
  except (json.JSONDecodeError, RecursionError) as error:
    raise ValueError(
      f"config: got {text[:20]!r}...; not the JSON of a config ({error}). "
      "Restore the file."
    ) from None
  if not isinstance(tree, dict):
    raise ValueError(f"config: got {text[:20]!r}...; expected a JSON object.")
  return tree


def _field(value: Any, kind: type | None) -> Any:
  if value is None:
    return config_dict.placeholder(kind or object)
  if kind is float and type(value) is int:
    return float(value)
  return copy.deepcopy(_tuples(value))  # A spec used twice is two specs.


def _tuples(value: Any) -> Any:
  if isinstance(value, tuple | list):
    return tuple(_tuples(v) for v in value)
  return value


def _is_data(value: Any) -> bool:
  if isinstance(value, tuple | list):
    return all(_is_data(v) for v in value)
  if isinstance(value, float):
    return math.isfinite(value)
  return value is None or isinstance(value, bool | int | str) or is_spec(value)


def _build_value(value: Any) -> Any:
  if is_spec(value):
    return build(value)
  if isinstance(value, tuple | list):
    return tuple(_build_value(v) for v in value)
  return value


def _plain(value: Any) -> Any:
  if isinstance(value, Mapping | ConfigDict):
    return {k: _plain(v) for k, v in value.items()}
  if isinstance(value, tuple | list):
    return [_plain(v) for v in value]
  return reference(value) if callable(value) else value


def _resolve_all(value: Any, trusted: tuple[str, ...]) -> Any:
  if isinstance(value, dict):
    return {
      k: _resolve(v, trusted) if k == "fn" else _resolve_all(v, trusted)
      for k, v in value.items()
    }
  if isinstance(value, list):
    return tuple(_resolve_all(v, trusted) for v in value)
  return value


def _resolve(name: Any, trusted: tuple[str, ...]) -> Callable[..., Any]:
  public = r"[A-Za-z]\w*(\.[A-Za-z]\w*)*:[A-Za-z]\w*"  # No dots in the name.
  if not isinstance(name, str) or not re.fullmatch(public, name, re.ASCII):
    raise ValueError(f"fn: got {name!r}; expected 'module:name', both public.")
  module_name, attribute = name.split(":")
  if not any(f"{module_name}.".startswith(f"{t}.") for t in trusted):
    raise ValueError(
      f"fn: got {name!r}; a saved config may use {list(trusted)}. If you trust "
      f"this file, allow the module with --allow={module_name}."
    )
  try:
    fn = getattr(importlib.import_module(module_name), attribute, None)
  except ModuleNotFoundError as error:
    raise ValueError(f"fn: got {name!r}; cannot import it: {error}.") from None
  # Defined there, not imported into it: `vit_jax.data.images:cv2` is a name
  # too. No instances either: a call of one may do anything.
  is_function = inspect.isfunction(fn) or inspect.isclass(fn)
  if fn is None or not is_function or reference(fn) != name:
    raise ValueError(
      f"fn: got {name!r}; {module_name} defines no such function or class."
    )
  return fn
