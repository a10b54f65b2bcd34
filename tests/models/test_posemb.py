"""Position embeddings against NumPy."""

import jax
import numpy as np
import pytest

from vit_jax.models import posemb


def test_sincos2d_equals_its_formula_on_a_rectangular_grid():
  rows, columns, width = 3, 5, 12
  expected = np.zeros((1, rows * columns, width))
  for y in range(rows):
    for x in range(columns):
      w = [10_000.0 ** (-i / 2) for i in range(3)]
      expected[0, y * columns + x] = (
        [np.sin(x * w_i) for w_i in w]
        + [np.cos(x * w_i) for w_i in w]
        + [np.sin(y * w_i) for w_i in w]
        + [np.cos(y * w_i) for w_i in w]
      )
  embedding = posemb.sincos2d((rows, columns), width)
  np.testing.assert_allclose(embedding, expected, atol=1e-6)  # f32 sin


def test_sincos2d_is_float32_and_distinct_for_each_patch():
  embedding = posemb.sincos2d((14, 10), 64)
  assert embedding.dtype == np.float32
  assert len(np.unique(np.asarray(embedding[0]), axis=0)) == 140


@pytest.mark.parametrize("width", [4, 10])
def test_sincos2d_names_the_widths_it_takes(width):
  match = f"width: got {width}; sincos2d needs a multiple of 4, at least 8"
  with pytest.raises(ValueError, match=match):
    posemb.sincos2d((2, 2), width)


def test_check_grid_accepts_the_training_grid():
  posemb.check_grid(jax.ShapeDtypeStruct((1, 6, 8), np.float32), (2, 3))


def test_check_grid_says_both_grids():
  trained = jax.ShapeDtypeStruct((1, 196, 8), np.float32)
  match = (
    r"got a grid of 24x24 = 576 patches; .* 196 positions \(14x14 if square\)"
  )
  with pytest.raises(ValueError, match=match):
    posemb.check_grid(trained, (24, 24))
  trained = jax.ShapeDtypeStruct((1, 6, 8), np.float32)
  with pytest.raises(ValueError, match=r"trained on 6 positions\. Use images"):
    posemb.check_grid(trained, (2, 2))
