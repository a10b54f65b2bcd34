"""A source that makes its images up: for tests, smoke runs and speed."""

import cv2
import numpy as np

from vit_jax.data.example import Example


class FakeSource:
  """Noisy images whose colour tells the class, so that a model can learn.

  An example is a function of its index and of the arguments alone.
  """

  def __init__(
    self,
    *,
    num_examples: int = 1024,
    size: tuple[int, int] = (32, 32),
    num_classes: int = 10,
    num_channels: int = 3,
    multi_label: bool = False,
    encoded: bool = False,
  ) -> None:
    """Checks the arguments.

    Args:
      num_examples: N.
      size: (height, width) in pixels.
      num_classes: K; example i has class i % K.
      num_channels: C.
      multi_label: whether labels are [2] class ids: i % K and, for half of the
        examples, (i + 1) % K, else -1. The colours are averaged.
      encoded: whether images are PNG bytes (C = 1 or 3) instead of arrays.

    Raises:
      ValueError: if an argument is out of range.
    """
    height, width = size
    if min(num_examples, num_classes, num_channels, height, width) < 1:
      raise ValueError(
        f"num_examples, size, num_classes, num_channels: got {num_examples}, "
        f"{size}, {num_classes}, {num_channels}; must be >= 1. Use larger ones."
      )
    if encoded and num_channels not in (1, 3):
      raise ValueError(
        f"num_channels: got {num_channels} with encoded=True; a PNG has 1 or "
        "3. Use encoded=False."
      )
    self._num_examples = num_examples
    self._shape = (height, width, num_channels)
    self._multi_label = multi_label
    self._encoded = encoded
    self.class_names = tuple(f"class_{i}" for i in range(num_classes))
    self.num_classes = num_classes

  def __len__(self) -> int:
    return self._num_examples

  def __getitem__(self, index: int) -> Example:
    label = np.asarray(index % self.num_classes, np.int32)  # []
    if self._multi_label:
      second = (index + 1) % self.num_classes if index % 4 < 2 else -1
      label = np.asarray([label, second], np.int32)  # [2]
    colours = [self._colour(int(k)) for k in label.ravel() if k >= 0]
    noise = np.random.default_rng((0, index)).integers(
      -32, 33, size=self._shape, dtype=np.int16
    )
    image = np.mean(colours, axis=0).astype(np.int16) + noise
    image = image.astype(np.uint8)  # [H, W, C], within [0, 255] by choice.
    return {
      "image": _png(image) if self._encoded else image,
      "label": label,
      "id": self.example_id(index),
    }

  def example_id(self, index: int) -> str:
    """Returns the id of the example at `index`."""
    return f"fake/{index}"

  def _colour(self, label: int) -> np.ndarray:
    """Returns [C] values in [32, 223], the same for every run."""
    rng = np.random.default_rng((1, label))
    return rng.integers(32, 224, size=self._shape[-1], dtype=np.int16)


def _png(image: np.ndarray) -> bytes:
  ok, encoded = cv2.imencode(".png", image[:, :, ::-1])  # OpenCV writes BGR.
  assert ok
  return encoded.tobytes()
