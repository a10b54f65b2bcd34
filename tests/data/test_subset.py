import subprocess
import sys

import numpy as np
import pytest

from vit_jax.data import arrays, fake, subset

SOURCE = fake.FakeSource(num_examples=2000, size=(2, 2))


def ids(source):
  return [source.example_id(i) for i in range(len(source))]


def test_holdout_parts_are_disjoint_and_complete():
  train = subset.Holdout(source=SOURCE, fraction=0.1, part="train")
  val = subset.Holdout(source=SOURCE, fraction=0.1, part="val")
  assert sorted(ids(train) + ids(val)) == sorted(ids(SOURCE))
  assert 150 < len(val) < 250  # 200 expected, standard deviation 13.


def test_holdout_gives_the_examples_of_the_source():
  val = subset.Holdout(source=SOURCE, fraction=0.1, part="val")
  assert (val.num_classes, val.class_names) == (10, SOURCE.class_names)
  example = val[7]
  assert example["id"] == val.example_id(7)
  original = SOURCE[int(example["id"].removeprefix("fake/"))]
  np.testing.assert_array_equal(example["image"], original["image"])


def test_holdout_keeps_classes_and_grows_with_the_fraction():
  small = subset.Holdout(source=SOURCE, fraction=0.1, part="val")
  large = subset.Holdout(source=SOURCE, fraction=0.3, part="val")
  assert set(ids(small)) < set(ids(large))
  assert len({int(small[i]["label"]) for i in range(len(small))}) == 10


def test_holdout_moves_no_example_when_others_are_added():
  larger = fake.FakeSource(num_examples=3000, size=(2, 2))
  val = set(ids(subset.Holdout(source=SOURCE, fraction=0.1, part="val")))
  grown = set(ids(subset.Holdout(source=larger, fraction=0.1, part="val")))
  assert grown & set(ids(SOURCE)) == val


def test_holdout_is_the_same_in_another_process():
  program = (
    "from vit_jax.data import fake, subset\n"
    "source = fake.FakeSource(num_examples=100, size=(2, 2))\n"
    "val = subset.Holdout(source=source, fraction=0.1, part='val')\n"
    "print([val.example_id(i) for i in range(len(val))])\n"
  )
  result = subprocess.run(
    [sys.executable, "-c", program], check=True, capture_output=True, text=True
  )
  source = fake.FakeSource(num_examples=100, size=(2, 2))
  val = subset.Holdout(source=source, fraction=0.1, part="val")
  assert result.stdout.strip() == str(ids(val))


@pytest.mark.parametrize(
  ("kwargs", "match"),
  [
    (
      {"fraction": 0.0, "part": "val"},
      r"fraction: got 0.0; must be in \(0, 1\)",
    ),
    ({"fraction": 1.0, "part": "val"}, "fraction: got 1.0"),
    ({"fraction": 0.5, "part": "test"}, "part: got 'test'; must be 'train'"),
    ({"fraction": 1e-9, "part": "val"}, "leaves no example of 2000"),
  ],
)
def test_holdout_arguments_out_of_range_are_an_error(kwargs, match):
  with pytest.raises(ValueError, match=match):
    subset.Holdout(source=SOURCE, **kwargs)


def test_holdout_works_over_arrays():
  source = arrays.digits(split="train")
  val = subset.Holdout(source=source, fraction=0.1, part="val")
  assert 100 < len(val) < 190
