"""The .npz of big_vision, from its documented names and in NumPy."""

import logging

import numpy as np
import pytest

from tests.weights import google_files
from vit_jax import spec
from vit_jax.models import hybrid, vit
from vit_jax.weights import adapt, big_vision, google, layout, official, tensors

IMAGE = np.random.default_rng(7).uniform(-1, 1, (2, 12, 12, 3))
IMAGE = IMAGE.astype(np.float32)
POSEMB = "pos_embedding"


def small(
  *, pool="gap", posemb=(POSEMB, 9), layers=google_files.LINEN, rep=None
):
  """Shapes of a ViT of 3 x 3 patches of 4 pixels, without a prefix."""
  d, heads, mlp = 12, 3, 20
  shapes = google_files.vit_shapes(
    patch=4,
    d=d,
    depth=3,
    heads=heads,
    mlp=mlp,
    rep=rep,
    posemb=posemb,
    layers=layers,
    cls=pool == "cls",
  )
  if pool == "map":
    shapes |= map_shapes(d, heads, mlp)
  return shapes | google_files.head_shapes(rep or d, 5)


def map_shapes(d, heads, mlp):
  attention = "MAPHead_0/MultiHeadDotProductAttention_0"
  return {
    "MAPHead_0/probe": (1, 1, d),
    "MAPHead_0/LayerNorm_0/scale": (d,),
    "MAPHead_0/LayerNorm_0/bias": (d,),
    **google_files.attention_shapes(attention, d, heads),
    **google_files.mlp_shapes("MAPHead_0/MlpBlock_0", d, mlp),
  }


def prefixed(prefix, arrays):
  return {prefix + name: x for name, x in arrays.items()}


def scanned(arrays):
  """Stacks the blocks, as a model has them that scans over them."""
  blocks = "Transformer/encoderblock_"
  result = {n: x for n, x in arrays.items() if not n.startswith(blocks)}
  for name in google_files.under(arrays, f"{blocks}0"):
    stack = [arrays[f"{blocks}{i}/{name}"] for i in range(3)]
    result[f"Transformer/encoderblock/{name}"] = np.stack(stack)
  return result


def load(arrays, **hints):
  opened = tensors.from_arrays(arrays)
  return google_files.load(big_vision, opened, **hints)


def assert_equal(actual, expected):
  assert actual.keys() == expected.keys()
  for name, x in expected.items():
    np.testing.assert_array_equal(actual[name], x, name)


@pytest.mark.parametrize(
  ("fields", "is_scanned"),
  [
    ({"pool": "gap", "rep": 12}, False),
    ({"pool": "map"}, True),
    ({"pool": "cls"}, False),
    ({"pool": "gap", "posemb": None}, True),
  ],
  ids=["average, tanh layer", "MAP", "class token", "sincos2d"],
)
def test_file_written_from_the_documentation_gives_the_logits_of_numpy(
  tmp_path, fields, is_scanned
):
  arrays = google_files.draw(small(**fields))
  file = prefixed("params/", scanned(arrays) if is_scanned else arrays)
  opened = google_files.write(tmp_path / "vit.npz", file)
  hints = {} if fields.get("posemb", True) else {"image_size": (12, 12)}
  model, params, card = google_files.load(big_vision, opened, **hints)
  expected = google_files.forward(arrays, IMAGE, layers=google_files.LINEN)
  actual = google_files.logits(model, params, IMAGE)
  np.testing.assert_allclose(actual, expected, atol=2e-6)  # f32, 3 blocks
  assert card.image_size == (12, 12)
  assert card.model["pool"] == fields["pool"]
  assert not card.model["cls_posemb"]
  again = google_files.save(big_vision, params, card)
  shapes = {name: x.shape for name, x in again.items()}
  assert shapes == prefixed("params/", small(**fields))
  assert_equal(again, prefixed("params/", arrays))


@pytest.mark.parametrize(
  ("variant", "pool", "sizes", "count"),
  [
    ("B/16", "gap", (16, 768, 12, 12, 3072), 86_566_120),
    ("B/16", "map", (16, 768, 12, 12, 3072), 93_653_224),
    ("L/16", "cls", (16, 1024, 24, 16, 4096), 304_325_608),
  ],
)
def test_published_sizes_have_the_documented_names_and_shapes(
  variant, pool, sizes, count
):
  patch, d, depth, heads, mlp = sizes
  expected = google_files.vit_shapes(
    patch=patch,
    d=d,
    depth=depth,
    heads=heads,
    mlp=mlp,
    posemb=(POSEMB, 196),
    layers=google_files.LINEN,
    cls=pool == "cls",
  )
  expected |= google_files.head_shapes(d, 1000)
  if pool == "map":
    expected |= map_shapes(d, heads, mlp)
  fields = vit.sizes(variant) | {"pool": pool, "cls_posemb": False}
  model = spec.spec(vit.ViT, num_classes=1000, **fields)
  card = google.card(model, (224, 224), num_channels=3)
  shapes = adapt.param_shapes(card.build_model(), (224, 224, 3))
  written = layout.expected_shapes(big_vision.rules(card, shapes, {}), shapes)
  assert written == prefixed("params/", expected)
  assert sum(np.prod(shape) for shape in written.values()) == count


