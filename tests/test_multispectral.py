"""Files of five channels and 16 bits, from the disk to the report."""

import base64
import io
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tifffile
from PIL import Image

from tests import tiny
from vit_jax import (
  mixup,
  predict,
  preemption,
  preprocess,
  sharding,
  spec,
  train,
  train_step,
)
from vit_jax import state as state_lib
from vit_jax.data import folder, manifest, pipeline, probe, transforms
from vit_jax.evaluators import classification


@pytest.fixture(scope="module")
def root(tmp_path_factory):
  """Returns 16 TIFFs of two classes, which the fifth band alone tells apart."""
  path = tmp_path_factory.mktemp("bands")
  rng = np.random.default_rng(0)
  lines = ["image,label"]
  for i in range(16):
    name = f"train/{('dim', 'lit')[i % 2]}/{i}.tiff"
    image = rng.integers(0, 20_000, (20, 16, 5), np.uint16)
    image[:, :, 4] += i % 2 * 40_000
    (path / name).parent.mkdir(parents=True, exist_ok=True)
    tifffile.imwrite(
      path / name, image, photometric="minisblack", planarconfig="contig"
    )
    lines.append(f"{name},{name.split('/')[1]}")
  (path / "list.csv").write_text("\n".join(lines))
  return path


def sources(root):
  return (
    spec.spec(folder.FolderSource, root=str(root), split="train"),
    spec.spec(manifest.ManifestSource, path=str(root / "list.csv")),
  )


def make_experiment(root):
  """Returns a run of two steps on the folder, evaluated on the manifest."""
  train_source, test_source = sources(root)
  transform = spec.spec(
    transforms.resize, size=(16, 16), num_channels=5, bits=16
  )
  test = spec.spec(
    classification.ClassificationEvaluator,
    source=test_source,
    transform=transform,
  )
  return tiny.experiment(
    model={"depth": 1},
    batch_size=8,
    total_steps=2,
    data={"source": train_source, "transform": transform},
    normalize=spec.spec(
      preprocess.Normalize, mean=(20_000.0,) * 5, std=(15_000.0,) * 5
    ),
    mix=spec.spec(mixup.mixup, alpha=0.5),
    evals={"val": test},
  )


def test_the_folder_and_the_manifest_feed_bands_of_16_bits_to_the_step(root):
  experiment = make_experiment(root)
  transform = spec.build(experiment.data.transform)
  shape = probe.image_shape(spec.build(experiment.data.source), transform)
  assert shape == (16, 16, 5)
  mesh = tiny.mesh(1)
  parts = train_step.make_parts(experiment, 2, shape)
  target = state_lib.abstract_state(
    parts.model, parts.tx, mesh, image_shape=shape, ema=False
  )
  step = train_step.jit_train_step(experiment, parts, target)
  with jax.set_mesh(mesh):
    state = jax.tree.map(
      lambda x: jnp.zeros(x.shape, x.dtype, device=x.sharding), target
    )
    for source in map(spec.build, sources(root)):
      batch = next(
        pipeline.train_batches(source, transform, batch_size=8, seed=0)
      )
      assert batch["image"].dtype == np.uint16
      lit = batch["image"][..., 4].mean((1, 2)) > 30_000
      np.testing.assert_array_equal(lit, batch["label"] == 1)
      state, told = step(state, sharding.to_global(batch, mesh))
      assert np.isfinite(told.loss.compute())
      assert told.finite.all()
  assert int(state.step) == 2


@pytest.mark.slow
def test_bands_of_16_bits_train_evaluate_and_predict(root, tmp_path):
  with preemption.StopSignal() as stop:
    results = train.train(make_experiment(root), tmp_path, stop=stop)
  assert results["val/count"] == 16
  assert np.isfinite(results["val/loss"])
  page = (tmp_path / "report.html").read_text()
  assert page.count("3 of 5 channels") == 8 + 16  # First batch, worst images.
  data = re.findall("data:image/png;base64,([^\"']*)", page)[-1]
  shown = np.asarray(Image.open(io.BytesIO(base64.b64decode(data))))
  assert shown.shape == (16, 16, 3)
  assert 50 < shown.max() <= 78  # 20,000 / 257
  file = str(root / "train/lit/1.tiff")
  ((_, found),) = predict.predict(predict.load(tmp_path), [file])
  assert {name for name, _ in found} == {"dim", "lit"}
