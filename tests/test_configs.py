"""Every recipe is parsed, its model built, and its JSON compared."""

import importlib.util
import pathlib
import re
import shlex

import jax
import numpy as np
import pytest
from PIL import Image

from vit_jax import config, spec, state

ROOT = pathlib.Path(__file__).parents[1]
GOLDEN = pathlib.Path(__file__).parent / "golden"
IMAGES = "ROOT"  # Stands for the folder in the golden file.
# file: each documented argument; None for none.
ARGUMENTS = {
  "cifar10": [None],
  "folder": [IMAGES],
  "quickstart": [None],
  "smoke": [None],
  "vit_b16": [None, "B/16", "B/32"],
  "vit_l16": [None, "L/16", "L/32"],
}
CASES = [(name, arg) for name, args in ARGUMENTS.items() for arg in args]
# Published for 224 pixels, 1000 classes, with the tanh layer.
COUNTS = {
  ("vit_b16", "B/16"): 87_158_248,
  ("vit_b16", "B/32"): 88_814_824,
  ("vit_l16", "L/16"): 305_376_232,
  ("vit_l16", "L/32"): 307_585_000,
}


def load(name: str):
  """Returns the module of a config file; no flags are needed."""
  file = ROOT / "configs" / f"{name}.py"
  found = importlib.util.spec_from_file_location(name, file)
  assert found is not None and found.loader is not None
  module = importlib.util.module_from_spec(found)
  found.loader.exec_module(module)
  return module


@pytest.fixture
def get(tmp_path):
  """Returns a function that calls `get_config` of a file."""

  def call(name, argument):
    if argument == IMAGES:
      write_images(tmp_path)
      argument = str(tmp_path)
    return load(name).get_config(*[] if argument is None else [argument])

  return call


def write_images(root, splits=("train", "val")):
  for split in splits:
    for label in ("hare", "hawk"):
      folder = root / split / label
      folder.mkdir(parents=True)
      for i in range(20):
        pixels = np.full((8, 8, 3), i, np.uint8)
        Image.fromarray(pixels).save(folder / f"{i}.png")


def num_parameters(experiment, num_classes):
  model = spec.build(experiment.model, num_classes=num_classes)
  shapes = state.param_shapes(model, (*experiment.data.transform["size"], 3))
  return sum(leaf.size for leaf in jax.tree.leaves(shapes))


def test_every_file_is_listed():
  files = {file.stem for file in (ROOT / "configs").glob("*.py")}
  assert files == ARGUMENTS.keys()


@pytest.mark.parametrize("name, argument", CASES)
def test_it_can_be_run_on_one_device_and_on_many(get, name, argument):
  tree = get(name, argument)
  for num_devices in (1, 8):
    experiment = config.parse(tree, num_devices=num_devices)
  assert num_parameters(experiment, 1000) > 0


@pytest.mark.parametrize("name, argument", CASES)
def test_its_json_is_the_golden_one(get, tmp_path, request, name, argument):
  experiment = config.parse(get(name, argument))
  text = spec.to_json(experiment.model_dump())
  text = text.replace(str(tmp_path), IMAGES)
  suffix = f"_{argument}".replace("/", "") if argument else ""
  file = GOLDEN / f"{name}{suffix}.json"
  if request.config.getoption("--update_golden"):
    file.write_text(text)
  assert file.read_text() == text, "see --update_golden"


@pytest.mark.parametrize("name, argument", CASES)
def test_its_json_gives_it_back(get, name, argument):
  experiment = config.parse(get(name, argument))
  text = spec.to_json(experiment.model_dump())
  assert config.parse(spec.from_json(text)) == experiment


@pytest.mark.parametrize("name", ARGUMENTS)
def test_it_says_what_it_is_and_how_it_is_started(name):
  doc = load(name).__doc__ or ""
  (command,) = re.findall(r"^python -m vit_jax.main .*$", doc, re.MULTILINE)
  _, _, main, *flags = shlex.split(command)
  given = dict(flag.removeprefix("--").split("=", 1) for flag in flags)
  file, _, argument = given["config"].partition(":")
  assert main == "vit_jax.main"
  assert file == f"configs/{name}.py"
  assert (argument or None) in ARGUMENTS[name]
  assert given["workdir"].startswith("runs/")


@pytest.mark.parametrize("name, argument", COUNTS)
def test_its_model_has_the_published_number_of_parameters(get, name, argument):
  experiment = config.parse(get(name, argument))
  assert num_parameters(experiment, 1000) == COUNTS[name, argument]


@pytest.mark.parametrize(
  "name, argument", [("vit_b16", "B/16"), ("vit_l16", "L/16")]
)
def test_its_default_is_the_variant_of_its_name(get, name, argument):
  assert get(name, None).to_dict() == get(name, argument).to_dict()


@pytest.mark.parametrize(
  "present, split",
  [
    (("train", "val", "test"), "val"),
    (("train", "validation", "test"), "validation"),
    (("train", "test"), "test"),
  ],
)
def test_folder_evaluates_on_the_split_that_is_there(tmp_path, present, split):
  write_images(tmp_path, present)
  experiment = config.parse(load("folder").get_config(str(tmp_path)))
  assert experiment.evals["val"]["source"]["split"] == split
  assert experiment.data.source["split"] == "train"


def test_folder_holds_out_a_tenth_where_there_is_no_split(tmp_path):
  write_images(tmp_path, ["train"])
  experiment = config.parse(load("folder").get_config(str(tmp_path)))
  train = spec.build(experiment.data.source)
  val = spec.build(experiment.evals["val"]["source"])
  ids = [{s[i]["id"] for i in range(len(s))} for s in (train, val)]
  assert not ids[0] & ids[1]
  assert len(ids[0] | ids[1]) == 40
  assert len(val) > 0


def test_folder_overrides_one_source_without_the_other(tmp_path):
  write_images(tmp_path, ["train"])
  tree = load("folder").get_config(str(tmp_path))
  tree.data.source.source.classes_from = "other"
  assert tree.evals.val.source.source.classes_from == "train"
