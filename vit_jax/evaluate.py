"""The evaluators of a run, in its loop or without one."""

from collections.abc import Mapping
from typing import Any

import jax
import numpy as np
from absl import logging
from etils import epath

from vit_jax import (
  checkpoint,
  report,
  sharding,
  spec,
  state,
  weights,
  workdir,
)
from vit_jax.config import Experiment
from vit_jax.data import probe
from vit_jax.evaluators import classification, evaluator

PyTree = Any


def make_evaluators(
  experiment: Experiment, context: evaluator.Context
) -> dict[str, evaluator.Evaluator]:
  """Returns the evaluators of a run by name."""
  return {
    name: spec.build(value, context=context)
    for name, value in experiment.evals.items()
  }


def run(
  evaluators: Mapping[str, evaluator.Evaluator], params: PyTree
) -> dict[str, float]:
  """Returns all metrics as `evaluator/metric`."""
  results = {}
  for name, one in evaluators.items():
    results |= {f"{name}/{key}": value for key, value in one(params).items()}
  return results


def run_and_show(
  evaluators: Mapping[str, evaluator.Evaluator], params: PyTree
) -> tuple[dict[str, float], list[report.EvalSection]]:
  """Returns all metrics as `run` does, and a section of the report for each."""
  results, sections = {}, []
  for name, one in evaluators.items():
    if isinstance(one, classification.ClassificationEvaluator):
      section = _section(name, one, one.inspect(params))
    else:
      section = report.EvalSection(name, one(params))
    results |= {f"{name}/{k}": v for k, v in section.metrics.items()}
    sections.append(section)
  return results, sections


def evaluate(
  experiment: Experiment,
  path: epath.PathLike,
  *,
  checkpoint_path: epath.PathLike | None = None,
) -> dict[str, float]:
  """Returns the metrics of a checkpoint on all evaluators of a config.

  Args:
    experiment: its model must be that of the checkpoint.
    path: workdir of the run.
    checkpoint_path: "best" or a step of the run, another checkpoint, or weights
      of any format that `weights.load` takes; None for the newest step.

  Raises:
    ValueError: if there is no checkpoint or it does not fit the model.
  """
  if not experiment.evals:
    raise ValueError(
      "evals: got none; there is nothing to evaluate. Add one to the config."
    )
  mesh = sharding.make_mesh(**experiment.mesh.model_dump())
  if checkpoint_path:
    where = checkpoint.choose(path, checkpoint_path)
  else:
    where = checkpoint.find_params(path)
  class_names = workdir.read_class_names(path)
  if class_names is None:
    class_names = spec.build(experiment.data.source).class_names
  model = spec.build(
    experiment.model,
    num_classes=len(class_names),
    constrain=sharding.constrain_batch,
  )
  context = evaluator.Context(
    model=model,
    mesh=mesh,
    normalize=spec.build(experiment.normalize),
    loss=spec.build(experiment.loss),
    class_names=class_names,
    batch_size=experiment.batch_size,
    check_stop=lambda: None,
  )
  with jax.set_mesh(mesh):
    evaluators = make_evaluators(experiment, context)
    image_shape = _image_shape(experiment)
    params, _ = weights.load_params(
      where,
      model,
      image_shape=image_shape,
      allow=spec.modules(experiment.model_dump()),
    )
    logging.info("evaluating %s", where)
    shapes = state.param_shapes(model, image_shape)
    return run(
      evaluators, sharding.place(params, sharding.placed(shapes, mesh))
    )


def _image_shape(experiment: Experiment) -> tuple[int, int, int]:
  """Returns [H, W, C] of what the first evaluator shows the model."""
  first = next(iter(experiment.evals.values()))
  return probe.image_shape(
    spec.build(first["source"]), spec.build(first["transform"])
  )


def _section(
  name: str,
  one: classification.ClassificationEvaluator,
  inspection: classification.Inspection,
) -> report.EvalSection:
  return report.EvalSection(
    name,
    inspection.metrics,
    class_names=one.source.class_names,
    per_class=inspection.accuracy,
    per_class_count=inspection.count,
    pictures=[_picture(one, prediction) for prediction in inspection.worst],
  )


def _picture(
  one: classification.ClassificationEvaluator,
  prediction: classification.Prediction,
) -> report.Picture:
  names = one.source.class_names
  example = one.source[prediction.index]
  shown = one.transform(example, np.random.default_rng(prediction.index))
  assert isinstance(shown["image"], np.ndarray)
  return report.prediction(
    shown["image"],
    truth=" + ".join(names[c] for c in prediction.label) or "nothing",
    predicted=names[prediction.predicted],
    probability=prediction.probability,
    loss=prediction.loss,
    id=example["id"],
  )
