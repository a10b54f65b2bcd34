"""Gathers what the report page of a run shows."""

import math
from collections.abc import Sequence

import jax
import numpy as np
from etils import epath

from vit_jax import report, spec, train_step
from vit_jax import writers as writers_lib
from vit_jax.config import Experiment
from vit_jax.data import pipeline
from vit_jax.data.example import Source

_NUM_TRAIN_PICTURES = 32


def write(
  experiment: Experiment,
  path: epath.Path,
  *,
  parts: train_step.Parts,
  params: train_step.PyTree,
  source: Source,
  sections: Sequence[report.EvalSection],
  num_bad: int = 0,
) -> None:
  """Writes `report.html` to the workdir.

  Args:
    experiment: the run.
    path: its workdir.
    parts: what its train step is made of.
    params: trained parameters, to be counted.
    source: the training examples.
    sections: what the evaluators found.
    num_bad: training images that were left out as undecodable.
  """
  total = sum(math.prod(x.shape) for x in jax.tree.leaves(params))
  images = experiment.total_steps * experiment.batch_size
  devices = jax.devices()
  left_out = {"left out": f"{num_bad:,} undecodable"} if num_bad else {}
  report.write_report(
    path / "report.html",
    title=experiment.name,
    facts={
      "model": spec.reference(experiment.model["fn"]),
      "parameters": f"{total:,}",
      "steps": f"{experiment.total_steps:,}",
      "batch size": f"{experiment.batch_size:,}",
      "images seen": f"{images:,} ({images / len(source):.1f} epochs)",
      "training images": f"{len(source):,} in {source.num_classes:,} classes",
      **left_out,
      "devices": f"{len(devices)} x {devices[0].device_kind}",
      "jax": jax.__version__,
    },
    history=writers_lib.read_history(path / "metrics.jsonl"),
    evaluations=sections,
    train_pictures=first_batch(experiment, parts, source),
    config_json=spec.to_json(experiment.model_dump()),
  )


def first_batch(
  experiment: Experiment, parts: train_step.Parts, source: Source
) -> list[report.Picture]:
  """Returns the first training batch as the model saw it: cropped and mixed."""
  batch = next(
    pipeline.train_batches(
      source,
      spec.build(experiment.data.transform),
      batch_size=experiment.batch_size,
      seed=experiment.seed,
      max_bad=experiment.data.max_bad,
    )
  )
  key = jax.random.fold_in(jax.random.key(experiment.seed), 0)
  mix = jax.jit(lambda batch, key: train_step.mix_batch(parts, batch, key))
  mixed = jax.device_get(mix({k: batch[k] for k in batch if k != "index"}, key))
  real = np.flatnonzero(mixed["mask"] > 0)[:_NUM_TRAIN_PICTURES]
  pixels = np.rint(mixed["image"][real])  # [N, H, W, C]
  pixels = pixels.astype(batch["image"].dtype)
  return [
    report.Picture(image, caption=report.label_text(label, source.class_names))
    for image, label in zip(pixels, mixed["label"][real])
  ]
