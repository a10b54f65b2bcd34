"""The state: drawn from the seed alone, placed as its abstract twin says."""

import functools

import jax
import numpy as np
import pytest

from tests import tiny
from vit_jax import sharding
from vit_jax import state as state_lib


def make_run(mesh):
  with jax.set_mesh(mesh):
    return tiny.run(tiny.experiment(ema_decay=0.9), mesh)


def init_state(run, seed):
  init = functools.partial(
    state_lib.init_state,
    run.parts.model,
    run.parts.tx,
    seed=seed,
    image_shape=tiny.IMAGE_SHAPE,
    ema=True,
  )
  return jax.jit(init, out_shardings=state_lib.shardings_of(run.target))()


@pytest.fixture(scope="module")
def run():
  return make_run(tiny.mesh(2, 4))


@pytest.fixture(scope="module")
def state(run):
  return init_state(run, 0)


def test_abstract_state_is_the_real_one_without_its_values(run, state):
  def facts(x):
    return x.shape, x.dtype, x.sharding

  assert jax.tree.structure(run.target) == jax.tree.structure(state)
  assert jax.tree.map(facts, run.target) == jax.tree.map(facts, state)
  assert state.step.dtype == np.int32 and int(state.step) == 0


def test_average_starts_as_a_copy_in_buffers_of_its_own(state):
  jax.tree.map(np.testing.assert_array_equal, state.params, state.ema_params)
  for one, other in zip(
    jax.tree.leaves(state.params), jax.tree.leaves(state.ema_params)
  ):
    a, b = one.addressable_data(0), other.addressable_data(0)
    assert a.unsafe_buffer_pointer() != b.unsafe_buffer_pointer()


def test_evaluation_takes_the_average_if_there_is_one(state):
  assert state.eval_params is state.ema_params
  assert state.replace(ema_params=None).eval_params is state.params


def test_parameters_are_drawn_from_the_seed_whatever_the_mesh(
  state, monkeypatch
):
  monkeypatch.setattr(sharding, "MIN_SHARD_SIZE", 64)  # Split nearly all.
  run = make_run(tiny.mesh(1, 8))
  init = jax.jit(
    lambda seed: state_lib.init_params(run.parts.model, seed, tiny.IMAGE_SHAPE),
    out_shardings=state_lib.shardings_of(run.target).params,
  )
  want, same, other = (tiny.flat(x) for x in (state.params, init(0), init(1)))
  for path, value in want.items():
    # rtol: other fusions of the same draws round differently.
    np.testing.assert_allclose(
      same[path], value, rtol=1e-6, atol=1e-9, err_msg=path
    )
    drawn = value.std() > 0
    assert np.array_equal(other[path], value) != drawn, path


def test_param_shapes_are_those_of_new_parameters(run, state):
  shapes = state_lib.param_shapes(run.parts.model, tiny.IMAGE_SHAPE)
  assert jax.tree.map(lambda x: x.shape, shapes) == (
    jax.tree.map(lambda x: x.shape, state.params)
  )
