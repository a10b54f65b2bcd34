"""The format of timm, against files that timm wrote: tests/golden/weights."""

import json
import pathlib
from typing import Any

import jax
import numpy as np
import pytest
from flax import traverse_util

from vit_jax import spec
from vit_jax.data import transforms
from vit_jax.models import axial, hybrid, vit
from vit_jax.weights import adapt, layout, pytorch, tensors, timm
from vit_jax.weights.card import Card

GOLDEN = pathlib.Path(__file__).parents[1] / "golden" / "weights"
CASES = sorted(p.name for p in GOLDEN.glob("timm_*") if p.is_dir())


def read_golden(name: str) -> tuple[tensors.Tensors, Any]:
  """Returns the arrays of a case, and the JSON beside them."""
  arrays = tensors.open_safetensors([GOLDEN / name / "model.safetensors"])
  config = json.loads((GOLDEN / name / "config.json").read_text("utf-8"))
  return arrays, {"config.json": config}


def shapes_of(card: Card) -> dict[str, tuple[int, ...]]:
  shape = (*card.image_size, card.num_channels)
  return adapt.param_shapes(card.build_model(), shape)


def read_params(arrays: tensors.Tensors, card: Card) -> layout.Params:
  shapes = shapes_of(card)
  return layout.read(arrays, timm.rules(card, shapes, arrays.shapes), shapes)


def describe(arrays: tensors.Tensors, config: Any = None, **hints: Any) -> Card:
  files = {} if config is None else {"config.json": config}
  return timm.describe(arrays, files, **hints)


def edited(arrays: tensors.Tensors, **others: Any) -> tensors.Tensors:
  """Returns arrays with some exchanged; None for one that is left out."""
  names = {k.replace("__", "."): x for k, x in others.items()}
  kept = {k: x for k, x in ({**arrays} | names).items() if x is not None}
  return tensors.from_arrays(kept)


def make_card(fn: Any = vit.ViT, **fields: Any) -> Card:
  sizes = {"num_classes": 5, "width": 24, "depth": 1, "num_heads": 3}
  sizes |= {"mlp_dim": 32, "patch_size": (4, 4), "activation": "gelu_erf"}
  return Card(
    model=spec.spec(fn, **sizes | fields),
    image_size=(16, 24),
    num_channels=3,
    transform=None,
    normalize=pytorch.normalize((0.5,), (0.5,)),
  )


@pytest.mark.parametrize("name", CASES)
def test_a_file_of_timm_gives_the_output_that_timm_gives(name):
  arrays, files = read_golden(name)
  card = timm.describe(arrays, files)
  params = traverse_util.unflatten_dict(read_params(arrays, card), sep="/")
  model: Any = card.build_model()
  with np.load(GOLDEN / name / "expected.npz") as expected:
    image, theirs = expected["image"], expected["output"]
  ours = jax.jit(model.apply)({"params": params}, image)
  ours = ours.logits if model.num_classes else ours.representation
  scale = np.abs(theirs).max()
  # float32 over one or two blocks, scaled to a maximum of one.
  np.testing.assert_allclose(ours / scale, theirs / scale, rtol=0, atol=2e-6)


@pytest.mark.parametrize("name", CASES)
def test_a_file_of_timm_is_written_back_as_it_was(name):
  arrays, files = read_golden(name)
  card = timm.describe(arrays, files)
  params = read_params(arrays, card)
  written = layout.write(params, timm.rules(card, shapes_of(card), {}))
  assert written.keys() == arrays.keys()
  for key, x in written.items():
    np.testing.assert_array_equal(x, arrays[key])
  # What we say of it is what timm said, as far as we read it.
  ours = json.loads(timm.sidecars(card)["config.json"])
  again = timm.describe(arrays, {"config.json": ours})
  assert again == card


def test_a_model_is_described_as_timm_built_it():
  arrays, files = read_golden("timm_vit")
  card = timm.describe(arrays, files)
  assert dict(card.model) == dict(
    spec.spec(
      vit.ViT,
      num_classes=5,
      width=24,
      depth=2,
      num_heads=3,
      mlp_dim=36,
      patch_size=(4, 4),
      activation="gelu_tanh",
    )
  )
  assert card.image_size == (16, 24)
  assert card.num_channels == 3
  assert timm.recognises(arrays, {})
  assert not timm.recognises(tensors.from_arrays({}), {})


