"""A run as a value: `Experiment`, its defaults, and every check of a config."""

import functools
import math
from collections.abc import Callable, Iterator, Mapping
from typing import Annotated, Any, Literal

import flax.linen as nn
import ml_collections
import optax
import pydantic
from ml_collections import config_dict

from vit_jax import losses, mixup, optim, preprocess, sharding, spec_check
from vit_jax import spec as spec_lib
from vit_jax.data.example import Transform

Spec = dict[str, Any]
# Steps and positions in a batch are int32 on the device.
PositiveInt = Annotated[int, pydantic.Field(gt=0, lt=2**31)]
# 0 disables what it counts.
Count = Annotated[int, pydantic.Field(ge=0, lt=2**31)]
Seed = Annotated[int, pydantic.Field(ge=0, lt=2**32)]


class _Frozen(pydantic.BaseModel):
  model_config = pydantic.ConfigDict(
    frozen=True, extra="forbid", strict=True, allow_inf_nan=False
  )


class Mesh(_Frozen):
  """Devices an axis; -1 takes what is left."""

  data: int = 1
  fsdp: int = -1


class Data(_Frozen):
  """What is trained on."""

  source: Spec
  transform: Spec
  num_workers: Count = 0  # reader subprocesses a process; 0: threads
  max_bad: Count = 0  # undecodable examples to skip before giving up


class Rules(_Frozen):
  """Which parameters get what; patterns are regular expressions on paths."""

  decay: tuple[str, ...] = ("kernel$",)
  freeze: tuple[str, ...] = ()
  freeze_blocks: Count = 0  # the first k encoder blocks
  layer_decay: Annotated[float, pydantic.Field(gt=0, le=1)] = 1.0
  lr_multipliers: tuple[tuple[str, float], ...] = ()


class Experiment(_Frozen):
  """Everything that a run depends on. Steps are optimizer updates."""

  name: str = "vit"
  seed: Seed = 0
  model: Spec
  data: Data
  normalize: Spec = spec_lib.spec(preprocess.Normalize).to_dict()
  mix: Spec = spec_lib.spec(mixup.mixup).to_dict()
  loss: Spec = spec_lib.spec(losses.softmax_cross_entropy).to_dict()

  batch_size: PositiveInt = 128  # global, over all devices
  accum_steps: PositiveInt = 1  # parts that a batch is computed in
  total_steps: PositiveInt
  optimizer: Spec = spec_lib.spec(optim.adamw).to_dict()
  schedule: Spec = spec_lib.spec(optim.cosine, lr=1e-3).to_dict()
  weight_decay: Annotated[float, pydantic.Field(ge=0)] = 0.0  # times the rate
  grad_clip_norm: Annotated[float, pydantic.Field(gt=0)] | None = None
  ema_decay: Annotated[float, pydantic.Field(gt=0, lt=1)] | None = None
  rules: Rules = Rules()
  mesh: Mesh = Mesh()

  evals: dict[str, Spec] = {}
  eval_every: Count = 0  # steps; the last step is always evaluated
  log_every: PositiveInt = 50
  checkpoint_every: Count = 1_000  # the last step is always saved
  keep_checkpoints: PositiveInt = 2
  best_metric: str | None = None  # e.g. "val/accuracy"; its best step is kept

  init_from: str | None = None  # weights: path, URL or name, or None
  # How their position embeddings are resized, as `weights.load` says.
  init_posemb_resize: Literal[
    "corner_linear", "half_pixel_linear", "timm", "transformers"
  ] = "corner_linear"
  resume_from: str | None = None  # another run's whole state, or None
  tensorboard: bool = True
  wandb_project: str | None = None


# What may change between a run and its continuation: none of these changes
# which numbers the training computes.
FREE_TO_CHANGE = [
  "name",
  "mesh",
  "evals",
  "eval_every",
  "log_every",
  "checkpoint_every",
  "keep_checkpoints",
  "best_metric",
  "init_from",
  "init_posemb_resize",
  "resume_from",
  "tensorboard",
  "wandb_project",
  "data.num_workers",
  "data.max_bad",
]


def base_config() -> Any:  # ConfigDict's attributes have no types.
  """Returns the defaults of `Experiment` as a ConfigDict to fill in.

  `model`, `data.source`, `data.transform` and `total_steps` have no default:
  each recipe sets them.
  """
  return _defaults(Experiment)


def steps(*, epochs: float, examples: int, batch_size: int) -> int:
  """Returns the whole number of batches in so many epochs, at least one."""
  return max(1, math.floor(epochs * examples / batch_size))


