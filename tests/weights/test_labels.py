"""Class names: the right words at the right ids, and none by guessing."""

import pytest

from vit_jax.weights import labels


@pytest.mark.parametrize("size", [1_000, 21_841, 21_843])
def test_there_is_a_name_for_each_class(size):
  names = labels.names(size)
  assert names is not None
  assert len(names) == size
  assert all(name and name == name.strip() for name in names)


def test_imagenet_is_in_the_order_of_its_challenge():
  names = labels.names(1_000)
  assert names is not None
  assert names[0] == "tench, Tinca tinca"
  assert names[1] == "goldfish, Carassius auratus"
  assert names[207] == "golden retriever"
  assert names[281] == "tabby, tabby cat"
  assert names[388] == "giant panda, panda, panda bear, coon bear, " + (
    "Ailuropoda melanoleuca"
  )
  assert names[999] == "toilet tissue, toilet paper, bathroom tissue"


def test_imagenet21k_is_in_the_order_of_the_published_heads():
  names = labels.names(21_843)
  assert names is not None
  assert names[0] == "organism, being"
  assert names[1] == "benthos"
  assert names[9205] == "picture, image, icon, ikon"
  assert names[15027] == "bleacher"
  small = labels.names(1_000)
  assert small is not None
  # One class of ImageNet, the teddy bear, is not in Google's ImageNet-21k.
  assert set(small) - set(names) == {"teddy, teddy bear"}


def test_the_release_of_2011_lacks_two_classes_of_the_others():
  names, all_names = labels.names(21_841), labels.names(21_843)
  assert names is not None
  assert all_names is not None
  assert names[9204:9206] == (all_names[9204], all_names[9206])
  assert names[-1] == all_names[-1]
  assert "bleacher" not in names


@pytest.mark.parametrize("size", [0, 10, 999, 11_221, 21_842])
def test_other_sizes_have_no_names(size):
  assert labels.names(size) is None
