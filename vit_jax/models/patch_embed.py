"""The patch embedding: pixels to tokens."""

import flax.linen as nn
import jax
import jax.numpy as jnp

Array = jax.Array


class PatchEmbed(nn.Module, kw_only=True):
  """Cuts an image into patches and projects each to a token.

  The kernel [Ph, Pw, C, D] is that of the equivalent convolution; reshaping
  and one matrix product are faster.

  Attributes:
    patch_size: pixels (height, width).
    width: D.
    dtype: compute dtype.
  """

  patch_size: tuple[int, int]
  width: int
  dtype: str = "float32"

  @nn.compact
  def __call__(self, image: Array) -> Array:
    """Returns [B, h, w, D], a token for each patch of [B, H, W, C]."""
    trained = None
    if self.has_variable("params", "kernel"):
      trained = self.get_variable("params", "kernel").shape[2]
    check_image(image, self.patch_size, channels=trained)
    ph, pw = self.patch_size
    b, height, width, c = image.shape
    h, w = height // ph, width // pw
    init = nn.initializers.lecun_normal()  # Fan-in Ph * Pw * C.
    kernel = self.param("kernel", init, (ph, pw, c, self.width))
    bias = self.param("bias", nn.initializers.zeros, (self.width,))
    x = image.astype(self.dtype).reshape(b, h, ph, w, pw, c)
    x = x.transpose(0, 1, 3, 2, 4, 5)  # [B, h, w, Ph, Pw, C]
    x = x.reshape(b * h * w, ph * pw * c)
    x = x @ kernel.astype(self.dtype).reshape(-1, self.width)  # [B * N, D]
    x = x + bias.astype(self.dtype)[None]
    return x.reshape(b, h, w, self.width)


def check_image(
  image: Array, patch_size: tuple[int, int], *, channels: int | None
) -> None:
  """Checks that a model of such patches can take `image`.

  Args:
    image: [B, H, W, C] float, if it is right.
    patch_size: pixels (height, width).
    channels: C of the trained kernel; None if there is none yet.

  Raises:
    ValueError: for another rank or dtype, another number of channels, or a
      size that the patches do not divide.
  """
  shape = image.shape
  if len(shape) != 4:
    raise ValueError(
      f"image: got shape {shape}; must be [B, H, W, C]. Add a batch axis to a "
      "single image with image[None]."
    )
  if not jnp.issubdtype(image.dtype, jnp.floating):
    raise ValueError(
      f"image: got dtype {image.dtype}; must be floating. Scale the pixels "
      "first, e.g. image / 127.5 - 1."
    )
  advice = "Convert or resize the images, or initialise a model for them."
  if shape[1] == channels or (shape[1] in (1, 3) and shape[1] < shape[3]):
    advice = (
      "This looks like [B, C, H, W]; use jnp.transpose(image, (0, 2, 3, 1))."
    )
  if channels is not None and shape[3] != channels:
    raise ValueError(
      f"image: got shape {shape}; the model has {channels} channels "
      f"and takes [B, H, W, {channels}]. {advice}"
    )
  for side, size, patch in zip(("height", "width"), shape[1:3], patch_size):
    if size == 0 or size % patch:
      below = size // patch * patch
      legal = f"{below} or {below + patch}" if below else f"{patch}"
      raise ValueError(
        f"image: got {side} {size} in shape {shape}; must be a multiple of "
        f"the patch {side} {patch}, such as {legal}. {advice}"
      )
