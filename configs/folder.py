r"""A small ViT on your own images: ROOT/train/CLASS/*.jpg, from scratch.

Images for evaluation lie in ROOT/val (or validation, or test); without such a
folder a tenth of ROOT/train is held out. ROOT alone is a model for 48 pixels
that two CPU cores train in minutes; ROOT,S/16 is a ViT-S/16 for 224 pixels and
a GPU, likewise any size that `vit.sizes` knows.

python -m vit_jax.main --config=configs/folder.py:ROOT --workdir=runs/mine
"""

from ml_collections import ConfigDict

from vit_jax import config as base
from vit_jax import mixup, optim
from vit_jax.data import folder, subset, transforms
from vit_jax.evaluators import classification
from vit_jax.models import vit
from vit_jax.spec import build, spec

_EPOCHS = 60


def get_config(root: str = "") -> ConfigDict:
  """Returns the config for the images under `root`, or of "root,size"."""
  root, _, size = root.partition(",")
  if not root:
    raise ValueError(
      "root: got ''; must be the folder of your images. Give it as "
      "--config=configs/folder.py:ROOT."
    )
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
