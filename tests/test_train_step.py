"""Laws of one update: it depends on the batch and the seed, on nothing else."""

import functools
import re
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests import tiny
from vit_jax import (
  losses,
  mixup,
  optim,
  preprocess,
  sharding,
  spec,
  train,
  train_step,
)
from vit_jax.data import fake

SMALL = {"data": 1, "fsdp": 1}
# AdamW would blow up rounding errors where the gradient is near nothing.
SGD: dict[str, Any] = {
  "optimizer": spec.spec(optim.sgd).to_dict(),
  "schedule": spec.spec(optim.constant, lr=0.1).to_dict(),
}
BATCHES = [tiny.batch(seed, masked=(0, 3, 17, 31)) for seed in range(4)]


def train_steps(run, state, batches):
  """Returns losses, gradient norms and the last parameters."""
  reports = []
  with jax.set_mesh(run.mesh):
    for batch in batches:
      state, report = run.step(state, run.put(batch))
      reports.append(report)
  return (
    [float(r.loss.compute()) for r in reports],
    [float(r.grad_norm) for r in reports],
    tiny.flat(state.params),
  )


def make_run(experiment, *, data=8, fsdp=1):
  mesh = tiny.mesh(data, fsdp)
  with jax.set_mesh(mesh):
    return tiny.run(experiment, mesh)


def assert_params_close(one, other, **tolerance):
  for path in one:
    # The gradient of the key bias is zero in exact arithmetic: a softmax does
    # not see it.
    if not path.endswith("key/bias"):
      np.testing.assert_allclose(
        one[path], other[path], err_msg=path, **tolerance
      )


@functools.cache
def on_mesh(data, fsdp, dropout):
  """Returns what four steps on a mesh give; nearly every leaf is split."""
  model = {"dropout": dropout, "stochastic_depth": dropout}
  with mock.patch.object(sharding, "MIN_SHARD_SIZE", 64):
    run = make_run(tiny.experiment(model=model, **SGD), data=data, fsdp=fsdp)
  return train_steps(run, run.place(tiny.random_params()), BATCHES)


@pytest.mark.parametrize(
  ("data", "fsdp", "dropout"),
  [
    (1, 8, 0.1),
    pytest.param(4, 2, 0.1, marks=pytest.mark.slow),
    pytest.param(1, 8, 0.0, marks=pytest.mark.slow),
    pytest.param(4, 2, 0.0, marks=pytest.mark.slow),
  ],
)
def test_losses_and_parameters_are_equal_on_every_mesh(data, fsdp, dropout):
  one, other = on_mesh(8, 1, dropout), on_mesh(data, fsdp, dropout)
  np.testing.assert_allclose(one[0], other[0], rtol=1e-5)
  np.testing.assert_allclose(one[1], other[1], rtol=1e-5)
  assert_params_close(one[2], other[2], rtol=1e-5, atol=1e-6)


# --- Accumulation.


@pytest.fixture(scope="module")
def whole_batch():
  return mixed_steps(accum_steps=1)


def mixed_steps(accum_steps):
  mix = spec.spec(mixup.mixup, alpha=1.0).to_dict()
  experiment = tiny.experiment(accum_steps=accum_steps, mix=mix, **SGD)
  run = make_run(experiment, **SMALL)
  return train_steps(run, run.place(tiny.random_params()), BATCHES[:2])


@pytest.mark.parametrize(
  "accum_steps", [4, pytest.param(2, marks=pytest.mark.slow)]
)
def test_accumulation_in_parts_equals_the_whole_batch(whole_batch, accum_steps):
  parts = mixed_steps(accum_steps)
  np.testing.assert_allclose(whole_batch[0], parts[0], rtol=1e-6)
  np.testing.assert_allclose(whole_batch[1], parts[1], rtol=1e-5)
  assert_params_close(whole_batch[2], parts[2], rtol=1e-5, atol=1e-7)


def test_split_batch_gives_each_part_every_third_row():
  x = jnp.arange(12).reshape(6, 2)
  np.testing.assert_array_equal(
    train_step.split_batch(x, 3)[:, :, 0], [[0, 6], [2, 8], [4, 10]]
  )


def compiled_text(accum_steps):
  run = make_run(tiny.experiment(accum_steps=accum_steps, **SGD))
  with jax.set_mesh(run.mesh):
    lowered = run.step.lower(run.target, run.put(tiny.batch()))
    return lowered.compile().as_text()


