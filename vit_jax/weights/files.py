"""Weights in and out of files, whatever their format."""

import dataclasses
import json
from collections.abc import Mapping
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import numpy as np
from absl import logging
from etils import epath
from flax import traverse_util

from vit_jax import spec
from vit_jax.weights import (
  adapt,
  big_vision,
  bit,
  labels,
  layout,
  mixer,
  official,
  onnx,
  own,
  resolve,
  timm,
  transformers,
)
from vit_jax.weights import card as card_lib
from vit_jax.weights import format as format_lib
from vit_jax.weights import tensors as tensors_lib
from vit_jax.weights.card import Card

PyTree = Any

FORMATS: tuple[format_lib.Format, ...] = (
  *(official, big_vision, bit, mixer, timm, transformers),
)
FORMAT_NAMES = tuple(fmt.NAME for fmt in FORMATS)
_SAFETENSORS = {"timm", "transformers"}


class Weights(NamedTuple):
  """What is in a file: parameters by slashed path, and what they are."""

  params: layout.Params
  card: Card


class Loaded(NamedTuple):
  """A model that is ready to be applied.

  Attributes:
    model: the Flax module.
    params: its parameters, nested, float32.
    card: what they are, and what was done to fit them.
  """

  model: nn.Module
  params: PyTree
  card: Card


def load(
  name: epath.PathLike,
  *,
  num_classes: int | None = None,
  image_size: tuple[int, int] | None = None,
  num_channels: int | None = None,
  head: str = "auto",
  posemb_resize: str = "corner_linear",
  relax: tuple[str, ...] = (),
  allow: tuple[str, ...] = (),
  **fields: Any,
) -> Loaded:
  """Returns the model that a file describes, with its weights.

  >>> model, params, card = load(
  ...   "timm/vit_base_patch16_224.augreg_in21k", num_classes=10
  ... )  # doctest: +SKIP

  Args:
    name: as `resolve.resolve` takes it: a path, a URL, a name of a hub.
    num_classes: K; those of the file if None. If they differ, the head starts
      anew; 0 is no head.
    image_size: (height, width) in pixels; those of the file if None.
      Position embeddings are resized.
    num_channels: C; those of the file if None. The patch kernel is adapted.
    head: "auto", "keep" (an error if classes differ) or "reset".
    posemb_resize: "corner_linear" (the published way), "half_pixel_linear",
      "timm" or "transformers", as those libraries do it.
    relax: patterns of parameters' paths, such as "map_head/*", that may be
      missing in the file, and are then initialised, or be there for nothing.
    allow: modules outside `vit_jax` that a run's config may name.
    **fields: further fields of the model, such as `dropout`; also `num_heads`,
      where a file does not tell.

  Raises:
    ValueError: if the name leads nowhere, the format is unknown, or the arrays
      do not fit.
  """
  found = read(
    name,
    image_size=image_size,
    num_heads=fields.get("num_heads"),
    allow=allow,
  )
  wanted = _edit(
    found.card,
    num_classes=num_classes,
    image_size=image_size,
    num_channels=num_channels,
    **fields,
  )
  model = wanted.build_model()
  params, notes = _adapt(
    found,
    model,
    (*wanted.image_size, wanted.num_channels),
    head=head,
    posemb_resize=posemb_resize,
    allow=relax,
  )
  history = tuple(dict.fromkeys((*wanted.history, *notes)))
  wanted = dataclasses.replace(wanted, history=history)
  return Loaded(model, _to_device(params), wanted)


def load_params(
  name: epath.PathLike,
  model: nn.Module,
  *,
  image_shape: tuple[int, int, int],
  posemb_resize: str = "corner_linear",
  allow: tuple[str, ...] = (),
) -> tuple[PyTree, Card]:
  """Returns the weights of a file, fitted to a model, and the file's card.

  Args:
    name: as for `load`.
    model: the one that they are for.
    image_shape: [H, W, C] of the images it will see.
    posemb_resize: as for `load`.
    allow: modules outside `vit_jax` that a run's config may name.

  Returns:
    Nested parameters, float32 NumPy; and the card as the file has it.

  Raises:
    ValueError: as `load`.
  """
  found = read(
    name,
    image_size=image_shape[:2],
    num_heads=getattr(model, "num_heads", None),
    allow=allow,
  )
  params, _ = _adapt(found, model, image_shape, posemb_resize=posemb_resize)
  return traverse_util.unflatten_dict(params, sep="/"), found.card


