import io
import struct
import zlib

import cv2
import numpy as np
import pytest
from PIL import Image, ImageOps

from vit_jax.data import images


def photo(height=40, width=50):
  """A smooth random [H, W, 3] image, which JPEG keeps."""
  rng = np.random.default_rng(0)
  coarse = rng.integers(0, 256, size=(4, 5, 3), dtype=np.uint8)
  return cv2.resize(coarse, (width, height))


def encode(image, file_format, **kwargs):
  if isinstance(image, np.ndarray):
    image = Image.fromarray(image)
  file = io.BytesIO()
  image.save(file, file_format, **kwargs)
  return file.getvalue()


def decode(image, *, exif=True, background=255):
  return images.decode(image, exif=exif, background=background)


@pytest.mark.parametrize("file_format", ["PNG", "BMP", "TIFF", "PPM"])
def test_lossless_rgb_decodes_to_its_pixels(file_format):
  np.testing.assert_array_equal(decode(encode(photo(), file_format)), photo())


@pytest.mark.parametrize("file_format", ["JPEG", "WEBP"])
def test_lossy_rgb_decodes_close_to_its_pixels(file_format):
  pixels = decode(encode(photo(), file_format, quality=95))
  assert pixels.dtype == np.uint8
  difference = np.abs(pixels.astype(int) - photo())
  assert difference.mean() < 4  # Colour is stored at half the resolution.


@pytest.mark.parametrize("file_format", ["PNG", "BMP", "TIFF", "PGM"])
def test_grey_becomes_three_equal_channels(file_format):
  grey = photo()[:, :, 0]
  pixels = decode(encode(grey, "PPM" if file_format == "PGM" else file_format))
  np.testing.assert_array_equal(pixels, np.stack([grey] * 3, -1))


def test_grey_jpeg_becomes_three_equal_channels():
  pixels = decode(encode(photo()[:, :, 0], "JPEG"))
  assert pixels.shape == (40, 50, 3)
  np.testing.assert_array_equal(pixels[:, :, 0], pixels[:, :, 2])


def test_black_and_white_becomes_0_and_255():
  pixels = decode(encode(Image.new("1", (3, 2), 1), "PNG"))
  np.testing.assert_array_equal(pixels, np.full((2, 3, 3), 255))


@pytest.mark.parametrize("file_format", ["PNG", "GIF", "BMP"])
def test_palette_is_looked_up(file_format):
  image = Image.new("P", (2, 1))
  image.putpalette([1, 2, 3, 250, 100, 50])
  image.putpixel((1, 0), 1)
  pixels = decode(encode(image, file_format))
  np.testing.assert_array_equal(pixels, [[[1, 2, 3], [250, 100, 50]]])


@pytest.mark.parametrize("file_format", ["PNG", "GIF"])
def test_transparent_palette_entry_shows_the_background(file_format):
  image = Image.new("P", (2, 1))
  image.putpalette([1, 2, 3, 250, 100, 50])
  image.putpixel((1, 0), 1)
  data = encode(image, file_format, transparency=0)
  pixels = decode(data, background=7)
  np.testing.assert_array_equal(pixels, [[[7, 7, 7], [250, 100, 50]]])


@pytest.mark.parametrize("file_format", ["PNG", "TIFF"])
def test_alpha_is_composited_over_the_background(file_format):
  rgba = np.array(
    [[[200, 0, 100, 255], [200, 0, 100, 0], [200, 0, 100, 51]]], np.uint8
  )
  pixels = decode(encode(rgba, file_format), background=250)
  # 51 / 255 is a fifth: 0.2 * 200 + 0.8 * 250 = 240.
  expected = [[[200, 0, 100], [250, 250, 250], [240, 200, 220]]]
  np.testing.assert_array_equal(pixels, expected)


def test_grey_with_alpha_is_composited():
  pixels = decode(encode(Image.new("LA", (1, 1), (0, 51)), "PNG"))
  np.testing.assert_array_equal(pixels, [[[204, 204, 204]]])