@pytest.mark.parametrize(
  "name, fields",
  [
    ("timm_deit3", {"cls_posemb": False, "layer_scale": 1e-5}),
    ("timm_dinov2", {"num_registers": 4, "activation": "swiglu"}),
    ("timm_map", {"pool": "map", "qk_norm": True}),
    ("timm_gap", {"pool": "gap", "norm_after_pool": True}),
    ("timm_hybrid", {"pool": "gap", "norm_after_pool": False, "stages": ()}),
  ],
)
def test_what_the_arrays_tell_is_in_the_card(name, fields):
  card = timm.describe(*read_golden(name))
  assert {key: card.model[key] for key in fields} == fields


@pytest.mark.parametrize(
  "variant, architecture",
  [
    ("R26+S/32", "vit_small_r26_s32_224"),
    ("R50+B/16", "vit_base_r50_s16_384"),
  ],
)
def test_hybrids_have_the_arrays_that_timm_has(variant, architecture):
  text = (GOLDEN / "timm_hybrid_shapes.json").read_text("utf-8")
  shapes = {k: tuple(v) for k, v in json.loads(text)[architecture].items()}
  arrays = tensors.Tensors(shapes, lambda _: np.zeros(0))
  card = describe(arrays, {"architecture": architecture})
  fields: Any = {**hybrid.sizes(variant), "depth": 1, "num_classes": 1000}
  assert {key: card.model[key] for key in fields} == fields
  expected = shapes_of(card)
  rules = timm.rules(card, expected, {})
  assert layout.expected_shapes(rules, expected) == shapes


def test_without_a_config_published_sizes_and_defaults_do():
  arrays, _ = read_golden("timm_vit")
  square = np.zeros((1, 26, 24), np.float32)
  arrays = edited(arrays, pos_embed=square)
  with pytest.raises(ValueError, match="num_heads: got none for width 24"):
    describe(arrays)
  card = describe(arrays, num_heads=3)
  assert card.image_size == (20, 20)
  assert card.model["activation"] == "gelu_erf"
  assert card.model["num_heads"] == 3
  assert card.transform is None
  assert card.normalize["mean"] == (127.5,)


def test_the_grid_is_asked_for_where_no_square_fits():
  arrays, _ = read_golden("timm_vit")
  arrays = edited(arrays, pos_embed=np.zeros((1, 1 + 27, 24), np.float32))
  with pytest.raises(ValueError, match="image_size: got position embeddings"):
    describe(arrays, num_heads=3)
  card = describe(arrays, num_heads=3, image_size=(36, 12))
  assert card.image_size == (36, 12)


def test_the_approximate_gelu_is_known_by_the_name():
  arrays, files = read_golden("timm_map")
  config = files["config.json"]
  name = "vit_so400m_patch16_siglip_256"
  card = describe(arrays, config | {"architecture": name})
  assert card.model["activation"] == "gelu_tanh"
  assert timm.describe(arrays, files).model["activation"] == "gelu_erf"
  args = config["model_args"] | {"act_layer": "quick_gelu"}
  with pytest.raises(ValueError, match="act_layer: got 'quick_gelu'"):
    describe(arrays, config | {"model_args": args})


@pytest.mark.parametrize(
  "images, expected",
  [
    (
      {"crop_pct": 0.9, "interpolation": "bicubic"},
      spec.spec(
        transforms.resize_center_crop,
        resize=(17, 26),
        size=(16, 24),
        interpolation="bicubic_antialias",
      ),
    ),
    (
      {"crop_pct": 1.0, "crop_mode": "squash", "interpolation": "bilinear"},
      spec.spec(
        transforms.resize, size=(16, 24), interpolation="bilinear_antialias"
      ),
    ),
    (
      {"crop_pct": 0.9, "crop_mode": "border", "interpolation": "bicubic"},
      None,
    ),
  ],
)
def test_preprocessing_is_read_from_the_config(images, expected):
  arrays, files = read_golden("timm_vit")
  images |= {"mean": [0.485, 0.456, 0.406], "std": [0.229, 0.224, 0.225]}
  config = files["config.json"] | {"pretrained_cfg": images}
  card = describe(arrays, config)
  assert card.transform == (expected and dict(expected))
  np.testing.assert_allclose(card.normalize["mean"], (123.675, 116.28, 103.53))
  if expected is not None:
    written = json.loads(timm.sidecars(card)["config.json"])
    assert written["pretrained_cfg"].items() >= images.items()


