import numpy as np
import pytest

from vit_jax.data import arrays, images, probe, transforms
from vit_jax.data.example import Example


def source(n=40, *, ids=None, names=("a", "b"), labels=None):
  labels = np.arange(n) % 2 if labels is None else labels
  pixels = np.zeros((n, 6, 4, 3), np.uint8)
  return arrays.ArraySource(pixels, labels, class_names=names, ids=ids)


class Damaged:
  """A source whose first images are damaged files."""

  num_classes = 2
  class_names = ("a", "b")

  def __init__(self, damaged: int, total: int = 40):
    self.damaged = damaged
    self.total = total

  def __len__(self):
    return self.total

  def __getitem__(self, index: int) -> Example:
    image = np.zeros((6, 4, 1), np.uint8)
    return {
      "image": b"no image" if index < self.damaged else image,
      "label": np.array(0, np.int32),
      "id": str(index),
    }


def test_image_shape_is_that_after_the_transform():
  resize = transforms.resize(size=(8, 16))
  assert probe.image_shape(source(), resize) == (8, 16, 3)


def test_image_shape_skips_damaged_examples():
  resize = transforms.resize(size=(8, 16))
  assert probe.image_shape(Damaged(1), resize) == (8, 16, 1)
  assert probe.image_shape(Damaged(15), resize) == (8, 16, 1)


@pytest.mark.parametrize("damaged, total", [(16, 40), (3, 3), (1, 1)])
def test_image_shape_gives_up_when_all_are_damaged(damaged, total):
  with pytest.raises(images.DecodeError):
    probe.image_shape(Damaged(damaged, total), transforms.resize())


def test_image_shape_of_nothing_is_an_error():
  with pytest.raises(ValueError, match="source: got 0 examples; check"):
    probe.image_shape(Damaged(0, 0), transforms.resize())


def test_fingerprint_is_the_same_for_the_same_data():
  assert probe.fingerprint(source()) == probe.fingerprint(source())


def test_fingerprint_differs_when_size_class_id_or_label_differs():
  ids = [str(i) for i in range(40)]
  swapped = [*ids[:-2], ids[-1], ids[-2]]
  labels = np.arange(40) % 2
  prints = [
    probe.fingerprint(s)
    for s in (
      source(),
      source(41),
      source(names=("a", "c")),
      source(names=("a", "b", "c")),
      source(ids=["x", *ids[1:]]),
      source(ids=swapped),
      source(labels=1 - labels),
    )
  ]
  assert len(set(prints)) == len(prints)


def test_fingerprint_needs_no_more_than_one_example():
  assert len(probe.fingerprint(source(1))) == 16
