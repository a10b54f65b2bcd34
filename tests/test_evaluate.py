"""Evaluators of a run, by name, on a checkpoint and without a loop."""

import dataclasses
import json

import jax
import numpy as np
import pytest

from tests import tiny
from vit_jax import checkpoint, evaluate, losses, preprocess, report, spec
from vit_jax import workdir as workdir_lib
from vit_jax.data import fake, transforms
from vit_jax.evaluators import classification, evaluator

CLASSES = tuple(f"class_{k}" for k in range(tiny.NUM_CLASSES))


def make_experiment(names=("val",), **changes):
  evaluator_spec = spec.spec(
    classification.ClassificationEvaluator,
    source=spec.spec(fake.FakeSource, num_examples=37, size=(16, 16)),
    transform=spec.spec(transforms.resize, size=(16, 16)),
  )
  evals = {name: evaluator_spec.to_dict() for name in names}
  return tiny.experiment(evals=evals, **changes)


@pytest.fixture(scope="module")
def workdir(tmp_path_factory):
  """A run: params of seed 3 and an average of seed 4, at step 3; 5 later."""
  path = tmp_path_factory.mktemp("run")
  experiment = make_experiment(ema_decay=0.9)
  mesh = tiny.mesh(4, 2)
  with jax.set_mesh(mesh):
    run = tiny.run(experiment, mesh)
  with checkpoint.Checkpointer(path / "checkpoints", keep=2) as checkpoints:
    for step in (3, 5):
      state = run.place(tiny.random_params(step))
      checkpoints.save(
        dataclasses.replace(
          state,
          step=jax.device_put(np.int32(step), run.target.step.sharding),
          ema_params=jax.device_put(
            tiny.random_params(step + 1),
            jax.tree.map(lambda x: x.sharding, run.target.params),
          ),
        ),
        {"image_shape": tiny.IMAGE_SHAPE},
      )
  workdir_lib.prepare(path, experiment, class_names=CLASSES, force=True)
  return path


def make_context(experiment, mesh):
  return evaluator.Context(
    model=spec.build(experiment.model, num_classes=tiny.NUM_CLASSES),
    mesh=mesh,
    normalize=preprocess.Normalize(),
    loss=losses.softmax_cross_entropy(),
    class_names=CLASSES,
    batch_size=16,
    check_stop=lambda: None,
  )


def direct(seed):
  """Returns the metrics of parameters on one device."""
  experiment = make_experiment()
  context = make_context(experiment, tiny.mesh(1, 1))
  evaluators = evaluate.make_evaluators(experiment, context)
  return evaluate.run(evaluators, tiny.random_params(seed))


def test_average_of_the_newest_step_is_evaluated_on_any_mesh(workdir):
  want = direct(6)
  assert want["val/count"] == 37
  for mesh in ({"data": 1, "fsdp": -1}, {"data": 8, "fsdp": 1}):
    got = evaluate.evaluate(make_experiment(mesh=mesh), workdir)
    assert got == pytest.approx(want, rel=1e-6)


@pytest.mark.parametrize("name", ["3", "{workdir}/checkpoints/3"])
def test_checkpoint_may_be_named(workdir, name):
  got = evaluate.evaluate(
    make_experiment(), workdir, checkpoint_path=name.format(workdir=workdir)
  )
  assert got == pytest.approx(direct(4), rel=1e-6)
  assert got != direct(6)


def test_classes_are_those_the_run_was_trained_on(workdir):
  file = workdir / "classes.json"
  before = file.read_text()
  file.write_text(json.dumps([f"other_{k}" for k in range(10)]))
  try:
    with pytest.raises(ValueError, match=r"the model knows 10: .'other_0'"):
      evaluate.evaluate(make_experiment(), workdir)
  finally:
    file.write_text(before)


def test_model_that_is_not_the_checkpoints_is_refused(workdir):
  experiment = make_experiment(model={"mlp_dim": 64})
  with pytest.raises(ValueError, match=r"(?s)do not fit the model:.*fc1/ker"):
    evaluate.evaluate(experiment, workdir)


def test_without_evaluators_there_is_nothing_to_do(workdir):
  with pytest.raises(ValueError, match=r"evals: got none; .* Add one"):
    evaluate.evaluate(tiny.experiment(), workdir)


def test_workdir_without_checkpoint_is_refused(tmp_path):
  with pytest.raises(ValueError, match="there is no checkpoint"):
    evaluate.evaluate(make_experiment(), tmp_path)


class Constant:
  """An evaluator of a kind that has nothing to show but numbers."""

  def __init__(self, value):
    self.value = value

  def __call__(self, params):
    return {"score": self.value}


def test_metrics_are_named_after_their_evaluator():
  evaluators = {"a": Constant(1.0), "b": Constant(2.0)}
  assert evaluate.run(evaluators, {}) == {"a/score": 1.0, "b/score": 2.0}
  results, sections = evaluate.run_and_show(evaluators, {})
  assert results == {"a/score": 1.0, "b/score": 2.0}
  assert sections == [
    report.EvalSection("a", {"score": 1.0}),
    report.EvalSection("b", {"score": 2.0}),
  ]


def test_report_shows_the_numbers_and_the_worst_pictures():
  experiment = make_experiment(names=("val",))
  context = make_context(experiment, tiny.mesh(1, 1))
  evaluators = evaluate.make_evaluators(experiment, context)
  params = tiny.random_params(6)
  results, (section,) = evaluate.run_and_show(evaluators, params)
  assert results == evaluate.run(evaluators, params)
  assert section.name == "val"
  assert section.class_names == context.class_names
  assert section.per_class is not None and section.per_class.shape == (10,)
  assert section.per_class_count is not None
  assert section.per_class_count.sum() == 37
  assert len(section.pictures) == 32
