"""timm's own models and files against ours, both ways, from random weights."""

import json
import pathlib
from typing import Any

import numpy as np
import pytest
import safetensors.torch
import timm
import torch
from timm.models import _hub, vision_transformer

from tests.parity import both
from vit_jax import spec
from vit_jax.models import hybrid, vit
from vit_jax.weights import (
  adapt,
  files,
  layout,
  pytorch,
  tensors,
  timm_config,
)
from vit_jax.weights import card as card_lib
from vit_jax.weights import timm as timm_format

SMALL = {"img_size": 32, "patch_size": 8, "embed_dim": 64, "num_heads": 2}
SMALL |= {"depth": 3, "num_classes": 7}
GAP = {"class_token": False, "global_pool": "avg"}

# Architecture and what differs from it.
PLAIN = {
  "Ti/16": ("vit_tiny_patch16_224", {}),
  "Ti/16 with tanh": ("vit_tiny_patch16_224", {"act_layer": "gelu_tanh"}),
  "S/16 at 96x160": (
    "vit_small_patch16_224",
    {"img_size": (96, 160), "depth": 4},
  ),
  "B/16": ("vit_base_patch16_224", {"depth": 3}),
  "DeiT-III": (
    "deit3_small_patch16_224",
    {"depth": 3, "img_size": 64, "num_classes": 7},
  ),
  "DINOv2": (
    "vit_small_patch14_dinov2",
    {"depth": 3, "img_size": 70, "num_classes": 0},
  ),
  "DINOv2 with registers": (
    "vit_small_patch14_reg4_dinov2",
    {"depth": 3, "img_size": (56, 70)},
  ),
  "SwiGLU": (
    "vit_giant_patch14_dinov2",
    SMALL | {"mlp_ratio": 5.0, "init_values": 0.5},
  ),
  "registers": (
    "vit_base_patch16_224",
    SMALL | {"reg_tokens": 3, "no_embed_class": True},
  ),
  "QK norm": ("vit_base_patch16_224", SMALL | {"qk_norm": True}),
  "MAP": (
    "vit_base_patch16_224",
    SMALL | {"class_token": False, "global_pool": "map"},
  ),
  "norm before the mean": (
    "vit_base_patch16_224",
    SMALL | GAP | {"fc_norm": False},
  ),
  "norm after the mean": ("vit_base_patch16_224", SMALL | GAP),
  "registers and no class token": (
    "vit_base_patch16_224",
    SMALL | GAP | {"reg_tokens": 2, "no_embed_class": True},
  ),
  "one channel": ("vit_base_patch16_224", SMALL | {"in_chans": 1}),
  "no positions": ("vit_base_patch16_224", SMALL | {"pos_embed": "none"}),
}
HYBRIDS = {
  "R+Ti/16": ("vit_tiny_r_s16_p8_224", {"depth": 3}),
  "R+Ti/16 at 128x160": (
    "vit_tiny_r_s16_p8_224",
    {"depth": 3, "img_size": (128, 160)},
  ),
  "R26+S/32": ("vit_small_r26_s32_224", {"depth": 2, "num_classes": 7}),
  "R50+B/16": (
    "vit_base_r50_s16_224",
    {"depth": 1, "img_size": 128, "num_classes": 7},
  ),
}
SLOW = {
  "S/16": ("vit_small_patch16_224", {}),
  "B/16": ("vit_base_patch16_224", {}),
  "B/16 at 384": ("vit_base_patch16_384", {}),
  "R50+B/16 at 384": ("vit_base_r50_s16_384", {"depth": 2}),
}


def save_theirs(folder: pathlib.Path, model: Any) -> None:
  """Writes a model as timm pushes it to the hub."""
  safetensors.torch.save_file(
    model.state_dict(), str(folder / "model.safetensors")
  )
  _hub.save_config_for_hf(model, str(folder / "config.json"))


def outputs(model: Any, image: np.ndarray) -> tuple[Any, Any]:
  """Returns their logits and the representation that they are of."""
  x = both.to_torch(image)
  pooled = model.forward_head(model.forward_features(x), pre_logits=True)
  return model(x), pooled