def moved_images(text):
  """Returns the collectives of a program that carry pixels or image rows."""
  moves = re.findall(
    r"^.* = .*(?:all-gather|all-to-all|collective-permute|all-reduce)"
    r"(?:-start)?\(.*$",
    text,
    re.MULTILINE,
  )
  assert moves, "the gradients must be summed somewhere"
  return [m for m in moves if re.search(r"u8\[|,16,16,3\]", m.split(" = ")[1])]


def test_accumulation_moves_no_image_between_devices():
  assert not moved_images(compiled_text(accum_steps=4))


@pytest.mark.slow
def test_contiguous_parts_would_move_images_between_devices(monkeypatch):
  def blocked(x, accum_steps):
    x = x.reshape(accum_steps, -1, *x.shape[1:])
    spec = jax.P(None, sharding.AXES)
    return jax.lax.with_sharding_constraint(x, spec)

  monkeypatch.setattr(train_step, "split_batch", blocked)
  assert moved_images(compiled_text(accum_steps=4))


# --- One compiled step: averages, frozen leaves, keys.

FROZEN = ("patch_embed/kernel", "encoder/blocks/mlp/fc1/kernel")


@pytest.fixture(scope="module")
def ema_run():
  experiment = tiny.experiment(
    model={"dropout": 0.1}, ema_decay=0.9, rules={"freeze": FROZEN}
  )
  return make_run(experiment, data=4, fsdp=2)


def test_ema_is_the_running_average_of_the_parameters(ema_run):
  state = ema_run.place(tiny.random_params())
  want = tiny.flat(state.params)
  with jax.set_mesh(ema_run.mesh):
    for batch in BATCHES[:3]:
      state, _ = ema_run.step(state, ema_run.put(batch))
      params = tiny.flat(state.params)
      want = {k: 0.9 * want[k] + 0.1 * params[k] for k in want}
  got = tiny.flat(state.ema_params)
  for path in want:
    np.testing.assert_allclose(got[path], want[path], rtol=1e-5, atol=1e-7)
  assert not np.array_equal(got["head/kernel"], params["head/kernel"])


def test_frozen_leaves_stay_to_the_bit_and_all_others_move(ema_run):
  before = tiny.random_params()
  state = ema_run.place(before)
  _, _, after = train_steps(ema_run, state, BATCHES[:2])
  for path, old in tiny.flat(before).items():
    assert np.array_equal(old, after[path]) == (path in FROZEN), path


def test_frozen_leaves_cost_no_gradient():
  def products(rules):
    run = make_run(tiny.experiment(rules=rules), **SMALL)
    with jax.set_mesh(run.mesh):
      lowered = run.step.lower(run.target, run.put(tiny.batch()))
    return lowered.as_text().count("dot_general")

  # Forward: patches, query, key, value, two of attention, out, fc1, fc2, head.
  # Backward: two each but one for the patches; or one, the head's kernel.
  assert products({"freeze": ("^(?!head/)",)}) == 11
  assert products({}) >= 10 + 19


def test_draws_depend_on_the_step_and_repeat_for_it(ema_run):
  start = ema_run.place(tiny.random_params())

  def losses_at(step):
    placed = jax.device_put(np.int32(step), start.step.sharding)
    state = tiny.copy(start).replace(step=placed)
    return train_steps(ema_run, state, BATCHES[:1])[0]

  assert losses_at(0) == losses_at(0)
  assert losses_at(0) != losses_at(1)


def test_step_moves_nothing_between_host_and_devices(ema_run):
  state = ema_run.place(tiny.random_params())
  batches = [ema_run.put(batch) for batch in BATCHES[:2]]
  with jax.set_mesh(ema_run.mesh), jax.transfer_guard("disallow"):
    for batch in batches:
      state, report = ema_run.step(state, batch)
    jax.block_until_ready(report)
    with pytest.raises(Exception, match="Disallowed host-to-device transfer"):
      jnp.sin(np.ones(3))  # The guard works here.


def test_step_consumes_its_state_and_compiles_once(ema_run):
  state = ema_run.place(tiny.random_params())
  train_steps(ema_run, state, BATCHES[:2])
  for old in jax.tree.leaves((state.params, state.ema_params)):
    assert old.is_deleted()
  assert ema_run.step._cache_size() == 1


def test_bfloat16_model_keeps_everything_else_in_float32():
  run = make_run(tiny.experiment(model={"dtype": "bfloat16"}, ema_decay=0.9))
  with jax.set_mesh(run.mesh):
    state, report = jax.eval_shape(run.step, run.target, run.put(tiny.batch()))
  wide = {jnp.dtype("float32"), jnp.dtype("int32"), jnp.dtype("bool")}
  assert {x.dtype for x in jax.tree.leaves((state, report))} == wide
  assert {x.dtype for x in jax.tree.leaves(state.params)} == {
    jnp.dtype("float32")
  }
  assert report.loss.total.dtype == jnp.float32
  assert report.loss.count.dtype == jnp.int32


