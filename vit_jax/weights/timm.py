"""The safetensors of timm: its ViTs and hybrids.

Source: pytorch-image-models, vision_transformer.py and
vision_transformer_hybrid.py. Query, key and value are one layer, `qkv`, and so
are the two halves of a SwiGLU. Pooling by average has the final norm before
the mean as `norm`, or after it as `fc_norm`. What the arrays do not tell is in
a config.json: see `timm_config`.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from vit_jax import spec
from vit_jax.models import check, hybrid, resnet, vit
from vit_jax.weights import pytorch, timm_config
from vit_jax.weights.card import Card
from vit_jax.weights.format import Files
from vit_jax.weights.layout import BLOCKS, Rule, same
from vit_jax.weights.tensors import Shape, Tensors

NAME = "timm"

_TRUNK = "patch_embed.backbone"


def recognises(tensors: Tensors, files: Files) -> bool:
  """Returns whether the arrays are those of a ViT of timm."""
  del files
  qkv = pytorch.count_blocks(tensors.shapes, "blocks.{block}.attn.qkv.")
  fc1 = pytorch.count_blocks(tensors.shapes, "blocks.{block}.mlp.fc1.")
  return "patch_embed.proj.weight" in tensors and min(qkv, fc1) > 0


def describe(tensors: Tensors, files: Files, **hints: Any) -> Card:
  """Returns the card; see `format.Format`."""
  shapes, config = tensors.shapes, files.get("config.json", {})
  check.raise_all(_refusals(shapes, config))
  fields = _fields(shapes, config, hints)
  channels = shapes["patch_embed.proj.weight"][1]
  model_class, cell = vit.ViT, fields["patch_size"]
  if any(name.startswith(_TRUNK) for name in shapes):
    model_class = hybrid.Hybrid
    trunk, channels = _trunk(shapes)
    fields |= trunk
    stride = resnet.stride(trunk["stages"])
    cell = cell[0] * stride, cell[1] * stride
  image_size, positions = _positions(shapes, cell, config, hints)
  return Card(
    model=spec.spec(model_class, **fields, **positions),
    image_size=image_size,
    num_channels=channels,
    transform=timm_config.transform(config, image_size),
    normalize=timm_config.normalize(config),
    class_names=timm_config.class_names(config, fields["num_classes"]),
  )


def rules(
  card: Card, shapes: Mapping[str, Shape], found: Mapping[str, Shape]
) -> Sequence[Rule]:
  """Returns the layout; see `format.Format`."""
  model: Any = card.build_model()
  check.raise_all(_problems(model))
  norm = "fc_norm" if model.norm_after_pool else "norm"
  result = [
    *pytorch.patch_embed("patch_embed.proj"),
    *_block_rules(model),
    *pytorch.norm(norm, "encoder/norm"),
  ]
  if isinstance(model, hybrid.Hybrid):
    result += _trunk_rules(model.stages)
  if model.has_cls:
    result.append(same("cls_token", "cls"))
  if model.num_registers:
    result.append(same("reg_token", "registers"))
  if model.posemb == "learned":
    result.append(_positions_rule(model, shapes, found))
  if model.pool == "map":
    result += _map_head_rules()
  if model.num_classes:
    result += pytorch.linear("head", "head")
  return result


def sidecars(card: Card) -> dict[str, str]:
  """Returns a config.json: `timm.create_model("local-dir:FOLDER")` reads it."""
  model: Any = card.build_model()
  check.raise_all(_problems(model))
  return {"config.json": timm_config.to_json(card, model)}


def _refusals(
  shapes: Mapping[str, Shape], config: timm_config.Config
) -> Iterator[str]:
  """Yields what the weights have that no model here has."""
  refused = {
    "norm_pre.weight": "a norm before the blocks, as in CLIP",
    "dist_token": "a distillation token, as in DeiT's distilled models",
  }
  for array, what in refused.items():
    if array in shapes:
      yield f"{array}: got {what}; no model here has one. Use other weights."
  name = timm_config.architecture(config)
  if "_rpn_" in name:  # The arrays look like those of any other.
    yield (
      f"architecture: got {name!r}, whose norms follow the residuals; no model "
      "here has that. Use other weights."
    )


def _fields(
  shapes: Mapping[str, Shape],
  config: timm_config.Config,
  hints: Mapping[str, Any],
) -> dict[str, Any]:
  """Returns the fields of a plain ViT, but for its positions."""
  width, _, *patch = shapes["patch_embed.proj.weight"]
  hidden, _ = pytorch.find_block(shapes, "blocks.{block}.mlp.fc1.weight")
  _, mlp_dim = pytorch.find_block(shapes, "blocks.{block}.mlp.fc2.weight")
  return {
    "num_classes": shapes.get("head.weight", (0,))[0],
    "width": width,
    "depth": pytorch.count_blocks(shapes, "blocks.{block}."),
    "mlp_dim": mlp_dim,
    "num_heads": timm_config.num_heads(
      *(width, mlp_dim), config=config, hints=hints
    ),
    "patch_size": tuple(patch),
    "pool": _pool(shapes, config),
    "norm_after_pool": "fc_norm.weight" in shapes,
    "num_registers": shapes.get("reg_token", (1, 0))[1],
    "layer_scale": 1e-5 if "blocks.0.ls1.gamma" in shapes else None,
    "qk_norm": "blocks.0.attn.q_norm.weight" in shapes,
    "activation": (
      "swiglu" if hidden == 2 * mlp_dim else timm_config.activation(config)
    ),
    "norm_epsilon": timm_config.EPSILON,
  }


def _pool(shapes: Mapping[str, Shape], config: timm_config.Config) -> str:
  has_cls = "cls_token" in shapes
  pool = "cls" if has_cls else "gap"
  if "attn_pool.latent" in shapes:
    pool = "map"
  elif "fc_norm.weight" in shapes:
    pool = "gap"
  named = config.get("global_pool") or pool
  if timm_config.POOLS.get(named, named) != pool or has_cls != (pool == "cls"):
    token = "a" if has_cls else "no"
    raise ValueError(
      f"pool: got {named!r} with {token} class token; here 'cls' alone has "
      "one. Use other weights."
    )
  return pool


def _trunk(shapes: Mapping[str, Shape]) -> tuple[dict[str, Any], int]:
  """Returns the fields of a hybrid's ResNet, and the channels of its images."""
  root = shapes.get(f"{_TRUNK}.stem.conv.weight") or shapes.get(
    f"{_TRUNK}.conv.weight"
  )
  if root is None:
    raise ValueError(
      f"{_TRUNK}: got another network than a BiT ResNet; the hybrids here have "
      "no other. Use other weights."
    )
  stages = []
  while units := pytorch.count_blocks(
    shapes, f"{_TRUNK}.stages.{len(stages)}.blocks.{{block}}."
  ):
    stages.append(units)
  return {"stages": tuple(stages), "width_factor": root[0] // 64}, root[1]


def _positions(
  shapes: Mapping[str, Shape],
  cell: tuple[int, int],
  config: timm_config.Config,
  hints: Mapping[str, Any],
) -> tuple[tuple[int, int], dict[str, Any]]:
  """Returns the (height, width) in pixels, and the fields on positions.

  Args:
    shapes: of the arrays.
    cell: (height, width) in pixels of a token.
    config: of the model.
    hints: may have `image_size`.
  """
  named = timm_config.image_sizes(config)
  hinted = [hints["image_size"]] if "image_size" in hints else []
  grids, hinted_grids = (
    [(h // cell[0], w // cell[1]) for h, w in sizes]
    for sizes in (named, hinted)
  )
  if "pos_embed" in shapes:
    # Either all tokens before the grid have a position, or none.
    has_cls = "cls_token" in shapes
    prefix = has_cls + shapes.get("reg_token", (1, 0))[1]
    grid, placed = pytorch.find_grid(
      shapes["pos_embed"][1],
      prefixes=sorted({0, prefix}),
      grids=grids,
      hints=hinted_grids,
    )
    fields = {"cls_posemb": placed > 0 or not has_cls}
  elif grids or hinted_grids:
    grid, fields = (grids + hinted_grids)[0], {"posemb": "none"}
  else:
    raise ValueError(
      "image_size: got none, and there are no position embeddings to tell. "
      "Give the image_size in pixels, (height, width)."
    )
  return (grid[0] * cell[0], grid[1] * cell[1]), fields


def _problems(model: Any) -> Iterator[str]:
  """Yields what a model has that timm's have not."""
  if type(model) not in (vit.ViT, hybrid.Hybrid):
    yield (
      f"model: got {type(model).__name__}; timm's format holds ViT and Hybrid. "
      "Use another format."
    )
    return
  yield from check.choice("pool", model.pool, list(timm_config.POOLS.values()))
  yield from check.choice("posemb", model.posemb, ["learned", "none"])
  yield from check.choice("posemb_at", model.posemb_at, ["stem"])
  if model.representation_size is not None:
    yield (
      f"representation_size: got {model.representation_size}; timm has no "
      "layer before the head. Drop it, or use another format."
    )
  if model.norm_epsilon != timm_config.EPSILON:
    yield (
      f"norm_epsilon: got {model.norm_epsilon}; timm's models have "
      f"{timm_config.EPSILON}. Use another format."
    )
  if model.pool == "map" and model.activation == "swiglu":
    yield (
      'activation: got "swiglu" with pool "map", where timm has a GELU. '
      "Use another format."
    )
  if isinstance(model, hybrid.Hybrid) and (
    model.stages not in timm_config.STAGES or model.width_factor != 1
  ):
    yield (
      f"stages: got {model.stages} with width_factor {model.width_factor}; "
      f"timm has {list(timm_config.STAGES)} with 1. Use another format."
    )


def _block_rules(model: vit.ViT) -> list[Rule]:
  block, ours = "blocks.{block}.", BLOCKS
  qkv = [f"{ours}attention/{name}" for name in ("query", "key", "value")]
  hidden = ["gate", "fc1"] if model.activation == "swiglu" else ["fc1"]
  result = [
    *pytorch.norm(f"{block}norm1", f"{ours}norm1"),
    *pytorch.linear(f"{block}attn.qkv", *qkv),
    *pytorch.linear(f"{block}attn.proj", f"{ours}attention/out", inputs=2),
    *pytorch.norm(f"{block}norm2", f"{ours}norm2"),
    *pytorch.linear(f"{block}mlp.fc1", *(f"{ours}mlp/{x}" for x in hidden)),
    *pytorch.linear(f"{block}mlp.fc2", f"{ours}mlp/fc2"),
  ]
  if model.qk_norm:
    result += pytorch.norm(f"{block}attn.q_norm", f"{ours}attention/query_norm")
    result += pytorch.norm(f"{block}attn.k_norm", f"{ours}attention/key_norm")
  if model.layer_scale is not None:
    result.append(same(f"{block}ls1.gamma", f"{ours}layer_scale1"))
    result.append(same(f"{block}ls2.gamma", f"{ours}layer_scale2"))
  return result


def _positions_rule(
  model: vit.ViT, shapes: Mapping[str, Shape], found: Mapping[str, Shape]
) -> Rule:
  """Returns the rule; registers have rows where the class token has one."""
  placed = model.has_cls_posemb
  unplaced = model.num_registers if placed else 0
  if "pos_embed" in found:
    unplaced = found["pos_embed"][1] - shapes["posemb"][1] - placed
  return pytorch.positions("pos_embed", cls=placed, unplaced=max(unplaced, 0))


def _map_head_rules() -> list[Rule]:
  theirs, ours = "attn_pool", "map_head"
  attention = f"{ours}/attention"
  return [
    same(f"{theirs}.latent", f"{ours}/probe"),
    *pytorch.linear(f"{theirs}.q", f"{attention}/query"),
    *pytorch.linear(f"{theirs}.kv", f"{attention}/key", f"{attention}/value"),
    *pytorch.linear(f"{theirs}.proj", f"{attention}/out", inputs=2),
    *pytorch.norm(f"{theirs}.norm", f"{ours}/norm"),
    *pytorch.linear(f"{theirs}.mlp.fc1", f"{ours}/mlp/fc1"),
    *pytorch.linear(f"{theirs}.mlp.fc2", f"{ours}/mlp/fc2"),
  ]


def _trunk_rules(stages: Sequence[int]) -> Iterator[Rule]:
  """Yields the rules of a ResNet; the stem alone has no `stem` in its names."""
  root = f"{_TRUNK}.stem" if stages else _TRUNK
  yield from _conv_and_norm(f"{root}.conv", f"{root}.norm", "trunk/root/", "")
  for s, num_units in enumerate(stages):
    for u in range(num_units):
      theirs = f"{_TRUNK}.stages.{s}.blocks.{u}"
      ours = f"trunk/stage{s + 1}/unit{u + 1}/"
      for i in (1, 2, 3):
        conv, norm = f"{theirs}.conv{i}", f"{theirs}.norm{i}"
        yield from _conv_and_norm(conv, norm, ours, str(i))
      if u == 0:
        conv, norm = f"{theirs}.downsample.conv", f"{theirs}.downsample.norm"
        yield from _conv_and_norm(conv, norm, ours, "_shortcut")


def _conv_and_norm(
  conv: str, norm: str, ours: str, suffix: str
) -> Iterator[Rule]:
  yield pytorch.kernel(conv, f"{ours}conv{suffix}")
  yield from pytorch.norm(norm, f"{ours}norm{suffix}")
