import io
import pickle

import numpy as np
import pytest
from PIL import Image

from vit_jax.data import images, transforms

FACTORIES = [
  transforms.inception_train,
  transforms.resize,
  transforms.resize_center_crop,
  transforms.pad_crop,
]


def photo(height=40, width=50, channels=3):
  rng = np.random.default_rng(0)
  return rng.integers(0, 256, size=(height, width, channels), dtype=np.uint8)


def png(image, **kwargs):
  file = io.BytesIO()
  Image.fromarray(image).save(file, "PNG", **kwargs)
  return file.getvalue()


def apply(transform, image, seed=0):
  example = {"image": image, "label": np.int32(3), "id": "a"}
  result = transform(example, np.random.default_rng(seed))
  assert {"label": result["label"], "id": result["id"]} == {
    "label": 3,
    "id": "a",
  }
  assert example["image"] is image  # Not changed in place.
  return result["image"]


@pytest.mark.parametrize("factory", FACTORIES)
@pytest.mark.parametrize("channels", [1, 3, 5])
def test_result_has_the_size_and_the_channels_of_the_array(factory, channels):
  image = apply(factory(size=(24, 16)), photo(channels=channels))
  assert (image.shape, image.dtype) == ((24, 16, channels), np.uint8)


@pytest.mark.parametrize("factory", FACTORIES)
def test_encoded_grey_becomes_rgb_of_the_same_size(factory):
  image = apply(factory(size=(24, 16)), png(photo()[:, :, 0]))
  assert (image.shape, image.dtype) == ((24, 16, 3), np.uint8)


@pytest.mark.parametrize("factory", FACTORIES)
def test_result_depends_on_example_and_generator_alone(factory):
  transform = factory(size=(24, 16))
  copied = pickle.loads(pickle.dumps(transform))  # As a worker gets it.
  first = apply(transform, photo(), seed=5)
  apply(transform, photo(30, 30), seed=6)
  np.testing.assert_array_equal(apply(copied, photo(), seed=5), first)


@pytest.mark.parametrize(
  "transform",
  [transforms.resize(size=(24, 16)), transforms.resize_center_crop()],
)
def test_evaluation_transforms_draw_nothing(transform):
  first = apply(transform, photo(), seed=0)
  np.testing.assert_array_equal(apply(transform, photo(), seed=1), first)


@pytest.mark.parametrize(
  "transform", [transforms.inception_train(), transforms.pad_crop()]
)
def test_training_transforms_draw_anew(transform):
  first = apply(transform, photo(), seed=0)
  assert not np.array_equal(apply(transform, photo(), seed=1), first)


def test_resize_keeps_digits_as_they_are():
  image = photo(8, 8, 1)
  result = apply(transforms.resize(size=(8, 8)), image[:, :, 0])
  np.testing.assert_array_equal(result, image)


def test_resize_flips_only_when_asked():
  image = photo(8, 8)
  flips = [
    np.array_equal(
      apply(transforms.resize(size=(8, 8), flip=True), image, seed),
      image[:, ::-1],
    )
    for seed in range(20)
  ]
  assert 0 < sum(flips) < 20


def test_resize_center_crop_cuts_the_middle_of_the_short_side_resize():
  image = photo(20, 40)
  result = apply(
    transforms.resize_center_crop(resize=(20, 20), size=(10, 10)), image
  )
  np.testing.assert_array_equal(result, image[5:15, 15:25])


def test_pad_crop_is_a_shift_with_black_borders():
  image = photo(8, 8)
  transform = transforms.pad_crop(size=(8, 8), padding=2, flip=False)
  padded = np.zeros((12, 12, 3), np.uint8)
  padded[2:10, 2:10] = image
  shifts = [padded[y : y + 8, x : x + 8] for y in range(5) for x in range(5)]
  seen = set()
  for seed in range(300):
    result = apply(transform, image, seed)
    match = [np.array_equal(result, shift) for shift in shifts]
    assert sum(match) == 1
    seen.add(match.index(True))
  assert len(seen) == 25


def test_inception_train_without_crop_and_flip_is_resize():
  transform = transforms.inception_train(
    size=(24, 16), area=(1.0, 1.0), aspect=(1.25, 1.25), flip=False
  )
  np.testing.assert_array_equal(
    apply(transform, photo(40, 50)),
    apply(transforms.resize(size=(24, 16)), photo(40, 50)),
  )


