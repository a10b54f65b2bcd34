"""Resizing of position embeddings and patch kernels."""

import jax
import numpy as np
import pytest
import scipy.ndimage

from vit_jax.weights import resample

GRIDS = [((14, 14), (24, 24)), ((24, 24), (14, 14)), ((3, 5), (7, 2))]


def table(grid, *, width=4, batch=(1,), seed=0):
  rng = np.random.default_rng(seed)
  return rng.normal(size=(*batch, grid[0] * grid[1], width)).astype(np.float32)


def kernel(shape, *, seed=0):
  return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


@pytest.mark.parametrize(("old", "new"), GRIDS)
def test_corner_linear_is_the_zoom_of_scipy(old, new):
  x = table(old)
  factors = (new[0] / old[0], new[1] / old[1], 1)
  zoomed = scipy.ndimage.zoom(x.reshape(*old, 4), factors, order=1)
  expected = np.asarray(zoomed)
  actual = resample.resize_posemb(x, old, new)
  assert actual.dtype == np.float32
  np.testing.assert_allclose(actual.reshape(*new, 4), expected, atol=1e-5)


def test_corner_linear_keeps_the_corners_and_spaces_evenly_between_them():
  x = np.array([[[0], [1], [2], [3]]], np.float32)
  actual = resample.resize_posemb(x, (1, 4), (1, 6))
  np.testing.assert_allclose(actual[0, :, 0], [0, 0.6, 1.2, 1.8, 2.4, 3])


@pytest.mark.parametrize(("old", "new"), GRIDS)
@pytest.mark.parametrize(
  ("method", "theirs"), [("timm", "cubic"), ("half_pixel_linear", "linear")]
)
def test_antialiased_methods_are_those_of_jax(method, theirs, old, new):
  x = table(old)
  expected = jax.image.resize(x.reshape(*old, 4), (*new, 4), theirs)
  actual = resample.resize_posemb(x, old, new, method=method)
  # Their weights are f32.
  np.testing.assert_allclose(actual.reshape(*new, 4), expected, atol=1e-5)


@pytest.mark.parametrize(
  ("new", "expected"),
  [
    (
      (3, 5),
      [
        [-0.30294448, 0.06111231, 1.1736114, 3.718612, 5.557613],
        [1.0960002, 0.32400054, 0.0, 2.3760006, 4.3840003],
        [2.494944, 0.58688873, -1.1736108, 1.0333905, 3.21039],
      ],
    ),
    ((1, 2), [[0.6328125, 3.0585938]]),
  ],
)
def test_transformers_is_the_bicubic_of_torch(new, expected):
  # torch 2.13: interpolate(x, size=new, mode="bicubic", align_corners=False)
  x = np.array([0, 1, 5, 2, -1, 3], np.float32).reshape(1, 6, 1)
  actual = resample.resize_posemb(x, (2, 3), new, method="transformers")
  np.testing.assert_allclose(
    actual.reshape(new), expected, atol=5e-6
  )  # f32 weights


@pytest.mark.parametrize("method", resample.METHODS)
def test_every_method_satisfies_the_laws_of_interpolation(method):
  def resize(x, old, new):
    return resample.resize_posemb(x, old, new, method=method)

  x = table((3, 5))
  np.testing.assert_array_equal(resize(x, (3, 5), (3, 5)), x)
  for new in ((1, 1), (1, 7), (4, 1), (5, 3)):
    y = resize(x, (3, 5), new)
    assert y.shape == (1, new[0] * new[1], 4)
    # Constants stay.
    ones = resize(np.ones_like(x), (3, 5), new)
    np.testing.assert_allclose(ones, np.ones_like(ones), rtol=1e-6)
    # Rows and columns are treated alike.
    turned = x.reshape(3, 5, 4).swapaxes(0, 1).reshape(1, 15, 4)
    y_turned = resize(turned, (5, 3), (new[1], new[0]))
    back = y_turned.reshape(new[1], new[0], 4).swapaxes(0, 1)
    np.testing.assert_allclose(back, y.reshape(*new, 4), atol=1e-6)
  # A single patch is everywhere.
  one = table((1, 1))
  everywhere = np.broadcast_to(one, (1, 6, 4))
  np.testing.assert_allclose(resize(one, (1, 1), (2, 3)), everywhere, rtol=1e-6)


def test_grids_of_equal_count_and_other_shape_are_resized():
  x = table((2, 8))
  assert not np.allclose(resample.resize_posemb(x, (2, 8), (4, 4)), x)


