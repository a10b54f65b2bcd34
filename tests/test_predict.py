"""Prediction with weights that no run of this project made."""

import numpy as np
import pytest
from PIL import Image

from tests import tiny_weights
from vit_jax import predict
from vit_jax.data.example import Example


@pytest.fixture
def photo(tmp_path):
  pixels = np.random.default_rng(0).integers(0, 256, (20, 24, 3), np.uint8)
  file = tmp_path / "photo.png"
  Image.fromarray(pixels).save(file)
  return file, pixels


def test_card_says_how_an_image_is_prepared_and_what_classes_are_called(
  tmp_path, photo
):
  file, pixels = photo
  path = tiny_weights.save(tmp_path, "timm")
  predictor = predict.load(path)
  assert predictor.class_names == ("a", "b", "c", "d", "e")
  ((_, found),) = predict.predict(predictor, [str(file)])
  # Independently: the short side to 16, the centre 12 x 12, less its mean.
  example = Example(image=pixels, label=np.zeros((), np.int32), id="x")
  prepared = predictor.transform(example, np.random.default_rng(0))["image"]
  image = (
    np.asarray(prepared)[None].astype(np.float32) - [1.0, 2.0, 3.0]
  ) / 127.5
  assert image.shape == (1, 12, 12, 3)
  model = tiny_weights.CARD.build_model()
  logits = tiny_weights.logits(
    model, tiny_weights.random_params(), image.astype(np.float32)
  )[0]
  want = np.exp(logits - logits.max())
  want /= want.sum()
  assert isinstance(found, list)
  for name, probability in found:
    np.testing.assert_allclose(
      probability, want["abcde".index(name)], atol=1e-5
    )


def test_weights_without_a_head_name_nothing(tmp_path):
  path = tiny_weights.save(tmp_path, "npz", num_classes=0)
  with pytest.raises(ValueError, match="no head, so there are no classes"):
    predict.load(path)
