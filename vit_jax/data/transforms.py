"""Transforms: what happens to an example between the source and the batch.

Each factory returns a function of (example, generator) that decodes the image
and gives it the size that the model takes, as integers: the device scales them.
They are pure and can be pickled, so workers may run them. Sizes are
(height, width) in pixels. All decode and resize as `images` documents.

`interpolation` is one of `images.INTERPOLATIONS`; `exif` turns images as their
EXIF orientation says; `background` is the grey level in [0, 255] under
transparent pixels; `num_channels` and `bits` say what files are decoded to:
3 for RGB, 1 for grey, or all channels of the file, as uint8 or uint16. Arrays
keep their channels. Use the same values in training, evaluation and prediction.
"""

import functools
from collections.abc import Callable

import numpy as np

from vit_jax.data import images
from vit_jax.data.example import Example, Transform

Size = tuple[int, int]  # (height, width) in pixels
Decode = Callable[[bytes | np.ndarray], np.ndarray]


def inception_train(
  *,
  size: Size = (224, 224),
  area: tuple[float, float] = (0.05, 1.0),
  aspect: tuple[float, float] = (3 / 4, 4 / 3),
  flip: bool = True,
  interpolation: str = "bilinear",
  exif: bool = True,
  background: int = 255,
  num_channels: int = 3,
  bits: int = 8,
) -> Transform:
  """Returns the Inception training crop: a random part, resized, maybe flipped.

  Source: Szegedy et al. (2015), with the area range of the ViT recipes.

  Args:
    size: (height, width) of the result in pixels.
    area: smallest and largest fraction of the image area in the crop.
    aspect: smallest and largest width / height of the crop.
    flip: whether to mirror left to right half of the time.
    interpolation: one of `images.INTERPOLATIONS`.
    exif: whether to apply the EXIF orientation.
    background: grey level in [0, 255] under transparent pixels.
    num_channels: C of a decoded file; 3 is RGB, 1 grey, else as it has.
    bits: 8 or 16, of the result.

  Raises:
    ValueError: if an argument is out of range.
  """
  size = _check_size("size", size)
  _check_interpolation(interpolation)
  if len(area) != 2 or not 0 < area[0] <= area[1] <= 1:
    raise ValueError(
      f"area: got {area!r}; must be (smallest, largest) with "
      "0 < smallest <= largest <= 1. The ViT recipes use (0.05, 1.0)."
    )
  if len(aspect) != 2 or not 0 < aspect[0] <= aspect[1]:
    raise ValueError(
      f"aspect: got {aspect!r}; must be (smallest, largest) with "
      "0 < smallest <= largest. The ViT recipes use (3 / 4, 4 / 3)."
    )
  return functools.partial(
    _inception_train,
    size=size,
    area=area,
    aspect=aspect,
    flip=flip,
    interpolation=interpolation,
    decode=_decoder(exif, background, num_channels, bits),
  )


def resize(
  *,
  size: Size = (224, 224),
  flip: bool = False,
  interpolation: str = "bilinear",
  exif: bool = True,
  background: int = 255,
  num_channels: int = 3,
  bits: int = 8,
) -> Transform:
  """Returns a plain resize to `size`; the aspect ratio is not kept.

  Images of that size already, such as handwritten digits, stay as they are.

  Args:
    size: (height, width) of the result in pixels.
    flip: whether to mirror left to right half of the time (training only).
    interpolation: one of `images.INTERPOLATIONS`.
    exif: whether to apply the EXIF orientation.
    background: grey level in [0, 255] under transparent pixels.
    num_channels: C of a decoded file; 3 is RGB, 1 grey, else as it has.
    bits: 8 or 16, of the result.

  Raises:
    ValueError: if an argument is out of range.
  """
  _check_interpolation(interpolation)
  return functools.partial(
    _resize,
    size=_check_size("size", size),
    flip=flip,
    interpolation=interpolation,
    decode=_decoder(exif, background, num_channels, bits),
  )


def resize_center_crop(
  *,
  resize: Size = (256, 256),
  size: Size = (224, 224),
  interpolation: str = "bilinear",
  exif: bool = True,
  background: int = 255,
  num_channels: int = 3,
  bits: int = 8,
) -> Transform:
  """Returns the usual ImageNet evaluation: resize, aspect kept; centre crop.

  Args:
    resize: (height, width) in pixels that the resized image just covers; for a
      square this is the length of the short side.
    size: (height, width) of the crop in pixels.
    interpolation: one of `images.INTERPOLATIONS`.
    exif: whether to apply the EXIF orientation.
    background: grey level in [0, 255] under transparent pixels.
    num_channels: C of a decoded file; 3 is RGB, 1 grey, else as it has.
    bits: 8 or 16, of the result.

  Raises:
    ValueError: if an argument is out of range or `size` exceeds `resize`.
  """
  resize = _check_size("resize", resize)
  size = _check_size("size", size)
  _check_interpolation(interpolation)
  if size[0] > resize[0] or size[1] > resize[1]:
    raise ValueError(
      f"size: got {size}; must be <= resize {resize}. Make resize larger, or "
      "crop less."
    )
  return functools.partial(
    _resize_center_crop,
    resize=resize,
    size=size,
    interpolation=interpolation,
    decode=_decoder(exif, background, num_channels, bits),
  )


