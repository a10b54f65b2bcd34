import numpy as np
import pytest
from sklearn import datasets

from vit_jax.data import arrays


def source(images=None, labels=(0, 1, 1), class_names=("a", "b"), **kwargs):
  images = np.zeros((3, 4, 5, 3), np.uint8) if images is None else images
  return arrays.ArraySource(
    images, np.array(labels), class_names=class_names, **kwargs
  )


def test_array_source_gives_image_label_and_id():
  images = np.arange(3 * 20, dtype=np.uint8).reshape(3, 4, 5)
  data = source(images, ids=["x", "y", "z"])
  assert (len(data), data.num_classes, data.class_names) == (3, 2, ("a", "b"))
  example = data[2]
  np.testing.assert_array_equal(example["image"], images[2])
  assert (example["label"].tolist(), example["label"].dtype) == (1, np.int32)
  assert (example["id"], data.example_id(2)) == ("z", "z")
  assert source()[2]["id"] == "2"


def test_array_source_takes_padded_labels():
  data = source(labels=[[0, 1], [1, -1], [-1, -1]])
  assert data[1]["label"].tolist() == [1, -1]


@pytest.mark.parametrize(
  ("kwargs", "match"),
  [
    ({"labels": [0, 2, 1]}, r"got 2 for example '1'; must be in \[0, 2\)"),
    ({"labels": [0, -1, 1]}, "got -1 for example '1'"),
    ({"labels": [[0, 5]] * 3}, r"got \[0, 5\] for example '0'.*\[-1, 2\)"),
    ({"labels": [0, 1]}, "labels: got 2 for 3 images and 3 ids"),
    ({"ids": ["a"]}, "got 3 for 3 images and 1 ids"),
    ({"labels": [0.0, 1.0, 1.0]}, r"labels: got shape \(3,\) of float64"),
    ({"images": np.zeros((3, 4, 5))}, "images: got shape .* of float64"),
    ({"images": np.zeros((3, 4), np.uint8)}, r"images: got shape \(3, 4\)"),
  ],
)
def test_arrays_that_do_not_fit_are_an_error(kwargs, match):
  with pytest.raises(ValueError, match=match):
    source(**kwargs)


def test_digits_are_scaled_images_of_scikit_learn():
  pixels, labels = datasets.load_digits(return_X_y=True)
  for split, count in (("train", 1437), ("test", 360)):
    data = arrays.digits(split=split)
    assert len(data) == count
    for i in (0, 100, count - 1):
      position = int(data[i]["id"].removeprefix("digits/"))
      expected = pixels[position].reshape(8, 8) / 16 * 255
      image = np.asarray(data[i]["image"])
      np.testing.assert_allclose(image, expected, atol=0.5)
      assert data[i]["label"] == labels[position]


def test_digits_splits_are_disjoint_complete_and_stratified():
  train, test = arrays.digits(split="train"), arrays.digits(split="test")
  ids = [data.example_id(i) for data in (train, test) for i in range(len(data))]
  assert len(set(ids)) == 1797
  labels = [
    np.bincount([data[i]["label"] for i in range(len(data))])
    for data in (train, test)
  ]
  share = labels[1] / (labels[0] + labels[1])
  np.testing.assert_allclose(share, 0.2, atol=1 / 174)  # Smallest class: 174.


def test_digits_test_split_never_changes():
  test = arrays.digits(split="test")
  first = [test.example_id(i) for i in range(5)]
  assert first == [f"digits/{i}" for i in (9, 12, 15, 27, 34)]


def test_digits_has_two_splits():
  with pytest.raises(ValueError, match="split: got 'val'; must be 'train' or"):
    arrays.digits(split="val")


def save(tmp_path, **named):
  path = tmp_path / "data.npz"
  np.savez(path, **named)
  return str(path)


def test_npz_reads_one_split_with_the_classes_of_train(tmp_path):
  path = save(
    tmp_path,
    train_images=np.zeros((3, 4, 4), np.uint8),
    train_labels=np.array([0, 2, 1]),
    test_images=np.ones((2, 4, 4), np.uint8),
    test_labels=np.array([[1], [0]]),  # As MedMNIST has them.
  )
  data = arrays.npz(path=path, split="test")
  assert (len(data), data.class_names) == (2, ("0", "1", "2"))
  assert data[0]["label"].tolist() == 1
  assert data[1]["id"] == "test/1"
  np.testing.assert_array_equal(np.asarray(data[0]["image"]), np.ones((4, 4)))


def test_npz_takes_class_names_and_several_labels(tmp_path):
  path = save(
    tmp_path,
    val_images=np.zeros((2, 4, 4, 3), np.uint8),
    val_labels=np.array([[0, 1], [1, -1]]),
    class_names=np.array(["cat", "dog", "cow"]),
  )
  data = arrays.npz(path=path, split="val")
  assert data.class_names == ("cat", "dog", "cow")
  assert data[1]["label"].tolist() == [1, -1]


def test_npz_class_only_in_the_test_split_is_an_error(tmp_path):
  path = save(
    tmp_path,
    train_images=np.zeros((1, 4, 4), np.uint8),
    train_labels=np.array([0]),
    test_images=np.zeros((1, 4, 4), np.uint8),
    test_labels=np.array([1]),
  )
  with pytest.raises(ValueError, match="got 1 for example 'test/0'"):
    arrays.npz(path=path, split="test")


def test_npz_without_the_split_lists_what_is_there(tmp_path):
  path = save(tmp_path, x_train=np.zeros(3))
  with pytest.raises(
    ValueError, match=r"no train_images, train_labels, only x"
  ):
    arrays.npz(path=path, split="train")


def test_npz_runs_no_pickled_code(tmp_path):
  path = save(
    tmp_path,
    train_images=np.array([object()]),
    train_labels=np.array([0]),
  )
  with pytest.raises(ValueError, match="allow_pickle=False"):
    arrays.npz(path=path, split="train")


def test_npz_that_is_not_there_is_an_error(tmp_path):
  with pytest.raises(FileNotFoundError, match=r"path: got .*no such file"):
    arrays.npz(path=str(tmp_path / "no.npz"), split="train")


@pytest.mark.parametrize("damage", ["truncated", "empty", "text", "one array"])
def test_npz_that_is_damaged_is_an_error(tmp_path, damage):
  path = tmp_path / "data.npz"
  np.savez(path, train_images=np.zeros((3, 4, 4), np.uint8))
  if damage == "one array":
    with path.open("wb") as file:
      np.save(file, np.zeros(3))
  else:
    whole = path.read_bytes()
    parts = {"truncated": whole[:99], "empty": b"", "text": b"label,image"}
    path.write_bytes(parts[damage])
  with pytest.raises(ValueError, match="cannot be read as a \\.npz of plain"):
    arrays.npz(path=str(path), split="train")


@pytest.mark.parametrize("labels", [[0, 10**12], ["cat", "dog"]])
def test_npz_labels_that_are_no_class_ids_are_an_error(tmp_path, labels):
  images = np.zeros((2, 4, 4), np.uint8)
  path = save(tmp_path, train_images=images, train_labels=np.array(labels))
  with pytest.raises(ValueError, match="must be class ids below 1,000,000"):
    arrays.npz(path=path, split="train")


def test_images_of_16_bits_stay_as_they_are():
  images = np.arange(2 * 30, dtype=np.uint16).reshape(2, 3, 2, 5) * 1000
  source = arrays.ArraySource(images, np.array([0, 1]), class_names="ab")
  np.testing.assert_array_equal(source[1]["image"], images[1])
