"""Where a run starts from, in which order, and what it refuses."""

from typing import Any

import jax
import numpy as np
import pytest

from tests import tiny
from vit_jax import (
  checkpoint,
  optim,
  preprocess,
  spec,
  start,
  weights,
  workdir,
)
from vit_jax.data import fake

SGD: dict[str, Any] = {
  "optimizer": spec.spec(optim.sgd).to_dict(),
  "schedule": spec.spec(optim.constant, lr=0.1).to_dict(),
  "ema_decay": 0.9,
}
FC1 = "encoder/blocks/mlp/fc1/kernel"


def make_run(**changes):
  mesh = tiny.mesh(4, 2)
  with jax.set_mesh(mesh):
    return tiny.run(tiny.experiment(**SGD, **changes), mesh)


def source_of(run):
  return spec.build(run.experiment.data.source)


def begin(run, workdir, **changes):
  """Returns the state and the step evaluated last, as the loop starts."""
  experiment = run.experiment.model_copy(update=changes)
  data = start.describe_data(experiment, source_of(run))
  with (
    jax.set_mesh(run.mesh),
    checkpoint.Checkpointer(workdir / "checkpoints") as checkpoints,
  ):
    return start.start(
      experiment,
      run.parts,
      run.target,
      image_shape=tiny.IMAGE_SHAPE,
      checkpoints=checkpoints,
      data=data,
    )


def train(run, state, steps):
  with jax.set_mesh(run.mesh):
    for seed in range(steps):
      state, _ = run.step(state, run.put(tiny.batch(seed)))
  return state


def save(run, state, path):
  data = start.describe_data(run.experiment, source_of(run))
  info = {**data, "evaluated": 2, "image_shape": tiny.IMAGE_SHAPE}
  with checkpoint.Checkpointer(path / "checkpoints") as checkpoints:
    checkpoints.save(state, info)
  names = source_of(run).class_names
  workdir.prepare(path, run.experiment, class_names=names, force=True)


def assert_same(tree, other):
  jax.tree.map(np.testing.assert_array_equal, tree, other)


@pytest.fixture(scope="module")
def run():
  return make_run()


@pytest.fixture(scope="module")
def scratch(run, tmp_path_factory):
  """The state that a run starts from with nothing given."""
  return begin(run, tmp_path_factory.mktemp("scratch"))[0]


@pytest.fixture(scope="module")
def trained(run, scratch, tmp_path_factory):
  """A workdir with the state of step 3, and that state on the host."""
  workdir = tmp_path_factory.mktemp("trained")
  state = train(run, tiny.copy(scratch), 3)
  save(run, state, workdir)
  return workdir, jax.device_get(state)


@pytest.fixture
def log(caplog):
  caplog.set_level("INFO", logger="absl")
  return caplog


def test_run_with_nothing_given_starts_from_its_seed(run, tmp_path, log):
  state, evaluated = begin(run, tmp_path, seed=5)
  assert (int(state.step), evaluated) == (0, 0)
  assert "initialised parameters from seed 5" in log.text


def test_workdir_comes_before_resume_from(run, scratch, trained, tmp_path, log):
  path, _ = trained
  own = train(run, tiny.copy(scratch), 1)
  save(run, own, tmp_path)
  state, evaluated = begin(run, tmp_path, resume_from=str(path))
  assert (int(state.step), evaluated) == (1, 2)
  assert_same(state, own)
  assert f"resumed from {tmp_path}/checkpoints/1" in log.text


def test_workdir_comes_before_init_from(run, trained, log):
  path, want = trained
  state, evaluated = begin(run, path, init_from="/nowhere")
  assert (int(state.step), evaluated) == (3, 2)
  assert_same(state, want)
  assert f"resumed from {path}/checkpoints/3" in log.text


def test_resume_from_takes_the_whole_state(run, trained, tmp_path, log):
  path, want = trained
  # Not even parse lets both be set; here the state wins.
  state, evaluated = begin(
    run, tmp_path, resume_from=str(path), init_from="/nowhere"
  )
  assert (int(state.step), evaluated) == (3, 2)
  assert_same(state, want)
  assert f"resumed from {path}/checkpoints/3" in log.text


def test_init_from_takes_the_averaged_parameters_alone(
  run, scratch, trained, tmp_path, log
):
  path, want = trained
  state, evaluated = begin(run, tmp_path, init_from=str(path))
  assert (int(state.step), evaluated) == (0, 0)
  assert_same(state.params, want.ema_params)
  assert_same(state.ema_params, want.ema_params)
  assert_same(state.opt_state, scratch.opt_state)
  assert f"initialised parameters from {path}" in log.text


def test_step_compiles_once_however_a_run_starts(
  run, scratch, trained, tmp_path
):
  path, _ = trained
  resumed, _ = begin(run, path)
  initialised, _ = begin(run, tmp_path, init_from=str(path))
  for state in (tiny.copy(scratch), resumed, initialised):
    train(run, state, 2)
  assert run.step._cache_size() == 1


def test_resumed_run_equals_the_uninterrupted_to_the_bit(run, scratch, trained):
  path, _ = trained
  resumed, _ = begin(run, path)
  with jax.set_mesh(run.mesh):
    resumed, _ = run.step(resumed, run.put(tiny.batch(3)))
  assert_same(resumed, train(run, tiny.copy(scratch), 4))