# --- What is not finite.

BLACK = tiny.batch()
BLACK |= {"image": np.zeros_like(BLACK["image"])}


@pytest.fixture(scope="module")
def fragile():
  """A run in which any pixel that is not black overflows."""
  normalize = spec.spec(preprocess.Normalize, mean=(0.0,), std=(1e-37,))
  experiment = tiny.experiment(normalize=normalize.to_dict(), accum_steps=4)
  return make_run(experiment, **SMALL)


def first_step(run, params, batch):
  with jax.set_mesh(run.mesh):
    return run.step(run.place(params), run.put(batch))


def check(reports, state, step):
  source = fake.FakeSource(num_examples=1000)
  train.check_finite(reports, step, source=source, params=state.params)


def with_bright_row(batch, row):
  image = batch["image"].copy()
  image[row] = 255
  return {**batch, "image": image}


@pytest.mark.parametrize("row", [0, 13, 31])
def test_example_whose_loss_is_not_finite_is_named(fragile, row):
  params = tiny.random_params()
  state, good = first_step(fragile, params, BLACK)
  check([good, good], state, 8)
  state, bad = first_step(fragile, params, with_bright_row(BLACK, row))
  name = f"fake/{BLACK['index'][row]}"
  match = f"^step 7: the loss of example '{name}' is not finite.*lower sched"
  with pytest.raises(train.NonFiniteError, match=match):
    check([good, bad, bad], state, 8)


def test_parameters_whose_gradient_is_not_finite_are_named(fragile):
  params = tiny.random_params()
  # Nothing reaches the head but its weights overflow on the way back.
  for leaf in params["encoder"]["norm"].values():
    leaf[:] = 0
  params["head"]["kernel"][:] = -3e38
  params["head"]["kernel"][:, 0] = 3e38
  batch = {**BLACK, "label": np.zeros_like(BLACK["label"])}
  state, report = first_step(fragile, params, batch)
  assert np.isfinite(float(report.loss.compute()))
  match = (
    "^step 1: the gradient of encoder/norm/bias, encoder/norm/scale is not"
  )
  with pytest.raises(train.NonFiniteError, match=match):
    check([report], state, 1)


def test_infinite_parameters_are_reported(fragile):
  params = tiny.random_params()
  params["posemb"][:] = np.inf
  state, report = first_step(fragile, params, BLACK)
  with pytest.raises(train.NonFiniteError, match="step 1: the loss of example"):
    check([report], state, 1)


def test_masked_rows_leak_nothing_even_if_not_finite(fragile):
  masked = {**BLACK, "mask": tiny.batch(masked=(5, 20))["mask"]}
  params = tiny.random_params()
  want, want_report = first_step(fragile, params, masked)
  for row in (5, 20):
    masked = with_bright_row(masked, row)
  got, got_report = first_step(fragile, params, masked)
  check([got_report], got, 1)
  jax.tree.map(
    np.testing.assert_array_equal,
    jax.device_get((got, got_report)),
    jax.device_get((want, want_report)),
  )
  assert got_report.loss.count == 30


def test_loss_is_the_mean_over_the_real_rows(fragile):
  masked = {**BLACK, "mask": tiny.batch(masked=tuple(range(2, 32)))["mask"]}
  params = tiny.random_params()
  _, report = first_step(fragile, params, masked)
  image = jnp.zeros((1, *tiny.IMAGE_SHAPE))
  logits = fragile.parts.model.apply({"params": params}, image).logits[0]
  log_p = np.log(np.exp(logits) / np.exp(logits).sum())
  want = -log_p[BLACK["label"][:2]].mean()
  np.testing.assert_allclose(report.loss.compute(), want, rtol=1e-5)


def test_mixed_batch_keeps_masks_and_makes_labels_one_hot():
  mix = mixup.mixup(alpha=0.0)
  parts = make_run(tiny.experiment(), **SMALL).parts._replace(mix=mix)
  batch = tiny.batch(masked=(2,))
  mixed = train_step.mix_batch(parts, batch, jax.random.key(0))
  np.testing.assert_array_equal(mixed["mask"], batch["mask"])
  np.testing.assert_array_equal(mixed["image"], batch["image"])
  want = losses.one_hot(jnp.asarray(batch["label"]), tiny.NUM_CLASSES)
  np.testing.assert_array_equal(mixed["label"], want)