def parse(
  config: Mapping[str, Any] | ml_collections.ConfigDict,
  *,
  name: str = "config",
  num_devices: int = 1,
) -> Experiment:
  """Returns the Experiment of a config, or reports all that is wrong with it.

  Args:
    config: what a config file returns, or what `spec.from_json` reads.
    name: the config's file, for the message.
    num_devices: devices of all processes, which the batch must divide over.

  Raises:
    ValueError: naming every problem, one a line.
  """
  experiment, problems = _validate(_to_dict(config))
  # What has problems of its own is not asked for more.
  bad = {problem.split(":")[0] for problem in problems}
  sound = {}
  for path, value, makes, runtime in _specs(experiment):
    check = functools.partial(
      spec_check.check, path, value, makes=makes, runtime=runtime
    )
    if path not in bad:
      found = check()
      problems += found
      if not found or not check():  # Only unknown arguments, now gone.
        sound[path] = value
  problems += _check_parts(experiment, sound, bad)
  problems += _check_sizes(sound)
  problems += _check_run(experiment, bad, num_devices)
  if problems:
    lines = "\n  ".join(problems)
    raise ValueError(f"{name} is not runnable:\n  {lines}")
  return experiment


def changes(old: Mapping[str, Any], new: Mapping[str, Any]) -> dict[str, str]:
  """Returns what differs between two configs: dotted path -> "old -> new".

  Args:
    old: a config as plain data, functions as `module:name`.
    new: another.
  """
  flat_old, flat_new = (
    {path: repr(value) for path, value in _flatten(tree)} for tree in (old, new)
  )
  both = {
    path: (flat_old.get(path, "absent"), flat_new.get(path, "absent"))
    for path in sorted(flat_old.keys() | flat_new.keys())
  }
  return {path: f"{a} -> {b}" for path, (a, b) in both.items() if a != b}


def is_free_to_change(path: str) -> bool:
  """Returns whether a continued run may differ in this entry."""
  return any(f"{path}.".startswith(f"{free}.") for free in FREE_TO_CHANGE)


def _defaults(cls: type[pydantic.BaseModel]) -> ml_collections.ConfigDict:
  result = config_dict.ConfigDict()
  for name, field in cls.model_fields.items():
    hint = field.annotation
    if isinstance(hint, type) and issubclass(hint, pydantic.BaseModel):
      result[name] = _defaults(hint)
    elif field.is_required():
      continue
    elif field.default is None:
      result[name] = config_dict.placeholder(spec_lib.scalar(hint))
    elif isinstance(field.default, dict):
      result[name] = config_dict.ConfigDict(field.default)
    else:
      result[name] = field.default
  return result


def _to_dict(value: Any) -> Any:
  if isinstance(value, (Mapping, config_dict.ConfigDict)):
    return {k: _to_dict(v) for k, v in value.items()}
  if isinstance(value, (tuple, list)):
    return tuple(_to_dict(v) for v in value)
  return value