def test_cmyk_jpeg_becomes_rgb():
  data = encode(Image.fromarray(photo()).convert("CMYK"), "JPEG", quality=95)
  difference = np.abs(decode(data).astype(int) - photo())
  assert difference.mean() < 4  # Inverted or mixed channels give over 50.


@pytest.mark.parametrize("file_format", ["PNG", "TIFF"])
def test_16_bit_grey_is_scaled_not_wrapped(file_format):
  grey = np.array([[0, 255, 40000, 65535]], np.uint16)
  pixels = decode(encode(grey, file_format))
  np.testing.assert_array_equal(pixels[0, :, 0], [0, 1, 156, 255])


@pytest.mark.parametrize("channels", [3, 4])
def test_16_bit_colour_is_scaled_not_wrapped(channels):
  image = np.full((1, 1, channels), 65535, np.uint16)
  image[:, :, :3] = 40000
  data = cv2.imencode(".png", image)[1].tobytes()
  np.testing.assert_array_equal(decode(data), [[[156, 156, 156]]])


def test_float_image_is_refused():
  data = encode(Image.fromarray(np.zeros((2, 2), np.float32)), "TIFF")
  with pytest.raises(images.DecodeError, match="range is unknown"):
    decode(data)


@pytest.mark.parametrize("file_format", ["GIF", "WEBP", "PNG", "TIFF"])
def test_first_frame_of_an_animation_is_taken(file_format):
  frames = [Image.new("RGB", (9, 5), grey) for grey in ("black", "white")]
  kwargs = {"lossless": True} if file_format == "WEBP" else {}
  data = encode(
    frames[0],
    file_format,
    save_all=True,
    append_images=frames[1:],
    **kwargs,
  )
  np.testing.assert_array_equal(decode(data), np.zeros((5, 9, 3)))


@pytest.mark.parametrize("file_format", ["PNG", "JPEG", "WEBP"])
@pytest.mark.parametrize("orientation", range(10))
def test_exif_orientation_is_applied_only_on_request(file_format, orientation):
  exif = Image.Exif()
  exif[0x0112] = orientation  # 0 and 9 mean nothing.
  data = encode(photo(), file_format, exif=exif)
  with Image.open(io.BytesIO(data)) as file:
    upright = np.asarray(ImageOps.exif_transpose(file).convert("RGB"))
    stored = np.asarray(file.convert("RGB"))
  # The two libraries may round the last bit of a JPEG differently.
  atol = 3 if file_format == "JPEG" else 0
  pixels = decode(data, exif=True).astype(int)
  np.testing.assert_allclose(pixels, upright, atol=atol)
  pixels = decode(data, exif=False).astype(int)
  np.testing.assert_allclose(pixels, stored, atol=atol)


@pytest.mark.parametrize("keep", [0.1, 0.5, 0.9])
@pytest.mark.parametrize(
  "file_format", ["JPEG", "PNG", "GIF", "WEBP", "BMP", "TIFF"]
)
def test_truncated_file_is_an_error_not_half_an_image(file_format, keep):
  data = encode(photo(), file_format)
  with pytest.raises(images.DecodeError, match="cannot be decoded"):
    decode(data[: int(len(data) * keep)])


def test_truncated_jpeg_with_a_whole_thumbnail_is_an_error():
  thumbnail = encode(photo(8, 8), "JPEG")  # Has an end marker of its own.
  data = encode(photo(), "JPEG")
  segment = b"\xff\xe1" + struct.pack(">H", len(thumbnail) + 2) + thumbnail
  data = data[:2] + segment + data[2:]
  np.testing.assert_array_equal(decode(data).shape, (40, 50, 3))
  with pytest.raises(images.DecodeError, match="truncated"):
    decode(data[:-200])


def test_bytes_after_the_end_of_a_jpeg_do_no_harm():
  data = encode(photo(), "JPEG")
  np.testing.assert_array_equal(decode(data + bytes(500)), decode(data))


