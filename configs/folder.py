r"""A small ViT on your own images: ROOT/train/CLASS/*.jpg, from scratch.

Images for evaluation lie in ROOT/val (or validation, or test); without such a
folder a tenth of ROOT/train is held out.

python -m vit_jax.main --config=configs/folder.py:ROOT --workdir=runs/mine
"""

from ml_collections import ConfigDict

from vit_jax import config as base
from vit_jax import mixup, optim
from vit_jax.data import folder, subset, transforms
from vit_jax.evaluators import classification
from vit_jax.models import vit
from vit_jax.spec import spec

_EPOCHS = 100
_SIZE = (96, 96)


def get_config(root: str) -> ConfigDict:
  """Returns the config for the images under `root`."""
  train = spec(folder.FolderSource, root=root, split="train")
  present = folder.splits(root)
  held_out = [s for s in ("val", "validation", "test") if s in present]
  if held_out:
    val = spec(folder.FolderSource, root=root, split=held_out[0])
  else:
    val = spec(subset.Holdout, source=train, fraction=0.1, part="val")
    train = spec(subset.Holdout, source=train, fraction=0.1, part="train")

  config = base.base_config()
  config.name = "own images"
  config.model = spec(vit.ViT, **vit.sizes("Ti/16"), dropout=0.1)
  config.batch_size = 32
  config.total_steps = base.steps(
    epochs=_EPOCHS,
    examples=len(folder.FolderSource(root=root, split="train")),
    batch_size=32,
  )
  config.mix = spec(mixup.mixup, alpha=0.2)
  warmup_steps = config.total_steps // 20
  config.schedule = spec(optim.cosine, lr=1e-3, warmup_steps=warmup_steps)
  config.weight_decay = 0.1
  config.grad_clip_norm = 1.0

  config.data.source = train
  config.data.transform = spec(
    transforms.inception_train, size=_SIZE, area=(0.3, 1.0)
  )
  config.evals.val = spec(
    classification.ClassificationEvaluator,
    source=val,
    transform=spec(
      transforms.resize_center_crop, resize=(104, 104), size=_SIZE
    ),
  )
  config.eval_every = max(1, config.total_steps // 10)
  config.checkpoint_every = 200
  config.best_metric = "val/accuracy"
  return config
