"""Conversion proves itself, or fails."""

import numpy as np
import pytest

from tests import commands, tiny_weights
from vit_jax import convert, weights


@pytest.mark.parametrize("format", tiny_weights.FORMATS)
def test_conversion_keeps_the_logits(tmp_path, format):
  source = tiny_weights.save(tmp_path, "npz", activation="gelu_erf")
  path, worst = convert.convert(
    str(source), str(tmp_path / "out"), format=format
  )
  assert worst <= 1e-6
  before, after = (weights.load(p) for p in (source, path))
  np.testing.assert_allclose(
    tiny_weights.logits(before.model, before.params),
    tiny_weights.logits(after.model, after.params),
    atol=1e-6,
  )


def test_conversion_that_changes_the_logits_is_an_error(tmp_path, monkeypatch):
  source = tiny_weights.save(tmp_path, "npz")
  load = weights.load

  def other(name, **options):
    loaded = load(name, **options)
    if str(name) != str(source):
      loaded.params["head"]["bias"] += 0.1
    return loaded

  monkeypatch.setattr(weights, "load", other)
  with pytest.raises(ValueError, match=r"they differ by 0\.1\. Do not use it"):
    convert.convert(str(source), str(tmp_path / "out"), format="timm")


def test_command_writes_another_size_and_head(tmp_path):
  source = tiny_weights.save(tmp_path, "npz")
  out = commands.run(
    *(tmp_path / "cache", source, tmp_path / "out"),
    *("--format=timm", "--num_classes=2", "--image_size", "16", "8"),
    module="vit_jax.convert",
  )
  assert "written and read again; logits differ by" in out
  _, params, card = weights.load(tmp_path / "out")
  assert card.image_size == (16, 8)
  assert params["posemb"].shape == (1, 8, 12)
  assert params["head"]["bias"].shape == (2,)


@pytest.mark.parametrize("name", ["w", "w.npz"])
def test_nothing_is_written_over(tmp_path, name):
  source = tiny_weights.save(tmp_path, "npz")
  before = source.read_bytes()
  with pytest.raises(ValueError, match=r"w\.npz is there already\. Remove it"):
    convert.convert(str(source), str(tmp_path / name), format="npz")
  assert source.read_bytes() == before
