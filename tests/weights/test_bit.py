"""The .npz of big_transfer, from its documented names and in NumPy."""

import logging

import numpy as np
import pytest

from tests.models import numpy_convnet
from tests.weights import google_files
from vit_jax import spec
from vit_jax.models import bit as bit_models
from vit_jax.models import resnet
from vit_jax.weights import adapt, bit, google, layout, tensors

IMAGE = np.random.default_rng(7).uniform(-1, 1, (1, 24, 32, 3))
IMAGE = IMAGE.astype(np.float32)


def documented(stages, *, width=1, classes=5, suffix=lambda name: ""):
  """Returns shape by name.

  Args:
    stages: units of each.
    width: factor.
    classes: 0 for no head.
    suffix: what follows `standardized_conv2d` in a name.
  """

  def conv(name):
    return f"{name}/standardized_conv2d{suffix(name)}/kernel"

  w = 64 * width
  shapes: dict[str, tuple[int, ...]]
  shapes = {conv("resnet/root_block"): (7, 7, 3, w)}
  inputs = w
  for s, units in enumerate(stages, 1):
    n = w * 2 ** (s - 1)
    for u in range(1, units + 1):
      unit = f"resnet/block{s}/unit{u:02d}"
      kernels = {
        "a": (1, 1, inputs, n),
        "b": (3, 3, n, n),
        "c": (1, 1, n, 4 * n),
      }
      for letter, shape in kernels.items():
        shapes[conv(f"{unit}/{letter}")] = shape
        for leaf in ("gamma", "beta"):
          shapes[f"{unit}/{letter}/group_norm/{leaf}"] = (shape[2],)
      if u == 1:
        shapes[conv(f"{unit}/a/proj")] = (1, 1, inputs, 4 * n)
      inputs = 4 * n
  for leaf in ("gamma", "beta"):
    shapes[f"resnet/group_norm/{leaf}"] = (inputs,)
  if classes:
    shapes["resnet/head/conv2d/kernel"] = (1, 1, inputs, classes)
    shapes["resnet/head/conv2d/bias"] = (classes,)
  return shapes


def forward(arrays, image, stages):
  """Returns the logits of one image."""
  a = {name: np.asarray(x, np.float64) for name, x in arrays.items()}

  def conv(name):
    return {"kernel": a[f"{name}/standardized_conv2d/kernel"]}

  def norm(name):
    return {
      "scale": a[f"{name}/group_norm/gamma"],
      "bias": a[f"{name}/group_norm/beta"],
    }

  p = {"root": {"conv": conv("resnet/root_block")}, "norm": norm("resnet")}
  for s, units in enumerate(stages, 1):
    p[f"stage{s}"] = {}
    for u in range(1, units + 1):
      name = f"resnet/block{s}/unit{u:02d}"
      unit = {}
      for i, letter in enumerate("abc", 1):
        unit[f"conv{i}"] = conv(f"{name}/{letter}")
        unit[f"norm{i}"] = norm(f"{name}/{letter}")
      if u == 1:
        unit["conv_shortcut"] = conv(f"{name}/a/proj")
      p[f"stage{s}"][f"unit{u}"] = unit
  pooled = numpy_convnet.bit(p, image, stages=stages).mean(axis=(0, 1))
  kernel = a["resnet/head/conv2d/kernel"][0, 0]
  return pooled @ kernel + a["resnet/head/conv2d/bias"]


def test_file_written_from_the_documentation_gives_the_logits_of_numpy(
  tmp_path,
):
  arrays = google_files.draw(documented((2, 1)))
  opened = google_files.write(tmp_path / "bit.npz", arrays)
  model, params, card = google_files.load(bit, opened)
  assert card.image_size == (224, 224)  # Of the released pre-training.
  expected = forward(arrays, IMAGE[0], (2, 1))
  actual = google_files.logits(model, params, IMAGE)
  # f32: 11 convolutions, and sums over 512 channels.
  np.testing.assert_allclose(actual[0], expected, atol=1e-5)


def test_what_is_written_is_bit_equal_to_what_was_read():
  arrays = google_files.draw(documented((1, 1)))
  _, params, card = google_files.load(bit, tensors.from_arrays(arrays))
  again = google_files.save(bit, params, card)
  assert {n: x.shape for n, x in again.items()} == documented((1, 1))
  for name, x in again.items():
    np.testing.assert_array_equal(x, arrays[name], name)


def test_numbers_after_the_names_of_convolutions_are_passed_over():
  plain = documented((1, 1))
  numbered = documented((1, 1), suffix=lambda name: f"_{len(name)}")
  assert numbered.keys() != plain.keys()
  arrays = google_files.draw(numbered)
  _, params, card = google_files.load(bit, tensors.from_arrays(arrays))
  again = google_files.save(bit, params, card)
  assert {n: x.shape for n, x in again.items()} == plain
  for old, new in zip(numbered, plain):
    np.testing.assert_array_equal(again[new], arrays[old], new)


@pytest.mark.parametrize(
  ("variant", "count"),
  [
    ("R50x1", 25_549_352),
    pytest.param("R101x3", 387_934_888, marks=pytest.mark.slow),
  ],
)
def test_published_sizes_have_the_documented_names_and_shapes(variant, count):
  sizes = resnet.sizes(variant)
  model = spec.spec(bit_models.BiT, num_classes=1000, **sizes)
  card = google.card(model, (224, 224), num_channels=3)
  shapes = adapt.param_shapes(card.build_model(), (64, 64, 3))
  written = layout.expected_shapes(bit.rules(card, shapes, {}), shapes)
  assert written == documented(
    sizes["stages"], width=sizes["width_factor"], classes=1000
  )
  assert sum(np.prod(shape) for shape in written.values()) == count


def test_card_says_what_the_arrays_do():
  arrays = google_files.draw(documented((1, 1), width=2, classes=0))
  opened = tensors.from_arrays(arrays)
  card = bit.describe(opened, {}, image_size=(480, 320))
  assert card.model["fn"] is bit_models.BiT
  assert card.model["stages"] == (1, 1)
  assert card.model["width_factor"] == 2
  assert card.model["num_classes"] == 0
  assert (card.image_size, card.num_channels) == ((480, 320), 3)
  assert bit.sidecars(card) == {}


def test_post_activation_resnet_is_refused():
  model = spec.spec(resnet.ResNet, num_classes=5, stages=(1,))
  card = google.card(model, (32, 32), num_channels=3)
  shapes = adapt.param_shapes(card.build_model(), (32, 32, 3))
  with pytest.raises(ValueError, match=r"'bit' for ResNet; it holds \['BiT'\]"):
    bit.rules(card, shapes, {})


def test_another_epsilon_is_logged(caplog):
  model = spec.spec(
    bit_models.BiT, num_classes=5, stages=(1,), norm_epsilon=1e-6
  )
  card = google.card(model, (32, 32), num_channels=3)
  shapes = adapt.param_shapes(card.build_model(), (32, 32, 3))
  with caplog.at_level(logging.WARNING):
    bit.rules(card, shapes, {})
  assert "bit: the model has norm_epsilon=1e-06" in caplog.text