def test_empty_file_is_an_error():
  with pytest.raises(
    images.DecodeError, match="got 0 bytes; the file is empty"
  ):
    decode(b"")


@pytest.mark.parametrize(
  "data",
  [b"<html>Not found</html>", bytes(100), b"\xff\xd8\xff\xd9", b"GIF89a"],
)
def test_junk_is_an_error_that_shows_its_first_bytes(data):
  with pytest.raises(ValueError, match="bytes starting with b"):
    decode(data)


@pytest.mark.filterwarnings("ignore::UserWarning")  # Pillow, on odd tags.
def test_damaged_files_never_raise_anything_else():
  rng = np.random.default_rng(0)
  whole = [
    encode(photo(), file_format)
    for file_format in ("JPEG", "PNG", "GIF", "WEBP", "TIFF", "BMP")
  ]
  refused = 0
  for i in range(300):
    data = bytearray(whole[i % len(whole)])
    for _ in range(4):
      data[rng.integers(len(data))] = rng.integers(256)
    try:
      assert decode(bytes(data)).shape[2] == 3
    except images.DecodeError:
      refused += 1
  assert 30 < refused < 270  # The bytes reached both outcomes.


def test_decompression_bomb_is_refused_from_its_header():
  header = struct.pack(">IIBBBBB", 30_000, 30_000, 8, 2, 0, 0, 0)
  chunk = b"IHDR" + header
  data = b"\x89PNG\r\n\x1a\n" + struct.pack(">I", len(header)) + chunk
  data += struct.pack(">I", zlib.crc32(chunk)) + b"\0\0\0\0IEND\xae\x42\x60\x82"
  with pytest.raises(images.DecodeError, match="decompression bomb"):
    decode(data)


def test_arrays_pass_through_and_grey_gets_a_channel():
  image = photo()
  assert decode(image) is image
  assert decode(image[:, :, 0]).shape == (40, 50, 1)
  assert decode(np.zeros((9, 5, 13), np.uint8)).shape == (9, 5, 13)


@pytest.mark.parametrize(
  ("image", "match"),
  [
    (np.zeros((4, 5, 3), np.float32), "got dtype float32; must be uint8 or"),
    (np.zeros((2, 4, 5, 3), np.uint8), r"got shape \(2, 4, 5, 3\); must be"),
    (np.zeros((0, 5, 3), np.uint8), "not empty"),
    (np.zeros((3, 40, 50), np.uint8), r"use image.transpose\(1, 2, 0\)"),
  ],
)
def test_wrong_array_is_an_error_with_a_hint(image, match):
  with pytest.raises(ValueError, match=match):
    decode(image)


def noise(dtype, shape):
  rng = np.random.default_rng(0)
  return rng.integers(0, np.iinfo(dtype).max, shape, dtype, endpoint=True)


def bilinear(image, size):
  """An independent bilinear resize: half-pixel centres, edges repeated."""
  result = image.astype(np.float64)
  for axis, n in enumerate(size):
    m = result.shape[axis]
    x = np.clip((np.arange(n) + 0.5) * m / n - 0.5, 0, m - 1)
    low = np.minimum(np.floor(x).astype(int), m - 1)
    high = np.minimum(low + 1, m - 1)
    shape = [1, 1, 1]
    shape[axis] = n
    t = (x - low).reshape(shape)
    result = result.take(low, axis) * (1 - t) + result.take(high, axis) * t
  return result


@pytest.mark.parametrize(
  "size", [(40, 50), (80, 100), (64, 33), (20, 25), (7, 9), (13, 50), (1, 1)]
)
@pytest.mark.parametrize("channels", [1, 3, 5])
@pytest.mark.parametrize("dtype", [np.uint8, np.uint16])
def test_resize_is_bilinear_without_antialias(size, channels, dtype):
  image = noise(dtype, (40, 50, channels))
  resized = images.resize(image, size)
  assert resized.dtype == dtype
  np.testing.assert_allclose(
    resized.astype(float),
    bilinear(image, size),
    atol=1.0,  # Fixed-point weights, then rounding.
  )


