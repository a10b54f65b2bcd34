import jax.numpy as jnp
import numpy as np
import pytest

from vit_jax import preprocess


def test_the_default_maps_pixels_to_minus_one_and_one():
  image = jnp.array([0, 51, 255], np.uint8).reshape(1, 1, 3)
  result = preprocess.Normalize()(image)
  assert result.dtype == np.float32
  np.testing.assert_allclose(result.ravel(), [-1.0, -0.6, 1.0], atol=1e-6)


def test_each_channel_has_its_own_mean_and_std():
  image = jnp.full((2, 4, 4, 3), 100, np.uint8)
  normalize = preprocess.Normalize(
    mean=(0.0, 100.0, 50.0), std=(1.0, 1.0, 10.0)
  )
  result = np.asarray(normalize(image))
  assert result.shape == (2, 4, 4, 3)
  np.testing.assert_allclose(result[1, 2, 3], [100.0, 0.0, 5.0])


def test_float_images_are_normalised_alike():
  image = jnp.arange(12, dtype=np.uint8).reshape(2, 2, 3)
  normalize = preprocess.Normalize(mean=(5.0,), std=(2.0,))
  np.testing.assert_array_equal(
    normalize(image), normalize(image.astype(np.float32))
  )


def test_16_bits_are_normalised_in_their_own_units():
  image = jnp.array([0, 13107, 65535], np.uint16).reshape(1, 1, 3)
  result = preprocess.Normalize(mean=(32767.5,), std=(32767.5,))(image)
  np.testing.assert_allclose(result.ravel(), [-1.0, -0.6, 1.0], atol=1e-6)


@pytest.mark.parametrize("name", ["mean", "std"])
def test_another_number_of_channels_is_refused(name):
  normalize = preprocess.Normalize(**{name: (1.0, 2.0, 3.0)})
  with pytest.raises(
    ValueError, match=f"normalize.{name}: got 3 values for 1 channels"
  ):
    normalize(jnp.zeros((2, 2, 1), np.uint8))


@pytest.mark.parametrize("values", [{"std": (0.0,)}, {"std": ()}, {"mean": ()}])
def test_a_division_by_nothing_is_refused(values):
  with pytest.raises(ValueError, match=r"std: got .*; both need a value"):
    preprocess.Normalize(**values)
