"""The losses against NumPy and SciPy, also where exponentials overflow."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.special

from vit_jax import losses


def _random(seed, *, b=5, k=7, scale=3.0):
  rng = np.random.default_rng(seed)
  logits = scale * rng.normal(size=(b, k)).astype(np.float32)
  label = rng.dirichlet(np.ones(k), size=b).astype(np.float32)
  return jnp.asarray(logits), jnp.asarray(label)


def test_softmax_loss_equals_scipy_for_soft_labels():
  logits, label = _random(0)
  expected = -(label * scipy.special.log_softmax(logits, -1)).sum(-1)
  got = losses.softmax_cross_entropy()(logits, label)
  assert got.shape == (5,)
  np.testing.assert_allclose(got, expected, rtol=1e-5)


def test_softmax_loss_of_equal_logits_is_log_k():
  label = losses.one_hot(jnp.array([0, 3]), 4)
  got = losses.softmax_cross_entropy()(jnp.zeros([2, 4]), label)
  np.testing.assert_allclose(got, [1.3862944, 1.3862944], rtol=1e-6)


def test_smoothing_spreads_the_share_over_all_classes():
  logits = jnp.array([[2.0, 0.0, 0.0, 0.0]])
  soft = np.array([[0.925, 0.025, 0.025, 0.025]])
  label = losses.one_hot(jnp.array([0]), 4)
  log_p = scipy.special.log_softmax(logits, -1)
  got = losses.softmax_cross_entropy(label_smoothing=0.1)(logits, label)
  np.testing.assert_allclose(got, -(soft * log_p).sum(-1), rtol=1e-5)
  x = np.asarray(logits, np.float64)
  binary = -soft * scipy.special.log_expit(x)
  binary -= (1 - soft) * scipy.special.log_expit(-x)
  got = losses.sigmoid_cross_entropy(label_smoothing=0.1)(logits, label)
  np.testing.assert_allclose(got, binary.sum(-1), rtol=1e-5)


def test_sigmoid_loss_is_the_sum_over_classes():
  logits, label = _random(1)
  p = scipy.special.expit(np.asarray(logits, np.float64))
  expected = -(label * np.log(p) + (1 - label) * np.log(1 - p)).sum(-1)
  got = losses.sigmoid_cross_entropy()(logits, label)
  np.testing.assert_allclose(got, expected, rtol=1e-4)
  # Paper-sized head with the usual bias: K * softplus(-10), one positive.
  got = losses.sigmoid_cross_entropy()(
    jnp.full([1, 21843], -10.0), losses.one_hot(jnp.array([5]), 21843)
  )
  np.testing.assert_allclose(got, [21843 * 4.5398899e-5 + 10], rtol=1e-5)


@pytest.mark.parametrize(
  "make", [losses.softmax_cross_entropy, losses.sigmoid_cross_entropy]
)
@pytest.mark.parametrize("size", [1e4, 3e38])
def test_extreme_bfloat16_logits_give_finite_losses_and_gradients(make, size):
  logits = jnp.array([[size, -size, -size]], jnp.bfloat16)
  right = losses.one_hot(jnp.array([0]), 3)
  loss = make()(logits, right)
  assert loss.dtype == jnp.float32
  np.testing.assert_array_equal(loss, [0.0])
  grad = jax.grad(lambda x: make()(x, right).sum())(logits)
  np.testing.assert_array_equal(grad.astype(jnp.float32), np.zeros([1, 3]))


def test_a_wrong_confident_bfloat16_logit_costs_its_margin():
  logits = jnp.array([[1024.0, 0.0]], jnp.bfloat16)
  wrong = losses.one_hot(jnp.array([1]), 2)
  loss = losses.softmax_cross_entropy()(logits, wrong)
  np.testing.assert_array_equal(loss, [1024.0])
  loss = losses.sigmoid_cross_entropy()(logits, wrong)
  np.testing.assert_allclose(loss, [1024.0 + np.log(2)], rtol=1e-6)


@pytest.mark.parametrize(
  "make", [losses.softmax_cross_entropy, losses.sigmoid_cross_entropy]
)
def test_bfloat16_logits_lose_nothing_after_their_own_rounding(make):
  logits, label = _random(2, k=1000)
  rounded = jnp.asarray(logits, jnp.bfloat16)
  np.testing.assert_array_equal(
    make()(rounded, label), make()(rounded.astype(jnp.float32), label)
  )


def test_one_hot_of_a_list_of_ids_is_multi_hot():
  label = jnp.array([[2, 0, -1], [1, 1, 1], [-1, -1, -1]])
  expected = [[1, 0, 1, 0], [0, 1, 0, 0], [0, 0, 0, 0]]
  got = losses.one_hot(label, 4)
  assert got.dtype == jnp.float32
  np.testing.assert_array_equal(got, expected)


def test_one_hot_of_single_ids_has_zeros_for_minus_one():
  got = losses.one_hot(jnp.array([1, -1], jnp.int32), 3)
  np.testing.assert_array_equal(got, [[0, 1, 0], [0, 0, 0]])


def test_one_hot_names_what_it_cannot_read():
  with pytest.raises(
    ValueError, match=r"label: got shape \(2, 1, 1\) of int32"
  ):
    losses.one_hot(jnp.zeros([2, 1, 1], jnp.int32), 3)
  with pytest.raises(ValueError, match=r"label: got .* of float32; must be"):
    losses.one_hot(jnp.zeros([2]), 3)


@pytest.mark.parametrize(
  "make", [losses.softmax_cross_entropy, losses.sigmoid_cross_entropy]
)
@pytest.mark.parametrize("amount", [-0.1, 1.0, float("nan")])
def test_smoothing_outside_its_range_is_refused(make, amount):
  with pytest.raises(ValueError, match=r"label_smoothing: got .*\[0, 1\)"):
    make(label_smoothing=amount)
