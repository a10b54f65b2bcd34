"""Checkpoints: bit-exact, onto any mesh, and never silently lost."""

import functools
import gc
import re
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from etils import epath

from tests import tiny
from vit_jax import checkpoint, sharding
from vit_jax import state as state_lib

# TensorStore may report a damaged array once more after Orbax has given up.
pytestmark = pytest.mark.filterwarnings(
  "ignore:Exception ignored in:pytest.PytestUnraisableExceptionWarning"
)


@pytest.fixture(autouse=True)
def late_reports_stay_here():
  yield
  gc.collect()


FC1 = "encoder/blocks/mlp/fc1/kernel"


def make_target(data=8, fsdp=1, *, mlp_dim=256):
  """Returns a state with the parts of a real one and few leaves."""
  shapes = {
    "encoder": {"blocks": {"mlp": {"fc1": {"kernel": (2, 32, mlp_dim)}}}},
    "head": {"bias": (10,), "kernel": (32, 10)},
    "posemb": (1, 4, 32),
  }
  zeros = functools.partial(
    jax.tree.map, jnp.zeros, shapes, is_leaf=lambda x: isinstance(x, tuple)
  )
  state = jax.eval_shape(
    lambda: state_lib.with_params(optax.adam(1e-3), zeros(), ema=True)
  )
  return sharding.placed(state, tiny.mesh(data, fsdp))


def make_state(target, step):
  """Returns a state of random values, others for each step."""
  rng = np.random.default_rng(step)

  def draw(x):
    value = np.asarray(rng.normal(size=x.shape) * 1000).astype(x.dtype)
    return jax.device_put(value, x.sharding)

  placed = jax.device_put(np.int32(step), target.step.sharding)
  return jax.tree.map(draw, target).replace(step=placed)


def assert_same(state, other):
  assert jax.tree.structure(state) == jax.tree.structure(other)
  for a, b in zip(jax.tree.leaves(state), jax.tree.leaves(other), strict=True):
    assert a.dtype == b.dtype
    np.testing.assert_array_equal(a, b)


def restore(path, target):
  with checkpoint.Checkpointer(path, keep=2) as checkpoints:
    restored = checkpoints.restore(target)
  assert restored is not None
  return restored


@pytest.fixture(scope="module")
def target():
  return make_target()


@pytest.fixture(scope="module")
def saved(target, tmp_path_factory):
  """A folder with the steps 3 and 7; tests that write take a copy."""
  path = tmp_path_factory.mktemp("saved") / "checkpoints"
  with checkpoint.Checkpointer(path, keep=2) as checkpoints:
    for step in (3, 7):
      checkpoints.save(make_state(target, step), {"seed": step})
  return path


@pytest.fixture
def folder(saved, tmp_path):
  return shutil.copytree(saved, tmp_path / "run" / "checkpoints")


def test_state_comes_back_to_the_bit_with_structure_and_dtypes(saved, target):
  restored = restore(saved, target)
  assert_same(restored.state, make_state(target, 7))
  assert jax.tree.structure(restored.state) == jax.tree.structure(target)
  assert restored.info == {"seed": 7, "step": 7}
  assert restored.path == epath.Path(saved) / "7"


@pytest.mark.parametrize("sizes", [(2, 4), (1, 8), (1, 1)])
def test_state_comes_back_onto_another_mesh(saved, target, sizes):
  other = make_target(*sizes)
  state = restore(saved, other).state
  assert_same(state, make_state(target, 7))
  assert state_lib.shardings_of(state) == state_lib.shardings_of(other)


def test_split_state_comes_back_onto_one_device(tmp_path):
  split = make_target(1, 8)
  state = make_state(split, 1)
  with checkpoint.Checkpointer(tmp_path) as checkpoints:
    checkpoints.save(state, {})
  assert_same(restore(tmp_path, make_target(1, 1)).state, state)


def test_empty_folder_has_nothing_to_restore(tmp_path, target):
  with checkpoint.Checkpointer(tmp_path) as checkpoints:
    assert checkpoints.steps() == []
    assert checkpoints.restore(target) is None


def test_state_without_average_is_saved_without_one(tmp_path, target):
  plain = target.replace(ema_params=None)
  state = make_state(plain, 2)
  with checkpoint.Checkpointer(tmp_path) as checkpoints:
    checkpoints.save(state, {})
  restored = restore(tmp_path, plain).state
  assert restored.ema_params is None
  assert_same(restored, state)
  with pytest.raises(ValueError, match="ema_decay: got a value; "):
    restore(tmp_path, target)


# --- Damage.


def largest_file(folder):
  files = [p for p in folder.rglob("*") if p.is_file()]
  return max(files, key=lambda p: p.stat().st_size)


def truncate(step):
  file = largest_file(step / "params" / "ocdbt.process_0")
  file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])