@pytest.mark.parametrize("is_scanned", [False, True], ids=["loop", "scan"])
@pytest.mark.parametrize(
  ("prefix", "others"),
  [
    ("", {}),
    ("params/", {"opt/0/mu/cls": (1, 1, 12), "chrono/step": ()}),
    ("params/img/", {"params/txt/head/bias": (3,), "params/t": (1,)}),
    ("opt/target/", {"opt/state/step": (), "extra/step": ()}),
  ],
)
def test_whatever_is_not_the_model_is_left_aside(
  caplog, prefix, others, is_scanned
):
  arrays = google_files.draw(small(pool="cls"))
  expected = load(prefixed("params/", arrays))[1]
  with caplog.at_level(logging.INFO):
    file = prefixed(prefix, scanned(arrays) if is_scanned else arrays)
    params = load(file | google_files.draw(others))[1]
  assert_equal(params, expected)
  assert ("2 arrays are not under" in caplog.text) == bool(others)


def test_array_among_those_of_the_model_is_not_left_aside():
  arrays = prefixed("params/", google_files.draw(small()))
  arrays["params/extra"] = np.zeros(3)
  with pytest.raises(ValueError, match=r"unexpected: params/extra \(3,\)"):
    load(arrays)


@pytest.mark.parametrize(
  ("prefix", "posemb", "layers"),
  [
    ("params/", google_files.OFFICIAL_POSEMB, google_files.BEFORE_LINEN),
    ("opt/target/", "Transformer/pos_embedding", google_files.BEFORE_LINEN),
    ("", "Transformer/pos_embedding", google_files.LINEN),
    ("", POSEMB, google_files.LINEN),
  ],
)
def test_class_token_of_old_files_keeps_a_position_of_its_own(
  prefix, posemb, layers
):
  arrays = google_files.draw(
    small(pool="cls", posemb=(posemb, 10), layers=layers)
  )
  _, params, card = load(prefixed(prefix, arrays))
  # The same arrays, as they are drawn in one order.
  official_arrays = google_files.draw(
    small(
      pool="cls",
      posemb=(google_files.OFFICIAL_POSEMB, 10),
      layers=google_files.BEFORE_LINEN,
    )
  )
  opened = tensors.from_arrays(official_arrays)
  _, expected, official_card = google_files.load(official, opened)
  assert_equal(params, expected)
  assert card == official_card


def test_row_for_a_class_token_that_is_not_there_is_left_out():
  arrays = google_files.draw(small(posemb=(POSEMB, 10)))
  _, params, card = load(arrays)
  np.testing.assert_array_equal(params["posemb"], arrays[POSEMB][:, 1:])
  assert card.image_size == (12, 12)


def test_map_head_at_the_top_is_that_of_newer_files():
  arrays = google_files.draw(small(pool="map"))
  expected = load(arrays)[1]
  old = {n.removeprefix("MAPHead_0/"): x for n, x in arrays.items()}
  assert "probe" in old
  assert_equal(load(old)[1], expected)


def test_position_of_the_class_token_is_added_to_it_with_equal_logits(caplog):
  model = spec.spec(
    vit.ViT,
    num_classes=5,
    width=12,
    depth=1,
    num_heads=3,
    mlp_dim=20,
    patch_size=(4, 4),
  )
  card = google.card(model, (12, 12), num_channels=3)
  shapes = adapt.param_shapes(card.build_model(), (12, 12, 3))
  params = google_files.draw(shapes)
  with caplog.at_level(logging.INFO):
    arrays = google_files.save(big_vision, params, card)
  assert "added to the token: other parameters, equal logits" in caplog.text
  np.testing.assert_array_equal(
    arrays["params/cls"], params["cls"] + params["cls_posemb"]
  )
  expected = google_files.logits(card.build_model(), params, IMAGE)
  # By what the file says, and by the card of what was written.
  other_model, other, _ = load(arrays)
  assert "cls_posemb" not in other
  actual = google_files.logits(other_model, other, IMAGE)
  np.testing.assert_allclose(actual, expected, atol=1e-6)  # f32
  opened = tensors.from_arrays(arrays)
  rules = big_vision.rules(card, shapes, opened.shapes)
  again = layout.read(opened, rules, shapes)
  assert again.keys() == params.keys() and not again["cls_posemb"].any()
  actual = google_files.logits(card.build_model(), again, IMAGE)
  np.testing.assert_array_equal(actual, expected)


def test_file_without_positions_needs_the_image_size():
  arrays = google_files.draw(small(posemb=None))
  with pytest.raises(ValueError, match="weights for any number of patches"):
    load(arrays)
  assert load(arrays, image_size=(8, 12))[2].image_size == (8, 12)


@pytest.mark.parametrize(
  ("model", "fields", "message"),
  [
    (vit.ViT, {"posemb": "none"}, "'big_vision' for posemb='none'"),
    (vit.ViT, {"pool": "cls_gap"}, "'big_vision' for pool='cls_gap'"),
    (vit.ViT, {"num_registers": 1}, r"for a model with \['registers'\]"),
    (
      hybrid.Hybrid,
      {"stages": (), "patch_size": (1, 1)},
      r"for Hybrid; it holds \['ViT'\]",
    ),
  ],
  ids=str,
)
def test_model_that_the_format_cannot_hold_is_refused(model, fields, message):
  sizes = {"width": 12, "depth": 1, "num_heads": 3, "mlp_dim": 20}
  fields = sizes | {"patch_size": (4, 4)} | fields
  card = google.card(
    spec.spec(model, num_classes=5, **fields), (12, 12), num_channels=3
  )
  shapes = adapt.param_shapes(card.build_model(), (12, 12, 3))
  with pytest.raises(ValueError, match=message):
    big_vision.rules(card, shapes, {})
