"""Reads the backbone inside an ONNX file: a DINOv2 of Transformers.

The file is a graph, written by PyTorch's TorchScript exporter from Transformers
before version 5. Only arrays and constants are read; nothing of it is run. The
arrays get their names in Transformers back, so that the format `transformers`
knows the rest: an export leaves those of linear layers, transposed, and the
position embeddings, cut in two, without a name, but the nodes that use them
keep the path of their layer.

What follows the backbone in the graph, such as a decoder, is left out. So is
the resizing of the position embeddings that the graph does by itself: it is
the method "transformers" of `resample`.
"""

import importlib
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np
from absl import logging
from etils import epath

from vit_jax.weights import pytorch
from vit_jax.weights import tensors as tensors_lib
from vit_jax.weights.format import Files
from vit_jax.weights.tensors import Shape, Tensors

_PATCH = "embeddings.patch_embeddings.projection.weight"
_POSITIONS = "embeddings.position_embeddings"
_ACTIVATIONS = {"Erf": "gelu", "Tanh": "gelu_pytorch_tanh"}
# An ONNX file has none: DINOv2's own, facebook/dinov2-small on the hub.
_PREPROCESSOR = {
  "do_resize": True,
  "size": {"shortest_edge": 256},
  "resample": 3,
  "do_center_crop": True,
  "crop_size": {"height": 224, "width": 224},
  "image_mean": [0.485, 0.456, 0.406],
  "image_std": [0.229, 0.224, 0.225],
}


def open_onnx(path: epath.PathLike) -> tuple[Tensors, Files]:
  """Returns the arrays of the backbone, and the JSON that would lie beside.

  The preprocessing, of which the file does not tell, is that of DINOv2.

  Args:
    path: of the file.

  Raises:
    ModuleNotFoundError: if the package onnx is not installed.
    ValueError: if the file is damaged, or has no such backbone.
  """
  graph = _read(path)
  arrays = dict(_named_arrays(graph))
  found = [name for name in arrays if name.endswith(_PATCH)]
  if len(found) != 1:
    raise ValueError(
      f"weights: got {str(path)!r}; {len(found)} arrays in it are called "
      f"{_PATCH}, must be one. Use the weights that it was exported from."
    )
  prefix = found[0].removesuffix(_PATCH)
  outside = {x.split(".")[0] for x in arrays if not x.startswith(prefix)}
  if outside:
    logging.info("%s: left out, no backbone: %s", path, sorted(outside))
  tensors = tensors_lib.from_arrays(
    {
      name.removeprefix(prefix): x
      for name, x in arrays.items()
      if name.startswith(prefix)
    }
  )
  config = _config(graph, prefix, tensors.shapes)
  if missing := [name for name, value in config.items() if value is None]:
    raise ValueError(
      f"weights: got {str(path)!r}; its graph does not tell {missing} the way "
      "an export of DINOv2 does. Use the weights that it was exported from."
    )
  return tensors, {
    "config.json": config,
    "preprocessor_config.json": _PREPROCESSOR,
  }


class _Graph(NamedTuple):
  """What is read of a file: its nodes, and their inputs that are known."""

  nodes: list[Any]
  arrays: dict[str, np.ndarray]
  constants: dict[str, np.ndarray]


def _read(path: epath.PathLike) -> _Graph:
  try:
    onnx = importlib.import_module("onnx")
  except ModuleNotFoundError as error:
    raise ModuleNotFoundError(
      f"weights: got {str(path)!r}; the package onnx is not installed. Run "
      'pip install -e ".[onnx]", or use the weights of another format.'
    ) from error
  damage = importlib.import_module("google.protobuf.message").DecodeError
  try:
    graph = onnx.load(str(path)).graph
  except damage as error:
    raise ValueError(
      f"weights: got {str(path)!r}; the file is damaged or of another kind "
      f"({error}). Get it again."
    ) from error
  to_array = onnx.numpy_helper.to_array
  return _Graph(
    nodes=list(graph.node),
    arrays={x.name: to_array(x) for x in graph.initializer},
    constants={
      node.output[0]: to_array(node.attribute[0].t)
      for node in graph.node
      if node.op_type == "Constant"
    },
  )


def _named_arrays(graph: _Graph) -> Iterator[tuple[str, np.ndarray]]:
  """Yields the arrays by the names that they have in PyTorch."""
  positions: dict[str, list[np.ndarray]] = {}
  for node in graph.nodes:
    for name in node.input:
      if name not in graph.arrays or not _is_anonymous(name):
        continue
      if node.op_type == "MatMul":
        yield f"{_layer(node)}.weight", graph.arrays[name].T
      elif _layer(node).endswith("embeddings"):
        positions.setdefault(_layer(node), []).append(graph.arrays[name])
  for layer, parts in positions.items():
    # The row of the class token, then those of the grid.
    parts = sorted(parts, key=lambda x: x.shape[1])
    yield f"{layer}.position_embeddings", np.concatenate(parts, axis=1)
  for name, x in graph.arrays.items():
    if not _is_anonymous(name):
      yield name, x


def _config(
  graph: _Graph, prefix: str, shapes: Mapping[str, Shape]
) -> dict[str, Any]:
  """Returns the config.json; None for what the graph does not tell."""
  patch_size = shapes[_PATCH][2]
  grid, _ = pytorch.find_grid(shapes[_POSITIONS][1], prefixes=[1])
  blocks = {x.split(".")[2] for x in shapes if x.startswith("encoder.layer.")}
  num_heads = activation = epsilon = None
  for node in graph.nodes:
    layer = _layer(node).removeprefix(prefix)
    known = [graph.constants[x] for x in node.input if x in graph.constants]
    if layer == "encoder.layer.0.attention.attention":
      if node.op_type == "Concat" and len(known) == 2:  # B, T, heads, their D.
        num_heads = known[0].item()
    elif layer == "encoder.layer.0.mlp.activation":
      activation = _ACTIVATIONS.get(node.op_type, activation)
    elif layer == "layernorm" and node.op_type == "Add" and known:
      epsilon = round(known[0].item(), 12)  # Of float32.
  return {
    "model_type": "dinov2",
    "image_size": grid[0] * patch_size,
    "num_hidden_layers": len(blocks),
    "num_attention_heads": num_heads,
    "hidden_act": activation,
    "layer_norm_eps": epsilon,
  }


def _is_anonymous(name: str) -> bool:
  return name.startswith("onnx::")


def _layer(node: Any) -> str:
  """Returns the path in PyTorch of the layer that a node is part of."""
  return ".".join(node.name.strip("/").split("/")[:-1])
