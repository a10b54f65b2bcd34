"""Pure functions on single images: decode, crop, resize, flip.

Resizing has half-pixel centres and one of these interpolations, the same in
training and in evaluation:

- "bilinear": OpenCV's, without antialiasing. It samples as TensorFlow's
  `tf.image.resize(method="bilinear", antialias=False)` does, which the
  published ViT recipes use.
- "bilinear_antialias" and "bicubic_antialias": Pillow's, which weights from
  PyTorch expect.
"""

import io
import struct
import zlib

import cv2
import numpy as np
from PIL import Image

Size = tuple[int, int]  # (height, width) in pixels

INTERPOLATIONS = ("bilinear", "bilinear_antialias", "bicubic_antialias")
_EXIF_ORIENTATION = 0x0112
_MAX_ATTEMPTS = 10  # As torchvision's RandomResizedCrop.
# What Pillow raises on files that are not what they claim to be.
_PILLOW_ERRORS = (
  OSError,  # Unidentified and truncated files.
  SyntaxError,  # Broken PNG chunks.
  ValueError,
  EOFError,
  IndexError,
  KeyError,
  NotImplementedError,
  OverflowError,
  struct.error,
  zlib.error,
  Image.DecompressionBombError,
)


class DecodeError(ValueError):
  """An image that cannot be decoded; the pipeline may be told to skip it."""


def decode(
  image: bytes | np.ndarray, *, exif: bool, background: int
) -> np.ndarray:
  """Returns the pixels of an encoded image, or checks an image array.

  One policy for all files, whatever their name says:

  - OpenCV decodes 8-bit grey and RGB JPEG and PNG; Pillow decodes the rest
    (GIF, WebP, BMP, TIFF, palette, alpha, CMYK, 16-bit, ...).
  - The result is RGB. Grey is repeated, a palette is looked up, CMYK is
    converted without a colour profile; embedded profiles are ignored.
  - Alpha, or a transparent palette entry, is composited over `background`.
  - 16-bit values are scaled by 255/65535. Float images are refused: their
    range is unknown.
  - Of an animation the first frame is taken.
  - EXIF orientation is applied if `exif` is set, else ignored.
  - Truncated, empty and other files are errors, never half an image. Beyond
    179 megapixels a file is refused as a decompression bomb (Pillow's limit).

  Args:
    image: encoded bytes, or [H, W] or [H, W, C] uint8, which passes through.
    exif: whether to turn the image as its EXIF orientation tag says.
    background: grey level in [0, 255] under transparent pixels.

  Returns:
    [H, W, 3] uint8 RGB from bytes; [H, W, C] uint8 from an array.

  Raises:
    DecodeError: if bytes cannot be decoded.
    ValueError: if an array is not a channels-last uint8 image.
  """
  if isinstance(image, np.ndarray):
    return _check_array(image)
  if not image:
    raise DecodeError("image: got 0 bytes; the file is empty. Remove it.")
  try:
    return _decode(image, exif=exif, background=background)
  except _PILLOW_ERRORS as error:
    raise DecodeError(
      f"image: got {len(image)} bytes starting with {image[:8]!r}; they "
      f"cannot be decoded ({error}). Repair or remove the file."
    ) from error


def with_channels(image: np.ndarray, num_channels: int) -> np.ndarray:
  """Returns a decoded file as the model takes it: RGB, or grey by its luma.

  Args:
    image: [H, W, 3] uint8.
    num_channels: 1 or 3.

  Raises:
    DecodeError: for another number; a file has no more than RGB.
  """
  if num_channels == image.shape[-1]:
    return image
  if num_channels != 1:
    raise DecodeError(
      f"image: got {image.shape[-1]} channels; the model takes {num_channels}. "
      "Predict from arrays in Python instead."
    )
  return cv2.cvtColor(image, cv2.COLOR_RGB2GRAY)[..., np.newaxis]


def resize(
  image: np.ndarray, size: Size, *, interpolation: str = "bilinear"
) -> np.ndarray:
  """Returns the image resized to `size`, aspect ratio not kept.

  8-bit arithmetic, within 1 of exact.

  Args:
    image: [H, W, C] uint8.
    size: (height, width) in pixels.
    interpolation: one of `INTERPOLATIONS`.

  Returns:
    [size[0], size[1], C] uint8; the image itself if it has that size already.
  """
  if image.shape[:2] == size:
    return image
  if interpolation != "bilinear":
    return _resize_pillow(image, size, interpolation)
  resized = cv2.resize(image, size[::-1], interpolation=cv2.INTER_LINEAR)
  return resized.reshape(*size, image.shape[2])  # OpenCV drops C = 1.


