import json
import logging

import pytest
from absl import logging as absl_logging
from etils import epath

from tests import object_store
from vit_jax import config, optim, spec, workdir
from vit_jax.data import fake, transforms
from vit_jax.evaluators import classification
from vit_jax.models import vit

NAMES = ("hare", "hawk")


def experiment(**changes):
  tree = config.base_config()
  tree.model = spec.spec(vit.ViT, **vit.sizes("mu/16"))
  tree.total_steps = 10
  tree.data.source = spec.spec(
    fake.FakeSource, num_examples=8, size=(16, 16), num_classes=2
  )
  tree.data.transform = spec.spec(transforms.resize, size=(16, 16))
  tree.evals.val = spec.spec(
    classification.ClassificationEvaluator,
    source=tree.data.source,
    transform=tree.data.transform,
  )
  return config.parse({**tree.to_dict(), **changes})


def prepare(folder, *, names=NAMES, force=False, **changes):
  workdir.prepare(folder, experiment(**changes), class_names=names, force=force)


@pytest.fixture
def log(caplog):
  """Returns what absl logs; its logger does not propagate by itself."""
  caplog.set_level(logging.INFO, logger="absl")
  logger = absl_logging.get_absl_logger()
  logger.addHandler(caplog.handler)
  yield caplog
  logger.removeHandler(caplog.handler)


@pytest.fixture
def remote(monkeypatch):
  """Returns a folder of an object store."""
  object_store.install(monkeypatch)
  return epath.Path("s3://bucket/runs/one")


def test_a_config_is_read_as_it_was_written(tmp_path):
  prepare(tmp_path / "a" / "run")
  assert workdir.read_config(tmp_path / "a" / "run") == experiment()
  assert workdir.read_class_names(tmp_path / "a" / "run") == NAMES


def test_class_names_may_be_of_any_script(tmp_path):
  names = ("Müll", "猫", "a\nb", "", '"', "\u2028")
  prepare(tmp_path, names=names)
  assert workdir.read_class_names(tmp_path) == names


def test_the_same_config_goes_on_without_a_word(tmp_path, log):
  prepare(tmp_path)
  prepare(tmp_path)
  assert not log.records


def test_a_free_change_is_logged(tmp_path, log):
  prepare(tmp_path)
  prepare(tmp_path, log_every=7)
  assert "log_every: 50 -> 7" in log.text


def test_a_change_of_the_numbers_is_an_error_that_lists_it(tmp_path):
  prepare(tmp_path)
  schedule = spec.spec(optim.linear, lr=0.5).to_dict()
  with pytest.raises(ValueError, match="the run of another config:") as caught:
    prepare(tmp_path, seed=1, schedule=schedule, log_every=7)
  assert str(caught.value).splitlines()[1:] == [
    "  schedule.fn: 'vit_jax.optim:cosine' -> 'vit_jax.optim:linear'",
    "  schedule.lr: 0.001 -> 0.5",
    "  seed: 0 -> 1",
    "Choose another workdir, or use --force to go on with the new values.",
  ]
  assert workdir.read_config(tmp_path) == experiment()


def test_force_goes_on_with_the_new_values(tmp_path, log):
  prepare(tmp_path)
  prepare(tmp_path, seed=1, force=True)
  assert "going on with a changed config:\n  seed: 0 -> 1" in log.text


def test_a_run_that_is_there_changes_by_write_alone(tmp_path):
  prepare(tmp_path)
  prepare(tmp_path, seed=1, names=("hawk", "hare"), force=True)
  assert workdir.read_config(tmp_path).seed == 0
  assert workdir.read_class_names(tmp_path) == NAMES
  names = ("hawk", "hare")
  workdir.write(tmp_path, experiment(seed=1), class_names=names)
  assert workdir.read_config(tmp_path).seed == 1
  assert workdir.read_class_names(tmp_path) == names


def test_other_classes_are_an_error(tmp_path):
  prepare(tmp_path)
  with pytest.raises(ValueError, match="of the 2 classes 'hare', 'hawk'; the"):
    prepare(tmp_path, names=("hawk", "hare"))
  prepare(tmp_path, names=("hawk", "hare"), force=True)


def test_a_folder_of_something_else_is_refused(tmp_path):
  (tmp_path / "thesis.tex").write_text("x")
  with pytest.raises(ValueError, match="which is not empty and not a run's"):
    prepare(tmp_path)
  assert not (tmp_path / "config.json").exists()
  prepare(tmp_path, force=True)
  assert (tmp_path / "thesis.tex").read_text() == "x"
  assert workdir.read_config(tmp_path) == experiment()


def test_an_empty_folder_is_taken(tmp_path):
  prepare(tmp_path)
  assert {p.name for p in tmp_path.iterdir()} == {"config.json", "classes.json"}


