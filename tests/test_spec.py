import importlib
import json
from typing import Annotated, Union

import flax.linen as nn
import pytest
from absl import flags
from ml_collections import config_flags

from vit_jax import losses, spec
from vit_jax.data import fake, subset, transforms
from vit_jax.evaluators import classification
from vit_jax.models import vit


def make(
  *,
  size: tuple[int, int] = (8, 8),
  rate: float = 0.0,
  count: int | None = None,
  scale: float | None = None,
  area: tuple[int, ...] | None = None,
  other: nn.Module | None = None,
  data: object,
) -> tuple:
  return size, rate, count, scale, area, other, data


def override(config, monkeypatch, *overrides):
  """Returns the config after overrides on a real command line."""
  values = flags.FlagValues()
  monkeypatch.setattr("sys.argv", ["prog", *overrides])
  config_flags.DEFINE_config_dict("c", config, flag_values=values)
  values(["prog", *overrides])
  return values.c


def test_spec_fills_every_default_that_json_can_hold():
  assert spec.spec(make).to_dict() == {
    "fn": make,
    "size": (8, 8),
    "rate": 0.0,
    "count": None,
    "scale": None,
    "area": None,
  }


def test_spec_suggests_the_argument_that_was_meant():
  with pytest.raises(
    ValueError,
    match=r"^vit_jax.models.vit:ViT: got argument 'wdith'; it takes "
    r"\['num_classes', 'width', .*\]. Did you mean 'width'\?$",
  ):
    spec.spec(vit.ViT, wdith=3)


@pytest.mark.parametrize(
  "value",
  [object(), {"a": 1}, {1, 2}, b"x", len, (1, len), float("nan"), float("inf")],
)
def test_spec_refuses_what_json_cannot_hold(value):
  with pytest.raises(ValueError, match=r"make: got data=.*; a config holds"):
    spec.spec(make, data=value)


def test_spec_refuses_a_function_without_a_name_of_its_own():
  for fn in (lambda: 0, fake.FakeSource.__len__):
    with pytest.raises(ValueError, match=r"spec: got .*; expected a function"):
      spec.spec(fn)


def test_the_fields_of_flax_are_no_arguments():
  tree = spec.spec(vit.ViT, **vit.sizes("mu/16"))
  assert not {"parent", "name"} & set(tree)
  # But an argument of that name is one, where there is no `parent`.
  assert "name" in spec.arguments(named)


def named(*, name: str) -> str:
  return name


def test_a_none_can_be_overridden_as_it_is_annotated(monkeypatch):
  config = override(
    spec.spec(make),
    monkeypatch,
    *("--c.count=3", "--c.scale=1", "--c.area=(1,2,3)"),
  )
  assert (config.count, config.scale, config.area) == (3, 1.0, (1, 2, 3))
  assert type(config.scale) is float


def test_an_integer_given_for_a_float_can_be_overridden(monkeypatch):
  tree = spec.spec(make, rate=1, scale=2)
  assert type(tree.rate) is type(tree.scale) is float
  config = override(tree, monkeypatch, "--c.rate=0.5", "--c.scale=0.25")
  assert (config.rate, config.scale) == (0.5, 0.25)


def test_lists_become_tuples_at_any_depth():
  tree = spec.spec(make, data=[["kernel$", 0.5], ["bias$", [1, 2]]])
  assert tree.data == (("kernel$", 0.5), ("bias$", (1, 2)))


def test_a_spec_used_twice_is_two_specs():
  inner = spec.spec(make)
  one, two = (spec.spec(make, data=(1, inner)) for _ in range(2))
  one.to_dict()["data"][1].rate = 0.5
  assert (inner.rate, two.to_dict()["data"][1].rate) == (0.0, 0.0)


def test_build_calls_nested_specs_first_and_adds_runtime_arguments():
  inner = spec.spec(make, data=1)
  tree = spec.spec(make, size=(1, 2), count=5)
  assert spec.build(tree, data=3) == ((1, 2), 0.0, 5, None, None, None, 3)
  tree = spec.spec(make, data=(inner, "x"))
  made = spec.build(inner)
  assert spec.build(tree)[-1] == (made, "x")


def test_json_gives_back_functions_tuples_and_nested_specs():
  source = spec.spec(
    fake.FakeSource, num_examples=4, size=(8, 6), num_classes=2
  )
  tree = spec.spec(
    classification.ClassificationEvaluator,
    source=spec.spec(subset.Holdout, source=source, fraction=0.5, part="val"),
    transform=spec.spec(transforms.resize, size=(8, 8)),
  )
  text = spec.to_json(tree)
  assert spec.from_json(text) == tree.to_dict()
  assert spec.from_json(text)["source"]["source"]["size"] == (8, 6)
  assert json.loads(text)["fn"] == (
    "vit_jax.evaluators.classification:ClassificationEvaluator"
  )


