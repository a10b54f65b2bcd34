r"""A small ViT on CIFAR-10 from scratch, through TensorFlow Datasets.

Needs a network the first time (170 MB) and `pip install -e ".[tfds]"`. No
figure is claimed for it: it has not been measured.

python -m vit_jax.main --config=configs/cifar10.py --workdir=runs/cifar10
"""

from ml_collections import ConfigDict

from vit_jax import config as base
from vit_jax import mixup, optim
from vit_jax.data import tfds_source, transforms
from vit_jax.evaluators import classification
from vit_jax.models import vit
from vit_jax.spec import spec


def get_config() -> ConfigDict:
  """Returns the config."""
  config = base.base_config()
  config.name = "CIFAR-10"
  config.model = spec(
    vit.ViT,
    width=192,
    depth=9,
    num_heads=3,
    mlp_dim=768,
    patch_size=(4, 4),  # 64 tokens of a 32x32 image.
    pool="gap",
    stochastic_depth=0.1,
  )
  config.batch_size = 512
  config.total_steps = base.steps(epochs=200, examples=50_000, batch_size=512)
  config.mix = spec(mixup.mixup, alpha=0.5)
  config.schedule = spec(optim.cosine, lr=1e-3, warmup_steps=1_000)
  config.weight_decay = 0.1
  config.grad_clip_norm = 1.0
  config.ema_decay = 0.999

  config.data.source = spec(
    tfds_source.TfdsSource, name="cifar10:3.0.2", split="train", download=True
  )
  config.data.transform = spec(transforms.pad_crop, size=(32, 32))
  config.evals.test = spec(
    classification.ClassificationEvaluator,
    source=spec(
      tfds_source.TfdsSource, name="cifar10:3.0.2", split="test", download=True
    ),
    transform=spec(transforms.resize, size=(32, 32)),
  )
  config.eval_every = 1_000
  return config
