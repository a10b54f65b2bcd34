"""Fits the parameters of one model to another that differs a little.

The only place where parameters are changed to fit: whatever the weights came
from, they pass through here. "There" is the model of the weights, "here" the
one that is wanted.
"""

import fnmatch
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from flax import traverse_util

from vit_jax.models import check, vit
from vit_jax.weights import layout, resample
from vit_jax.weights.tensors import Shape

Image = tuple[int, int, int]  # (height, width, channels)

HEADS = ("auto", "keep", "reset")

# What changes the output of a model, and no shape.
_FUNCTION = (
  *("activation", "norm_epsilon", "pool", "norm_after_pool"),
  *("posemb", "posemb_at"),
)
# Where the scale of a residual can be folded into.
_BEFORE_SCALE = {"layer_scale1": "attention/out", "layer_scale2": "mlp/fc2"}


class Adapted(NamedTuple):
  """Parameters that fit, and what was done to them.

  Attributes:
    params: float32, by path; the arrays that fitted are those of the input.
    notes: a line for each change, each choice, and each difference between the
      models that no change of parameters can mend.
  """

  params: layout.Params
  notes: tuple[str, ...]


def adapt(
  params: Mapping[str, np.ndarray],
  *,
  old: nn.Module,
  new: nn.Module,
  old_image: Image,
  new_image: Image,
  posemb_resize: str = "corner_linear",
  head: str = "auto",
  allow: Sequence[str] = (),
) -> Adapted:
  """Returns the parameters of `new` made from those of `old`.

  Equal output is kept where it can be. What follows the image and the task is
  fitted: head, class token, registers, position embeddings, patch kernel. All
  else must agree.

  Args:
    params: of `old`, float32 by path. Neither it nor its arrays are changed.
    old: the model that they are of; any of this package.
    new: the model that is wanted.
    old_image: what `old` was trained on.
    new_image: what `new` will see.
    posemb_resize: how position embeddings are resized, one of
      `resample.METHODS`.
    head: "auto" keeps the head where it has as many classes, and else starts
      it anew; "keep" does not allow that; "reset" always starts it anew.
    allow: patterns, as of `fnmatch`, of paths that may be missing, which are
      then initialised, or unexpected, which are then dropped.

  Raises:
    ValueError: listing every parameter that is missing, unexpected or of
      another shape; for one that is bound to its image size; for a head that
      cannot be kept.
  """
  check.raise_all(
    [
      *check.choice("posemb_resize", posemb_resize, list(resample.METHODS)),
      *check.choice("head", head, HEADS),
    ]
  )
  shapes = param_shapes(new, new_image)
  result = dict(params)
  notes = (
    *_fit_head(result, shapes, new=new, head=head),
    *_fit_tokens(result, shapes, old=old),
    *_fit_layer_scale(result, shapes),
    *_fit_posemb(result, old, new, old_image, new_image, method=posemb_resize),
    *_fit_kernels(result, shapes),
    *_differences(old, new),
  )
  _check_bound(result, shapes, old_image, new_image)
  missing = _allowed(shapes.keys() - result.keys(), allow)
  dropped = _allowed(result.keys() - shapes.keys(), allow)
  layout.check(
    {k: x.shape for k, x in result.items() if k not in dropped},
    {k: shape for k, shape in shapes.items() if k not in missing},
  )
  if missing:
    result |= _initial(new, new_image, missing)
  notes += tuple(f"{path}: none there; initialised" for path in missing)
  notes += tuple(f"{path}: none here; dropped" for path in dropped)
  return Adapted({path: result[path] for path in shapes}, notes)


def param_shapes(model: nn.Module, image: Image) -> dict[str, Shape]:
  """Returns the shape of each parameter by path, and computes nothing.

  Args:
    model: any of this package.
    image: (height, width, channels) that it sees.

  Raises:
    ValueError: if the model does not take such images.
  """
  params = jax.eval_shape(lambda: _init(model, image))
  return {path: tuple(x.shape) for path, x in params.items()}


# Each of the following edits `params` and yields a note for each edit.