def delete_data(step):
  largest_file(step / "ema_params" / "ocdbt.process_0").unlink()


def delete_metadata(step):
  (step / "params" / "_METADATA").unlink()


def empty_manifest(step):
  (step / "params" / "manifest.ocdbt").write_bytes(b"")


def garbage_metadata(step):
  (step / "opt_state" / "_METADATA").write_text("{")


def garbage_info(step):
  (step / "info" / "metadata").write_text('{"seed": 7, "st')


def info_of_something_else(step):
  (step / "info" / "metadata").write_text("[]")


def binary_info(step):
  (step / "info" / "metadata").write_bytes(b"\xff\x00\xfe")


def missing_item(step):
  shutil.rmtree(step / "opt_state")


def empty_folder(step):
  shutil.rmtree(step)
  step.mkdir()


DAMAGES = [
  truncate,
  delete_data,
  delete_metadata,
  empty_manifest,
  garbage_metadata,
  garbage_info,
  info_of_something_else,
  binary_info,
  missing_item,
  empty_folder,
]


@pytest.mark.parametrize("damage", DAMAGES, ids=lambda f: f.__name__)
def test_damaged_newest_step_gives_way_to_the_one_before(
  folder, target, damage, caplog
):
  damage(folder / "7")
  with checkpoint.Checkpointer(folder, keep=2) as checkpoints:
    restored = checkpoints.restore(target)
    assert restored is not None
    assert checkpoints.steps() == [3]
  assert_same(restored.state, make_state(target, 3))
  match = r"checkpoint of step 7 cannot be read, going back to step 3: \w+Error"
  assert re.search(match, caplog.text)
  assert (folder / "damaged-7").is_dir()


def test_saving_goes_on_after_a_damaged_step(folder, target):
  truncate(folder / "7")
  with checkpoint.Checkpointer(folder, keep=2) as checkpoints:
    checkpoints.restore(target)
    for step in (5, 7, 9):  # Below, at and above the damaged one.
      checkpoints.save(make_state(target, step), {})
    checkpoints.wait()
    assert checkpoints.steps() == [7, 9]
  for step in (7, 9):
    restored = checkpoint.restore_folder(epath.Path(folder) / f"{step}", target)
    assert_same(restored.state, make_state(target, step))


def test_same_step_may_be_damaged_twice(folder, target):
  for _ in range(2):
    garbage_info(folder / "7")
    with checkpoint.Checkpointer(folder, keep=2) as checkpoints:
      checkpoints.restore(target)
      checkpoints.save(make_state(target, 7), {})
  assert restore(folder, target).info == {"step": 7}


def test_never_starts_anew_when_all_steps_are_damaged(folder, target):
  truncate(folder / "7")
  empty_folder(folder / "3")
  match = r"(?s)none of \[7, 3\] in .* can be read.*step 7: .*step 3: "
  with pytest.raises(ValueError, match=match):
    restore(folder, target)
  assert (folder / "7").is_dir() and (folder / "3").is_dir()


def test_what_a_killed_process_leaves_is_ignored(folder, target):
  left = folder / "9.orbax-checkpoint-tmp"
  shutil.copytree(folder / "7", left)
  (folder / "8.orbax-checkpoint-tmp-123").mkdir()
  restored = restore(folder, target)
  assert restored.info["step"] == 7
  assert checkpoint.find_params(folder).name == "7"
  with checkpoint.Checkpointer(folder, keep=2) as checkpoints:
    checkpoints.save(make_state(target, 9), {})
    checkpoints.wait()
    assert checkpoints.steps() == [7, 9]
  assert not left.exists()


def test_leaf_of_another_shape_is_named(saved):
  other = make_target(mlp_dim=512)
  match = (
    r"(?s)none of \[7, 3\].*checkpoints/7 does not fit the model:.*"
    rf"shape: {FC1} is \(2, 32, 256\), the model wants \(2, 32, 512\)"
  )
  with pytest.raises(ValueError, match=match):
    restore(saved, other)


# --- Saving.


def test_keeps_as_many_as_asked(tmp_path, target):
  with checkpoint.Checkpointer(tmp_path, keep=2) as checkpoints:
    for step in (1, 2, 3, 4):
      checkpoints.save(make_state(target, step), {})
    checkpoints.wait()
    assert checkpoints.steps() == [3, 4]
  folders = sorted(p.name for p in tmp_path.iterdir() if p.name.isdigit())
  assert folders == ["3", "4"]


def test_step_that_is_there_is_not_written_again(folder, target):
  with checkpoint.Checkpointer(folder, keep=2) as checkpoints:
    checkpoints.save(make_state(target, 7), {"seed": "other"})
    assert checkpoints.info(7)["seed"] == 7


