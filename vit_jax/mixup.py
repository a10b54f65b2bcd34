"""Mixup on the device (arXiv:1710.09412)."""

from collections.abc import Callable

import jax
import jax.numpy as jnp

Array = jax.Array
# key, image [B, H, W, C] of pixels, label [B, K], mask [B] -> image, label
MixFn = Callable[[Array, Array, Array, Array], tuple[Array, Array]]


def mixup(*, alpha: float = 0.0) -> MixFn:
  """Returns a function that mixes each example with another of the batch.

  One share lam ~ Beta(alpha, alpha), taken as max(lam, 1 - lam), mixes the
  images and labels of the whole batch, as in the published code; partners are
  a random permutation of the whole batch, whatever devices it lies on. For that
  each device gathers it, so mix while images are integers (0.6 GiB for 4096 of
  224 x 224 x 3 uint8). A row that is padding (mask 0), or whose partner is,
  stays as it is.

  Args:
    alpha: of the beta distribution, e.g. 0.2; 0 turns mixing off.

  Returns:
    Function of a key, image [B, H, W, C] uint8, uint16 or float32, label [B, K]
    float32 and mask [B]; returns image and label of the same shapes, float32 if
    mixed.

  Raises:
    ValueError: if `alpha` is negative.
  """
  if not alpha >= 0:
    raise ValueError(f"alpha: got {alpha!r}; must be >= 0. Use 0 for none.")

  def mix(
    key: Array, image: Array, label: Array, mask: Array
  ) -> tuple[Array, Array]:
    if alpha == 0:
      return image, label
    lam_key, partner_key = jax.random.split(key)
    lam = jax.random.beta(lam_key, alpha, alpha)
    lam = jnp.maximum(lam, 1 - lam)
    partner = jax.random.permutation(partner_key, len(mask))  # [B]
    both = (mask > 0) & (mask[partner] > 0)  # [B]

    def blend(x: Array) -> Array:
      # Not a product with the mask: padding may hold anything, also nan.
      rows = both.reshape(-1, *[1] * (x.ndim - 1))
      return jnp.where(rows, lam * x + (1 - lam) * x[partner], x)

    return blend(image), blend(label)

  return mix
