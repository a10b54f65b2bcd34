r"""A few steps on fake data: does everything run here? Under 20 s on two cores.

python -m vit_jax.main --config=configs/smoke.py --workdir=runs/smoke
"""

from ml_collections import ConfigDict

from vit_jax import config as base
from vit_jax import mixup
from vit_jax.data import fake, transforms
from vit_jax.evaluators import classification
from vit_jax.models import vit
from vit_jax.spec import spec


def get_config() -> ConfigDict:
  """Returns the config."""
  config = base.base_config()
  config.name = "smoke"
  config.model = spec(vit.ViT, **vit.sizes("mu/16"))
  config.batch_size = 16
  config.total_steps = 12
  config.mix = spec(mixup.mixup, alpha=0.2)
  config.ema_decay = 0.9
  config.data.source = spec(
    fake.FakeSource, num_examples=64, size=(48, 40), num_classes=10
  )
  config.data.transform = spec(transforms.inception_train, size=(32, 32))
  config.evals.val = spec(
    classification.ClassificationEvaluator,
    source=spec(
      fake.FakeSource, num_examples=37, size=(48, 40), num_classes=10
    ),
    transform=spec(
      transforms.resize_center_crop, resize=(36, 36), size=(32, 32)
    ),
  )
  config.log_every = 4
  config.eval_every = 6
  config.checkpoint_every = 4
  return config
