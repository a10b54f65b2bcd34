import numpy as np
import pytest

from vit_jax.data import fake, images


def test_fake_example_is_a_function_of_its_index():
  first = fake.FakeSource(num_examples=5)[3]
  again = fake.FakeSource(num_examples=900)[3]
  np.testing.assert_array_equal(first["image"], again["image"])
  assert (first["label"].tolist(), first["id"]) == (3, "fake/3")
  other = fake.FakeSource(num_examples=900)[13]
  assert other["label"] == 3
  assert not np.array_equal(first["image"], other["image"])


def test_fake_class_shows_in_the_mean_colour():
  source = fake.FakeSource(num_examples=200, size=(8, 8), num_classes=10)
  pixels = np.array([source[i]["image"] for i in range(200)])
  colours = pixels.mean((1, 2))  # [N, C]
  centres = colours[:10]
  distance = np.linalg.norm(colours[:, None] - centres[None], axis=-1)
  np.testing.assert_array_equal(distance.argmin(1), np.arange(200) % 10)


@pytest.mark.parametrize("channels", [1, 3, 7])
def test_fake_image_has_size_and_channels(channels):
  image = fake.FakeSource(size=(6, 9), num_channels=channels)[0]["image"]
  assert isinstance(image, np.ndarray)
  assert (image.shape, image.dtype) == ((6, 9, channels), np.uint8)


@pytest.mark.parametrize("channels", [1, 3])
def test_fake_encoded_image_decodes_to_the_same_pixels(channels):
  kwargs = {"size": (6, 9), "num_channels": channels}
  data = fake.FakeSource(**kwargs, encoded=True)[4]["image"]
  assert isinstance(data, bytes)
  pixels = images.decode(data, exif=True, background=255)
  expected = fake.FakeSource(**kwargs)[4]["image"]
  np.testing.assert_array_equal(pixels, np.broadcast_to(expected, pixels.shape))


def test_fake_multi_label_has_one_or_two_classes():
  source = fake.FakeSource(num_classes=4, multi_label=True)
  labels = [source[i]["label"].tolist() for i in range(4)]
  assert labels == [[0, 1], [1, 2], [2, -1], [3, -1]]


@pytest.mark.parametrize(
  ("kwargs", "match"),
  [
    ({"num_examples": 0}, "num_examples, size, .* got 0"),
    ({"num_channels": 4, "encoded": True}, "num_channels: got 4 with encoded"),
  ],
)
def test_fake_arguments_out_of_range_are_an_error(kwargs, match):
  with pytest.raises(ValueError, match=match):
    fake.FakeSource(**kwargs)