def resize_cover(
  image: np.ndarray, size: Size, *, interpolation: str = "bilinear"
) -> np.ndarray:
  """Returns the image resized, aspect ratio kept, to just cover `size`.

  For a square size this is "resize the short side". Resizing as in `resize`.

  Args:
    image: [H, W, C] uint8.
    size: (height, width) in pixels, at least reached by both sides.
    interpolation: one of `INTERPOLATIONS`.

  Returns:
    [H', W', C] uint8 with H' >= size[0], W' >= size[1], one of them equal.
  """
  h, w = image.shape[:2]
  scale = max(size[0] / h, size[1] / w)
  covering = max(size[0], round(h * scale)), max(size[1], round(w * scale))
  return resize(image, covering, interpolation=interpolation)


def central_crop(image: np.ndarray, size: Size) -> np.ndarray:
  """Returns the [size[0], size[1], C] centre; an odd margin is cut low.

  Raises:
    ValueError: if the image is smaller than `size`.
  """
  _check_covers(image, size)
  top = (image.shape[0] - size[0]) // 2
  left = (image.shape[1] - size[1]) // 2
  return _crop(image, (top, left, *size))


def random_crop(
  image: np.ndarray, size: Size, *, rng: np.random.Generator
) -> np.ndarray:
  """Returns a uniformly placed [size[0], size[1], C] crop.

  Raises:
    ValueError: if the image is smaller than `size`.
  """
  _check_covers(image, size)
  top = int(rng.integers(image.shape[0] - size[0] + 1))
  left = int(rng.integers(image.shape[1] - size[1] + 1))
  return _crop(image, (top, left, *size))


def pad(image: np.ndarray, padding: int, *, value: int) -> np.ndarray:
  """Returns the image with a border of `padding` pixels of grey `value`."""
  widths = ((padding, padding), (padding, padding), (0, 0))
  return np.pad(image, widths, constant_values=value)


def random_flip(image: np.ndarray, *, rng: np.random.Generator) -> np.ndarray:
  """Returns the image, mirrored left to right with probability 1/2."""
  return image[:, ::-1] if rng.random() < 0.5 else image


def inception_crop(
  image: np.ndarray,
  size: Size,
  *,
  area: tuple[float, float],
  aspect: tuple[float, float],
  rng: np.random.Generator,
  interpolation: str = "bilinear",
) -> np.ndarray:
  """Returns a random part of the image, resized to `size`.

  The crop of Szegedy et al. (2015), drawn by `sample_crop`, resized by
  `resize`.

  Args:
    image: [H, W, C] uint8.
    size: (height, width) of the result in pixels.
    area: smallest and largest fraction of the image area.
    aspect: smallest and largest width / height.
    rng: source of the draws.
    interpolation: one of `INTERPOLATIONS`.

  Returns:
    [size[0], size[1], C] uint8.
  """
  box = sample_crop(image.shape[:2], area=area, aspect=aspect, rng=rng)
  return resize(_crop(image, box), size, interpolation=interpolation)


def sample_crop(
  shape: Size,
  *,
  area: tuple[float, float],
  aspect: tuple[float, float],
  rng: np.random.Generator,
) -> tuple[int, int, int, int]:
  """Returns a random box (top, left, height, width) inside an image.

  The fraction of the area is uniform in `area` and the aspect ratio
  log-uniform in `aspect`, as in torchvision; a box that does not fit is drawn
  again, and after ten draws the largest central box of a permitted ratio is
  taken. (TensorFlow's sampler draws the height uniformly instead.)

  Args:
    shape: (height, width) of the image in pixels.
    area: smallest and largest fraction of the image area.
    aspect: smallest and largest width / height.
    rng: source of the draws.
  """
  h, w = shape
  for _ in range(_MAX_ATTEMPTS):
    pixels = h * w * rng.uniform(*area)
    ratio = np.exp(rng.uniform(*np.log(aspect)))
    height = max(1, round(float(np.sqrt(pixels / ratio))))
    width = max(1, round(float(np.sqrt(pixels * ratio))))
    if height <= h and width <= w:
      top = int(rng.integers(h - height + 1))
      left = int(rng.integers(w - width + 1))
      return top, left, height, width
  ratio = min(max(w / h, aspect[0]), aspect[1])
  height = min(h, max(1, round(w / ratio)))
  width = min(w, max(1, round(h * ratio)))
  return (h - height) // 2, (w - width) // 2, height, width