def test_later_steps_are_set_aside_when_a_run_goes_on_from_an_earlier(
  folder, target
):
  with checkpoint.Checkpointer(folder, keep=2) as checkpoints:
    checkpoints.save(make_state(target, 5), {})
    checkpoints.wait()
    assert checkpoints.steps() == [3, 5]
  assert (folder / "superseded-7").is_dir()


def test_refusal_to_save_is_an_error(folder, target, monkeypatch):
  manager = checkpoint.ocp.CheckpointManager
  monkeypatch.setattr(manager, "save", lambda *unused, **args: False)
  with checkpoint.Checkpointer(folder, keep=2) as checkpoints:
    match = r"Orbax declined to save step 9 beside \[3, 7\]"
    with pytest.raises(RuntimeError, match=match):
      checkpoints.save(make_state(target, 9), {})


def test_state_may_be_overwritten_as_soon_as_save_returns(tmp_path, target):
  state = make_state(target, 1)
  want = jax.device_get(state)
  overwrite = jax.jit(
    lambda s: jax.tree.map(lambda x: x * 0, s), donate_argnums=0
  )
  with checkpoint.Checkpointer(tmp_path) as checkpoints:
    checkpoints.save(state, {})
    jax.block_until_ready(overwrite(state))
  assert_same(restore(tmp_path, target).state, want)


# --- Parameters alone.


def test_parameters_are_found_from_any_folder_of_a_run(folder):
  workdir, step = folder.parent, epath.Path(folder) / "7"
  shutil.copytree(folder / "3", workdir / "best" / "3")
  assert checkpoint.find_params(workdir) == step
  assert checkpoint.find_params(folder) == step
  assert checkpoint.find_params(folder / "7") == step
  assert checkpoint.find_params(str(folder / "3")).name == "3"
  assert checkpoint.find_params(workdir / "best").parent.name == "best"


def test_relative_paths_are_found_as_full_ones(folder, monkeypatch):
  monkeypatch.chdir(folder.parent.parent)
  found = checkpoint.find_params(folder.parent.name)
  assert found == epath.Path(folder) / "7"


def test_a_checkpoint_of_a_run_goes_by_its_name(folder):
  workdir = folder.parent
  shutil.copytree(folder / "3", workdir / "best" / "5")
  choose = functools.partial(checkpoint.choose, workdir)
  assert checkpoint.find_params(choose("best")) == workdir / "best" / "5"
  assert choose("5") == workdir / "best" / "5"
  assert choose("3") == folder / "3"
  assert choose("ViT-B_16.npz") == "ViT-B_16.npz"
  with pytest.raises(
    ValueError, match=r"got '4'; .* steps \[3, 7\], and as its best \[5\]"
  ):
    choose("4")


def test_a_run_without_a_best_step_says_so(folder):
  with pytest.raises(ValueError, match=r"got 'best'; .*as its best \[\]\."):
    checkpoint.choose(folder.parent, "best")


def test_steps_are_compared_as_numbers(folder):
  (folder / "7").rename(folder / "10")
  assert checkpoint.find_params(folder).name == "10"


@pytest.mark.parametrize("made", [False, True])
def test_folder_without_checkpoint_is_refused(tmp_path, made):
  path = tmp_path / "run"
  if made:
    (path / "checkpoints").mkdir(parents=True)
  match = f"checkpoint: got '{path}'; there is no checkpoint. Give a workdir"
  with pytest.raises(ValueError, match=match):
    checkpoint.find_params(path)


def test_running_average_is_preferred(folder, target):
  want = make_state(target, 7)
  step = epath.Path(folder) / "7"
  assert_same(checkpoint.read_params(step), tiny.flat(want.ema_params))
  shutil.rmtree(folder / "7" / "ema_params")
  params = checkpoint.read_params(step)
  assert_same(params, tiny.flat(want.params))
  assert all(isinstance(x, np.ndarray) for x in params.values())


def test_parameters_that_do_not_fit_are_all_named(saved, target):
  shapes = checkpoint.saved_shapes(epath.Path(saved) / "7")
  params = {k: v for k, v in target.params.items() if k != "posemb"}
  params["extra"] = target.params["posemb"]
  params["head"] = {
    "bias": jax.ShapeDtypeStruct((7,), np.float32),
    "kernel": target.params["head"]["kernel"],
  }
  with pytest.raises(ValueError, match="does not fit the model") as error:
    checkpoint.check_tree(shapes, params, source="it")
  assert str(error.value).splitlines()[1:] == [
    "  missing: extra (1, 4, 32)",
    "  unexpected: posemb (1, 4, 32)",
    "  shape: head/bias is (10,), the model wants (7,)",
  ]


def test_saved_shapes_are_listed_by_path(saved, target):
  shapes = checkpoint.saved_shapes(epath.Path(saved) / "7")
  assert shapes[FC1] == (2, 32, 256)
  assert shapes == {
    path: x.shape for path, x in tiny.flat(make_state(target, 0).params).items()
  }
