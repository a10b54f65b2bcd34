"""Hybrids: a ViT whose patches are cut from the feature map of a ResNet.

Source: arXiv:2010.11929, sections 3.1 and 4.4, and vision_transformer. The
parameters are those of ViT and, under `trunk`, those of `resnet.Trunk`.
"""

import jax

from vit_jax.models import check, resnet, vit

Array = jax.Array


class Hybrid(vit.ViT, kw_only=True):
  """A ViT on the feature map of a ResNet, for images of any size.

  A side of the image need not be a multiple of the stride of the ResNet: the
  last cell then sees padding.

  Attributes are as in ViT, and:
    patch_size: cells (height, width) of the feature map.
    stages: units of each stage of the ResNet; () for its stem alone.
    width_factor: multiplies the channels of the ResNet, which start at 64.
    constrain: also pins its [B, h, w, C] activations.
  """

  patch_size: tuple[int, int] = (1, 1)
  stages: tuple[int, ...] = (3, 4, 9)
  width_factor: int = 1

  def __post_init__(self) -> None:
    check.raise_all(resnet.stage_problems(self))
    super().__post_init__()

  def grid(self, image_size: tuple[int, int]) -> tuple[int, int]:
    """Returns the (rows, columns) of patches in an image, sizes in pixels."""
    stride = resnet.stride(self.stages)
    height, width = image_size
    return super().grid((-(-height // stride), -(-width // stride)))

  def _embed(self, image: Array) -> Array:
    """Returns [B, h, w, D], one token for each patch of the feature map."""
    trunk = resnet.Trunk(
      stages=self.stages,
      width_factor=self.width_factor,
      dtype=self.dtype,
      constrain=self.constrain,
      name="trunk",
    )
    x = trunk(image)
    self._check_map(image, x)
    return super()._embed(x)

  def _check_map(self, image: Array, x: Array) -> None:
    """Checks that the patches divide the map, in terms of the image."""
    stride = resnet.stride(self.stages)
    for side, size, cells, patch in zip(
      *(("height", "width"), image.shape[1:3], x.shape[1:3], self.patch_size)
    ):
      if cells % patch:
        below = cells // patch * patch * stride
        above = below + patch * stride
        raise ValueError(
          f"image: got {side} {size} in shape {image.shape}; the ResNet makes "
          f"{cells} cells of it, which must be a multiple of the patch {side} "
          f"{patch}. Use {f'{below} or ' if below else ''}{above} pixels."
        )


class Sizes(vit.Sizes):
  """The arguments of Hybrid that a variant's name stands for."""

  stages: tuple[int, ...]
  width_factor: int


# (ViT, stages, patch_size). The number in the name is pixels per token.
VARIANTS = {
  # In name only: with the max-pool of the stem, which the released weights
  # need, the stride is 4 * 8 = 32.
  "R+Ti/16": ("Ti", (), (8, 8)),
  "R26+S/32": ("S", (2, 2, 2, 2), (1, 1)),
  "R26+B/32": ("B", (2, 2, 2, 2), (1, 1)),
  # The units of the fourth stage moved to the third (section 4.1).
  "R50+B/16": ("B", (3, 4, 9), (1, 1)),
  "R50+L/16": ("L", (3, 4, 9), (1, 1)),
  "R50+B/32": ("B", (3, 4, 6, 3), (1, 1)),
  "R50+L/32": ("L", (3, 4, 6, 3), (1, 1)),
}


def sizes(variant: str) -> Sizes:
  """Returns the sizes of a published variant, as arguments of Hybrid.

  Args:
    variant: ResNet, ViT and pixels per token, such as "R50+B/16".

  Raises:
    ValueError: for another name; lists the names and the closest match.
  """
  check.raise_all(check.choice("variant", variant, list(VARIANTS)))
  name, stages, patch_size = VARIANTS[variant]
  rows, columns = patch_size
  return Sizes(
    **vit.sizes(f"{name}/{rows}x{columns}"), stages=stages, width_factor=1
  )