def _fit_head(
  params: layout.Params,
  shapes: Mapping[str, Shape],
  *,
  new: Any,
  head: str,
) -> Iterator[str]:
  """Keeps, drops or starts anew the head, and drops what came before it."""
  bare = "representation/kernel" in params.keys() - shapes.keys()
  if bare:
    _drop(params, "representation/kernel", "representation/bias")
    yield "representation: none here; dropped"
  kernel, expected = params.get("head/kernel"), shapes.get("head/kernel")
  if expected is None:
    if kernel is not None:
      _drop(params, "head/kernel", "head/bias")
      yield f"head: {kernel.shape[1]} classes there, none here; dropped"
    return
  if kernel is None:
    reason = "none there"
  elif kernel.shape[1] != expected[1]:
    reason = f"{kernel.shape[1]} classes there, {expected[1]} here"
  elif bare:
    reason = "reads the representation there, which is not here"
  elif kernel.shape != expected:
    reason = f"reads {kernel.shape[0]} values there, {expected[0]} here"
  elif head == "reset":
    reason = f"{expected[1]} classes, to be reset"
  else:
    yield f"head: {expected[1]} classes; kept"
    if np.ptp(kernel) == 0:
      yield "head: its kernel is constant there, so it says nothing; train it"
    return
  if head == "keep":
    raise ValueError(
      f'head: got one that cannot be kept ({reason}). Use head="auto" to start '
      "it anew, or the model of the weights."
    )
  params["head/kernel"] = np.zeros(expected, np.float32)
  params["head/bias"] = np.full(
    shapes["head/bias"], new.head_bias_init, np.float32
  )
  yield f"head: {reason}; starts anew"


def _fit_tokens(
  params: layout.Params, shapes: Mapping[str, Shape], *, old: Any
) -> Iterator[str]:
  """Fits the class token, its position, and the registers."""
  if "cls" in params.keys() - shapes.keys():
    _drop(params, "cls", *_ending(params, "cls_posemb"))
    yield "class token: none here; dropped"
  if "cls" in shapes.keys() - params.keys():
    for path in ("cls", *_ending(shapes, "cls_posemb")):
      params[path] = np.zeros(shapes[path], np.float32)
    yield "class token: none there; starts as zeros and needs training"
  for path in _ending(shapes, "cls_posemb"):
    if path not in params:
      params[path] = np.zeros(shapes[path], np.float32)
      yield f"{path}: none there; zeros, for equal output"
  if "cls_posemb" in params.keys() - shapes.keys() and old.posemb_at == "stem":
    params["cls"] = params["cls"] + params.pop("cls_posemb")
    yield "cls_posemb: none here; added to cls, for equal output"
  if "registers" in params.keys() - shapes.keys():
    _drop(params, "registers")
    yield "registers: none here; dropped, which changes the output"
  if "registers" in shapes.keys() - params.keys():
    rng = np.random.default_rng(0)
    drawn = rng.normal(scale=1e-6, size=shapes["registers"])
    params["registers"] = drawn.astype(np.float32)
    yield "registers: none there; start near zero and need training"


def _fit_layer_scale(
  params: layout.Params, shapes: Mapping[str, Shape]
) -> Iterator[str]:
  """Makes the scales of residuals, or folds them into what they scale."""
  for name, before in _BEFORE_SCALE.items():
    for path in _ending(shapes, name):
      if path not in params:
        params[path] = np.ones(shapes[path], np.float32)
        yield f"{path}: none there; ones, for equal output"
    for path in _ending(params, name):
      if path not in shapes:
        scale = params.pop(path)  # [L, D]
        dense = path.removesuffix(name) + before
        for leaf in (f"{dense}/kernel", f"{dense}/bias"):
          x = params[leaf]  # [L, ..., D]
          ones = (1,) * (x.ndim - 2)
          params[leaf] = x * scale.reshape(len(scale), *ones, -1)
        yield f"{path}: none here; folded into {dense}, for equal output"


