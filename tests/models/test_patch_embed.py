"""The patch embedding: the convolution it stands for, and its errors."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from vit_jax.models import patch_embed

EMBED = patch_embed.PatchEmbed(patch_size=(4, 2), width=5)
RNG = np.random.default_rng(0)
PARAMS = {
  "kernel": RNG.normal(size=(4, 2, 3, 5)).astype(np.float32),
  "bias": RNG.normal(size=5).astype(np.float32),
}


def embed(image) -> Any:
  return EMBED.apply({"params": PARAMS}, image)


def test_patch_embedding_is_a_convolution_with_its_kernel():
  image = RNG.normal(size=(2, 8, 6, 3)).astype(np.float32)
  convolved = jax.lax.conv_general_dilated(
    jnp.asarray(image),
    jnp.asarray(PARAMS["kernel"]),
    window_strides=(4, 2),
    padding="VALID",
    dimension_numbers=("NHWC", "HWIO", "NHWC"),
  )
  expected = convolved + PARAMS["bias"].reshape(1, 1, 1, -1)
  np.testing.assert_allclose(embed(image), expected, atol=1e-5)  # f32, 24 terms


@pytest.mark.parametrize(
  ("image", "message"),
  [
    (jnp.zeros((8, 6, 3)), r"got shape \(8, 6, 3\); must be \[B, H, W, C\]"),
    (jnp.zeros((1, 8, 6, 3), "uint8"), "got dtype uint8; must be floating"),
    (jnp.zeros((1, 8, 6, 1)), "has 3 channels and takes .* Convert or"),
    (jnp.zeros((1, 3, 8, 6)), r"looks like \[B, C, H, W\]; use jnp.transpose"),
    (jnp.zeros((1, 10, 6, 3)), "height 10 .* patch height 4, such as 8 or 12"),
    (jnp.zeros((1, 8, 5, 3)), "width 5 .* patch width 2, such as 4 or 6"),
    (jnp.zeros((1, 2, 6, 3)), "multiple of the patch height 4, such as 4"),
  ],
)
def test_image_that_does_not_fit_is_refused_with_advice(image, message):
  with pytest.raises(ValueError, match=message):
    embed(image)


def test_channels_first_is_recognised_before_there_are_parameters():
  with pytest.raises(ValueError, match=r"looks like \[B, C, H, W\]"):
    EMBED.init(jax.random.key(0), jnp.zeros((1, 3, 8, 6)))
