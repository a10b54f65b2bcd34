"""All placement: the mesh, the rules, and batches on devices."""

import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

PyTree = Any
Rule = Callable[[str, jax.ShapeDtypeStruct, Mesh], PartitionSpec]

AXES = ("data", "fsdp")
BATCH = PartitionSpec(AXES)  # The batch axis lies over all devices.
# Elements; below this, gathering a leaf costs more than keeping it whole.
MIN_SHARD_SIZE = 2**14


def mesh_shape(*, data: int, fsdp: int, num_devices: int) -> tuple[int, int]:
  """Returns the sizes of the mesh axes; one of them may be -1 (the rest).

  Raises:
    ValueError: if they do not multiply to the number of devices.
  """
  sizes = [data, fsdp]
  if sizes.count(-1) == 1:
    known = -math.prod(sizes)
    sizes[sizes.index(-1)] = num_devices // known if known > 0 else 0
  if min(sizes) < 1 or math.prod(sizes) != num_devices:
    raise ValueError(
      f"mesh: got data={data}, fsdp={fsdp}; their product must be the "
      f"{num_devices} devices. Use -1 for one of them to take what is left."
    )
  return sizes[0], sizes[1]


def make_mesh(*, data: int = 1, fsdp: int = -1) -> Mesh:
  """Returns the mesh (data, fsdp) over all devices of all processes."""
  shape = mesh_shape(data=data, fsdp=fsdp, num_devices=jax.device_count())
  return jax.make_mesh(shape, AXES, axis_types=(AxisType.Auto,) * len(AXES))


def replicate(
  path: str, leaf: jax.ShapeDtypeStruct, mesh: Mesh
) -> PartitionSpec:
  """Keeps a whole copy of the leaf on every device."""
  del path, leaf, mesh
  return PartitionSpec()


def fsdp(path: str, leaf: jax.ShapeDtypeStruct, mesh: Mesh) -> PartitionSpec:
  """Splits the largest axis that the fsdp size divides.

  Small leaves, and leaves without such an axis, are replicated. The first axis
  of a leaf under `encoder/blocks` is the depth, over which the blocks are
  scanned; it is never split.
  """
  size = mesh.shape["fsdp"]
  if size == 1 or math.prod(leaf.shape) < MIN_SHARD_SIZE:
    return PartitionSpec()
  first = 1 if "encoder/blocks/" in path else 0
  axes = range(first, len(leaf.shape))
  for axis in sorted(axes, key=lambda i: -leaf.shape[i]):
    if leaf.shape[axis] % size == 0:
      return PartitionSpec(*[None] * axis, "fsdp")
  return PartitionSpec()


def tree_shardings(tree: PyTree, mesh: Mesh, rule: Rule = fsdp) -> PyTree:
  """Returns the NamedSharding of each leaf of `tree` by its slashed path."""

  def one(path: Any, leaf: jax.ShapeDtypeStruct) -> NamedSharding:
    name = jax.tree_util.keystr(path, simple=True, separator="/")
    return NamedSharding(mesh, rule(name, leaf, mesh))

  return jax.tree_util.tree_map_with_path(one, tree)


def placed(tree: PyTree, mesh: Mesh, rule: Rule = fsdp) -> PyTree:
  """Returns ShapeDtypeStructs with the shardings that the rule gives."""
  return jax.tree.map(
    lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s),
    tree,
    tree_shardings(tree, mesh, rule),
  )


def place(tree: PyTree, target: PyTree) -> PyTree:
  """Returns arrays laid out as the target's leaves say, of their dtype.

  Args:
    tree: NumPy arrays, the same and whole on every process.
    target: ShapeDtypeStructs with shardings.
  """
  return jax.tree.map(
    lambda x, t: jax.device_put(
      np.asarray(x, t.dtype),
      t.sharding,
      may_alias=False,  # A step will be given its memory.
    ),
    *(tree, target),
  )


def constrain_batch(x: jax.Array) -> jax.Array:
  """Pins the first axis of an activation to the batch sharding.

  Works under `jax.set_mesh(mesh)`; without a mesh it is the identity.
  """
  if jax.sharding.get_abstract_mesh().empty:
    return x
  return jax.lax.with_sharding_constraint(x, BATCH)


def to_global(batch: PyTree, mesh: Mesh) -> PyTree:
  """Returns a batch of global arrays from each process's rows, in order.

  Args:
    batch: arrays [b, ...] on the host; b rows times the number of processes is
      the global batch. int64 becomes int32.
    mesh: the mesh over which the rows are laid.
  """
  put = functools.partial(
    jax.make_array_from_process_local_data, NamedSharding(mesh, BATCH)
  )
  return jax.tree.map(
    lambda x: put(x.astype(np.int32) if x.dtype == np.int64 else x), batch
  )