def _fit_posemb(
  params: layout.Params,
  old: nn.Module,
  new: nn.Module,
  old_image: Image,
  new_image: Image,
  *,
  method: str,
) -> Iterator[str]:
  """Resizes what is learned of positions on the grid."""
  if not (isinstance(old, vit.ViT) and isinstance(new, vit.ViT)):
    return
  h, w = old.grid(old_image[:2])
  new_h, new_w = new.grid(new_image[:2])
  if (h, w) == (new_h, new_w):
    return
  for name, before, after in (
    ("posemb", (h, w), (new_h, new_w)),
    ("posemb_rows", (h, 1), (new_h, 1)),
    ("posemb_columns", (w, 1), (new_w, 1)),
  ):
    for path in _ending(params, name):
      params[path] = resample.resize_posemb(
        *(params[path], before, after), method=method
      )
      yield (
        f"{path}: grid {h}x{w} there, {new_h}x{new_w} here; resized by {method}"
      )


def _fit_kernels(
  params: layout.Params, shapes: Mapping[str, Shape]
) -> Iterator[str]:
  """Resizes the patch kernel, and changes the channels of what sees pixels."""
  patch, root = "patch_embed/kernel", "trunk/root/conv/kernel"
  both = params.keys() & shapes.keys()
  if patch in both and params[patch].shape[:2] != shapes[patch][:2]:
    (h, w), (new_h, new_w) = params[patch].shape[:2], shapes[patch][:2]
    params[patch] = resample.resize_kernel(params[patch], (new_h, new_w))
    yield (
      f"{patch}: patches of {h}x{w} there, {new_h}x{new_w} here; resized by "
      "pseudo-inverse"
    )
  pixels = root if root in params else patch
  if pixels in both and params[pixels].shape[2] != shapes[pixels][2]:
    before, now = params[pixels].shape[2], shapes[pixels][2]
    params[pixels] = resample.change_channels(params[pixels], now)
    yield (
      f"{pixels}: {before} channels there, {now} here; "
      + ("summed" if now < before else "shared")
      # Standardisation takes away what the sum says of the scale.
      + ", which changes the scale of its result" * (pixels == root)
    )


def _differences(old: nn.Module, new: nn.Module) -> Iterator[str]:
  """Yields what the models compute differently from equal parameters."""
  for name in _FUNCTION:
    before, now = getattr(old, name, None), getattr(new, name, None)
    if before != now:
      yield (
        f"{name}: the weights were trained with {before!r}, the model has "
        f"{now!r}, which changes its output"
      )


def _check_bound(
  params: layout.Params,
  shapes: Mapping[str, Shape],
  old_image: Image,
  new_image: Image,
) -> None:
  """Checks parameters that belong to one image size and cannot be resized."""
  before, now = (f"{h}x{w}" for h, w, _ in (old_image, new_image))
  for path, x in params.items():
    bound = "relative_posemb" in path or "token_mlp" in path
    if bound and before != now and x.shape != shapes.get(path, x.shape):
      raise ValueError(
        f"image_size: got {now} for weights trained at {before}; {path} "
        f"belongs to that size and cannot be resized: it is {x.shape}, "
        f"expected {shapes[path]}. Use images of {before}."
      )


def _allowed(paths: Iterable[str], allow: Sequence[str]) -> list[str]:
  """Returns the paths that a pattern names, in order."""
  return sorted(
    path for path in paths if any(fnmatch.fnmatchcase(path, p) for p in allow)
  )


def _initial(
  model: nn.Module, image: Image, paths: Sequence[str]
) -> layout.Params:
  """Returns some parameters as the model starts with them, from seed 0."""

  @jax.jit  # It draws no others than those returned.
  def draw() -> dict[str, jax.Array]:
    fresh = _init(model, image)
    return {path: fresh[path] for path in paths}

  return {path: np.asarray(x) for path, x in draw().items()}


def _init(model: nn.Module, image: Image) -> dict[str, jax.Array]:
  """Returns fresh parameters by path."""
  variables: Any = model.init(jax.random.key(0), jnp.zeros((1, *image)))
  flat: Any = traverse_util.flatten_dict(variables["params"], sep="/")
  return flat


def _ending(paths: Mapping[str, Any], leaf: str) -> list[str]:
  """Returns the paths of a leaf, be it of the model or of its blocks."""
  return [path for path in paths if path.split("/")[-1] == leaf]


def _drop(params: layout.Params, *paths: str) -> None:
  for path in paths:
    del params[path]
