r"""A small ViT on the images that a table names: FILE.csv, from scratch.

Its columns are image, a path relative to the file, and label. If there is a
third one, split, the rows "val" (or validation, or test) are for evaluation and
"train" for training; if not, a tenth of all is held out. FILE.csv alone is a
model for 48 pixels that two CPU cores train in minutes; FILE.csv,S/16 is a
ViT-S/16 for 224 pixels and a GPU, likewise any size that `vit.sizes` knows.

python -m vit_jax.main --config=configs/manifest.py:FILE.csv --workdir=runs/mine
"""

from ml_collections import ConfigDict

from vit_jax import config as base
from vit_jax import mixup, optim
from vit_jax.data import manifest, subset, transforms
from vit_jax.evaluators import classification
from vit_jax.models import vit
from vit_jax.spec import build, spec

_EPOCHS = 60


def get_config(path: str = "") -> ConfigDict:
  """Returns the config for the images in `path`, or of "path,size"."""
  path, _, size = path.partition(",")
  if not path:
    raise ValueError(
      "path: got ''; must be the table of your images. Give it as "
      "--config=configs/manifest.py:FILE.csv."
    )
  present = manifest.splits(path)
  held_out = [s for s in ("val", "validation", "test") if s in present]
  train = spec(
    manifest.ManifestSource, path=path, split="train" if present else None
  )
  if held_out:
    val = spec(manifest.ManifestSource, path=path, split=held_out[0])
  else:
    val = spec(subset.Holdout, source=train, fraction=0.1, part="val")
    train = spec(subset.Holdout, source=train, fraction=0.1, part="train")

  config = base.base_config()
  config.name = "own images"
  if size:
    pixels = 224
    config.model = spec(vit.ViT, **vit.sizes(size), dropout=0.1)
  else:
    pixels = 48
    config.model = spec(
      vit.ViT,
      width=128,
      depth=4,
      num_heads=4,
      mlp_dim=512,
      patch_size=(8, 8),
      scan_unroll=4,  # Two thirds of the time a step, on a CPU.
    )
  config.batch_size = 32
  config.total_steps = base.steps(
    epochs=_EPOCHS, examples=len(build(train)), batch_size=32
  )
  config.mix = spec(mixup.mixup, alpha=0.2)
  warmup_steps = config.total_steps // 10
  config.schedule = spec(optim.cosine, lr=1e-3, warmup_steps=warmup_steps)
  config.weight_decay = 0.1
  config.grad_clip_norm = 1.0

  config.data.source = train
  config.data.transform = spec(
    transforms.inception_train, size=(pixels, pixels), area=(0.3, 1.0)
  )
  resize = (pixels * 8 // 7, pixels * 8 // 7)
  config.evals.val = spec(
    classification.ClassificationEvaluator,
    source=val,
    transform=spec(
      transforms.resize_center_crop, resize=resize, size=(pixels, pixels)
    ),
  )
  config.eval_every = max(1, config.total_steps // 10)
  config.checkpoint_every = 200
  config.best_metric = "val/accuracy"
  return config
