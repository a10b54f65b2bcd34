"""Evaluation is exact: each example counts once, whatever the batches are."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from sklearn import metrics as sklearn_metrics

from tests import tiny
from vit_jax import losses, preprocess
from vit_jax.data import fake, transforms
from vit_jax.evaluators import classification, evaluator
from vit_jax.models import output

N, K = 37, 10  # 37 examples: no batch size divides them.
RESIZE = transforms.resize(size=(8, 8))


class Linear(nn.Module, kw_only=True):
  """Mean colour to logits, rounded to `dtype`: NumPy can follow."""

  dtype: str = "float32"

  @nn.compact
  def __call__(self, image, *, train=False):
    x = image.mean((1, 2))  # [B, C]
    kernel = self.param("kernel", nn.initializers.zeros, (3, K))
    bias = self.param("bias", nn.initializers.zeros, (K,))
    logits = (x @ kernel + bias[None]).astype(self.dtype)
    return output.ModelOutput(logits, x, x[:, None])


def make_evaluator(
  source, *, mesh=None, loss=None, model=None, check_stop=None, **kwargs
):
  context = evaluator.Context(
    model=model or Linear(),
    mesh=mesh or tiny.mesh(1, 1),
    normalize=preprocess.Normalize(),
    loss=loss or losses.softmax_cross_entropy(),
    class_names=tuple(f"class_{k}" for k in range(K)),
    batch_size=16,
    check_stop=check_stop or (lambda: None),
  )
  return classification.ClassificationEvaluator(
    source=source, transform=RESIZE, context=context, **kwargs
  )


def fake_source(num_examples=N, **kwargs):
  return fake.FakeSource(num_examples=num_examples, size=(8, 8), **kwargs)


def mean_colours(source):
  images = np.stack([source[i]["image"] for i in range(len(source))])
  return ((images - 127.5) / 127.5).mean((1, 2))  # [N, C] float64


def blurred_prototypes(seed):
  """Returns a classifier by the nearest colour that is often mistaken."""
  rng = np.random.default_rng(seed)
  colours = mean_colours(fake_source(K))  # The first K have the K classes.
  colours += 0.6 * rng.normal(size=colours.shape)
  return {
    "kernel": (6 * colours.T).astype(np.float32),
    "bias": (-3 * (colours**2).sum(1)).astype(np.float32),
  }


PARAMS = blurred_prototypes(0)


def numpy_logits(source):
  return mean_colours(source) @ PARAMS["kernel"] + PARAMS["bias"]


def numpy_metrics(source):
  logits = numpy_logits(source)
  label = np.asarray([int(source[i]["label"]) for i in range(len(source))])
  order = np.argsort(-logits, axis=1)
  correct = order[:, 0] == label
  each = np.log(np.exp(logits).sum(1)) - logits[np.arange(len(label)), label]
  metrics = {
    "accuracy": correct.mean(),
    "top5": (order[:, :5] == label[:, None]).any(1).mean(),
    "mean_per_class": np.mean([correct[label == k].mean() for k in range(K)]),
    "loss": each.mean(),
    "count": len(label),
  }
  return metrics, correct, label, each


@pytest.mark.parametrize("devices", [1, 8])
@pytest.mark.parametrize("batch_size", [1, 7, 16, 37, 64])
def test_metrics_are_those_of_numpy_for_any_batches(batch_size, devices):
  source = fake_source()
  mesh = tiny.mesh(devices, 1)
  got = make_evaluator(source, mesh=mesh, batch_size=batch_size)(PARAMS)
  want, *_ = numpy_metrics(source)
  assert got.keys() == want.keys()
  assert isinstance(got["count"], int)
  assert 0.1 < want["accuracy"] < want["top5"] < 1  # No case is trivial.
  for name in ("count", "accuracy", "top5", "mean_per_class"):
    assert got[name] == pytest.approx(want[name], rel=1e-12), name
  assert got["loss"] == pytest.approx(want["loss"], rel=1e-6)


def test_accuracies_and_counts_per_class_are_those_of_numpy():
  source = fake_source()
  inspection = make_evaluator(source, batch_size=7).inspect(PARAMS)
  want, correct, label, _ = numpy_metrics(source)
  np.testing.assert_array_equal(
    inspection.count, np.bincount(label, minlength=K)
  )
  np.testing.assert_array_equal(
    inspection.accuracy, [correct[label == k].mean() for k in range(K)]
  )
  assert inspection.metrics["accuracy"] == want["accuracy"]


def test_class_without_example_is_left_out_of_the_mean():
  source = fake_source(7)
  inspection = make_evaluator(source).inspect(PARAMS)
  assert np.isnan(inspection.accuracy[7:]).all()
  assert inspection.metrics["mean_per_class"] == inspection.accuracy[:7].mean()


class Relabelled:
  """A source in which the model is right exactly where `right` says."""

  def __init__(self, right, model_says):
    self.right, self.model_says = right, model_says
    self.num_classes = K
    self.class_names = tuple(f"class_{k}" for k in range(K))
    self.source = fake_source(len(right))

  def __len__(self):
    return len(self.right)

  def __getitem__(self, index):
    label = (self.model_says[index] + (not self.right[index])) % K
    return {**self.source[index], "label": np.asarray(label, np.int32)}


def right_but_for_the_last(num_examples, num_wrong):
  says = numpy_logits(fake_source(num_examples)).argmax(1)
  return Relabelled(np.arange(num_examples) < num_examples - num_wrong, says)


def test_last_batch_weighs_what_it_holds():
  source = right_but_for_the_last(100, 36)  # All of the second batch.
  metrics = make_evaluator(source, batch_size=64)(PARAMS)
  assert metrics["accuracy"] == 0.64  # A mean of batch means would be 0.5.
  assert metrics["count"] == 100


def test_bfloat16_model_is_counted_in_integers_and_summed_in_float32():
  # Neither 299 nor 300 is a bfloat16: a sum of ones in it stalls at 256.
  source = right_but_for_the_last(300, 0)
  model = Linear(dtype="bfloat16")
  metrics = make_evaluator(source, model=model, batch_size=300)(PARAMS)
  logits = np.asarray(
    jnp.asarray(numpy_logits(source), jnp.bfloat16), np.float64
  )
  says = np.asarray([source[i]["label"] for i in range(300)])
  each = np.log(np.exp(logits).sum(1)) - logits[np.arange(300), says]
  assert metrics["count"] == 300
  assert metrics["top5"] == 1.0
  # A logit on the edge of two bfloat16 values may round to either, 1 / 256 off.
  assert metrics["loss"] == pytest.approx(each.mean(), rel=1e-4)


# --- Multi-label data.


def numpy_multi_hot(source):
  hot = np.zeros((len(source), K))
  for i in range(len(source)):
    hot[i, [k for k in source[i]["label"] if k >= 0]] = 1
  return hot


@pytest.mark.parametrize(("batch_size", "devices"), [(7, 1), (64, 1), (16, 8)])
def test_map_is_that_of_scikit_learn(batch_size, devices):
  source = fake_source(multi_label=True)
  got = make_evaluator(
    source,
    mesh=tiny.mesh(devices, 1),
    loss=losses.sigmoid_cross_entropy(),
    batch_size=batch_size,
  )(PARAMS)
  logits, hot = numpy_logits(source), numpy_multi_hot(source)
  p = 1 / (1 + np.exp(-logits))
  assert got.keys() == {"accuracy", "loss", "count", "mAP"}
  assert got["count"] == N
  assert got["mAP"] == pytest.approx(
    sklearn_metrics.average_precision_score(hot, logits), rel=1e-12
  )
  assert got["accuracy"] == hot[np.arange(N), logits.argmax(1)].mean()
  each = -(hot * np.log(p) + (1 - hot) * np.log(1 - p)).sum(1)
  assert got["loss"] == pytest.approx(each.mean(), rel=1e-6)


def test_image_without_label_counts_for_the_loss_but_not_the_accuracy():
  class Unlabelled(fake.FakeSource):
    def __getitem__(self, index):
      example = super().__getitem__(index)
      if index < 5:
        example["label"] = np.full(2, -1, np.int32)
      return example

  source = Unlabelled(num_examples=N, size=(8, 8), multi_label=True)
  got = make_evaluator(source, loss=losses.sigmoid_cross_entropy())(PARAMS)
  hot = numpy_multi_hot(source)
  says = numpy_logits(source).argmax(1)
  assert got["count"] == N
  assert got["accuracy"] == hot[np.arange(N), says][5:].mean()


# --- Worst predictions.


@pytest.mark.parametrize("batch_size", [7, 64])
def test_worst_predictions_are_the_highest_losses_in_order(batch_size):
  source = fake_source()
  evaluate = make_evaluator(source, batch_size=batch_size)
  worst = evaluate.inspect(PARAMS, num_worst=9).worst
  _, _, label, each = numpy_metrics(source)
  logits = numpy_logits(source)
  p = np.exp(logits) / np.exp(logits).sum(1, keepdims=True)
  assert [one.index for one in worst] == np.argsort(-each)[:9].tolist()
  for one in worst:
    assert one.loss == pytest.approx(each[one.index], rel=1e-5)
    assert one.label == (label[one.index],)
    assert one.predicted == logits[one.index].argmax()
    assert one.probability == pytest.approx(p[one.index].max(), rel=1e-5)


def test_worst_predictions_are_all_there_are_if_these_are_fewer():
  worst = make_evaluator(fake_source(3)).inspect(PARAMS, num_worst=9).worst
  assert sorted(one.index for one in worst) == [0, 1, 2]  # And no padding.


def test_prediction_of_multi_label_data_has_all_its_labels():
  source = fake_source(4, multi_label=True)
  evaluate = make_evaluator(source, loss=losses.sigmoid_cross_entropy())
  labels = {one.index: one.label for one in evaluate.inspect(PARAMS).worst}
  assert labels == {0: (0, 1), 1: (1, 2), 2: (2,), 3: (3,)}


# --- What does not fit, and leaving early.


def test_other_classes_are_refused():
  match = (
    r"source: got 7 classes \('class_0', .*, ...\); the model knows 10: "
    r"\('class_0'.*Evaluate on data with the same classes in the same order"
  )
  with pytest.raises(ValueError, match=match):
    make_evaluator(fake_source(num_classes=7))


def test_classes_in_another_order_are_refused():
  source = fake_source()
  source.class_names = source.class_names[::-1]
  with pytest.raises(ValueError, match=r"got 10 classes \('class_9'"):
    make_evaluator(source)


class Damaged(fake.FakeSource):
  """The image of example 5 cannot be decoded."""

  def __getitem__(self, index):
    example = super().__getitem__(index)
    return {**example, "image": b"no image"} if index == 5 else example


@pytest.mark.parametrize("batch_size", [7, 64])
def test_damaged_example_is_left_out_and_said_to_be(batch_size):
  damaged = Damaged(num_examples=N, size=(8, 8))
  got = make_evaluator(damaged, max_bad=1, batch_size=batch_size)(PARAMS)
  _, correct, _, each = numpy_metrics(fake_source())
  assert got["count"] == 36 and got["skipped"] == 1
  good = np.arange(N) != 5
  assert got["accuracy"] == correct[good].mean()
  assert got["loss"] == pytest.approx(each[good].mean(), rel=1e-6)


def test_damaged_example_is_named_if_none_may_be():
  damaged = Damaged(num_examples=N, size=(8, 8))
  with pytest.raises(ValueError, match="fake/5"):
    make_evaluator(damaged)(PARAMS)


def test_evaluation_is_left_when_asked_to():
  asked = []

  def check_stop():
    asked.append(True)
    if len(asked) == 2:
      raise evaluator.Stopped

  with pytest.raises(evaluator.Stopped):
    make_evaluator(fake_source(), batch_size=7, check_stop=check_stop)(PARAMS)
  assert len(asked) == 2  # Of six batches.


def test_evaluation_compiles_once_over_passes_and_parameters(caplog):
  evaluate = make_evaluator(fake_source(), batch_size=7)
  with jax.log_compiles():
    evaluate(PARAMS)
    caplog.clear()
    other = {name: 2 * x for name, x in PARAMS.items()}
    assert evaluate(PARAMS) != evaluate(other)
  assert "Compiling jit(_sums)" not in caplog.text


@pytest.mark.parametrize(
  "wrong", [{"batch_size": 0}, {"num_workers": -1}, {"max_bad": -1}]
)
def test_numbers_out_of_range_are_refused_before_training(wrong):
  with pytest.raises(ValueError, match="batch_size, num_workers, max_bad: got"):
    make_evaluator(fake_source(), **wrong)