def test_resize_takes_more_channels_than_opencv():
  image = noise(np.uint16, (8, 9, 300))
  resized = images.resize(image, (5, 7)).astype(float)
  np.testing.assert_allclose(resized, bilinear(image, (5, 7)), atol=1.0)


def antialiased(length, target, support, kernel):
  """The [target, length] matrix of an antialiased resize, by its formula."""
  scale = max(length / target, 1.0)
  centre = (np.arange(target)[:, None] + 0.5) * length / target - 0.5
  x = np.abs(np.arange(length)[None] - centre) / scale
  weights = np.where(x < support, kernel(x), 0.0)
  return weights / weights.sum(axis=1, keepdims=True)


def triangle(x):
  return 1 - x


def cubic(x, a=-0.5):
  near = (a + 2) * x**3 - (a + 3) * x**2 + 1
  far = a * (x**3 - 5 * x**2 + 8 * x - 4)
  return np.where(x < 1, near, far)


@pytest.mark.parametrize("channels", [1, 3, 5])
@pytest.mark.parametrize(
  ("interpolation", "support", "kernel"),
  [("bilinear_antialias", 1, triangle), ("bicubic_antialias", 2, cubic)],
)
@pytest.mark.parametrize("dtype", [np.uint8, np.uint16])
def test_resize_with_antialias_is_its_formula(
  channels, dtype, interpolation, support, kernel
):
  image = noise(dtype, (31, 20, channels))
  rows = antialiased(31, 12, support, kernel)
  columns = antialiased(20, 26, support, kernel)
  expected = np.einsum("yh,xw,hwc->yxc", rows, columns, image.astype(float))
  resized = images.resize(image, (12, 26), interpolation=interpolation)
  assert resized.dtype == dtype
  expected = np.clip(expected, 0, np.iinfo(dtype).max)
  # Pillow rounds 8 bits after each axis; 16 are rounded once.
  atol = 1.5 if dtype == np.uint8 else 0.52
  np.testing.assert_allclose(resized.astype(float), expected, atol=atol)


def test_resize_cover_keeps_the_aspect_ratio():
  assert images.resize_cover(photo(40, 50), (20, 20)).shape == (20, 25, 3)
  assert images.resize_cover(photo(50, 40), (20, 20)).shape == (25, 20, 3)
  assert images.resize_cover(photo(40, 50), (40, 100)).shape == (80, 100, 3)
  assert images.resize_cover(photo(3, 1000), (7, 7)).shape == (7, 2333, 3)


def test_central_crop_takes_the_middle():
  image = np.arange(5 * 6, dtype=np.uint8).reshape(5, 6, 1)
  np.testing.assert_array_equal(
    images.central_crop(image, (2, 2))[:, :, 0], [[8, 9], [14, 15]]
  )


def test_random_crop_reaches_every_place_equally():
  image = np.arange(4 * 5, dtype=np.uint8).reshape(4, 5, 1)
  rng = np.random.default_rng(0)
  corners = [
    int(images.random_crop(image, (3, 3), rng=rng)[0, 0, 0])
    for _ in range(1200)
  ]
  values, counts = np.unique(corners, return_counts=True)
  assert values.tolist() == [0, 1, 2, 5, 6, 7]
  assert counts.min() > 150  # 200 expected, standard deviation 13.


@pytest.mark.parametrize("crop", [images.central_crop, images.random_crop])
def test_crop_larger_than_the_image_is_an_error(crop):
  kwargs = {}
  if crop is images.random_crop:
    kwargs["rng"] = np.random.default_rng(0)
  with pytest.raises(ValueError, match=r"size: got \(41, 2\); the image of"):
    crop(photo(), (41, 2), **kwargs)