@pytest.mark.parametrize(
  "name",
  [
    "os:system",
    "subprocess:Popen",
    "builtins:eval",
    "vit_jax.main:main",
    "vit_jax.main:app",
    "vit_jax.command:run",
    "vit_jax.spec:build",
    "vit_jax.modelsevil:x",
    "vit_jax.models_evil.vit:ViT",
    "vit_jax:data",
    f"{__name__}:make",
  ],
)
def test_a_saved_config_may_not_leave_the_trusted_modules(name):
  with pytest.raises(ValueError, match=r"fn: got .*; a saved config may use"):
    spec.from_json(json.dumps({"model": {"fn": name}}))


@pytest.mark.parametrize(
  "name",
  [
    "vit_jax.main:os.system",
    "vit_jax.models.vit:ViT.__init__",
    "vit_jax.data.images:cv2.imread",
    "vit_jax.data.pipeline:_load",
    "vit_jax.data._private:x",
    "vit_jax.data..images:decode",
    ".vit_jax.data:x",
    "vit_jax.data.images",
    "vit_jax.data.images:",
    "vit_jax.data.images:decode:x",
    "vit_jax.data.images:decode\n",
    "vit_jax.data.images:__import__",
    "",
    None,
    3,
    ["os:system"],
    {"fn": "os:system"},
  ],
)
def test_a_saved_config_names_one_public_thing_of_a_module(name):
  with pytest.raises(ValueError, match=r"fn: got .*; expected 'module:name'"):
    spec.from_json(json.dumps([{"a": {"fn": name}}]))


@pytest.mark.parametrize(
  "name",
  [
    "vit_jax.data.images:cv2",  # Modules.
    "vit_jax.data.folder:epath",
    "vit_jax.data.folder:Iterator",  # Classes and functions from elsewhere.
    "vit_jax.data.folder:Example",
    "vit_jax.evaluators.classification:Context",
    "vit_jax.data.folder:IMAGE_SUFFIXES",  # No function.
    "vit_jax.models.vit:POOLS",
    "vit_jax.optim:Schedule",  # An alias.
    "vit_jax.data.transforms:nothing",
  ],
)
def test_a_saved_config_takes_only_what_its_module_defines(name):
  with pytest.raises(ValueError, match="defines no such function or class"):
    spec.from_json(json.dumps({"fn": name}))


def test_a_saved_config_that_names_no_module_is_refused():
  for name in ("vit_jax.data.nothing:x", "vit_jax.losses.deeper:x"):
    with pytest.raises(ValueError, match=f"fn: got '{name}'; cannot import"):
      spec.from_json(json.dumps({"fn": name}))


def test_an_instance_is_not_a_function(monkeypatch):
  instance = spec.build(spec.spec(transforms.resize))
  instance.__module__ = losses.__name__
  instance.__qualname__ = "instance"
  monkeypatch.setattr(losses, "instance", instance, raising=False)
  with pytest.raises(ValueError, match="defines no such function"):
    spec.from_json('{"fn": "vit_jax.losses:instance"}')


def test_a_refused_name_is_never_called_or_imported(tmp_path, monkeypatch):
  (tmp_path / "evil_module.py").write_text("raise SystemExit('imported')")
  monkeypatch.syspath_prepend(tmp_path)
  with pytest.raises(ValueError, match="a saved config may use"):
    spec.from_json('{"fn": "evil_module:run"}')


def test_allow_names_a_module_or_a_package_that_may_be_used():
  text = spec.to_json(spec.spec(make))
  assert spec.from_json(text, allow=(__name__,))["fn"] is make
  with pytest.raises(ValueError, match=f"--allow={__name__}"):
    spec.from_json(text, allow=(__name__[:-1],))
  # What an allowed module has imported stays refused.
  with pytest.raises(ValueError, match="defines no such function"):
    spec.from_json(json.dumps({"fn": f"{__name__}:json"}), allow=(__name__,))


@pytest.mark.parametrize(
  "text",
  [
    *("", "{", "[1, 2]", "null", '"x"'),
    "[" * 100_000,
    '{"a":' * 100_000,
    "[" * 5_000 + "]" * 5_000,
  ],
)
def test_what_is_no_config_is_one_error(text):
  with pytest.raises(ValueError, match="config: got"):
    spec.from_json(text)


def test_every_trusted_package_exists():
  for name in spec.TRUSTED:
    importlib.import_module(name)


def test_scalar_looks_through_optional_and_annotated():
  assert spec.scalar(int) is int
  assert spec.scalar(float | None) is float
  assert spec.scalar(Union[str, None]) is str  # noqa: UP007
  assert spec.scalar(Union[Annotated[float, 0], None]) is float  # noqa: UP007
  assert spec.scalar(tuple[int, int] | None) is tuple
  for other in (int | str, nn.Module, None, object):
    assert spec.scalar(other) is None


def test_modules_are_all_that_a_config_names():
  config = {
    "a": spec.spec(fake.FakeSource),
    "b": [{"fn": spec.spec}, "text", 3],
  }
  assert spec.modules(config) == ("vit_jax.data.fake", "vit_jax.spec")
