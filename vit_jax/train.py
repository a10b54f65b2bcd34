"""The training loop."""

import contextlib
import math
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np
from absl import logging
from etils import epath
from jax.sharding import Mesh

from vit_jax import (
  checkpoint,
  evaluate,
  optim,
  page,
  preemption,
  sharding,
  spec,
  start,
  train_step,
  workdir,
)
from vit_jax import state as state_lib
from vit_jax import writers as writers_lib
from vit_jax.config import Experiment
from vit_jax.data import pipeline, probe
from vit_jax.data.example import Source
from vit_jax.evaluators import evaluator


class NonFiniteError(FloatingPointError):
  """The loss or a gradient is not a finite number."""


def train(
  experiment: Experiment,
  path: epath.Path,
  *,
  stop: preemption.StopSignal,
  force: bool = False,
) -> dict[str, float]:
  """Trains to `total_steps`, evaluates, and writes the report.

  Args:
    experiment: the run.
    path: its workdir; a run that was interrupted there goes on.
    stop: asked after every step and at every batch of an evaluation.
    force: as in `workdir.prepare`.

  Returns:
    The last evaluation's metrics, as `evaluator/metric`.

  Raises:
    preemption.Preempted: when asked to stop; the state is saved.
    NonFiniteError: naming the step and the culprit.
    ValueError: if data, config, checkpoint and workdir do not fit together.
  """
  total_steps = experiment.total_steps
  mesh = sharding.make_mesh(**experiment.mesh.model_dump())
  source = spec.build(experiment.data.source)
  transform = spec.build(experiment.data.transform)
  image_shape = probe.image_shape(source, transform)
  parts = train_step.make_parts(experiment, source.num_classes, image_shape)
  shapes = state_lib.param_shapes(parts.model, image_shape)
  evaluators = evaluate.make_evaluators(
    experiment,
    evaluator.Context(
      model=parts.model,
      mesh=mesh,
      normalize=parts.normalize,
      loss=parts.loss,
      class_names=source.class_names,
      batch_size=experiment.batch_size,
      check_stop=lambda: _check_stop(stop),
    ),
  )
  workdir.prepare(path, experiment, class_names=source.class_names, force=force)
  _log_facts(experiment, mesh, source, image_shape)
  data = start.describe_data(experiment, source)
  data["image_shape"] = list(image_shape)

  def info() -> dict[str, Any]:  # What is kept beside a state.
    return {**data, "bad_examples": dict(bad)}

  with (
    workdir.held(path),
    jax.set_mesh(mesh),
    checkpoint.Checkpointer(
      path / "checkpoints", keep=experiment.keep_checkpoints
    ) as checkpoints,
    checkpoint.Checkpointer(path / "best") as best,
  ):
    target = state_lib.abstract_state(
      parts.model,
      parts.tx,
      mesh,
      image_shape=image_shape,
      ema=experiment.ema_decay is not None,
    )
    state, evaluated = start.start(
      experiment,
      parts,
      target,
      image_shape=image_shape,
      checkpoints=checkpoints,
      data=data,
    )
    workdir.write(path, experiment, class_names=source.class_names)
    step = int(state.step)
    bad = _known_bad(checkpoints, step)
    if step < total_steps:
      rules = experiment.rules.model_dump()
      logging.info("parameters:\n%s", optim.describe(shapes, **rules))
    run_step = train_step.jit_train_step(experiment, parts, target)
    batches = pipeline.train_batches(
      source,
      transform,
      batch_size=experiment.batch_size,
      seed=experiment.seed,
      start_step=step,
      process_index=jax.process_index(),
      process_count=jax.process_count(),
      num_workers=experiment.data.num_workers,
      max_bad=experiment.data.max_bad,
      bad=bad,
    )
    speed = writers_lib.Speed(experiment.batch_size)
    reports: list[train_step.StepReport] = []  # Of the steps not yet looked at.
    with (
      contextlib.closing(batches),  # Ends its worker processes.
      writers_lib.make_writers(
        path,
        step=step,
        total_steps=total_steps,
        primary=jax.process_index() == 0,
        tensorboard=experiment.tensorboard,
        wandb_project=experiment.wandb_project,
        config=experiment.model_dump(),
      ) as writers,
    ):
      try:
        while step < total_steps:
          if due(step, experiment.eval_every) and step != evaluated:
            results = evaluate.run(evaluators, state.eval_params)
            writers.write(step, results)
            evaluated = step
            keep_best(experiment, best, state, results, info=info())
            speed.update(step)  # What follows is not slower for it.
          if due(step, experiment.checkpoint_every):
            checkpoints.save(state, {**info(), "evaluated": evaluated})

          batch = sharding.to_global(next(batches), mesh)
          state, report = run_step(state, batch)
          step += 1

          reports.append(report)
          jax.block_until_ready(reports[-2:-1])  # At most two steps ahead.
          writers.advance(step)
          stopping = stop.asked(step)
          if (
            stopping
            or step == total_steps
            or due(step, experiment.log_every)
            or due(step, experiment.eval_every)
            or due(step, experiment.checkpoint_every)
          ):
            check_finite(reports, step, source=source, params=state.params)
            reports.clear()
          if due(step, experiment.log_every) or step == total_steps:
            metrics = summary(report, parts.schedule(step - 1), bad=len(bad))
            writers.write(step, metrics | speed.update(step))
          if stopping:
            raise evaluator.Stopped
        checkpoints.save(state, {**info(), "evaluated": evaluated})
        results, sections = evaluate.run_and_show(evaluators, state.eval_params)
      except evaluator.Stopped:
        checkpoints.save(state, {**info(), "evaluated": evaluated})
        checkpoints.wait()
        raise preemption.Preempted(step) from None
      writers.write(step, results)
      keep_best(experiment, best, state, results, info=info())
  if bad:
    logging.warning(
      "training images left out as undecodable: %d; the first is %s",
      *(len(bad), next(iter(bad.values()))),
    )
  if jax.process_index() == 0:
    page.write(
      experiment,
      path,
      parts=parts,
      params=shapes,
      source=source,
      sections=sections,
      num_bad=len(bad),
    )
  return results