def check_read(
  tmp_path: pathlib.Path, name: str, arguments: Any, *, atol: float
) -> None:
  theirs = both.randomise(timm.create_model(name, **arguments))
  save_theirs(tmp_path, theirs)
  model, params, card = files.load(tmp_path)
  image = both.images(card.image_size, channels=card.num_channels)
  logits, pooled = outputs(theirs, image)
  ours = both.apply(model, params, image)
  both.assert_close(ours.representation, pooled, atol=atol)
  if theirs.num_classes:
    both.assert_close(ours.logits, logits, atol=atol)


@pytest.mark.parametrize("case", PLAIN)
def test_a_vit_of_timm_reads_as_equal_logits(case, tmp_path):
  check_read(tmp_path, *PLAIN[case], atol=both.ATOL)


@pytest.mark.parametrize("case", HYBRIDS)
def test_a_hybrid_of_timm_reads_as_equal_logits(case, tmp_path):
  check_read(tmp_path, *HYBRIDS[case], atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("case", SLOW)
def test_whole_models_of_timm_read_as_equal_logits(case, tmp_path):
  atol = 1e-5 if case.startswith("R") else both.ATOL
  check_read(tmp_path, *SLOW[case], atol=atol)


OURS = {"num_classes": 7, "width": 48, "depth": 2, "num_heads": 3}
OURS |= {"mlp_dim": 100, "patch_size": (8, 8)}
WRITTEN = {
  "class token": {},
  "tanh": {"activation": "gelu_tanh"},
  "no head": {"num_classes": 0},
  "tall patches": {"patch_size": (8, 4)},
  "DeiT-III": {"cls_posemb": False, "layer_scale": 0.1},
  "registers": {"num_registers": 2},
  "registers and no position of the class token": {
    "num_registers": 2,
    "cls_posemb": False,
  },
  "QK norm": {"qk_norm": True},
  "MAP": {"pool": "map"},
  "norm before the mean": {"pool": "gap"},
  "norm after the mean": {"pool": "gap", "norm_after_pool": True},
  "registers before the mean": {"pool": "gap", "num_registers": 1},
  "SwiGLU": {"activation": "swiglu", "layer_scale": 0.1},
  "no positions": {"posemb": "none"},
}


def write(folder: pathlib.Path, model: Any, size: Any) -> Any:
  """Returns our model, parameters and card, written for timm."""
  card = card_lib.Card(
    model=model,
    image_size=size,
    num_channels=3,
    transform=None,
    normalize=pytorch.normalize((0.5,), (0.5,)),
  )
  params = both.random_params(card)
  files.save(folder, both.nested(params), card, format="timm")
  return params, card


def check_written(
  tmp_path: pathlib.Path, fn: Any, size: Any, *, atol: float, **fields: Any
) -> None:
  model = spec.spec(fn, **{"activation": "gelu_erf"} | fields)
  params, card = write(tmp_path, model, size)
  config = json.loads((tmp_path / "config.json").read_text("utf-8"))
  from_file = timm.create_model(
    config["architecture"],
    **config["model_args"],
    checkpoint_path=str(tmp_path / "model.safetensors"),
  ).eval()
  image = both.images(size)
  logits, pooled = outputs(from_file, image)
  ours = both.apply(card.build_model(), both.nested(params), image)
  both.assert_close(ours.representation, pooled, atol=atol)
  if config["num_classes"]:
    both.assert_close(ours.logits, logits, atol=atol)
  from_folder = timm.create_model(f"local-dir:{tmp_path}", pretrained=True)
  torch.testing.assert_close(
    from_folder.eval()(both.to_torch(image)), logits, rtol=0, atol=0
  )
  # And back, without our card: what timm is told tells us.
  (tmp_path / "card.json").unlink()
  again = files.read(tmp_path)
  fields = {k: v for k, v in again.card.model.items() if k != "layer_scale"}
  assert fields == {k: card.model[k] for k in fields}
  assert again.card.image_size == size
  for path, x in params.items():
    np.testing.assert_array_equal(again.params[path], x)


@pytest.mark.parametrize("case", WRITTEN)
def test_timm_reads_ours_as_equal_logits(case, tmp_path):
  fields = OURS | WRITTEN[case]
  check_written(tmp_path, vit.ViT, (32, 48), atol=both.ATOL, **fields)


@pytest.mark.parametrize("name", ["R+Ti/16", "R26+S/32", "R50+B/16"])
def test_timm_reads_our_hybrids_as_equal_logits(name, tmp_path):
  fields = {**hybrid.sizes(name), "num_classes": 7, "depth": 1}
  check_written(tmp_path, hybrid.Hybrid, (64, 96), atol=1e-5, **fields)


@pytest.mark.slow
def test_timm_reads_our_b16_as_equal_logits(tmp_path):
  fields = {**vit.sizes("B/16"), "num_classes": 1000}
  check_written(tmp_path, vit.ViT, (224, 224), atol=both.ATOL, **fields)


def test_a_size_that_timm_would_round_down_is_kept():
  model = vit.ViT(
    **{**vit.sizes("So400m/14"), "num_classes": 0}, activation="gelu_erf"
  )
  card = card_lib.Card(
    model=spec.spec(vit.ViT, **vit.sizes("So400m/14"), num_classes=0),
    image_size=(224, 224),
    num_channels=3,
    transform=None,
    normalize=pytorch.normalize((0.5,), (0.5,)),
  )
  ratio = json.loads(timm_config.to_json(card, model))["model_args"][
    "mlp_ratio"
  ]
  assert int(1152 * ratio) == 4304


@pytest.mark.parametrize("size", [(48, 80), (16, 24)])
def test_positions_resized_by_timm_are_those_of_the_method_timm(size, tmp_path):
  theirs = both.randomise(timm.create_model("vit_base_patch16_224", **SMALL))
  save_theirs(tmp_path, theirs)
  theirs.set_input_size(size)
  model, params, _ = files.load(tmp_path, image_size=size, posemb_resize="timm")
  image = both.images(size)
  ours = both.apply(model, params, image)
  both.assert_close(ours.logits, theirs(both.to_torch(image)))


@pytest.mark.slow
def test_every_vit_of_timm_is_described_rightly_or_refused():
  described = []
  names = timm.list_models(module="vision_transformer")
  names += timm.list_models(module="vision_transformer_hybrid")
  names += timm.list_models(module="deit")
  for name in names:
    with torch.device("meta"):
      theirs = timm.create_model(name)
    cfg = theirs.pretrained_cfg
    config = {
      "architecture": name,
      "pretrained_cfg": {"input_size": cfg["input_size"]},
    }
    shapes = {k: tuple(x.shape) for k, x in theirs.state_dict().items()}
    arrays = tensors.Tensors(shapes, lambda _: np.zeros(0))
    if not timm_format.recognises(arrays, {}):
      continue
    try:
      card = timm_format.describe(arrays, {"config.json": config})
      ours: Any = card.build_model()
      expected = adapt.param_shapes(ours, (*card.image_size, card.num_channels))
      rules = timm_format.rules(card, expected, shapes)
      layout.check(shapes, layout.expected_shapes(rules, expected))
    except ValueError:
      continue
    assert isinstance(theirs, vision_transformer.VisionTransformer), name
    block: Any = theirs.blocks[0]
    assert type(block) is vision_transformer.Block, name
    assert ours.num_heads == block.attn.num_heads, name
    assert {"GELU": "gelu_erf", "GELUTanh": "gelu_tanh", "SiLU": "swiglu"}[
      type(block.mlp.act).__name__
    ] == ours.activation, name
    pools = {"token": "cls", "avg": "gap", "map": "map"}
    assert ours.pool == pools[theirs.global_pool], name
    for module in theirs.modules():
      if isinstance(module, torch.nn.LayerNorm):
        assert module.eps == ours.norm_epsilon, name
    described.append(name)
  assert len(described) >= 105
  assert {
    *("vit_base_patch16_224", "vit_so400m_patch14_siglip_384"),
    *("vit_giant_patch14_reg4_dinov2", "vit_base_r50_s16_384"),
    *("vit_base_patch16_reg4_gap_256", "deit3_huge_patch14_224"),
  } <= set(described)
