"""Metrics against literal numbers, NumPy and scikit-learn."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import sklearn.metrics
from clu import metrics as clu_metrics

from vit_jax import metrics


def test_average_leaves_padding_out_even_when_it_is_nan():
  got = metrics.average(
    jnp.array([1.0, 2.0, jnp.nan]), jnp.array([1.0, 1.0, 0.0])
  )
  assert got.total == 3.0
  assert got.count == 2


def test_sums_of_bfloat16_values_are_float32_and_counts_int32():
  ones = jnp.ones(257, jnp.bfloat16)
  total = clu_metrics.Average.empty()
  for _ in range(4):
    total = total.merge(metrics.average(ones, jnp.ones(257)))
  assert total.total.dtype == jnp.float32
  assert total.count.dtype == jnp.int32
  assert total.total == 1028.0  # bfloat16 has no 1028, and none of 257.
  assert total.count == 1028
  # Why the cast is there: a running sum in bfloat16 stops at 256.
  running = jnp.zeros([], jnp.bfloat16)
  running = jax.lax.fori_loop(0, 1000, lambda _, total: total + 1, running)
  assert running == 256


def test_float64_sums_merge_on_the_host_without_loss():
  batch = metrics.to_host({"loss": metrics.average(jnp.ones(3), jnp.ones(3))})
  total = batch["loss"].replace(
    total=np.float64(2.0**24), count=np.int64(2**40)
  )
  for _ in range(2):
    total = total.merge(batch["loss"])
  assert isinstance(total, clu_metrics.Average)
  assert total.total.dtype == np.float64
  assert total.count.dtype == np.int64
  assert total.total == 2**24 + 6  # float32 has only even numbers here.
  assert total.count == 2**40 + 6


def test_an_average_does_not_depend_on_how_the_examples_are_batched():
  values = np.random.default_rng(0).normal(size=100).astype(np.float32)

  def mean(batch_size):
    total = metrics.to_host(clu_metrics.Average.empty())
    for start in range(0, 100, batch_size):
      part = values[start : start + batch_size]
      padded = np.full(batch_size, np.nan, np.float32)
      padded[: len(part)] = part
      mask = (np.arange(batch_size) < len(part)).astype(np.float32)
      update = metrics.average(jnp.asarray(padded), jnp.asarray(mask))
      total = total.merge(metrics.to_host(update))
    assert total.count == 100
    return float(total.compute())

  expected = values.astype(np.float64).mean()
  assert [mean(b) for b in (1, 7, 64, 100)] == pytest.approx(
    [expected] * 4, abs=1e-7
  )


def test_top_k_of_a_single_label():
  logits = jnp.array([[3.0, 2.0, 1.0, 0.0]] * 4)
  label = jnp.eye(4)
  np.testing.assert_array_equal(
    metrics.top_k(logits, label, k=1), [1.0, 0.0, 0.0, 0.0]
  )
  np.testing.assert_array_equal(
    metrics.top_k(logits, label, k=3), [1.0, 1.0, 1.0, 0.0]
  )


def test_top_k_of_several_labels_needs_one_among_the_highest():
  logits = jnp.array([[3.0, 2.0, 1.0], [3.0, 2.0, 1.0], [3.0, 2.0, 1.0]])
  label = jnp.array([[1.0, 0.0, 1.0], [0.0, 1.0, 1.0], [0.0, 0.0, 0.0]])
  np.testing.assert_array_equal(metrics.top_k(logits, label, k=1), [1, 0, 0])
  np.testing.assert_array_equal(metrics.top_k(logits, label, k=2), [1, 1, 0])


def test_top_k_beyond_the_classes_takes_them_all():
  logits = jnp.array([[0.0, 1.0], [0.0, 1.0]])
  label = jnp.array([[1.0, 0.0], [0.0, 0.0]])
  np.testing.assert_array_equal(metrics.top_k(logits, label, k=5), [1, 0])


def test_top_k_takes_the_lower_class_among_equal_logits():
  logits = jnp.zeros([3, 3], jnp.bfloat16)
  np.testing.assert_array_equal(
    metrics.top_k(logits, jnp.eye(3), k=1), [1, 0, 0]
  )
  np.testing.assert_array_equal(
    metrics.top_k(logits, jnp.eye(3), k=2), [1, 1, 0]
  )


def test_top_1_equals_argmax_and_top_k_equals_scikit_learn():
  rng = np.random.default_rng(0)
  logits = rng.normal(size=(64, 10)).astype(np.float32)
  ids = rng.integers(10, size=64)
  label = jnp.eye(10)[ids]
  np.testing.assert_array_equal(
    metrics.top_k(jnp.asarray(logits), label, k=1), logits.argmax(-1) == ids
  )
  expected = sklearn.metrics.top_k_accuracy_score(
    ids, logits, k=5, labels=range(10)
  )
  assert (
    float(metrics.top_k(jnp.asarray(logits), label, k=5).mean()) == expected
  )


def test_top_k_below_one_is_refused():
  with pytest.raises(ValueError, match=r"k: got 0; must be >= 1"):
    metrics.top_k(jnp.zeros([1, 2]), jnp.zeros([1, 2]), k=0)


def test_per_class_counts_leave_padding_out():
  label = jnp.eye(3)[jnp.array([0, 0, 1, 1, 1])]
  correct = jnp.array([1.0, 0.0, 1.0, 1.0, 1.0], jnp.bfloat16)
  mask = jnp.array([1.0, 1.0, 1.0, 1.0, 0.0])
  hits, counts = metrics.per_class(correct, label, mask=mask)
  assert hits.dtype == counts.dtype == jnp.int32
  np.testing.assert_array_equal(hits, [1, 2, 0])
  np.testing.assert_array_equal(counts, [2, 2, 0])
  assert metrics.mean_per_class(hits, counts) == 0.75


def test_mean_per_class_equals_balanced_accuracy():
  rng = np.random.default_rng(1)
  ids = rng.choice(6, p=[0.5, 0.3, 0.1, 0.05, 0.05, 0.0], size=300)
  predicted = np.where(rng.random(300) < 0.7, ids, (ids + 1) % 5)
  hits, counts = metrics.per_class(
    jnp.asarray(predicted == ids), jnp.eye(6)[ids], mask=jnp.ones(300)
  )
  expected = np.mean(
    [(predicted == ids)[ids == k].mean() for k in range(6) if (ids == k).any()]
  )
  assert metrics.mean_per_class(hits, counts) == pytest.approx(expected)


def test_mean_per_class_of_nothing_is_nan():
  assert np.isnan(metrics.mean_per_class(np.zeros(3), np.zeros(3)))


@pytest.mark.parametrize("levels", [2, 5, 1_000_000])
@pytest.mark.parametrize("seed", range(3))
def test_average_precision_equals_scikit_learn_with_ties(levels, seed):
  rng = np.random.default_rng(seed)
  scores = (rng.integers(levels, size=(97, 6)) / levels).astype(np.float32)
  labels = (rng.random((97, 6)) < 0.2).astype(np.float32)
  labels[:, 4] = 1
  expected = [
    sklearn.metrics.average_precision_score(labels[:, k], scores[:, k])
    for k in range(6)
  ]
  got = metrics.average_precision(scores, labels)
  np.testing.assert_allclose(got, expected, rtol=1e-12)
  assert metrics.mean_average_precision(scores, labels) == pytest.approx(
    np.mean(expected)
  )


def test_average_precision_does_not_depend_on_the_order_of_examples():
  rng = np.random.default_rng(2)
  scores = rng.integers(4, size=(50, 3)).astype(np.float32)
  labels = rng.integers(2, size=(50, 3))
  order = rng.permutation(50)
  np.testing.assert_array_equal(
    metrics.average_precision(scores, labels),
    metrics.average_precision(scores[order], labels[order]),
  )


def test_classes_without_examples_are_nan_and_left_out_of_the_mean():
  scores = np.array([[0.9, 0.1], [0.8, 0.2]], np.float32)
  labels = np.array([[0, 0], [1, 0]])
  np.testing.assert_array_equal(
    metrics.average_precision(scores, labels), [0.5, np.nan]
  )
  assert metrics.mean_average_precision(scores, labels) == 0.5
  assert np.isnan(metrics.mean_average_precision(scores, 0 * labels))
  empty = np.zeros([0, 2])
  assert np.isnan(metrics.mean_average_precision(empty, empty))


def test_average_precision_names_what_it_cannot_rank():
  with pytest.raises(ValueError, match=r"scores: got shape \(2, 3\) with"):
    metrics.average_precision(np.zeros([2, 3]), np.zeros([2, 4]))
  scores = np.array([[0.0, np.nan], [0.0, 0.0]])
  with pytest.raises(ValueError, match=r"scores: got nan for class 1"):
    metrics.average_precision(scores, np.ones([2, 2]))