@pytest.mark.parametrize("number", [0, 1, 2, 3])
def test_a_start_that_was_killed_at_any_file_can_be_repeated(
  tmp_path, monkeypatch, number
):
  written = []
  replace = epath.Path.replace

  def killed(path, target):
    written.append(target)
    if len(written) > number:
      raise KeyboardInterrupt
    return replace(path, target)

  monkeypatch.setattr(type(epath.Path(tmp_path)), "replace", killed)
  if number < 2:
    with pytest.raises(KeyboardInterrupt):
      prepare(tmp_path)
  else:
    prepare(tmp_path)
  monkeypatch.undo()
  prepare(tmp_path)
  assert workdir.read_config(tmp_path) == experiment()


def test_a_damaged_config_is_one_error(tmp_path):
  prepare(tmp_path)
  (tmp_path / "config.json").write_text('{"seed"')
  with pytest.raises(ValueError, match=r"its config.json is damaged"):
    prepare(tmp_path)
  with pytest.raises(ValueError, match=r"config.json: config: got '\{\"seed"):
    workdir.read_config(tmp_path)


def test_damaged_class_names_are_one_error(tmp_path):
  prepare(tmp_path)
  (tmp_path / "classes.json").write_text('["hare"')
  with pytest.raises(ValueError, match=r"its classes.json is damaged .*anew"):
    workdir.read_class_names(tmp_path)


@pytest.mark.parametrize("below", ["", "run"])
def test_a_file_is_no_workdir(tmp_path, below):
  (tmp_path / "file").write_text("x")
  with pytest.raises(ValueError, match=r"cannot write there \(.+\). Choose"):
    prepare(tmp_path / "file" / below)


def test_a_folder_is_held_by_one_run_at_a_time(tmp_path):
  second = workdir.held(tmp_path)
  refused = pytest.raises(ValueError, match="another process is training there")
  with workdir.held(tmp_path), refused, second:
    pass
  with workdir.held(tmp_path):
    pass
  assert not list(tmp_path.iterdir())


def test_a_folder_without_a_config_is_no_run(tmp_path):
  with pytest.raises(
    ValueError, match=r"it has no config.json. Give the folder"
  ):
    workdir.read_config(tmp_path)
  assert workdir.read_class_names(tmp_path) is None


def test_a_config_from_elsewhere_runs_no_code(tmp_path):
  prepare(tmp_path)
  file = tmp_path / "config.json"
  tree = json.loads(file.read_text())
  tree["loss"] = {"fn": "os:system", "command": "true"}
  file.write_text(json.dumps(tree))
  with pytest.raises(ValueError, match=r"config.json: fn: got 'os:system'"):
    workdir.read_config(tmp_path)


def gray(*, size: tuple[int, int]) -> transforms.Transform:
  return transforms.resize(size=size)


def test_own_functions_are_read_when_they_are_allowed(tmp_path):
  data = experiment().data.model_dump()
  data["transform"] = spec.spec(gray, size=(16, 16)).to_dict()
  prepare(tmp_path, data=data)
  with pytest.raises(ValueError, match=f"--allow={__name__}"):
    workdir.read_config(tmp_path)
  read = workdir.read_config(tmp_path, allow=(__name__,))
  assert read.data.transform["fn"] is gray


def test_a_run_of_other_devices_can_be_read(tmp_path):
  tree = experiment().model_dump()
  tree["mesh"] = {"data": 4, "fsdp": 2}
  there = config.parse(tree, num_devices=8)
  workdir.prepare(tmp_path, there, class_names=NAMES)
  assert workdir.read_config(tmp_path).mesh == config.Mesh()


def test_paths_are_resolved(tmp_path, monkeypatch):
  monkeypatch.setenv("HOME", str(tmp_path))
  monkeypatch.chdir(tmp_path)
  assert str(workdir.resolve("~/runs/x")) == str(tmp_path / "runs/x")
  assert str(workdir.resolve("runs/x")) == str(tmp_path / "runs/x")
  assert str(workdir.resolve("gs://bucket/runs/x")) == "gs://bucket/runs/x"
  with pytest.raises(ValueError, match="workdir: got ''; expected a folder"):
    workdir.resolve("")
  with pytest.raises(ValueError, match="path: got 'https://x/y'; must be"):
    workdir.resolve("https://x/y")


def test_a_run_lies_in_an_object_store_as_well(remote):
  prepare(remote)
  prepare(remote)
  assert workdir.read_config(remote) == experiment()
  assert workdir.read_class_names(remote) == NAMES
  with pytest.raises(ValueError, match="seed: 0 -> 1"):
    prepare(remote, seed=1)


@pytest.mark.parametrize("number", [1, 2])  # The second finds no trace.
def test_an_object_store_folder_of_something_else_is_refused(remote, number):
  del number
  (remote / "thesis.tex").write_text("x")
  with pytest.raises(ValueError, match="which is not empty and not a run's"):
    prepare(remote)
  assert [file.name for file in remote.iterdir()] == ["thesis.tex"]


def test_a_storage_that_checkpoints_do_not_reach_is_refused():
  with pytest.raises(ValueError, match="must be a local folder or gs://"):
    workdir.resolve("s3://bucket/run")
