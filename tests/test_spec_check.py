import json

import flax.linen as nn
import optax
import pytest

from vit_jax import config, losses, mixup, optim, preprocess, spec, spec_check
from vit_jax.data import arrays, fake, tfds_source, transforms
from vit_jax.data.example import Source, Transform
from vit_jax.evaluators import classification
from vit_jax.models import vit


def part(
  *, size: tuple[int, int], rate: float = 0.5, source: Source | None = None
) -> Transform: ...


def several(*, transforms: tuple[Transform, ...]) -> Transform: ...


def unannotated(*, anything, more=1): ...


def check(tree, **kwargs):
  return spec_check.check("x", dict(tree), **kwargs)


def test_a_spec_that_can_be_built_has_no_problem():
  assert check(spec.spec(part, size=(1, 2))) == []
  assert check(spec.spec(unannotated, anything=3)) == []


def test_every_problem_of_a_spec_is_listed():
  tree = {"fn": part, "rate": "high", "ratio": 1, "source": 5}
  assert check(tree) == [
    "x.rate: got 'high'; it should be a valid number.",
    f"x.ratio: unknown; {__name__}:part takes ['size', 'rate', 'source']."
    " Did you mean 'rate'?",
    f"x.size: missing; {__name__}:part needs it.",
  ]


def test_what_is_no_spec_is_a_problem():
  for value in (3, {"size": 1}, {"fn": "os:system"}, None):
    assert check_value(value) == [
      f"x: got {value!r}; expected spec(function, ...)."
    ]


def check_value(value):
  return spec_check.check("x", value)


@pytest.mark.parametrize("given", [14, (14,), (14, 14)])
def test_one_number_is_a_pair(given):
  tree = {"fn": part, "size": given}
  assert spec_check.check("x", tree) == []
  assert tree["size"] == (14, 14)


@pytest.mark.parametrize("given", [(1, 2, 3), (), 1.5, "8", (1, "a"), True])
def test_a_pair_is_two_integers(given):
  (problem,) = check({"fn": part, "size": given})
  assert problem.startswith("x.size: got ")


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_numbers_are_finite(value):
  assert check({"fn": part, "size": (1, 1), "rate": value}) == [
    f"x.rate: got {value!r}; it should be a finite number."
  ]


def test_what_the_run_gives_may_not_be_set():
  tree = spec.spec(vit.ViT, **vit.sizes("mu/16"), num_classes=3)
  runtime = ("num_classes", "constrain")
  assert check(tree, runtime=runtime) == [
    "x.num_classes: given by the run. Leave it out."
  ]


def test_what_the_run_gives_must_be_taken():
  assert check(spec.spec(part, size=(1, 1)), runtime=("context",)) == [
    f"x: got {__name__}:part; it must take 'context', of the run."
  ]


def test_a_second_check_finds_no_more_than_what_remains():
  tree = {"fn": part, "size": (1, 1), "wrong": 1}
  assert len(spec_check.check("x", tree)) == 1
  assert spec_check.check("x", tree) == []


def test_nested_specs_are_checked_where_they_stand():
  inner = spec.spec(transforms.resize, size=(8, 8)).to_dict()
  inner["flipp"] = True
  tree = {"fn": several, "transforms": (inner, {"fn": transforms.pad_crop})}
  (problem,) = check(tree)
  assert problem.startswith("x.transforms[0].flipp: unknown; vit_jax.data.")


ATTACK = spec.spec(tfds_source.TfdsSource, name="x", split="y", download=True)


@pytest.mark.parametrize(
  "makes",
  [
    nn.Module,
    Transform,
    preprocess.Normalize,
    mixup.MixFn,
    losses.LossFn,
    optax.GradientTransformation,
    optim.Schedule,
  ],
)
@pytest.mark.parametrize(
  "fn", [tfds_source.TfdsSource, arrays.npz, fake.FakeSource]
)
def test_a_source_passes_for_nothing_that_reading_a_config_builds(makes, fn):
  (problem,) = check({"fn": fn}, makes=makes)
  assert "it must make a" in problem


@pytest.mark.parametrize("slot", ["size", "rate"])
def test_no_number_can_be_a_spec(slot):
  tree = {"fn": part, "size": (1, 1)} | {slot: ATTACK.to_dict()}
  (problem,) = check(tree)
  assert problem.startswith(f"x.{slot}: got ")
  tree["size"] = (ATTACK.to_dict(), 1)
  assert any(p.startswith("x.size[0]: got ") for p in check(tree))


def test_reading_a_config_builds_no_source(monkeypatch):
  """Whatever a file names, and wherever: none of it is called."""

  def fail(self, **kwargs):
    raise AssertionError(kwargs)

  monkeypatch.setattr(tfds_source.TfdsSource, "__init__", fail)
  good = json.loads(spec.to_json(complete()))
  attack = json.loads(spec.to_json(ATTACK))
  slots = [
    *("model", "normalize", "mix", "loss", "optimizer", "schedule", "name"),
    *("batch_size", "rules", "best_metric", "data", "mesh", "evals"),
  ]
  for bad in [good | {slot: attack} for slot in slots] + [
    good | {slot: {**good[slot], key: attack}}
    for slot in ("model", "normalize", "mix", "loss", "optimizer", "schedule")
    for key in [*good[slot], "total_steps", "num_classes", "constrain"]
    if key != "fn"
  ]:
    tree = spec.from_json(json.dumps(bad))
    with pytest.raises(ValueError, match="is not runnable"):
      config.parse(tree)


def complete():
  result = config.base_config()
  result.model = spec.spec(vit.ViT, **vit.sizes("mu/16"))
  result.total_steps = 8
  result.data.source = spec.spec(
    fake.FakeSource, num_examples=8, size=(16, 16), num_classes=2
  )
  result.data.transform = spec.spec(transforms.resize, size=(16, 16))
  result.evals.val = spec.spec(
    classification.ClassificationEvaluator,
    source=result.data.source,
    transform=spec.spec(transforms.resize, size=(16, 16)),
  )
  return result
