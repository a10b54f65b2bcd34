"""The last step of preprocessing, on the device: to the model's range."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np


@dataclasses.dataclass(frozen=True)
class Normalize:
  """Maps [..., C] pixels to `(pixel - mean) / std` in float32.

  The default maps 8 bits to [-1, 1], which the published weights expect; for 16
  bits that is a mean and std of 32767.5.

  Attributes:
    mean: per channel, or one value for all, in the units of the pixels: 0..255,
      or 0..65535 if the transform has `bits=16`.
    std: per channel, or one value for all, above 0, in the same units.
  """

  mean: tuple[float, ...] = (127.5,)
  std: tuple[float, ...] = (127.5,)

  def __post_init__(self) -> None:
    if not self.mean or not self.std or min(self.std) <= 0:
      raise ValueError(
        f"std: got {self.std!r} with mean {self.mean!r}; both need a value, "
        "and std must be > 0. Use (127.5,) for [-1, 1]."
      )

  def __call__(self, image: jax.Array) -> jax.Array:
    """Returns [..., C] float32 from [..., C] uint8, uint16 or float."""
    mean, std = self._rows(image.shape)
    return (image.astype(jnp.float32) - mean) / std

  def _rows(self, shape: tuple[int, ...]) -> tuple[np.ndarray, np.ndarray]:
    for name in ("mean", "std"):
      length = len(getattr(self, name))
      if length not in (1, shape[-1]):
        raise ValueError(
          f"normalize.{name}: got {length} values for {shape[-1]} channels; "
          "give one value, or one a channel."
        )
    rank = (1,) * (len(shape) - 1) + (-1,)
    mean, std = (np.asarray(x, np.float32) for x in (self.mean, self.std))
    return mean.reshape(rank), std.reshape(rank)
