"""Reads image files: any format in, an array of one declared kind out.

`images.decode` states the policy. OpenCV decodes 8-bit grey and RGB JPEG and
PNG, and 16-bit colour of which Pillow would drop half; tifffile decodes TIFF of
16-bit colour or of other channels than grey and RGB; Pillow the rest.
"""

import io
import struct
import zlib

import cv2
import numpy as np
from PIL import Image, TiffImagePlugin, UnidentifiedImageError

MAX_PIXELS = 178_956_970  # Pillow's limit; more is taken for an attack.
_EXIF_ORIENTATION = 0x0112
_SAMPLES_PER_PIXEL = 0x0115
_BITS_PER_SAMPLE = 0x0102
_TIFF = (b"II*\0", b"MM\0*", b"II+\0", b"MM\0+")  # Classic and BigTIFF.
# What the libraries raise on files that are not what they claim to be.
_ERRORS = (
  OSError,  # Unidentified and truncated files.
  SyntaxError,  # Broken PNG chunks.
  ValueError,
  EOFError,
  ArithmeticError,
  LookupError,
  NotImplementedError,
  TypeError,
  struct.error,
  zlib.error,
  cv2.error,
  Image.DecompressionBombError,
)


class DecodeError(ValueError):
  """An image that cannot be decoded; the pipeline may be told to skip it."""


def read(
  image: bytes, *, exif: bool, background: int, num_channels: int, bits: int
) -> np.ndarray:
  """Returns the pixels of an encoded image, as `images.decode` says.

  Raises:
    DecodeError: if they cannot be had.
  """
  if not image:
    raise DecodeError("image: got 0 bytes; the file is empty. Remove it.")
  try:
    if image[:4] in _TIFF and num_channels not in (1, 3):
      pixels, orientation = _read_tiff(image)
    else:
      with Image.open(io.BytesIO(image)) as file:  # No more than the header.
        orientation = file.getexif().get(_EXIF_ORIENTATION, 1) if exif else 1
        samples = _tiff_tag(file, _SAMPLES_PER_PIXEL, 1)
        if samples > 4:  # Pillow might take the first ones.
          raise _wrong_channels(samples, num_channels)
        if num_channels in (1, 3):
          pixels = _read_rgb(file, image, background, bits)
        else:
          pixels = _read_all(file, image)
  except DecodeError:
    raise
  except _ERRORS as error:
    hint = ""
    if image[:4] in _TIFF and num_channels in (1, 3):
      hint = " If it has other channels than grey or RGB, set num_channels."
    raise DecodeError(
      f"image: got {len(image)} bytes starting with {image[:8]!r}; they "
      f"cannot be decoded ({_reason(error)}). Repair or remove the file.{hint}"
    ) from error
  if num_channels == 1:
    pixels = luma(pixels)
  if pixels.shape[2] != num_channels:
    raise _wrong_channels(pixels.shape[2], num_channels)
  return _orient(to_bits(pixels, bits), orientation if exif else 1)


def luma(image: np.ndarray) -> np.ndarray:
  """Returns [H, W, 1] from RGB (ITU-R BT.601); equal channels are kept."""
  return cv2.cvtColor(image, cv2.COLOR_RGB2GRAY)[:, :, np.newaxis]


