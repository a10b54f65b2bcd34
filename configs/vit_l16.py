r"""ViT-L/16 on ImageNet-1k from scratch (paper, Table 3, last row).

Expected: 76.53 % top-1 at 384 pixels after fine-tuning (paper, Table 5); not
measured with this code. The paper used a TPUv3 pod; any number of devices will
do, and where a batch does not fit into memory --config.accum_steps=8 computes
it in 8 parts with the same result.

python -m vit_jax.main --config=configs/vit_l16.py --workdir=runs/vit_l16

ImageNet cannot be downloaded freely: without it this says how to prepare it.
"""

from ml_collections import ConfigDict

from vit_jax import config as base
from vit_jax import losses, optim
from vit_jax.data import tfds_source, transforms
from vit_jax.evaluators import classification
from vit_jax.models import vit
from vit_jax.spec import spec


def get_config(variant: str = "L/16") -> ConfigDict:
  """Returns the config of a variant, e.g. "L/16" or "L/32"."""
  sizes = vit.sizes(variant)
  config = base.base_config()
  config.name = f"ViT-{variant} on ImageNet"
  config.model = spec(
    vit.ViT,
    **sizes,
    representation_size=sizes["width"],  # Tanh layer, sec. 3.1 and D.3.
    dropout=0.1,
    head_bias_init=-6.9,  # -ln 1000: each class starts at its prior.
    dtype="bfloat16",
  )
  # The paper does not name its loss; the public code that followed it uses the
  # sigmoid one for pre-training, on ImageNet-1k too.
  config.loss = spec(losses.sigmoid_cross_entropy)
  config.batch_size = 4096
  config.total_steps = base.steps(
    epochs=300, examples=1_281_167, batch_size=4096
  )
  config.optimizer = spec(optim.adamw, b1=0.9, b2=0.999)
  config.schedule = spec(optim.cosine, lr=3e-3, warmup_steps=10_000)
  config.weight_decay = 0.3
  config.grad_clip_norm = 1.0  # For ImageNet alone, caption of Table 3.

  config.data.source = spec(
    tfds_source.TfdsSource, name="imagenet2012:5.*.*", split="train"
  )
  config.data.transform = spec(transforms.inception_train, size=(224, 224))
  config.data.num_workers = 8
  config.evals.val = spec(
    classification.ClassificationEvaluator,
    source=spec(
      tfds_source.TfdsSource, name="imagenet2012:5.*.*", split="validation"
    ),
    transform=spec(
      transforms.resize_center_crop, resize=(256, 256), size=(224, 224)
    ),
    num_workers=8,
  )
  config.eval_every = 5_000
  config.checkpoint_every = 2_000
  config.log_every = 100
  return config
