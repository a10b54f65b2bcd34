"""Position embeddings against NumPy."""

from typing import Any

import flax.linen as nn
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


class Table(nn.Module):
  """A module that only has a table."""

  @nn.compact
  def __call__(self, kind, grid):
    return posemb.table(self, kind, grid, width=4, cls=True, num_unplaced=2)


def test_table_has_a_row_for_each_token_and_zeros_for_those_without_a_place():
  rows, variables = Table().init_with_output(
    jax.random.key(0), "learned", (2, 3)
  )
  params: Any = variables["params"]
  assert rows.shape == (1, 1 + 2 + 6, 4)
  np.testing.assert_array_equal(rows[0, :1], params["cls_posemb"][0])
  np.testing.assert_array_equal(rows[0, 1:3], np.zeros((2, 4)))
  np.testing.assert_array_equal(rows[0, 3:], params["posemb"][0])


def test_learned_2d_is_the_column_beside_the_row():
  rows, variables = Table().init_with_output(
    jax.random.key(0), "learned_2d", (2, 3)
  )
  params: Any = variables["params"]
  for n, (row, column) in enumerate(np.ndindex(2, 3)):
    x, y = params["posemb_columns"][0, column], params["posemb_rows"][0, row]
    np.testing.assert_array_equal(rows[0, 3 + n], np.concatenate([x, y]))


@pytest.mark.parametrize(
  ("trained", "square"), [((14, 14), r" \(14x14 if square\)"), ((2, 3), "")]
)
def test_table_of_another_grid_is_refused_with_both_sizes(trained, square):
  variables = Table().init(jax.random.key(0), "learned", trained)
  count = trained[0] * trained[1]
  match = (
    "posemb: got a grid of 24x24 patches, which needs 576 positions; the "
    f"parameters were trained on {count}{square}\\. Use images"
  )
  with pytest.raises(ValueError, match=match):
    Table().apply(variables, "learned", (24, 24))