def read(
  name: epath.PathLike,
  *,
  image_size: tuple[int, int] | None = None,
  num_heads: int | None = None,
  allow: tuple[str, ...] = (),
) -> Weights:
  """Returns what is in a file as it is.

  Args:
    name: as for `load`.
    image_size: (height, width) in pixels, where the file does not tell.
    num_heads: likewise.
    allow: modules outside `vit_jax` that a run's config may name.

  Raises:
    ValueError: as `load`.
  """
  path = resolve.resolve(name)
  if own.is_checkpoint(path):
    return Weights(*own.read(path, allow=allow))
  tensors, files = _open(path)
  if part := resolve.split_part(name)[1]:
    tensors = _part(tensors, part)
  fmt = _recognise(tensors, files, path)
  hints = {"image_size": image_size, "num_heads": num_heads}
  hints = {k: v for k, v in hints.items() if v is not None}
  card = _read_card(path, allow) or fmt.describe(tensors, files, **hints)
  if card.class_names is None:
    names = labels.names(card.model.get("num_classes", 0))
    card = dataclasses.replace(card, class_names=names)
  card = dataclasses.replace(card, origin=str(name))
  shapes = adapt.param_shapes(
    card.build_model(), (*card.image_size, card.num_channels)
  )
  rules = fmt.rules(card, shapes, tensors.shapes)
  return Weights(layout.read(tensors, rules, shapes), card)


def save(
  path: epath.PathLike, params: PyTree, card: Card, *, format: str
) -> epath.Path:
  """Writes weights in a format, with their card beside them.

  Args:
    path: of the file for .npz formats, of the folder for safetensors ones.
    params: nested parameters.
    card: what they are.
    format: "npz", "big_vision", "bit", "mixer", "timm" or "transformers".

  Returns:
    The path of the arrays.

  Raises:
    ValueError: if the format is unknown, or cannot hold such a model.
  """
  if format not in FORMAT_NAMES:
    raise ValueError(
      f"format: got {format!r}; must be one of {list(FORMAT_NAMES)}."
      f"{spec.closest(format, FORMAT_NAMES)}"
    )
  fmt = FORMATS[FORMAT_NAMES.index(format)]
  flat: dict[str, Any] = traverse_util.flatten_dict(
    jax.tree.map(np.asarray, params), sep="/"
  )
  shapes = {name: tuple(x.shape) for name, x in flat.items()}
  arrays = layout.write(flat, fmt.rules(card, shapes, {}))
  path = epath.Path(path).expanduser()
  if format in _SAFETENSORS:
    path.mkdir(parents=True, exist_ok=True)
    tensors_lib.write_safetensors(path / "model.safetensors", arrays)
    folder, card_file = path, path / "card.json"
    path = path / "model.safetensors"
  else:
    path = path if path.suffix == ".npz" else path.with_name(f"{path.name}.npz")
    path.parent.mkdir(parents=True, exist_ok=True)
    tensors_lib.write_npz(path, arrays)
    folder, card_file = path.parent, path.with_suffix(".card.json")
  for name, text in fmt.sidecars(card).items():
    (folder / name).write_text(text, "utf-8")
  card_file.write_text(card.to_json(), "utf-8")
  return path


def _edit(
  card: Card,
  *,
  num_classes: int | None,
  image_size: tuple[int, int] | None,
  num_channels: int | None,
  **fields: Any,
) -> Card:
  """Returns the card of what is wanted of weights with `card`."""
  if num_classes is not None and num_classes != card.model["num_classes"]:
    card = dataclasses.replace(card, class_names=None)
    fields["num_classes"] = num_classes
  if fields:
    card = card_lib.edit_model(card, **fields)
  if image_size is not None:
    card = card_lib.at_size(card, image_size)
  if num_channels is not None:
    card = card_lib.with_channels(card, num_channels)
  return card