# --- What does not fit.


@pytest.mark.parametrize(
  ("changes", "match"),
  [
    ({"seed": 1}, "data.seed: got 1; .*checkpoints/3 was trained with 0"),
    ({"batch_size": 64}, "data.batch_size: got 64; .* trained with 32"),
  ],
)
def test_changed_seed_or_batch_size_is_refused(run, trained, changes, match):
  path, _ = trained
  with pytest.raises(ValueError, match=match):
    begin(run, path, **changes)


@pytest.mark.parametrize(
  ("fields", "match"),
  [
    ({"num_examples": 63}, "data.examples: got 63; .* trained with 64"),
    ({"multi_label": True}, "data.fingerprint: got .*other examples"),
  ],
)
def test_changed_data_is_refused(run, trained, fields, match):
  path, _ = trained
  source = {**run.experiment.data.source, **fields}
  data = run.experiment.data.model_copy(update={"source": source})
  other = run._replace(
    experiment=run.experiment.model_copy(update={"data": data})
  )
  with pytest.raises(ValueError, match=match):
    begin(other, path)


def test_data_of_a_resumed_run_is_checked_too(run, trained, tmp_path):
  path, _ = trained
  with pytest.raises(ValueError, match=r"data\.seed: got 9;"):
    begin(run, tmp_path, resume_from=str(path), seed=9)


def test_fingerprint_is_that_of_the_examples():
  experiment = tiny.experiment()
  one, same, other = (
    start.describe_data(experiment, fake.FakeSource(num_classes=k))
    for k in (10, 10, 11)
  )
  assert one == same
  assert one["fingerprint"] != other["fingerprint"]
  assert one["examples"] == 1024


def test_more_steps_than_asked_for_are_refused(run, trained):
  path, _ = trained
  match = r"total_steps: got 2; .*checkpoints/3 has already trained 3 steps"
  with pytest.raises(ValueError, match=match):
    begin(run, path, total_steps=2)


def test_finished_run_is_said_to_be_finished(run, trained, caplog):
  path, _ = trained
  state, _ = begin(run, path, total_steps=3)
  assert int(state.step) == 3
  assert "has trained all 3 steps; nothing is left" in caplog.text


@pytest.mark.parametrize(
  ("field", "match"),
  [
    ("resume_from", "there is no checkpoint"),
    ("init_from", "empty'; there is no such file or folder"),
  ],
)
def test_folder_without_checkpoint_is_refused(run, tmp_path, field, match):
  with pytest.raises(ValueError, match=match):
    begin(run, tmp_path, **{field: str(tmp_path / "empty")})


# --- Other weights.


def test_other_classes_reset_the_head_alone(trained, tmp_path, log):
  path, want = trained
  run = make_run(num_classes=7)
  state, _ = begin(run, tmp_path, init_from=str(path))
  params = tiny.flat(state.params)
  assert params["head/kernel"].shape == (32, 7)
  assert not params["head/kernel"].any() and not params["head/bias"].any()
  for name, value in tiny.flat(want.ema_params).items():
    if not name.startswith("head/"):
      np.testing.assert_array_equal(params[name], value, err_msg=name)
  assert "head: 10 classes there, 7 here; starts anew" in log.text
  assert tiny.flat(want.ema_params)["head/kernel"].any()


@pytest.mark.parametrize("num_classes", [10, 7])
def test_body_of_another_shape_is_refused(trained, tmp_path, num_classes):
  path, _ = trained
  run = make_run(model={"mlp_dim": 512}, num_classes=num_classes)
  with pytest.raises(ValueError, match="do not fit the model") as error:
    begin(run, tmp_path, init_from=str(path))
  fc1, fc2 = FC1, FC1.replace("fc1", "fc2")
  bias = fc1.replace("kernel", "bias")
  assert sorted(str(error.value).splitlines()[1:]) == [
    f"  shape: {bias} is (2, 256); expected (2, 512)",
    f"  shape: {fc1} is (2, 32, 256); expected (2, 32, 512)",
    f"  shape: {fc2} is (2, 256, 32); expected (2, 512, 32)",
  ]


def test_weights_of_another_format_and_preprocessing_are_taken_and_told(
  run, scratch, tmp_path, log
):
  model = dict(run.experiment.model) | {"num_classes": tiny.NUM_CLASSES}
  size = tiny.IMAGE_SHAPE[:2]
  card = weights.Card(
    model=model,
    image_size=(size[0] * 2, size[1]),
    num_channels=3,
    transform=None,
    normalize=spec.spec(preprocess.Normalize, mean=(1.0, 2.0, 3.0)),
  )
  params = tiny.random_params(1)
  params["posemb"] = np.repeat(params["posemb"], 2, axis=1)
  path = weights.save(tmp_path / "w", params, card, format="timm")
  state, _ = begin(run, tmp_path / "run", init_from=str(path))
  fc1 = tiny.flat(state.params)[FC1]
  np.testing.assert_array_equal(fc1, tiny.flat(params)[FC1])
  assert "the weights were trained at (32, 16)" in log.text
  assert '"mean": [ 1.0, 2.0, 3.0 ]' in log.text
  assert "posemb: grid" in log.text
