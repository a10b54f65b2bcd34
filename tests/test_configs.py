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
TABLE = "FILE.csv"  # Likewise.
# file: each documented argument; None for none.
ARGUMENTS = {
  "cifar10": [None],
  "folder": [IMAGES, f"{IMAGES},S/16"],
  "manifest": [TABLE],
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
    if (argument or "").startswith(IMAGES):
      write_images(tmp_path)
      argument = argument.replace(IMAGES, str(tmp_path))
    elif argument == TABLE:
      argument = str(write_table(tmp_path))
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


def write_table(root, splits=None):
  """Writes the images of `write_images`, and a table of them."""
  write_images(root, splits or ["train"])
  rows = ["image,label,split" if splits else "image,label"]
  for file in sorted(root.glob("*/*/*.png")):
    split, label, _ = file.relative_to(root).parts
    row = [file.relative_to(root).as_posix(), label, split]
    rows.append(",".join(row if splits else row[:2]))
  (root / "table.csv").write_text("\n".join(rows))
  return root / "table.csv"


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
  text = text.replace(f"{tmp_path}/table.csv", TABLE)
  text = text.replace(str(tmp_path), IMAGES)
  suffix = re.sub("[/,.]", "", f"_{argument}") if argument else ""
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


def sources(tree):
  """Returns what a recipe trains on and evaluates on."""
  experiment = config.parse(tree)
  val = experiment.evals["val"]["source"]
  return spec.build(experiment.data.source), spec.build(val)


def ids(source):
  return {source.example_id(i) for i in range(len(source))}


SPLITS = [
  (("train", "val", "test"), "val"),
  (("train", "validation", "test"), "validation"),
  (("train", "test"), "test"),
]
OWN_IMAGES = {
  "folder": lambda root, splits=("train",): write_images(root, splits) or root,
  "manifest": write_table,
}


@pytest.mark.parametrize("name", OWN_IMAGES)
@pytest.mark.parametrize("present, split", SPLITS)
def test_own_images_are_evaluated_on_the_split_that_is_there(
  tmp_path, name, present, split
):
  argument = OWN_IMAGES[name](tmp_path, present)
  train, val = sources(load(name).get_config(str(argument)))
  assert {x.split("/")[0] for x in ids(train)} == {"train"}
  assert {x.split("/")[0] for x in ids(val)} == {split}


@pytest.mark.parametrize("name", OWN_IMAGES)
def test_a_tenth_of_own_images_is_held_out_where_there_is_no_split(
  tmp_path, name
):
  argument = OWN_IMAGES[name](tmp_path)
  tree = load(name).get_config(str(argument))
  train, val = sources(tree)
  assert not ids(train) & ids(val)
  assert len(ids(train) | ids(val)) == 40
  assert len(val) > 0
  assert tree.total_steps == 60 * len(train) // 32  # Epochs of what is left.


@pytest.mark.parametrize("name", OWN_IMAGES)
def test_own_images_take_a_size(tmp_path, name):
  argument = OWN_IMAGES[name](tmp_path)
  experiment = config.parse(load(name).get_config(f"{argument},S/16"))
  assert experiment.model["width"] == 384
  assert experiment.data.transform["size"] == (224, 224)


@pytest.mark.parametrize(
  "name, what", [("folder", "root"), ("manifest", "path")]
)
def test_own_images_must_be_named(name, what):
  with pytest.raises(ValueError, match=rf"{what}: got ''; .*/{name}\.py:"):
    load(name).get_config()


def test_folder_overrides_one_source_without_the_other(tmp_path):
  write_images(tmp_path, ["train"])
  tree = load("folder").get_config(str(tmp_path))
  tree.data.source.source.classes_from = "other"
  assert tree.evals.val.source.source.classes_from == "train"