def test_class_names_are_those_of_the_config():
  arrays, files = read_golden("timm_vit")
  names = ["a", "b", "c", "d", "e"]
  card = describe(arrays, files["config.json"] | {"label_names": names})
  assert card.class_names == tuple(names)
  assert json.loads(timm.sidecars(card)["config.json"])["label_names"] == names


@pytest.mark.parametrize(
  "arrays, message",
  [
    ({"norm_pre__weight": np.ones(24)}, "norm_pre.weight: got a norm before"),
    ({"dist_token": np.ones((1, 1, 24))}, "dist_token: got a distillation"),
    ({"fc_norm__weight": np.ones(24)}, "pool: got 'token' with a class token"),
    ({"pos_embed": None}, None),
    ({"patch_embed__backbone__conv1__weight": np.ones(3)}, "another network"),
  ],
)
def test_what_no_model_here_has_is_refused(arrays, message):
  found, files = read_golden("timm_vit")
  found = edited(found, **arrays)
  if message is None:
    assert timm.describe(found, files).model["posemb"] == "none"
    with pytest.raises(ValueError, match="image_size: got none"):
      describe(found, num_heads=3)
    return
  with pytest.raises(ValueError, match=message):
    timm.describe(found, files)


def test_a_renamed_array_is_named_and_so_is_the_one_it_should_be():
  arrays, files = read_golden("timm_vit")
  names = {k.replace("blocks.0.mlp", "blocks.0.ffn"): k for k in arrays}
  renamed = arrays.renamed(names)
  card = timm.describe(renamed, files)
  with pytest.raises(ValueError) as error:
    read_params(renamed, card)
  assert "missing: blocks.0.mlp.fc1.weight (36, 24)" in str(error.value)
  assert "unexpected: blocks.0.ffn.fc1.weight (36, 24)" in str(error.value)
  names = {k: k for k in arrays if "mlp.fc2" not in k}
  with pytest.raises(ValueError, match=r"got no array .*mlp.fc2.weight"):
    timm.describe(arrays.renamed(names), files)


def test_norms_after_the_residuals_are_refused_by_name():
  arrays, files = read_golden("timm_vit")
  config = files["config.json"] | {"architecture": "vit_base_patch16_rpn_224"}
  with pytest.raises(ValueError, match="whose norms follow the residuals"):
    describe(arrays, config)


def test_positions_of_registers_must_be_zero():
  arrays, files = read_golden("timm_dinov2")
  table = np.zeros((1, 5 + 24, 24), np.float32)
  table[:, :1] = 3
  table[:, 5:] = arrays["pos_embed"]
  good = edited(arrays, pos_embed=table)
  card = timm.describe(good, files)
  assert card.model["cls_posemb"]
  np.testing.assert_array_equal(read_params(good, card)["cls_posemb"], 3)
  table[:, 2] = 1
  with pytest.raises(ValueError, match="positions for the 4 tokens"):
    read_params(edited(arrays, pos_embed=table), card)


def test_registers_with_positions_are_refused_without_a_class_token_too():
  arrays, files = read_golden("timm_gap")
  table = np.ones((1, 2 + 24, 24), np.float32)
  registers = np.ones((1, 2, 24), np.float32)
  arrays = edited(arrays, pos_embed=table, reg_token=registers)
  card = timm.describe(arrays, files)
  assert card.image_size == (16, 24)
  with pytest.raises(ValueError, match="positions for the 2 tokens"):
    read_params(arrays, card)


@pytest.mark.parametrize(
  "card, message",
  [
    (make_card(axial.AxialViT, pool="gap"), "model: got AxialViT"),
    (make_card(pool="cls_gap"), "pool: got 'cls_gap'"),
    (make_card(posemb="sincos2d"), "posemb: got 'sincos2d'"),
    (make_card(posemb_at="every_layer"), "posemb_at: got 'every_layer'"),
    (make_card(representation_size=8), "representation_size: got 8"),
    (make_card(norm_epsilon=1e-12), "norm_epsilon: got 1e-12"),
    (make_card(pool="map", activation="swiglu"), 'activation: got "swiglu"'),
    (
      make_card(hybrid.Hybrid, stages=(1,), patch_size=(1, 1)),
      r"stages: got \(1,\)",
    ),
  ],
)
def test_what_timm_cannot_hold_is_not_written(card, message):
  with pytest.raises(ValueError, match=message):
    timm.rules(card, {}, {})
  with pytest.raises(ValueError, match=message):
    timm.sidecars(card)