def test_tables_of_all_blocks_are_resized_as_each_alone():
  x = table((2, 3), batch=(3, 1))
  both = resample.resize_posemb(x, (2, 3), (4, 5))
  each = [resample.resize_posemb(layer, (2, 3), (4, 5)) for layer in x]
  np.testing.assert_allclose(both, each, atol=1e-6)


@pytest.mark.parametrize(
  ("patch", "side", "sizes"),
  [
    (16, 14, (976, 1840, 1952)),
    (14, 37, (546, 602, 1092, 1204, 1610, 1722)),
  ],
)
def test_sizes_whose_ratio_rounds_down_give_every_row(patch, side, sizes):
  x = table((side, side), width=1)
  for size in sizes:
    new = size // patch
    y = resample.resize_posemb(
      *(x, (side, side), (new, new)), method="transformers"
    )
    assert y.shape == (1, new * new, 1)


def test_table_with_a_prefix_token_is_refused():
  match = (
    r"posemb: got shape \(1, 7, 4\); expected \[..., 6, D\] for the grid 2x3. "
    "Give the grid of the training, and no prefix tokens"
  )
  with pytest.raises(ValueError, match=match):
    resample.resize_posemb(table((1, 7)), (2, 3), (4, 4))


def test_unknown_method_is_refused_with_the_closest():
  match = "method: got 'tim'; must be one of .* Did you mean 'timm'?"
  with pytest.raises(ValueError, match=match):
    resample.resize_posemb(table((1, 1)), (1, 1), (2, 2), method="tim")


def bilinear(patches, size):
  """Resizes patches [N, Ph, Pw, C], each for itself."""
  shape = (len(patches), *size, patches.shape[-1])
  return np.asarray(jax.image.resize(patches, shape, "linear", antialias=False))


def test_enlarged_kernel_gives_equal_tokens_on_enlarged_patches():
  w = kernel((4, 3, 2, 5))
  patches = kernel((6, 4, 3, 2), seed=1)
  bigger = bilinear(patches, (7, 9))
  new = resample.resize_kernel(w, (7, 9))
  assert new.shape == (7, 9, 2, 5)
  assert new.dtype == np.float32
  np.testing.assert_allclose(
    np.einsum("nyxc,yxcd->nd", bigger, new),
    np.einsum("nyxc,yxcd->nd", patches, w),
    atol=2e-5,  # f32 sums over 126 products
  )


@pytest.mark.parametrize("size", [(2, 2), (8, 3), (1, 1)])
def test_resized_kernel_is_the_pseudo_inverse_of_the_whole_matrix(size):
  w = kernel((4, 3, 2, 5))
  basis = np.eye(12, dtype=np.float32).reshape(12, 4, 3, 1)
  matrix = bilinear(basis, size).reshape(12, -1).T  # [Ph' Pw', Ph Pw]
  pinv = np.linalg.pinv(matrix.astype(np.float64).T)
  expected = (pinv @ w.reshape(12, 10)).reshape(*size, 2, 5)
  actual = resample.resize_kernel(w, size)
  np.testing.assert_allclose(actual, expected, atol=1e-5)  # f32 matrix


def test_kernel_of_the_same_size_and_channels_stays():
  w = kernel((4, 3, 2, 5))
  assert resample.resize_kernel(w, (4, 3)) is w
  assert resample.change_channels(w, 2) is w


def test_rgb_becomes_grey_by_the_sum_and_grey_rgb_by_thirds():
  rgb = kernel((2, 2, 3, 4))
  grey = resample.change_channels(rgb, 1)
  np.testing.assert_allclose(
    grey, rgb[:, :, :1] + rgb[:, :, 1:2] + rgb[:, :, 2:], atol=1e-6
  )
  np.testing.assert_allclose(
    resample.change_channels(grey, 3), np.repeat(grey / 3, 3, axis=2), atol=1e-6
  )


def test_more_channels_take_turns_and_share():
  w = kernel((1, 1, 3, 2))
  r, g, b = w[0, 0]
  np.testing.assert_allclose(
    resample.change_channels(w, 7)[0, 0],
    [r / 3, g / 2, b / 2, r / 3, g / 2, b / 2, r / 3],
    rtol=1e-6,
  )
  np.testing.assert_allclose(
    resample.change_channels(w, 2)[0, 0], [r + b, g], rtol=1e-6
  )


@pytest.mark.parametrize(("old", "new"), [(3, 1), (1, 3), (3, 13), (13, 3)])
def test_equal_channels_give_equal_tokens(old, new):
  w = kernel((2, 2, old, 4))
  changed = resample.change_channels(w, new)
  assert changed.shape == (2, 2, new, 4)
  assert changed.dtype == np.float32
  np.testing.assert_allclose(changed.sum(axis=2), w.sum(axis=2), atol=1e-5)