def _adapt(
  found: Weights,
  model: nn.Module,
  image_shape: tuple[int, int, int],
  **options: Any,
) -> tuple[layout.Params, tuple[str, ...]]:
  adapted = adapt.adapt(
    found.params,
    old=found.card.build_model(),
    new=model,
    old_image=(*found.card.image_size, found.card.num_channels),
    new_image=image_shape,
    **options,
  )
  for note in adapted.notes:
    logging.info("%s: %s", found.card.origin, note)
  return adapted.params, tuple(adapted.notes)


def _to_device(params: layout.Params) -> PyTree:
  """Returns nested arrays on the device; empties `params` on the way."""
  flat = {name: jax.device_put(params.pop(name)) for name in sorted(params)}
  return traverse_util.unflatten_dict(flat, sep="/")


def _open(
  path: epath.Path,
) -> tuple[tensors_lib.Tensors, Mapping[str, Mapping[str, Any]]]:
  """Returns the arrays at a path, and the JSON files beside them by name."""
  folder = path if path.is_dir() else path.parent
  if path.suffix == ".npz":
    return tensors_lib.open_npz(path), {}
  if path.suffix == ".onnx":
    return onnx.open_onnx(path)
  if path.is_dir():
    parts = sorted(folder.glob("*.safetensors"))
    if not parts:
      npz = sorted(folder.glob("*.npz"))
      raise ValueError(
        f"weights: got {str(path)!r}; the folder has no .safetensors and no "
        "checkpoint in it. "
        + (f"Name one file, e.g. {npz[0]}." if npz else "Check the path.")
      )
  elif path.suffix == ".safetensors":
    parts = [path]
  else:
    raise ValueError(
      f"weights: got {str(path)!r}; must be an .npz, .safetensors or .onnx "
      "file, a folder with one, or a run of this project. Other formats (.pt, "
      ".bin, .pkl) can run code when they are read; convert them first."
    )
  files = {}
  for file in folder.glob("*.json"):
    try:
      content = json.loads(file.read_text("utf-8"))
    except ValueError as error:
      raise ValueError(f"{file}: no JSON ({error}). Get it again.") from None
    if isinstance(content, dict):
      files[file.name] = content
  return tensors_lib.open_safetensors(parts), files


def _part(tensors: tensors_lib.Tensors, part: str) -> tensors_lib.Tensors:
  """Returns the arrays of one model of several in a file, such as "img"."""
  for prefix in (f"params/{part}/", f"{part}/"):
    names = {n.removeprefix(prefix): n for n in tensors if n.startswith(prefix)}
    if names:
      return tensors.renamed(names)
  known = sorted({n.removeprefix("params/").split("/")[0] for n in tensors})
  raise ValueError(
    f"weights: got the part {part!r}; the file has {known}. Name one of these."
  )


def _recognise(
  tensors: tensors_lib.Tensors, files: format_lib.Files, path: epath.Path
) -> format_lib.Format:
  for fmt in FORMATS:
    if fmt.recognises(tensors, files):
      return fmt
  names = list(tensors)
  raise ValueError(
    f"weights: got {str(path)!r} with {len(names)} arrays such as "
    f"{names[:3]}; none of the formats {[f.NAME for f in FORMATS]} has these."
  )


def _read_card(path: epath.Path, allow: tuple[str, ...]) -> Card | None:
  """Returns the card beside a file that this project wrote, or None."""
  file = path.with_suffix(".card.json")
  if path.suffix != ".npz":
    file = (path if path.is_dir() else path.parent) / "card.json"
  if not file.exists():
    return None
  try:
    return card_lib.from_json(file.read_text("utf-8"), allow=allow)
  except ValueError as error:
    raise ValueError(f"{file}: {error}") from None
