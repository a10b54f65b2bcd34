"""Files of other channels or bits than RGB of 8; test_images has the rest."""

import importlib.util
import io
import struct
import zlib

import cv2
import numpy as np
import pytest
import tifffile
from PIL import Image

from vit_jax.data import images

DTYPES = pytest.mark.parametrize("dtype", [np.uint8, np.uint16])


def noise(dtype, channels, height=6, width=7):
  """Random [H, W, C] pixels over all of their range."""
  rng = np.random.default_rng(0)
  high = np.iinfo(dtype).max
  shape = height, width, channels
  return rng.integers(0, high, shape, dtype, endpoint=True)


def pillow(image, file_format, **kwargs):
  if isinstance(image, np.ndarray):
    image = Image.fromarray(image)
  file = io.BytesIO()
  image.save(file, file_format, **kwargs)
  return file.getvalue()


def opencv(image, suffix):
  """Encodes RGB or RGBA."""
  image = image[:, :, [2, 1, 0, 3][: image.shape[2]]]
  ok, encoded = cv2.imencode(suffix, image)
  assert ok
  return encoded.tobytes()


def tiff(image, *, planar=False, **kwargs):
  """Encodes [H, W, C] as a TIFF, as remote sensing does."""
  if planar:
    image = image.transpose(2, 0, 1)
    kwargs["planarconfig"] = "separate"
  kwargs = {"photometric": "minisblack", "planarconfig": "contig", **kwargs}
  file = io.BytesIO()
  tifffile.imwrite(file, image, **kwargs)
  return file.getvalue()


def png(image, *, color_type, transparent=None):
  """Encodes [H, W, C] of 16 bits, by the format's definition."""

  def chunk(name, data):
    checksum = struct.pack(">I", zlib.crc32(name + data))
    return struct.pack(">I", len(data)) + name + data + checksum

  height, width = image.shape[:2]
  header = struct.pack(">IIBBBBB", width, height, 16, color_type, 0, 0, 0)
  rows = b"".join(b"\0" + row.astype(">u2").tobytes() for row in image)
  result = b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header)
  if transparent is not None:
    result += chunk(b"tRNS", struct.pack(">HHH", *transparent))
  return result + chunk(b"IDAT", zlib.compress(rows)) + chunk(b"IEND", b"")


def decode(image, *, exif=True, background=255, **kwargs):
  return images.decode(image, exif=exif, background=background, **kwargs)


@pytest.mark.parametrize("file_format", ["PNG", "TIFF", "BMP"])
def test_grey_files_keep_their_values_as_one_channel(file_format):
  grey = noise(np.uint8, 1)
  data = pillow(grey[:, :, 0], file_format)
  np.testing.assert_array_equal(decode(data, num_channels=1), grey)


@pytest.mark.parametrize("file_format", ["PNG", "TIFF"])
@pytest.mark.parametrize("channels", [1, 3])
def test_grey_of_16_bits_keeps_its_values(file_format, channels):
  grey = noise(np.uint16, 1)
  data = pillow(grey[:, :, 0], file_format)
  pixels = decode(data, num_channels=channels, bits=16)
  np.testing.assert_array_equal(pixels, np.repeat(grey, channels, axis=2))


def test_colour_becomes_its_luma_as_one_channel():
  rgb = noise(np.uint8, 3)
  pixels = decode(pillow(rgb, "PNG"), num_channels=1)
  luma = rgb @ np.array([0.299, 0.587, 0.114])  # ITU-R BT.601
  np.testing.assert_allclose(pixels[:, :, 0], luma, atol=0.51)


@pytest.mark.parametrize("suffix", [".png", ".tiff", ".ppm"])  # TIFF: LZW.
def test_rgb_of_16_bits_keeps_its_values(suffix):
  rgb = noise(np.uint16, 3)
  np.testing.assert_array_equal(decode(opencv(rgb, suffix), bits=16), rgb)


@pytest.mark.parametrize("file_format", ["PNG", "JPEG", "GIF", "TIFF", "PPM"])
def test_files_of_8_bits_are_scaled_to_16(file_format):
  data = pillow(noise(np.uint8, 3), file_format)
  pixels = decode(data, bits=16)
  assert pixels.dtype == np.uint16 and pixels.max() > 255
  np.testing.assert_array_equal(pixels, decode(data).astype(int) * 257)


