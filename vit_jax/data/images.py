"""Pure functions on single images: decode, crop, resize, flip.

Resizing has half-pixel centres and one of these interpolations, the same in
training and in evaluation:

- "bilinear": OpenCV's, without antialiasing. It samples as TensorFlow's
  `tf.image.resize(method="bilinear", antialias=False)` does, which the
  published ViT recipes use.
- "bilinear_antialias" and "bicubic_antialias": Pillow's, which weights from
  PyTorch expect.
"""

import cv2
import numpy as np
from PIL import Image

from vit_jax.data import image_file

Size = tuple[int, int]  # (height, width) in pixels
DecodeError = image_file.DecodeError

INTERPOLATIONS = ("bilinear", "bilinear_antialias", "bicubic_antialias")
_MAX_CHANNELS = 128  # CV_CN_MAX of OpenCV 5; it was 512.
_MAX_ATTEMPTS = 10  # As torchvision's RandomResizedCrop.


def decode(
  image: bytes | np.ndarray,
  *,
  exif: bool,
  background: int,
  num_channels: int = 3,
  bits: int = 8,
) -> np.ndarray:
  """Returns the pixels of an encoded image, or checks an image array.

  One policy for all files, whatever their name says:

  - With 3 channels the result is RGB. Grey is repeated, a palette is looked
    up, CMYK is converted without a colour profile; embedded profiles are
    ignored. With 1 channel it is the luma of that (ITU-R BT.601); grey keeps
    its values.
  - With 1 or 3 channels alpha, or a transparent palette entry, is composited
    over `background`.
  - Any other number of channels, among them alpha, is that of the file, in its
    order: (grey, alpha), RGBA, CMYK, the bands of a TIFF.
  - 16-bit values are scaled to 8 by 255/65535, 8-bit values to 16 by 257.
    Float images are refused: their range is unknown.
  - Of an animation, or of several pages, the first is taken.
  - EXIF orientation is applied if `exif` is set, else ignored.
  - Truncated, empty and other files are errors, never half an image. Beyond
    179 megapixels a file is refused as a decompression bomb (Pillow's limit).

  Args:
    image: encoded bytes, or [H, W] or [H, W, C] uint8 or uint16, which keeps
      its C.
    exif: whether to turn the image as its EXIF orientation tag says.
    background: grey level in [0, 255] under transparent pixels.
    num_channels: C of what is decoded.
    bits: 8 or 16, of the result.

  Returns:
    [H, W, num_channels] from bytes, [H, W, C] from an array: uint8, or uint16
    for 16 bits.

  Raises:
    DecodeError: if bytes cannot be decoded, or to other channels only.
    ValueError: if an array is not a channels-last uint8 or uint16 image.
  """
  if isinstance(image, np.ndarray):
    return image_file.to_bits(_check_array(image), bits)
  return image_file.read(
    image,
    exif=exif,
    background=background,
    num_channels=num_channels,
    bits=bits,
  )


def with_channels(image: np.ndarray, num_channels: int) -> np.ndarray:
  """Returns a decoded file as the model takes it: RGB, or grey by its luma.

  Args:
    image: [H, W, C] uint8 or uint16.
    num_channels: C, or 1 if C is 3.

  Raises:
    DecodeError: for another number.
  """
  if num_channels == image.shape[-1]:
    return image
  if (image.shape[-1], num_channels) != (3, 1):
    raise DecodeError(
      f"image: got {image.shape[-1]} channels; the model takes {num_channels}. "
      "Set num_channels of the transform, or predict from arrays in Python."
    )
  return image_file.luma(image)


def resize(
  image: np.ndarray, size: Size, *, interpolation: str = "bilinear"
) -> np.ndarray:
  """Returns the image resized to `size`, aspect ratio not kept.

  Integer arithmetic, within 1 of exact.

  Args:
    image: [H, W, C] uint8 or uint16.
    size: (height, width) in pixels.
    interpolation: one of `INTERPOLATIONS`.

  Returns:
    [size[0], size[1], C] of the same type; the image itself if it has that
    size already.
  """
  if image.shape[:2] == size:
    return image
  if interpolation != "bilinear":
    return _resize_pillow(image, size, interpolation)
  channels = image.shape[2]
  if channels > _MAX_CHANNELS:
    parts = np.split(image, range(_MAX_CHANNELS, channels, _MAX_CHANNELS), 2)
    return np.concatenate([resize(part, size) for part in parts], axis=2)
  resized = cv2.resize(image, size[::-1], interpolation=cv2.INTER_LINEAR)
  return resized.reshape(*size, channels)  # OpenCV drops C = 1.


def resize_cover(
  image: np.ndarray, size: Size, *, interpolation: str = "bilinear"
) -> np.ndarray:
  """Returns the image resized, aspect ratio kept, to just cover `size`.

  For a square size this is "resize the short side". Resizing as in `resize`.

  Args:
    image: [H, W, C] uint8 or uint16.
    size: (height, width) in pixels, at least reached by both sides.
    interpolation: one of `INTERPOLATIONS`.

  Returns:
    [H', W', C] with H' >= size[0], W' >= size[1], one of them equal.

  Raises:
    DecodeError: if the image is a line that would get very long.
  """
  h, w = image.shape[:2]
  scale = max(size[0] / h, size[1] / w)
  covering = max(size[0], round(h * scale)), max(size[1], round(w * scale))
  if covering[0] * covering[1] > image_file.MAX_PIXELS:
    raise DecodeError(
      f"image: got {h}x{w} pixels; too narrow to be resized to {covering}. "
      "Remove the file."
    )
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
    image: [H, W, C] uint8 or uint16.
    size: (height, width) of the result in pixels.
    area: smallest and largest fraction of the image area.
    aspect: smallest and largest width / height.
    rng: source of the draws.
    interpolation: one of `INTERPOLATIONS`.

  Returns:
    [size[0], size[1], C] of the same type.
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
  if image.shape[2] == 3 and image.dtype == np.uint8:
    return np.array(Image.fromarray(image).resize((width, height), method))
  # Pillow antialiases 16 bits in float only.
  exact = np.uint8 if image.dtype == np.uint8 else np.float32
  channels = [
    Image.fromarray(np.ascontiguousarray(image[:, :, c], exact))
    for c in range(image.shape[2])
  ]
  resized = [np.array(x.resize((width, height), method)) for x in channels]
  stacked = np.stack(resized, axis=-1)  # [height, width, C]
  if image.dtype == np.uint8:
    return stacked
  return np.rint(np.clip(stacked, 0, 65535)).astype(np.uint16)


def _check_array(image: np.ndarray) -> np.ndarray:
  if image.dtype not in (np.uint8, np.uint16):
    raise ValueError(
      f"image: got dtype {image.dtype}; must be uint8 or uint16. Scale and "
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