def _resize_pillow(
  image: np.ndarray, size: Size, interpolation: str
) -> np.ndarray:
  method = {
    "bilinear_antialias": Image.Resampling.BILINEAR,
    "bicubic_antialias": Image.Resampling.BICUBIC,
  }[interpolation]
  height, width = size
  if image.shape[2] == 3:
    return np.array(Image.fromarray(image).resize((width, height), method))
  channels = [
    Image.fromarray(np.ascontiguousarray(image[:, :, c]))
    for c in range(image.shape[2])
  ]
  resized = [x.resize((width, height), method) for x in channels]
  return np.stack(resized, axis=-1)


def _decode(image: bytes, *, exif: bool, background: int) -> np.ndarray:
  with Image.open(io.BytesIO(image)) as file:  # Reads no more than the header.
    orientation = file.getexif().get(_EXIF_ORIENTATION, 1) if exif else 1
    pixels = _decode_opencv(image) if _is_plain(file, image) else None
    if pixels is None:
      pixels = _decode_pillow(file, background)
  return _orient(pixels, orientation)


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


def _decode_opencv(image: bytes) -> np.ndarray | None:
  flags = cv2.IMREAD_COLOR_RGB | cv2.IMREAD_IGNORE_ORIENTATION
  try:
    return cv2.imdecode(np.frombuffer(image, np.uint8), flags)
  except cv2.error:
    return None


def _decode_pillow(file: Image.Image, background: int) -> np.ndarray:
  """Returns [H, W, 3] uint8 from the first frame, whatever the mode."""
  if file.mode == "F":
    raise DecodeError("image: got float pixels; their range is unknown")
  if file.mode.startswith("I"):  # 16-bit grey, in 16 or 32 bits.
    grey = np.asarray(file).astype(np.int64)
    if grey.min() < 0 or grey.max() > 65535:
      raise DecodeError(f"image: got pixels up to {grey.max()}; max is 65535")
    grey = ((grey * 255 + 32767) // 65535).astype(np.uint8)
    return np.repeat(grey[:, :, None], 3, axis=2)  # [H, W, 3]
  if "transparency" in file.info or file.has_transparency_data:
    rgba = np.asarray(file.convert("RGBA")).astype(np.int32)
    rgb, alpha = rgba[:, :, :3], rgba[:, :, 3:]
    mixed = (rgb * alpha + background * (255 - alpha) + 127) // 255
    return mixed.astype(np.uint8)
  return np.array(file.convert("RGB"))  # A copy: Pillow's is read-only.


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


def _check_array(image: np.ndarray) -> np.ndarray:
  if image.dtype != np.uint8:
    raise ValueError(
      f"image: got dtype {image.dtype}; must be uint8 in [0, 255]. Scale and "
      "round it in the source; the device scales to the model's range."
    )
  if image.ndim == 2:
    image = image[:, :, None]  # [H, W, 1]
  if image.ndim != 3 or image.size == 0:
    raise ValueError(
      f"image: got shape {image.shape}; must be [H, W] or [H, W, C], not "
      "empty. Give one image an example."
    )
  if image.shape[0] in (1, 3, 4) and image.shape[2] not in (1, 3, 4):
    raise ValueError(
      f"image: got shape {image.shape}; channels come last, [H, W, C]. If "
      "this is [C, H, W], use image.transpose(1, 2, 0)."
    )
  return image


def _check_covers(image: np.ndarray, size: Size) -> None:
  if image.shape[0] < size[0] or image.shape[1] < size[1]:
    raise ValueError(
      f"size: got {size}; the image of shape {image.shape} is smaller. Resize "
      "before the crop, or crop less."
    )


def _crop(image: np.ndarray, box: tuple[int, int, int, int]) -> np.ndarray:
  top, left, height, width = box
  return image[top : top + height, left : left + width]
