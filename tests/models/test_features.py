"""Looking inside changes nothing, and shows what NumPy computes."""

from typing import Any

import jax
import numpy as np
import pytest

from vit_jax.models import features, output, vit

MODEL = vit.ViT(
  num_classes=3,
  width=8,
  depth=3,
  num_heads=2,
  mlp_dim=12,
  patch_size=(4, 2),
  num_registers=1,
)
IMAGE: Any = (
  np.random.default_rng(0).normal(size=(2, 8, 6, 3)).astype(np.float32)
)
T = 1 + 1 + 2 * 3  # class token, register, grid


def random_params(model):
  shapes = jax.eval_shape(model.init, jax.random.key(0), IMAGE)["params"]
  rng = np.random.default_rng(1)
  return jax.tree.map(
    lambda x: rng.normal(0.1, 0.4, x.shape).astype(np.float32), shapes
  )


def test_logits_are_the_same_with_and_without_looking():
  params = random_params(MODEL)
  plain = output.apply(MODEL, params, IMAGE)
  seen = features.extract(MODEL, params, IMAGE, attention=[1], blocks=[0])
  jax.tree.map(np.testing.assert_array_equal, plain, seen.output)


def test_looking_costs_nothing_when_it_is_off():
  params = random_params(MODEL)

  def plain(image):
    return output.apply(MODEL, params, image)

  def off(image):
    return features.extract(MODEL, params, image).output

  texts = [jax.jit(f).lower(IMAGE).as_text() for f in (plain, off)]
  assert texts[0].replace("jit_plain", "") == texts[1].replace("jit_off", "")


def test_attention_is_the_softmax_of_queries_and_keys():
  params = random_params(MODEL)
  seen = features.extract(
    MODEL, params, IMAGE, attention=range(3), blocks=range(3)
  )
  assert set(seen.attention) == {0, 1, 2}
  # The second block again, from the tokens that the first hands it.
  block = jax.tree.map(lambda x: x[1], params["encoder"]["blocks"])
  x = np.asarray(seen.blocks[0], np.float64)  # [B, T, D]
  x = x - x.mean(-1, keepdims=True)
  x = x / np.sqrt((x**2).mean(-1, keepdims=True) + 1e-6)
  x = x * block["norm1"]["scale"] + block["norm1"]["bias"]
  q, k = (
    np.einsum("btd,dhk->bhtk", x, block["attention"][name]["kernel"])
    + block["attention"][name]["bias"][:, None]
    for name in ("query", "key")
  )
  weights = np.exp(np.einsum("bhik,bhjk->bhij", q, k) / 2.0)  # sqrt(d = 4)
  weights /= weights.sum(axis=-1, keepdims=True)
  assert seen.attention[1].shape == (2, 2, T, T)
  np.testing.assert_allclose(seen.attention[1], weights, atol=2e-6)  # f32


def test_last_block_before_the_norm_gives_the_tokens():
  params = random_params(MODEL)
  seen = features.extract(MODEL, params, IMAGE, blocks=[-1])
  x = np.asarray(seen.blocks[-1][:, 2:], np.float64)
  x = x - x.mean(-1, keepdims=True)
  x = x / np.sqrt((x**2).mean(-1, keepdims=True) + 1e-6)
  norm = params["encoder"]["norm"]
  x = x * norm["scale"] + norm["bias"]
  np.testing.assert_allclose(seen.output.tokens, x, atol=1e-5)  # f32


def test_map_head_shows_what_its_probe_looks_at():
  model = MODEL.clone(pool="map")
  seen = features.extract(model, random_params(model), IMAGE, attention=[0])
  assert seen.pool_attention is not None
  assert seen.pool_attention.shape == (2, 2, 1, 6)
  np.testing.assert_allclose(seen.pool_attention.sum(-1), 1.0, atol=1e-6)


def test_block_that_is_not_there_is_named():
  match = r"attention: got block 3; the model has 3. Use 0 to 2, or -1"
  with pytest.raises(ValueError, match=match):
    features.extract(MODEL, random_params(MODEL), IMAGE, attention=[3])