def pad_crop(
  *,
  size: Size = (32, 32),
  padding: int = 4,
  flip: bool = True,
  exif: bool = True,
  background: int = 255,
  num_channels: int = 3,
  bits: int = 8,
) -> Transform:
  """Returns the CIFAR training crop: resize, pad with black, crop, maybe flip.

  Source: He et al. (2015), sec. 4.2 (padding 4 on each side, crop 32, flip).

  Args:
    size: (height, width) of the result in pixels; the image is resized to it
      first if it has another size.
    padding: black border in pixels on each side, >= 0.
    flip: whether to mirror left to right half of the time.
    exif: whether to apply the EXIF orientation.
    background: grey level in [0, 255] under transparent pixels.
    num_channels: C of a decoded file; 3 is RGB, 1 grey, else as it has.
    bits: 8 or 16, of the result.

  Raises:
    ValueError: if an argument is out of range.
  """
  if padding < 0:
    raise ValueError(
      f"padding: got {padding}; must be >= 0 pixels. CIFAR recipes use 4."
    )
  return functools.partial(
    _pad_crop,
    size=_check_size("size", size),
    padding=padding,
    flip=flip,
    decode=_decoder(exif, background, num_channels, bits),
  )


def _inception_train(
  example: Example,
  rng: np.random.Generator,
  *,
  size: Size,
  area: tuple[float, float],
  aspect: tuple[float, float],
  flip: bool,
  interpolation: str,
  decode: Decode,
) -> Example:
  image = decode(example["image"])
  image = images.inception_crop(
    image,
    size,
    area=area,
    aspect=aspect,
    rng=rng,
    interpolation=interpolation,
  )
  image = images.random_flip(image, rng=rng) if flip else image
  return {**example, "image": image}


def _resize(
  example: Example,
  rng: np.random.Generator,
  *,
  size: Size,
  flip: bool,
  interpolation: str,
  decode: Decode,
) -> Example:
  image = decode(example["image"])
  image = images.resize(image, size, interpolation=interpolation)
  image = images.random_flip(image, rng=rng) if flip else image
  return {**example, "image": image}


def _resize_center_crop(
  example: Example,
  rng: np.random.Generator,
  *,
  resize: Size,
  size: Size,
  interpolation: str,
  decode: Decode,
) -> Example:
  del rng  # Evaluation draws nothing.
  image = decode(example["image"])
  image = images.resize_cover(image, resize, interpolation=interpolation)
  return {**example, "image": images.central_crop(image, size)}


def _pad_crop(
  example: Example,
  rng: np.random.Generator,
  *,
  size: Size,
  padding: int,
  flip: bool,
  decode: Decode,
) -> Example:
  image = decode(example["image"])
  image = images.resize(image, size)
  image = images.pad(image, padding, value=0)
  image = images.random_crop(image, size, rng=rng)
  image = images.random_flip(image, rng=rng) if flip else image
  return {**example, "image": image}


def _check_size(name: str, size: Size) -> Size:
  if len(size) != 2 or not all(isinstance(x, int) and x > 0 for x in size):
    raise ValueError(
      f"{name}: got {size!r}; must be two positive integers, (height, width) "
      "in pixels. Write (224, 224) for a square."
    )
  return size[0], size[1]  # A ConfigDict or JSON may have made it a list.


def _check_interpolation(interpolation: str) -> None:
  if interpolation not in images.INTERPOLATIONS:
    raise ValueError(
      f"interpolation: got {interpolation!r}; must be one of "
      f'{list(images.INTERPOLATIONS)}. The ViT recipes use "bilinear".'
    )


def _decoder(
  exif: bool, background: int, num_channels: int, bits: int
) -> Decode:
  """Returns `images.decode` with checked arguments."""
  if not 0 <= background <= 255:
    raise ValueError(
      f"background: got {background!r}; must be a grey level in [0, 255]. Use "
      "255 for white."
    )
  if num_channels < 1:
    raise ValueError(
      f"num_channels: got {num_channels!r}; must be >= 1. Use 3 for RGB, 1 for "
      "grey, or as many as the files have."
    )
  if bits not in (8, 16):
    raise ValueError(
      f"bits: got {bits!r}; must be 8 or 16. Use 8 but for finer sensors."
    )
  return functools.partial(
    images.decode,
    exif=exif,
    background=background,
    num_channels=num_channels,
    bits=bits,
  )
