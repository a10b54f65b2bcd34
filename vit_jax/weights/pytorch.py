"""What the formats that come from PyTorch share: rules, grids, preprocessing.

A Linear there has a weight [out, in], where a kernel here is [in, out] with
the heads on an axis of their own; a convolution has [out, in, h, w]; a norm
has weight and bias.
"""

import math
import re
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from vit_jax import preprocess, spec
from vit_jax.weights.layout import Rule, same, transposed
from vit_jax.weights.tensors import Shape

# Pillow's filters by the names of PyTorch.
INTERPOLATIONS = {
  "bilinear": "bilinear_antialias",
  "bicubic": "bicubic_antialias",
}


def linear(theirs: str, *ours: str, inputs: int = 1) -> list[Rule]:
  """Returns the rules for the weight and bias of a Linear.

  Args:
    theirs: its name there.
    *ours: the layers here whose outputs it concatenates, all of one size.
    inputs: leading axes of a kernel here that are inputs; 2 if heads go in.
  """

  def weight(kernel: np.ndarray) -> np.ndarray:
    return kernel.reshape(math.prod(kernel.shape[:inputs]), -1).T

  return [
    Rule(
      f"{theirs}.weight",
      tuple(f"{name}/kernel" for name in ours),
      lambda xs: np.concatenate([weight(x) for x in xs]),
      lambda x, shapes: [part.T for part in np.split(x, len(shapes))],
    ),
    Rule(
      f"{theirs}.bias",
      tuple(f"{name}/bias" for name in ours),
      lambda xs: np.concatenate([x.reshape(-1) for x in xs]),
      lambda x, shapes: np.split(x, len(shapes)),
    ),
  ]


def kernel(theirs: str, ours: str) -> Rule:
  """Returns the rule for the kernel [h, w, in, out] of a convolution."""
  return transposed(f"{theirs}.weight", f"{ours}/kernel", 3, 2, 0, 1)


def patch_embed(theirs: str) -> list[Rule]:
  """Returns the rules for the convolution that makes tokens of patches."""
  return [
    kernel(theirs, "patch_embed"),
    same(f"{theirs}.bias", "patch_embed/bias"),
  ]


def norm(theirs: str, ours: str) -> list[Rule]:
  """Returns the rules for the weight and bias of a norm."""
  return [
    same(f"{theirs}.weight", f"{ours}/scale"),
    same(f"{theirs}.bias", f"{ours}/bias"),
  ]


def positions(theirs: str, *, cls: bool, unplaced: int) -> Rule:
  """Returns the rule for a table of positions [1, T, D], prefix and grid.

  Args:
    theirs: its name there.
    cls: whether the class token has a position here; it is the first row.
    unplaced: rows for tokens that have none here; zero, after that row.
  """

  def pack(xs: Sequence[np.ndarray]) -> np.ndarray:
    *prefix, grid = xs
    zeros = np.zeros((1, unplaced, grid.shape[-1]), grid.dtype)
    return np.concatenate([*prefix, zeros, grid], axis=1)

  def unpack(x: np.ndarray, _: Sequence[Any]) -> list[np.ndarray]:
    if x[:, cls : cls + unplaced].any():
      raise ValueError(
        f"{theirs}: got positions for the {unplaced} tokens before the grid "
        "that have none here; those rows must be zero. Add them to the tokens "
        "themselves, which changes no output."
      )
    return [x[:, :1]] * cls + [x[:, cls + unplaced :]]

  return Rule(theirs, ("cls_posemb",) * cls + ("posemb",), pack, unpack)


def count_blocks(shapes: Mapping[str, Shape], name: str) -> int:
  """Returns 1 + the largest number that stands for `{block}` in the names."""
  pattern = re.escape(name).replace(r"\{block\}", r"(\d+)")
  found = (re.match(pattern, array) for array in shapes)
  return max((int(match[1]) + 1 for match in found if match), default=0)


def find_block(shapes: Mapping[str, Shape], name: str) -> Shape:
  """Returns the shape of an array that every block has; one may lack it.

  Args:
    shapes: of all arrays, by name.
    name: of that array, with `{block}` for the number of the block.

  Raises:
    ValueError: if none has it.
  """
  for i in range(count_blocks(shapes, name)):
    if (array := name.replace("{block}", str(i))) in shapes:
      return shapes[array]
  raise ValueError(
    f"weights: got no array {name!r} for any block; its shape tells the sizes "
    "of the model. Get the file again, or use other weights."
  )


def find_grid(
  num_rows: int,
  *,
  prefixes: Sequence[int],
  grids: Sequence[tuple[int, int]] = (),
  hints: Sequence[tuple[int, int]] = (),
) -> tuple[tuple[int, int], int]:
  """Returns the grid of a table of positions, and how many rows precede it.

  Args:
    num_rows: of the table, prefix and grid.
    prefixes: possible numbers of rows before the grid.
    grids: (rows, columns) that the file names; the first that fits is taken.
    hints: (rows, columns) to try if there is neither that nor a square.

  Raises:
    ValueError: if no grid fits, or more than one.
  """
  sizes = [(num_rows - prefix, prefix) for prefix in prefixes]
  roots = [(math.isqrt(max(n, 0)), p) for n, p in sizes]
  found = [
    [(grid, p) for grid in grids for n, p in sizes if math.prod(grid) == n][:1],
    [((r, r), p) for r, p in roots if r > 0 and (r * r, p) in sizes],
    [(grid, p) for grid in hints for n, p in sizes if math.prod(grid) == n],
  ]
  for candidates in found:
    if len(candidates) == 1:
      return candidates[0]
    if candidates:
      break
  raise ValueError(
    f"image_size: got position embeddings of {num_rows} rows, up to "
    f"{max(prefixes)} of them before the grid; "
    f"{'several grids fit' if any(found) else 'no square grid fits'}. Give the "
    "image_size in pixels, (height, width), that they were trained at."
  )


def normalize(
  mean: Sequence[float], std: Sequence[float], *, scale: float = 1 / 255
) -> Any:
  """Returns the spec for `(pixel * scale - mean) / std`, pixels in 0..255."""
  return spec.spec(
    preprocess.Normalize,
    mean=tuple(round(m / scale, 7) for m in mean),
    std=tuple(round(s / scale, 7) for s in std),
  )


def mean_and_std(
  spec_: Mapping[str, Any], num_channels: int
) -> tuple[list[float], list[float]]:
  """Returns mean and std of each channel, in 0..1, of a spec of Normalize."""
  mean, std = (
    [round(x / 255, 9) for x in spec_[name]] for name in ("mean", "std")
  )
  return (
    mean * (num_channels // len(mean)),
    std * (num_channels // len(std)),
  )


def filter_name(interpolation: str) -> str:
  """Returns PyTorch's name of one of `images.INTERPOLATIONS`.

  "bilinear", which is TensorFlow's, becomes Pillow's, which is antialiased.
  """
  return interpolation.removesuffix("_antialias")