def due(step: int, every: int) -> bool:
  """Returns whether something is done after `step`; `every=0` means never."""
  return every > 0 and step > 0 and step % every == 0


def summary(
  report: train_step.StepReport, lr: jax.Array, *, bad: int = 0
) -> dict[str, float]:
  """Returns the metrics of one step; they are those of its own batch.

  A mean since the last line would depend on where a run was interrupted.

  Args:
    report: of the step.
    lr: its learning rate.
    bad: examples that could not be decoded so far; told if there are any.
  """
  metrics: dict[str, float] = {
    "train/loss": float(report.loss.compute()),
    "train/grad_norm": float(report.grad_norm),
    "train/lr": float(lr),
    "train/images": int(report.loss.count),
  }
  if bad:
    metrics["train/bad_examples"] = bad
  return metrics


def check_finite(
  reports: list[train_step.StepReport],
  step: int,
  *,
  source: Source,
  params: state_lib.PyTree,
) -> None:
  """Checks the steps that end with `step`.

  Args:
    reports: one a step, the last is of `step`.
    step: updates so far.
    source: names the example.
    params: names the gradients.

  Raises:
    NonFiniteError: for the first step with a loss or gradient that is not
      finite; names the example or the parameters.
  """
  for i, report in enumerate(jax.device_get(reports)):
    at = step - len(reports) + 1 + i
    if report.culprit >= 0:
      what = f"the loss of example {source[int(report.culprit)]['id']!r}"
    elif not report.finite.all():
      leaves = jax.tree_util.tree_leaves_with_path(params)
      paths = [optim.path_str(path) for path, _ in leaves]
      bad = [paths[k] for k in np.flatnonzero(~report.finite)]
      what = "the gradient of " + ", ".join(bad)
    else:
      continue
    raise NonFiniteError(
      f"step {at}: {what} is not finite. Checkpoints from before it stand; a "
      "lower schedule.lr, a longer warm-up or a grad_clip_norm may help."
    )


def keep_best(
  experiment: Experiment,
  best: checkpoint.Checkpointer,
  state: state_lib.TrainState,
  results: dict[str, float],
  *,
  info: Mapping[str, Any],
) -> None:
  """Saves the state if it has the best value yet of `best_metric`.

  Higher is better, but for a metric whose name ends with "loss".

  Args:
    experiment: names the metric.
    best: holds the best state so far.
    state: was just evaluated.
    results: of the evaluation.
    info: what is kept beside a state.

  Raises:
    ValueError: if no evaluator gives the metric.
  """
  name = experiment.best_metric
  if name is None:
    return
  if name not in results:
    raise ValueError(
      f"best_metric: got {name!r}; the evaluators give {sorted(results)}. "
      "Choose one of these."
    )
  sign = -1 if name.endswith("loss") else 1
  value, step = float(results[name]), int(state.step)
  kept = best.info(best.steps()[-1]) if best.steps() else {}
  old = kept["value"] if kept.get("metric") == name else -sign * math.inf
  if sign * (value - old) > 0:
    logging.info("step %d has the best %s", step, name)
    best.save(
      state, {**info, "evaluated": step, "metric": name, "value": value}
    )


def _known_bad(
  checkpoints: checkpoint.Checkpointer, step: int
) -> dict[int, str]:
  """Returns which examples were known to be bad at a checkpoint, and why."""
  info = checkpoints.info(step) if step in checkpoints.steps() else {}
  return {int(k): why for k, why in info.get("bad_examples", {}).items()}


def _check_stop(stop: preemption.StopSignal) -> None:
  if stop.asked_locally():
    raise evaluator.Stopped


def _log_facts(
  experiment: Experiment,
  mesh: Mesh,
  source: Source,
  image_shape: tuple[int, int, int],
) -> None:
  """Says what the run resolves to."""
  batch_size, total_steps = experiment.batch_size, experiment.total_steps
  logging.info(
    "mesh data=%d * fsdp=%d over %d %s in %d processes",
    mesh.shape["data"],
    mesh.shape["fsdp"],
    mesh.size,
    jax.devices()[0].device_kind,
    jax.process_count(),
  )
  shares = (
    (jax.process_count(), f", {batch_size // jax.process_count()} a process"),
    (mesh.size, f", {batch_size // mesh.size} a device"),
    (experiment.accum_steps, f", in {experiment.accum_steps} parts"),
  )
  told = "".join(text for number, text in shares if number > 1)
  logging.info("batch %d%s", batch_size, told)
  logging.info(
    "%d steps = %.2f epochs of %d images %s, %d classes",
    total_steps,
    total_steps * batch_size / len(source),
    len(source),
    "x".join(map(str, image_shape)),
    source.num_classes,
  )
