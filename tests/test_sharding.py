"""Placement: what is split, what is whole, and where activations lie."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from tests import tiny
from vit_jax import sharding
from vit_jax import state as state_lib
from vit_jax.models import encoder

FC1 = "encoder/blocks/mlp/fc1/kernel"  # [L, D, M] = [2, 32, 256]
FC2 = "encoder/blocks/mlp/fc2/kernel"  # [L, M, D]


def leaf(*shape):
  return jax.ShapeDtypeStruct(shape, np.float32)


@pytest.fixture(scope="module")
def run():
  mesh = tiny.mesh(2, 4)
  with jax.set_mesh(mesh):
    return tiny.run(tiny.experiment(ema_decay=0.9), mesh)


@pytest.mark.parametrize(
  ("sizes", "shape"),
  [((1, -1), (1, 8)), ((-1, 2), (4, 2)), ((8, 1), (8, 1)), ((2, 4), (2, 4))],
)
def test_minus_one_takes_the_devices_that_are_left(sizes, shape):
  data, fsdp = sizes
  assert sharding.mesh_shape(data=data, fsdp=fsdp, num_devices=8) == shape
  assert sharding.make_mesh(data=data, fsdp=fsdp).devices.shape == shape


@pytest.mark.parametrize("sizes", [(3, -1), (-1, -1), (2, 2), (0, -1), (16, 1)])
def test_mesh_that_is_not_the_devices_is_refused(sizes):
  data, fsdp = sizes
  match = f"mesh: got data={data}, fsdp={fsdp}; their product must be the 8"
  with pytest.raises(ValueError, match=match):
    sharding.mesh_shape(data=data, fsdp=fsdp, num_devices=8)


@pytest.mark.parametrize(
  ("path", "shape", "want"),
  [
    ("head/kernel", (768, 1000), P(None, "fsdp")),
    ("head/kernel", (768, 1001), P("fsdp")),  # 4 does not divide the largest.
    ("head/kernel", (767, 1001), P()),  # Nor any other.
    ("head/kernel", (127, 128), P()),  # Small.
    ("head/kernel", (128, 128), P("fsdp")),
    # 16,384 blocks would be the largest axis; they are scanned over.
    ("encoder/blocks/norm1/scale", (16384, 8), P(None, "fsdp")),
    ("encoder/blocks/norm1/scale", (16384, 3), P()),
    ("1/inner/mu/encoder/blocks/norm1/scale", (16384, 3), P()),
  ],
)
def test_fsdp_splits_the_largest_axis_that_divides(path, shape, want):
  mesh = tiny.mesh(2, 4)
  assert sharding.fsdp(path, leaf(*shape), mesh) == want
  assert sharding.fsdp(path, leaf(*shape), tiny.mesh(8, 1)) == P()
  assert sharding.replicate(path, leaf(*shape), mesh) == P()


def test_large_leaves_take_a_share_of_each_devices_memory(run):
  state = run.place(tiny.random_params())
  for tree in (state.params, state.ema_params, adam(state).mu, adam(state).nu):
    leaves = tiny.flat(tree)
    placed = jax.tree.leaves(tree)
    for (path, whole), x in zip(leaves.items(), placed, strict=True):
      share = 4 if path in (FC1, FC2) else 1  # The mesh is 2 x 4.
      for shard in x.addressable_shards:
        assert shard.data.nbytes == whole.nbytes // share, path
  assert state.params["encoder"]["blocks"]["mlp"]["fc1"]["kernel"].sharding == (
    jax.NamedSharding(run.mesh, P(None, None, "fsdp"))
  )


def adam(state):
  """Returns the Adam state within the optimizer's."""
  nodes = jax.tree.leaves(
    state.opt_state, is_leaf=lambda node: hasattr(node, "mu")
  )
  return next(node for node in nodes if hasattr(node, "mu"))


def test_moments_and_average_lie_where_their_parameter_lies(run):
  target = run.target
  want = state_lib.shardings_of(target.params)
  for tree in (target.ema_params, adam(target).mu, adam(target).nu):
    assert state_lib.shardings_of(tree) == want
  assert adam(target).count.sharding.spec == P()
  assert target.step.sharding.spec == P()


def test_no_leaf_of_the_blocks_is_split_over_the_depth(monkeypatch):
  monkeypatch.setattr(sharding, "MIN_SHARD_SIZE", 1)
  mesh = tiny.mesh(4, 2)  # The depth, 2, could be split.
  with jax.set_mesh(mesh):
    target = tiny.run(tiny.experiment(ema_decay=0.9), mesh).target
  split = 0
  for path, x in jax.tree_util.tree_leaves_with_path(target):
    if "blocks" in jax.tree_util.keystr(path):
      spec = x.sharding.spec
      assert not spec or spec[0] is None, path
      split += spec != P()
  assert split == 4 * 16  # params, EMA and two moments of all 16 leaves


def constraints(run):
  """Returns how often a program pins [B, N, D] to the batch sharding."""
  with jax.set_mesh(run.mesh):
    text = run.step.lower(run.target, run.put(tiny.batch())).as_text()
  return len(
    re.findall(
      r'sharding_constraint .*\[\{"data", "fsdp"\}, \{\}, \{\}\]>.*x32xf32>',
      text,
    )
  )


def test_each_block_pins_its_activations_to_the_batch(run):
  """Without the pin XLA may replicate the batch and split the features."""
  # One in the patch embedding, one in the scanned block; each forward and, as
  # the gradient of a constraint is one, backward.
  assert constraints(run) >= 4


def test_without_the_hook_nothing_is_pinned(run, monkeypatch):
  monkeypatch.setattr(sharding, "constrain_batch", encoder.identity)
  with jax.set_mesh(run.mesh):
    free = tiny.run(run.experiment, run.mesh)
  assert constraints(free) == 0


def test_constrain_batch_is_the_identity_without_a_mesh():
  x = jnp.arange(6.0).reshape(3, 2)
  assert sharding.constrain_batch(x) is x


def test_batch_lies_over_all_devices_in_order():
  mesh = tiny.mesh(4, 2)
  batch = tiny.batch()
  placed = sharding.to_global(batch, mesh)
  for name, x in placed.items():
    np.testing.assert_array_equal(x, batch[name])
    shards = [shard.data.shape[0] for shard in x.addressable_shards]
    assert shards == [4] * 8
  assert placed["image"].dtype == np.uint8
  assert placed["index"].dtype == np.int32
  first = placed["index"].addressable_shards[0]
  np.testing.assert_array_equal(first.data, batch["index"][:4])


def test_place_lays_host_arrays_out_as_the_target_without_sharing_memory():
  mesh = tiny.mesh(2, 4)
  target = {
    "a": jax.ShapeDtypeStruct(
      (4, 8), np.float32, sharding=jax.NamedSharding(mesh, P(None, "fsdp"))
    )
  }
  host = {"a": np.arange(32, dtype=np.float64).reshape(4, 8)}
  placed = sharding.place(host, target)["a"]
  assert placed.sharding == target["a"].sharding
  assert placed.dtype == np.float32
  before = np.array(placed)
  host["a"] *= 2
  np.testing.assert_array_equal(placed, before)