def _flatten(tree: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
  if isinstance(tree, Mapping):
    for key, value in tree.items():
      yield from _flatten(value, f"{prefix}.{key}" if prefix else key)
  else:
    yield prefix, tree


def _validate(tree: dict[str, Any]) -> tuple[Experiment, list[str]]:
  """Returns the config without what is wrong in it, and what that is."""
  tree.setdefault("data", {})
  problems = {}
  while True:
    try:
      return Experiment(**tree), list(problems.values())
    except pydantic.ValidationError as error:
      for found in error.errors():
        path = ".".join(map(str, found["loc"]))
        problems.setdefault(path, _explain(found))
        _repair(tree, found["type"], found["loc"])


def _repair(node: dict[str, Any], kind: str, loc: tuple[Any, ...]) -> None:
  """Fills in what is missing, takes out what is wrong."""
  for key in loc[:-1]:
    if not isinstance(node[key], dict):
      del node[key]
      return
    node = node[key]
  if kind == "missing":
    node[loc[-1]] = 1 if loc[-1] == "total_steps" else {}
  else:
    node.pop(loc[-1], None)


def _explain(error: Any) -> str:
  """Returns one line for one finding of pydantic."""
  *parents, key = error["loc"]
  path = ".".join(map(str, error["loc"]))
  if error["type"] == "missing":
    return f"{path}: missing; set it in the config file."
  if error["type"] == "extra_forbidden":
    fields: dict[str, Any] = Experiment.model_fields
    for parent in parents:
      fields = fields[parent].annotation.model_fields
    close = spec_lib.closest(key, fields)
    return f"{path}: unknown; must be one of {list(fields)}.{close}"
  return f"{path}: got {error['input']!r}; {spec_check.explain(error)}."


def _specs(
  experiment: Experiment,
) -> Iterator[tuple[str, Spec, Any, tuple[str, ...]]]:
  """Yields each spec: its path, itself, what it makes, runtime arguments."""
  e, data = experiment, experiment.data
  yield "model", e.model, nn.Module, ("num_classes", "constrain")
  yield "data.source", data.source, Any, ()
  yield "data.transform", data.transform, Transform, ()
  yield "normalize", e.normalize, preprocess.Normalize, ()
  yield "mix", e.mix, mixup.MixFn, ()
  yield "loss", e.loss, losses.LossFn, ()
  yield "optimizer", e.optimizer, optax.GradientTransformation, ()
  yield "schedule", e.schedule, optim.Schedule, ("total_steps",)
  for name, evaluator in e.evals.items():
    yield f"evals.{name}", evaluator, Callable, ("context",)


def _check_parts(
  experiment: Experiment, sound: dict[str, Spec], bad: set[str]
) -> list[str]:
  """Builds what is cheap to build; each part states its own conditions."""
  runtime: dict[str, dict[str, Any]] = {"model": {"num_classes": 1}}
  if "total_steps" not in bad:
    runtime["schedule"] = {"total_steps": experiment.total_steps}
  parts = dict(_transforms(sound))
  for name in ("model", "normalize", "mix", "loss", "optimizer", "schedule"):
    if name in sound and (name in runtime or name != "schedule"):
      parts[name] = sound[name]
  problems = []
  for name, part in parts.items():
    try:
      spec_lib.build(part, **runtime.get(name, {}))
    except ValueError as error:
      problems += [f"{name}.{line}" for line in str(error).splitlines()]
  return problems


def _transforms(sound: dict[str, Spec]) -> Iterator[tuple[str, Spec]]:
  for path, value in sound.items():
    if path == "data.transform":
      yield path, value
    elif path.startswith("evals.") and spec_lib.is_spec(value.get("transform")):
      yield f"{path}.transform", value["transform"]


def _check_sizes(sound: dict[str, Spec]) -> list[str]:
  """Checks sizes and range of images, and that all are decoded alike."""
  problems = []
  train = sound.get("data.transform", {})
  model = sound.get("model", {})
  default = spec_lib.spec(preprocess.Normalize).to_dict()
  if train.get("bits") == 16 and sound.get("normalize") == default:
    problems.append(
      "normalize: got the default, which is for 8 bits; data.transform.bits is "
      "16. Set mean and std in 0..65535, e.g. (32767.5,)."
    )
  patch = model.get("patch_size")
  for path, transform in _transforms(sound):
    size = transform.get("size")
    if patch and size and any(p > 0 and n % p for n, p in zip(size, patch)):
      problems.append(
        f"model.patch_size: got {patch} with {path}.size {size}; "
        f"{tuple(n % p for n, p in zip(size, patch))} pixels are left over. "
        f"Use size {_legal(size, patch)}."
      )
    fixed = model.get("posemb") == "learned"
    if fixed and size and train.get("size") and size != train["size"]:
      problems.append(
        f"{path}.size: got {size}; must equal data.transform.size "
        f"{train['size']}, for which the position embeddings are learned."
      )
    for key in ("exif", "background", "num_channels", "bits"):
      if key in transform and transform[key] != train.get(key, transform[key]):
        problems.append(
          f"{path}.{key}: got {transform[key]!r}; must equal "
          f"data.transform.{key} {train[key]!r}. Decode alike everywhere."
        )
  return problems


def _legal(size: tuple[int, int], patch: tuple[int, int]) -> str:
  """Returns the nearest sizes that the patches divide, as text."""
  below = tuple(n // p * p for n, p in zip(size, patch))
  above = tuple(-(-n // p) * p for n, p in zip(size, patch))
  return f"{below} or {above}" if min(below) else f"{above}"


def _check_run(
  experiment: Experiment, bad: set[str], num_devices: int
) -> list[str]:
  """Checks the batch against the devices, and names against each other."""
  problems = []
  if not bad & {"batch_size", "accum_steps", "mesh.data", "mesh.fsdp"}:
    problems += _check_batch(experiment, num_devices)
  if experiment.init_from and experiment.resume_from:
    problems.append(
      "init_from: got both it and resume_from; init_from takes another run's "
      "parameters, resume_from its whole state. Set one."
    )
  best = experiment.best_metric
  evaluator, _, metric = (best or "").partition("/")
  if best is not None and not (metric and evaluator in experiment.evals):
    problems.append(
      f"best_metric: got {best!r}; must be '<evaluator>/<metric>' with an "
      f"evaluator of {sorted(experiment.evals)}."
    )
  return problems


def _check_batch(experiment: Experiment, num_devices: int) -> list[str]:
  mesh, batch_size = experiment.mesh, experiment.batch_size
  try:
    data, fsdp = sharding.mesh_shape(
      data=mesh.data, fsdp=mesh.fsdp, num_devices=num_devices
    )
  except ValueError as error:
    return [str(error)]
  unit = num_devices * experiment.accum_steps
  if batch_size % unit == 0:
    return []
  below, above = batch_size // unit * unit, -(-batch_size // unit) * unit
  parts = experiment.accum_steps
  times = f" times accum_steps {parts}" if parts > 1 else ""
  return [
    f"batch_size: got {batch_size}; must be divisible by {num_devices} devices "
    f"(mesh data={data} * fsdp={fsdp}){times}. Try "
    f"{f'{below} or {above}' if below else above}."
  ]
