"""Mixup: what is mixed with what, and that the mesh does not matter."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from vit_jax import mixup

B = K = 16
MIX = jax.jit(mixup.mixup(alpha=1.0))


def _batch(seed=0, *, masked=()):
  rng = np.random.default_rng(seed)
  image = rng.normal(size=(B, 4, 6, 3)).astype(np.float32)
  label = np.eye(K, dtype=np.float32)[rng.integers(K, size=B)]
  mask = np.ones(B, np.float32)
  mask[list(masked)] = 0
  return jnp.asarray(image), jnp.asarray(label), jnp.asarray(mask)


def _rows_as_labels():
  """A batch whose labels name the row: the mixed label shows who met whom."""
  image, _, mask = _batch()
  return image, jnp.eye(B), mask


def test_alpha_zero_is_the_identity():
  image, label, mask = _batch()
  mixed_image, mixed_label = mixup.mixup()(
    jax.random.key(0), image, label, mask
  )
  assert mixed_image is image
  assert mixed_label is label


@pytest.mark.parametrize("seed", range(5))
def test_image_and_label_are_mixed_alike_with_one_partner_each(seed):
  image, label, mask = _rows_as_labels()
  mixed_image, weights = MIX(jax.random.key(seed), image, label, mask)
  # The mixed label of a row is its row of the mixing matrix.
  np.testing.assert_allclose(
    mixed_image, np.einsum("ab,bhwc->ahwc", weights, image), atol=1e-5
  )
  weights = np.asarray(weights)
  np.testing.assert_allclose(weights.sum(1), np.ones(B), atol=1e-6)
  np.testing.assert_allclose(weights.sum(0), np.ones(B), atol=1e-6)
  own = np.diag(weights)
  mixed = own < 1
  assert (own >= 0.5).all()
  # One lam a step; a row that met itself keeps 1.
  np.testing.assert_allclose(own[mixed], own[mixed][0], atol=1e-6)
  assert mixed.sum() > B // 2


def test_the_share_follows_the_folded_beta_distribution():
  keys = jax.random.split(jax.random.key(0), 1000)
  mix = jax.vmap(mixup.mixup(alpha=1.0), in_axes=(0, None, None, None))
  image, rows, mask = _rows_as_labels()
  _, weights = jax.jit(mix)(keys, image[:, :1, :1, :1], rows, mask)
  # With alpha 1 the share is uniform in [0.5, 1].
  share = np.diagonal(weights, axis1=1, axis2=2).min(1)
  np.testing.assert_allclose(
    np.quantile(share, [0.0, 0.25, 0.5, 0.75, 1.0]),
    [0.5, 0.625, 0.75, 0.875, 1.0],
    atol=0.03,  # 4 standard deviations of a quartile of 1000 draws.
  )


def test_pairs_and_share_change_with_the_key():
  image, label, mask = _rows_as_labels()
  first = MIX(jax.random.key(0), image, label, mask)[1]
  second = MIX(jax.random.key(1), image, label, mask)[1]
  assert np.any(np.asarray(first > 0) != np.asarray(second > 0))


@pytest.mark.parametrize("seed", range(5))
def test_padding_never_leaks_and_stays_as_it_is(seed):
  masked = [0, 3, 9, 15]
  image, label, mask = _batch(masked=masked)
  image = image.at[jnp.array(masked)].set(jnp.nan)
  _, rows, _ = _rows_as_labels()
  key = jax.random.key(seed)
  mixed, _ = MIX(key, image, label, mask)
  real = np.asarray(mask) > 0
  assert np.isfinite(mixed[real]).all()
  weights = np.asarray(MIX(key, image, rows, mask)[1])
  assert (weights[np.ix_(real, ~real)] == 0).all()
  np.testing.assert_array_equal(weights[~real], np.eye(B)[~real])


@pytest.mark.parametrize("shape", [(8, 1), (2, 4)])
def test_result_is_equal_on_every_mesh(shape):
  image, label, mask = _batch(masked=[2])
  expected = MIX(jax.random.key(3), image, label, mask)
  mesh = jax.make_mesh(
    shape, ("data", "fsdp"), axis_types=(jax.sharding.AxisType.Auto,) * 2
  )
  batch_sharding = jax.sharding.NamedSharding(
    mesh, jax.sharding.PartitionSpec(("data", "fsdp"))
  )
  put = [jax.device_put(x, batch_sharding) for x in (image, label, mask)]
  got = MIX(jax.random.key(3), *put)
  assert len(got[0].sharding.device_set) == 8
  # 1e-6: a fused multiply-add rounds once, the eager product twice.
  np.testing.assert_allclose(got[0], expected[0], atol=1e-6)
  np.testing.assert_allclose(got[1], expected[1], atol=1e-6)


@pytest.mark.parametrize("alpha", [-0.1, float("nan")])
def test_a_negative_alpha_is_refused(alpha):
  with pytest.raises(ValueError, match=r"alpha: got .*; must be >= 0"):
    mixup.mixup(alpha=alpha)


def test_16_bits_are_mixed_in_their_own_range():
  _, rows, mask = _rows_as_labels()
  image = np.random.default_rng(0).integers(0, 2**16, (B, 4, 6, 5), np.uint16)
  mixed, weights = MIX(jax.random.key(0), jnp.asarray(image), rows, mask)
  assert mixed.dtype == np.float32
  expected = np.einsum("ab,bhwc->ahwc", weights, image.astype(float))
  np.testing.assert_allclose(mixed, expected, rtol=1e-5)