@pytest.mark.parametrize("suffix", [".png", ".tiff"])
def test_alpha_of_16_bits_is_composited(suffix):
  rgba = np.array([[[50000, 0, 10, 65535], [50000, 0, 10, 13107]]], np.uint16)
  pixels = decode(opencv(rgba, suffix), bits=16, background=100)
  # A fifth, over 100 * 257: 0.2 * 50000 + 0.8 * 25700 = 30560.
  expected = [[[50000, 0, 10], [30560, 20560, 20562]]]
  np.testing.assert_array_equal(pixels, expected)


def test_a_transparent_colour_of_16_bits_is_composited():
  rgb = np.array([[[1000, 2000, 3000], [40000, 5, 6]]], np.uint16)
  data = png(rgb, color_type=2, transparent=(1000, 2000, 3000))
  pixels = decode(data, bits=16)
  np.testing.assert_array_equal(pixels, [[[65535] * 3, [40000, 5, 6]]])


@DTYPES
@pytest.mark.parametrize("suffix", [".png", ".tiff"])
def test_four_channels_are_red_green_blue_alpha(dtype, suffix):
  rgba = noise(dtype, 4)
  bits = 8 * rgba.itemsize
  pixels = decode(opencv(rgba, suffix), num_channels=4, bits=bits)
  np.testing.assert_array_equal(pixels, rgba)


def test_two_channels_are_grey_and_alpha():
  grey_alpha = noise(np.uint8, 2)
  data = pillow(Image.fromarray(grey_alpha, "LA"), "PNG")
  np.testing.assert_array_equal(decode(data, num_channels=2), grey_alpha)
  grey_alpha = noise(np.uint16, 2)
  data = png(grey_alpha, color_type=4)
  pixels = decode(data, num_channels=2, bits=16)
  np.testing.assert_array_equal(pixels, grey_alpha)


def test_a_transparent_palette_has_four_channels():
  image = Image.new("P", (2, 1))
  image.putpalette([1, 2, 3, 250, 100, 50])
  image.putpixel((1, 0), 1)
  data = pillow(image, "PNG", transparency=0)
  pixels = decode(data, num_channels=4)
  np.testing.assert_array_equal(pixels, [[[1, 2, 3, 0], [250, 100, 50, 255]]])


@DTYPES
@pytest.mark.parametrize("channels", [2, 4, 5, 13, 200])
@pytest.mark.parametrize(
  "kwargs",
  [
    {},
    {"planar": True},
    {"compression": "zlib", "predictor": 2},
    {"tile": (16, 16), "byteorder": ">"},
    {"photometric": "rgb"},
    {"bigtiff": True},
  ],
  ids=str,
)
def test_the_bands_of_a_tiff_are_its_channels(dtype, channels, kwargs):
  if "photometric" in kwargs:
    channels = max(channels, 4)  # RGB and something more.
  image = noise(dtype, channels)
  data = tiff(image, **kwargs)
  pixels = decode(data, num_channels=channels, bits=8 * image.itemsize)
  np.testing.assert_array_equal(pixels, image)


def test_bands_of_16_bits_are_scaled_to_8():
  pixels = decode(tiff(noise(np.uint16, 5)), num_channels=5)
  assert pixels.dtype == np.uint8
  expected = np.rint(noise(np.uint16, 5) / 257)
  np.testing.assert_array_equal(pixels, expected)


def test_bands_of_one_page_are_taken_of_several():
  file = io.BytesIO()
  with tifffile.TiffWriter(file) as writer:
    for _ in range(2):
      writer.write(
        noise(np.uint8, 5), photometric="minisblack", planarconfig="contig"
      )
  pixels = decode(file.getvalue(), num_channels=5)
  np.testing.assert_array_equal(pixels, noise(np.uint8, 5))


def test_the_orientation_of_bands_is_applied_only_on_request():
  image = noise(np.uint8, 5)
  data = tiff(image, extratags=[(0x0112, "H", 1, 6, False)])
  turned = np.rot90(image, -1)  # 6: to be turned right.
  np.testing.assert_array_equal(decode(data, num_channels=5), turned)
  stored = decode(data, num_channels=5, exif=False)
  np.testing.assert_array_equal(stored, image)


def test_lzw_of_two_channels_needs_a_package_that_the_error_names():
  grey_alpha = noise(np.uint8, 2)
  image = Image.fromarray(grey_alpha, "LA")
  data = pillow(image, "TIFF", compression="tiff_lzw")
  if importlib.util.find_spec("imagecodecs"):
    np.testing.assert_array_equal(decode(data, num_channels=2), grey_alpha)
  else:
    with pytest.raises(images.DecodeError, match="'imagecodecs' package"):
      decode(data, num_channels=2)