def test_random_flip_mirrors_half_of_the_images():
  image = photo()
  rng = np.random.default_rng(0)
  flipped = 0
  for _ in range(400):
    result = images.random_flip(image, rng=rng)
    is_flipped = not np.array_equal(result, image)
    flipped += is_flipped
    if is_flipped:
      np.testing.assert_array_equal(result, image[:, ::-1])
  assert 160 < flipped < 240  # 200 expected, standard deviation 10.


def boxes(shape, area, n=4000):
  rng = np.random.default_rng(0)
  return np.array(
    [
      images.sample_crop(shape, area=area, aspect=(3 / 4, 4 / 3), rng=rng)
      for _ in range(n)
    ]
  )


def distance_from_uniform(x, low, high):
  """The Kolmogorov-Smirnov distance; 0.026 is the 1 % level at n = 4000."""
  x = np.sort((x - low) / (high - low))
  return np.abs(x - (np.arange(len(x)) + 0.5) / len(x)).max()


def test_inception_crop_area_is_uniform_and_aspect_log_uniform():
  # Up to half the area, a box of ratio 3/4 to 4/3 always fits into 3:2.
  _, _, height, width = boxes((400, 600), area=(0.05, 0.5)).T
  area = height * width / (400 * 600)
  assert distance_from_uniform(area, 0.05, 0.5) < 0.026
  aspect = np.log(width / height)
  assert distance_from_uniform(aspect, -np.log(4 / 3), np.log(4 / 3)) < 0.026


def test_inception_crop_place_is_uniform_given_its_size():
  top, left, height, width = boxes((400, 600), area=(0.05, 0.5)).T
  assert distance_from_uniform(top / (400 - height), 0, 1) < 0.026
  assert distance_from_uniform(left / (600 - width), 0, 1) < 0.026


@pytest.mark.parametrize("shape", [(7, 9), (1, 1), (300, 200), (2, 500)])
def test_inception_crop_stays_inside_the_image(shape):
  top, left, height, width = boxes(shape, area=(0.05, 1.0), n=300).T
  assert min(top.min(), left.min()) >= 0
  assert min(height.min(), width.min()) >= 1
  assert (top + height).max() <= shape[0]
  assert (left + width).max() <= shape[1]


def test_inception_crop_of_a_panorama_is_its_centre():
  assert boxes((10, 1000), area=(0.05, 1.0), n=1)[0].tolist() == [
    0,
    493,
    10,
    13,
  ]
  assert boxes((1000, 10), area=(0.05, 1.0), n=1)[0].tolist() == [
    493,
    0,
    13,
    10,
  ]


def test_a_grey_model_sees_the_luma_of_a_file():
  image = np.array([[[255, 0, 0], [0, 255, 0], [7, 7, 7]]], np.uint8)
  grey = images.with_channels(image, 1)
  np.testing.assert_array_equal(grey, [[[76], [150], [7]]])  # ITU-R BT.601
  assert images.with_channels(image, 3) is image


def test_a_grey_model_sees_16_bits_of_luma():
  image = np.array([[[65535, 0, 0], [777, 777, 777]]], np.uint16)
  grey = images.with_channels(image, 1)
  assert grey.dtype == np.uint16
  assert grey[0, 1, 0] == 777
  assert abs(int(grey[0, 0, 0]) - 19595) <= 1  # 0.299 * 65535, in fixed point.


def test_a_model_of_more_channels_takes_no_file():
  image = np.zeros((2, 2, 3), np.uint8)
  with pytest.raises(images.DecodeError, match="got 3 channels; the model"):
    images.with_channels(image, 4)


def test_an_image_too_narrow_to_cover_is_an_error_not_all_of_memory():
  line = np.zeros((1, 50_000, 3), np.uint8)
  with pytest.raises(
    images.DecodeError, match="got 1x50000 pixels; too narrow"
  ):
    images.resize_cover(line, (256, 256))