def to_bits(image: np.ndarray, bits: int) -> np.ndarray:
  """Returns uint8 or uint16 pixels as those of `bits`, scaled and rounded."""
  if image.dtype == (np.uint16 if bits == 16 else np.uint8):
    return image
  if bits == 16:
    return image.astype(np.uint16) * np.uint16(257)  # 65535 / 255
  return ((image.astype(np.uint32) + 128) // 257).astype(np.uint8)


def _reason(error: Exception) -> str:
  if isinstance(error, UnidentifiedImageError):  # Pillow names an address.
    return "no format that Pillow knows"
  return str(error).rstrip(".")


def _wrong_channels(got: int, wanted: int) -> DecodeError:
  return DecodeError(
    f"image: got {got} channels in the file; the transform's num_channels is "
    f"{wanted}. Set it to {got}, or leave the file out."
  )


def _read_rgb(
  file: Image.Image, image: bytes, background: int, bits: int
) -> np.ndarray:
  """Returns [H, W, 3] uint8, or uint16 if the file has it and it is wanted."""
  wide = bits == 16 and _is_wide(file, image)
  if not wide and _is_plain(file, image):
    flags = cv2.IMREAD_COLOR_RGB | cv2.IMREAD_IGNORE_ORIENTATION
    pixels = _decode_opencv(image, flags)
    if pixels is not None:
      return pixels
  if file.mode == "F":
    raise _unknown_range("float")
  if file.mode.startswith("I"):  # 16-bit grey, in 16 or 32 bits.
    grey = np.asarray(file)
    if grey.min() < 0 or grey.max() > 65535:
      raise _unknown_range(f"values {grey.min()} to {grey.max()}")
    return np.repeat(grey.astype(np.uint16)[:, :, None], 3, axis=2)
  transparent = _is_transparent(file)
  # Pillow raises for a truncated file. A copy: its own array is read-only.
  pixels = np.array(file.convert("RGBA" if transparent else "RGB"))
  if wide and file.format == "TIFF":
    pixels, _ = _read_tiff(image)
  elif wide:
    pixels = _full_depth(image)
  if not transparent:
    return np.ascontiguousarray(pixels[:, :, :3])  # A fourth means nothing.
  limit = np.iinfo(pixels.dtype).max
  rgb, alpha = np.split(pixels.astype(np.int64), [3], axis=2)
  below = background * (limit // 255)
  mixed = (rgb * alpha + below * (limit - alpha) + limit // 2) // limit
  return mixed.astype(pixels.dtype)


def _read_all(file: Image.Image, image: bytes) -> np.ndarray:
  """Returns [H, W, C] uint8 or uint16 of a file that is no TIFF."""
  shown = file
  if _is_transparent(file) and file.mode not in ("LA", "RGBA"):
    shown = file.convert("RGBA")
  elif file.mode == "P":
    shown = file.convert("RGB")
  pixels = np.array(shown)  # Raises for a truncated file.
  if _is_wide(file, image):
    pixels = _full_depth(image)
    if file.format == "PNG" and image[25] == 4:  # IHDR: grey with alpha,
      pixels = pixels[:, :, [0, 3]]  # which OpenCV returns as RGBA.
  return pixels.reshape(*pixels.shape[:2], -1)


def _read_tiff(image: bytes) -> tuple[np.ndarray, int]:
  """Returns [H, W, C] uint8 or uint16 of the first page; its orientation."""
  import tifffile  # Takes 0.25 s; few need it.

  with tifffile.TiffFile(io.BytesIO(image)) as file:
    page = file.pages.first
    if page.imagewidth * page.imagelength > MAX_PIXELS:
      raise Image.DecompressionBombError("could be a decompression bomb")
    if page.dtype not in (np.uint8, np.uint16):
      raise _unknown_range(str(page.dtype))
    if page.axes not in ("YX", "YXS", "SYX"):
      raise ValueError(f"axes {page.axes} are no image")
    orientation = page.tags.valueof(_EXIF_ORIENTATION, default=1)
    if page.compression not in tifffile.TIFF.DECOMPRESSORS and (
      (page.photometric, page.axes) == (tifffile.PHOTOMETRIC.RGB, "YXS")
    ):  # LZW, say; of planes or other colours OpenCV makes nonsense.
      with Image.open(io.BytesIO(image)) as whole:
        whole.load()  # Raises for a truncated file.
      return _full_depth(image), orientation
    pixels = page.asarray(maxworkers=1)  # The pipeline is parallel already.
  if page.axes == "SYX":
    pixels = np.ascontiguousarray(pixels.transpose(1, 2, 0))  # [H, W, C]
  return pixels.reshape(*pixels.shape[:2], -1), orientation


def _full_depth(image: bytes) -> np.ndarray:
  """Returns [H, W, C] RGB or RGBA of a whole file with all of its bits."""
  pixels = _decode_opencv(image, cv2.IMREAD_UNCHANGED)
  if pixels is None:
    raise ValueError("OpenCV does not know its kind")
  return pixels[:, :, [2, 1, 0, 3][: pixels.shape[2]]]  # From BGR or BGRA.


def _unknown_range(what: str) -> DecodeError:
  return DecodeError(
    f"image: got {what} pixels; their range is unknown. Scale them to 8 or 16 "
    "bits."
  )


def _tiff_tag(file: Image.Image, tag: int, default: int) -> int:
  """Returns the tag's value, the largest if it has several."""
  if not isinstance(file, TiffImagePlugin.TiffImageFile):
    return default
  value = file.tag_v2.get(tag, default)
  return max(value) if isinstance(value, tuple) else value


def _is_transparent(file: Image.Image) -> bool:
  return "transparency" in file.info or file.has_transparency_data


def _is_wide(file: Image.Image, image: bytes) -> bool:
  """Whether colour has, or may have, 16 bits, of which Pillow gives 8."""
  if file.mode not in ("LA", "RGB", "RGBA", "RGBX"):
    return False
  if file.format == "PNG":
    return image[24] == 16  # IHDR: the bit depth.
  return file.format == "PPM" or _tiff_tag(file, _BITS_PER_SAMPLE, 8) == 16


def _is_plain(file: Image.Image, image: bytes) -> bool:
  """Whether OpenCV decodes this file fully and as the policy says.

  OpenCV fills the missing part of a truncated file with grey and says nothing,
  so the end marker must be there; without it Pillow decides.
  """
  if file.mode not in ("L", "RGB") or "transparency" in file.info:
    return False
  end = image[-64:]  # Some cameras and tools pad after the end marker.
  if file.format in ("JPEG", "MPO"):
    return b"\xff\xd9" in end
  return file.format == "PNG" and b"IEND" in end


def _decode_opencv(image: bytes, flags: int) -> np.ndarray | None:
  try:
    return cv2.imdecode(np.frombuffer(image, np.uint8), flags)
  except cv2.error:
    return None


def _orient(image: np.ndarray, orientation: int) -> np.ndarray:
  """Returns the image as its EXIF orientation, 1 to 8, says to show it."""
  if orientation not in range(2, 9):  # 1 is upright; the rest means nothing.
    return image
  if orientation >= 5:  # Stored with rows and columns exchanged.
    image = image.transpose(1, 0, 2)  # [W, H, C]
  if orientation in (3, 4, 7, 8):
    image = image[::-1]
  if orientation in (2, 3, 6, 7):
    image = image[:, ::-1]
  return np.ascontiguousarray(image)