@pytest.mark.parametrize("factory", FACTORIES)
def test_exif_and_background_reach_the_decoder(factory):
  exif = Image.Exif()
  exif[0x0112] = 6
  rgba = np.zeros((8, 8, 4), np.uint8)  # Fully transparent.
  rgba[:4, :, 3] = 255  # The upper half is black.
  data = png(rgba, exif=exif)
  kwargs = {"size": (4, 4), "background": 99}
  if factory is transforms.resize_center_crop:
    kwargs["resize"] = (4, 4)
  turned = apply(factory(**kwargs), data)
  as_stored = apply(factory(**kwargs, exif=False), data)
  assert not np.array_equal(turned, as_stored)
  assert 99 in turned
  if factory in (transforms.resize, transforms.resize_center_crop):
    assert turned[0, :, 0].tolist() == [99, 99, 0, 0]  # Black turned right.
    assert as_stored[:, 0, 0].tolist() == [0, 0, 99, 99]


@pytest.mark.parametrize("factory", FACTORIES)
@pytest.mark.parametrize(("bits", "dtype"), [(8, np.uint8), (16, np.uint16)])
def test_channels_and_bits_reach_the_decoder(factory, bits, dtype):
  transform = factory(size=(4, 6), num_channels=4, bits=bits)
  image = apply(transform, png(np.full((8, 8, 4), 9, np.uint8)))
  assert (image.shape, image.dtype) == ((4, 6, 4), dtype)
  array = apply(transform, photo(8, 8, 5))  # Arrays keep their channels.
  assert (array.shape, array.dtype) == ((4, 6, 5), dtype)


@pytest.mark.parametrize("factory", FACTORIES)
def test_channels_and_bits_must_be_possible(factory):
  with pytest.raises(ValueError, match="num_channels: got 0; must be >= 1"):
    factory(num_channels=0)
  with pytest.raises(ValueError, match="bits: got 12; must be 8 or 16"):
    factory(bits=12)


@pytest.mark.parametrize("factory", FACTORIES)
def test_bad_file_is_a_decode_error(factory):
  with pytest.raises(images.DecodeError, match="cannot be decoded"):
    apply(factory(), b"nothing")


@pytest.mark.parametrize("factory", FACTORIES)
@pytest.mark.parametrize("size", [(224,), (0, 224), (1.5, 2), (1, 2, 3)])
def test_size_must_be_a_pair(factory, size):
  with pytest.raises(ValueError, match=r"size: got \(.*two positive integers"):
    factory(size=size)


@pytest.mark.parametrize("factory", FACTORIES)
def test_background_must_be_a_grey_level(factory):
  with pytest.raises(ValueError, match=r"background: got 256; must be a grey"):
    factory(background=256)


@pytest.mark.parametrize("area", [(0.0, 1.0), (0.5, 0.4), (0.1, 1.1), (0.1,)])
def test_area_must_be_an_ordered_pair_of_fractions(area):
  with pytest.raises(ValueError, match=r"area: got \(.*smallest <= largest"):
    transforms.inception_train(area=area)


@pytest.mark.parametrize("aspect", [(0.0, 1.0), (2.0, 1.0), (1.0,)])
def test_aspect_must_be_an_ordered_pair(aspect):
  with pytest.raises(ValueError, match=r"aspect: got \(.*smallest <= largest"):
    transforms.inception_train(aspect=aspect)


def test_crop_must_fit_into_the_resized_image():
  with pytest.raises(ValueError, match=r"size: got \(384, 384\); must be <="):
    transforms.resize_center_crop(size=(384, 384))


def test_padding_must_not_be_negative():
  with pytest.raises(ValueError, match="padding: got -1; must be >= 0"):
    transforms.pad_crop(padding=-1)


@pytest.mark.parametrize(
  "factory",
  [
    transforms.inception_train,
    transforms.resize,
    transforms.resize_center_crop,
  ],
)
def test_interpolation_reaches_the_image_or_is_refused(factory):
  results = [
    apply(factory(interpolation=x), photo(300, 400))
    for x in ("bilinear", "bilinear_antialias", "bicubic_antialias")
  ]
  assert not np.array_equal(results[0], results[1])
  assert not np.array_equal(results[1], results[2])
  match = "interpolation: got 'bicubic'; must be one of"
  with pytest.raises(ValueError, match=match):
    factory(interpolation="bicubic")
