"""The .npz of the MLP-Mixers, from its documented names and in NumPy."""

import numpy as np
import pytest

from tests.weights import google_files
from vit_jax import spec
from vit_jax.models import mixer as mixer_models
from vit_jax.weights import adapt, google, layout, mixer, tensors

IMAGE = np.random.default_rng(7).uniform(-1, 1, (2, 12, 12, 3))
IMAGE = IMAGE.astype(np.float32)


def documented(
  *, patch=4, d=16, depth=2, patches=9, tokens=10, channels=20, classes=5
):
  """Returns shape by name."""
  shapes = {
    "stem/kernel": (patch, patch, 3, d),
    "stem/bias": (d,),
    "pre_head_layer_norm/scale": (d,),
    "pre_head_layer_norm/bias": (d,),
  }
  for i in range(depth):
    block = f"MixerBlock_{i}"
    for norm in ("LayerNorm_0", "LayerNorm_1"):
      shapes |= {f"{block}/{norm}/scale": (d,), f"{block}/{norm}/bias": (d,)}
    shapes |= google_files.mlp_shapes(f"{block}/token_mixing", patches, tokens)
    shapes |= google_files.mlp_shapes(f"{block}/channel_mixing", d, channels)
  return shapes | google_files.head_shapes(d, classes)


def forward(arrays, image):
  """Returns the logits of one image."""
  a = {name: np.asarray(x, np.float64) for name, x in arrays.items()}
  windows = image.reshape(3, 4, 3, 4, 3).transpose(0, 2, 1, 3, 4)
  x = np.tensordot(windows, a["stem/kernel"], 3) + a["stem/bias"]
  x = x.reshape(9, -1)
  for i in range(2):
    p = google_files.under(a, f"MixerBlock_{i}")
    token, channel = (
      google_files.under(p, f"{kind}_mixing") for kind in ("token", "channel")
    )
    y = google_files.norm(google_files.under(p, "LayerNorm_0"), x)
    x = x + google_files.mlp(token, y.T).T
    y = google_files.norm(google_files.under(p, "LayerNorm_1"), x)
    x = x + google_files.mlp(channel, y)
  x = google_files.norm(google_files.under(a, "pre_head_layer_norm"), x)
  return x.mean(axis=0) @ a["head/kernel"] + a["head/bias"]


def test_file_written_from_the_documentation_gives_the_logits_of_numpy(
  tmp_path,
):
  arrays = google_files.draw(documented())
  opened = google_files.write(tmp_path / "mixer.npz", arrays)
  model, params, card = google_files.load(mixer, opened)
  assert card.image_size == (12, 12)
  expected = np.stack([forward(arrays, image) for image in IMAGE])
  actual = google_files.logits(model, params, IMAGE)
  np.testing.assert_allclose(actual, expected, atol=2e-6)  # f32, 2 blocks
  again = google_files.save(mixer, params, card)
  assert {name: x.shape for name, x in again.items()} == documented()
  for name, x in again.items():
    np.testing.assert_array_equal(x, arrays[name], name)


@pytest.mark.parametrize(
  ("variant", "sizes", "count"),
  [
    ("B/16", (16, 768, 12, 196, 384, 3072), 59_880_472),
    ("L/16", (16, 1024, 24, 196, 512, 4096), 208_196_168),
  ],
)
def test_published_sizes_have_the_documented_names_and_shapes(
  variant, sizes, count
):
  names = ("patch", "d", "depth", "patches", "tokens", "channels")
  expected = documented(**dict(zip(names, sizes)), classes=1000)
  fields = mixer_models.sizes(variant)
  model = spec.spec(mixer_models.Mixer, num_classes=1000, **fields)
  card = google.card(model, (224, 224), num_channels=3)
  shapes = adapt.param_shapes(card.build_model(), (224, 224, 3))
  written = layout.expected_shapes(mixer.rules(card, shapes, {}), shapes)
  assert written == expected
  assert sum(np.prod(shape) for shape in written.values()) == count


def test_grid_that_is_no_square_needs_the_image_size():
  arrays = google_files.draw(documented(patches=6))
  opened = tensors.from_arrays(arrays)
  with pytest.raises(ValueError, match="got weights for 6 patches"):
    mixer.describe(opened, {})
  card = mixer.describe(opened, {}, image_size=(8, 12))
  assert card.image_size == (8, 12)
  assert card.model["tokens_mlp_dim"] == 10
  assert mixer.sidecars(card) == {}