@pytest.mark.parametrize(
  ("data", "got", "wanted"),
  [
    (pillow(noise(np.uint8, 3), "PNG"), 3, 4),
    (pillow(noise(np.uint8, 3), "JPEG"), 3, 2),
    (pillow(noise(np.uint8, 1)[:, :, 0], "PNG"), 1, 5),
    (tiff(noise(np.uint16, 5)), 5, 4),
    (pillow(noise(np.uint16, 1)[:, :, 0], "TIFF"), 1, 5),
    (tiff(noise(np.uint8, 5), photometric="rgb"), 5, 3),
    (tiff(noise(np.uint16, 5), planar=True, compression="zlib"), 5, 1),
  ],
)
def test_other_channels_than_wanted_are_an_error(data, got, wanted):
  match = f"got {got} channels in the file; .*num_channels is {wanted}"
  with pytest.raises(images.DecodeError, match=match):
    decode(data, num_channels=wanted)


def test_bands_that_pillow_does_not_know_are_an_error_with_a_hint():
  with pytest.raises(images.DecodeError, match="set num_channels"):
    decode(tiff(noise(np.uint16, 5)))


@pytest.mark.parametrize("dtype", [np.float32, np.int16, np.uint32])
def test_bands_of_unknown_range_are_refused(dtype):
  with pytest.raises(images.DecodeError, match="their range is unknown"):
    decode(tiff(np.zeros((4, 5, 6), dtype)), num_channels=6)


def test_a_volume_is_no_image():
  file = io.BytesIO()
  volume = np.zeros((16, 16, 16), np.uint8)
  tifffile.imwrite(file, volume, volumetric=True, tile=(16, 16, 16))
  with pytest.raises(images.DecodeError, match="axes ZYX are no image"):
    decode(file.getvalue(), num_channels=16)


@pytest.mark.parametrize("keep", [0.01, 0.1, 0.5, 0.9])
@pytest.mark.parametrize("compression", [None, "zlib"])
def test_truncated_bands_are_an_error(keep, compression):
  data = tiff(noise(np.uint16, 5, 20, 20), compression=compression)
  with pytest.raises(images.DecodeError, match="cannot be decoded"):
    decode(data[: int(len(data) * keep)], num_channels=5)


@pytest.mark.filterwarnings("ignore::UserWarning")  # Pillow, on no tags.
@pytest.mark.parametrize("channels", [3, 4])
@pytest.mark.parametrize("suffix", [".png", ".tiff"])
def test_truncated_colour_of_16_bits_is_an_error(channels, suffix):
  data = opencv(noise(np.uint16, 4, 40, 40), suffix)
  with pytest.raises(images.DecodeError, match="cannot be decoded"):
    decode(data[: len(data) // 2], num_channels=channels, bits=16)


@pytest.mark.filterwarnings("ignore::UserWarning")  # Pillow, on odd tags.
def test_damaged_files_never_raise_anything_else():
  rng = np.random.default_rng(0)
  image = noise(np.uint16, 4, 12, 12)
  whole = [
    opencv(image, ".png"),
    tiff(image),
    tiff(image, compression="zlib"),
    tiff(image, tile=(16, 16)),
    tiff(image, planar=True),
  ]
  refused = 0
  for i in range(600):
    data = bytearray(whole[i % len(whole)])
    head = min(len(data), 400)  # Where the tags are.
    for _ in range(3):
      data[rng.integers(head)] = rng.integers(256)
    try:
      assert decode(bytes(data), num_channels=4, bits=16).shape[2] == 4
    except images.DecodeError:
      refused += 1
  assert 60 < refused < 540  # The bytes reached both outcomes.


def test_a_tiff_too_large_is_refused_from_its_header():
  data = bytearray(tiff(noise(np.uint8, 5)))
  for tag in (256, 257):  # Width and height, of type 3 or 4.
    for kind in (3, 4):
      at = data.find(struct.pack("<HHI", tag, kind, 1))
      if at >= 0:
        data[at : at + 12] = struct.pack("<HHII", tag, 4, 1, 30_000)
  with pytest.raises(images.DecodeError, match="decompression bomb"):
    decode(bytes(data), num_channels=5)


def test_arrays_have_the_bits_asked_for():
  image = noise(np.uint16, 5)
  assert decode(image, bits=16) is image
  expected = np.rint(image / 257)
  np.testing.assert_array_equal(decode(image), expected)
  np.testing.assert_array_equal(
    decode(noise(np.uint8, 5), bits=16), noise(np.uint8, 5).astype(int) * 257
  )
