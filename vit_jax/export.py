"""Exports weights as an ONNX graph, and proves it in onnxruntime.

  python -m vit_jax.export SRC DST.onnx

SRC is a path, a URL, a name of a hub or a run of this project. The input of the
graph is `image`, [B, H, W, C] float32 pixels in 0..255, resized and cropped as
the card says, which is in the graph's metadata; B is free. Its outputs are
`logits` [B, K], if there is a head, and `representation` [B, R].
"""

import argparse
import importlib
import logging as std_logging
from typing import Any

import jax
import numpy as np
from etils import epath

from vit_jax import command, processes, spec, weights
from vit_jax.models import output
from vit_jax.weights import arguments

# f32: logits of one model in two programs, with sums in another order.
_TOLERANCE = 1e-5
_MAX_BYTES = 2**31  # Of a file in ONNX's format, protobuf.


def export(
  source: epath.PathLike,
  destination: epath.PathLike,
  *,
  batch_size: int | None = None,
  num_classes: int | None = None,
  image_size: tuple[int, int] | None = None,
  posemb_resize: str = "corner_linear",
  allow: tuple[str, ...] = (),
) -> float:
  """Writes weights as an ONNX graph, once it has given the same outputs.

  The outputs are those of images drawn at random, in onnxruntime on the CPU.

  Args:
    source: as `weights.load` takes it.
    destination: the .onnx file.
    batch_size: B, if the graph shall take no other.
    num_classes: K; another than the file's is a new head. The file's if None.
    image_size: (height, width) in pixels; the file's if None.
    posemb_resize: method by which position embeddings are resized.
    allow: modules outside `vit_jax` that a run's config may name.

  Returns:
    The largest difference of the outputs, relative to the largest if that is
    above 1.

  Raises:
    ModuleNotFoundError: if the packages of the extra `onnx` are missing.
    ValueError: if the weights cannot be read, are too many for a file, or the
      outputs differ.
  """
  onnx, onnxruntime, jax2onnx = _import()
  path = epath.Path(destination).expanduser()
  _check_arguments(path, batch_size)
  model, params, card = weights.load(
    source,
    num_classes=num_classes,
    image_size=image_size,
    posemb_resize=posemb_resize,
    allow=allow,
    dtype="float32",
  )
  num_bytes = sum(x.nbytes for x in jax.tree.leaves(params))
  if num_bytes >= _MAX_BYTES:
    raise ValueError(
      f"params: got {num_bytes:,} bytes; one ONNX file holds fewer than "
      f"{_MAX_BYTES:,}. Export a smaller model."
    )
  normalize = spec.build(card.normalize)
  has_head = card.model["num_classes"] > 0
  names = ["logits"] * has_head + ["representation"]

  def forward(image: jax.Array) -> tuple[jax.Array, ...]:
    out = output.apply(model, params, normalize(image))
    return tuple(getattr(out, name) for name in names)

  shape = (*card.image_size, card.num_channels)
  graph = jax2onnx.to_onnx(
    forward,
    [(batch_size or "B", *shape)],
    model_name="vit_jax",
    input_names=["image"],
    output_names=names,
  )
  onnx.helper.set_model_props(graph, {"card": card.to_json()})
  content = graph.SerializeToString()
  session = _start(onnxruntime, content)
  batches = (batch_size,) if batch_size else (1, 3)
  worst = max(_difference(session, forward, (b, *shape)) for b in batches)
  if not worst <= _TOLERANCE:
    raise ValueError(
      f"export: the graph of {source} gives other outputs: they differ by "
      f"{worst:.2g}. Nothing was written."
    )
  path.parent.mkdir(parents=True, exist_ok=True)
  path.write_bytes(content)
  return worst


def _check_arguments(path: epath.Path, batch_size: int | None) -> None:
  if path.suffix != ".onnx":
    raise ValueError(
      f"destination: got {str(path)!r}; must be a file that ends in .onnx. Use "
      f"{path.name}.onnx."
    )
  if batch_size is not None and batch_size < 1:
    raise ValueError(
      f"batch_size: got {batch_size}; must be at least 1. Leave it out for any."
    )


def _import() -> list[Any]:
  """Returns onnx, onnxruntime and jax2onnx."""
  # It warns of its plugins for libraries that are not used here.
  std_logging.getLogger("jax2onnx").setLevel(std_logging.ERROR)
  try:
    names = "onnx", "onnxruntime", "jax2onnx"
    return [importlib.import_module(name) for name in names]
  except ModuleNotFoundError as error:
    raise ModuleNotFoundError(
      f"export: a package is not installed ({error}). Run "
      'pip install -e ".[onnx]".'
    ) from error


def _start(onnxruntime: Any, content: bytes) -> Any:
  """Returns the session that runs a graph."""
  options = onnxruntime.SessionOptions()
  options.log_severity_level = 3  # Errors; it warns of what it simplifies.
  return onnxruntime.InferenceSession(
    content, options, providers=["CPUExecutionProvider"]
  )


def _difference(session: Any, forward: Any, shape: tuple[int, ...]) -> float:
  """Returns how much a graph and a function differ for images of a shape."""
  image = np.random.default_rng(0).uniform(0, 255, shape).astype(np.float32)
  found = session.run(None, {"image": image})
  expected = [np.asarray(x) for x in jax.jit(forward)(image)]
  scale = max(1.0, *(float(np.abs(x).max()) for x in expected))
  pairs = zip(found, expected, strict=True)
  return max(float(np.abs(a - b).max()) for a, b in pairs) / scale


def main() -> int:
  """Runs the command; returns its exit code."""
  parser = argparse.ArgumentParser(
    "python -m vit_jax.export",
    description="Exports weights to ONNX, and checks that the outputs agree.",
  )
  arguments.add(parser)
  parser.add_argument("destination", help="file that ends in .onnx")
  parser.add_argument("--batch_size", type=int, help="any if not given")
  options = parser.parse_args()

  processes.start()
  worst = export(
    options.source,
    options.destination,
    batch_size=options.batch_size,
    **arguments.load_options(options),
  )
  command.show(
    f"{options.destination}: written; in onnxruntime the outputs differ by "
    f"{worst:.1g}"
  )
  return 0


if __name__ == "__main__":
  command.run(main)
