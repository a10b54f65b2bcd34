"""The house: which module may import which, and what an import may cost."""

import ast
import pathlib
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).parents[1]
PACKAGE = ROOT / "vit_jax"
# Imports go down or stay level; a folder counts as one module.
LAYERS = {
  4: "main predict convert export doctor",
  3: "train train_step start evaluate page",
  2: "config state checkpoint workdir weights evaluators",
  1: "models data optim losses mixup preprocess",
  0: "spec spec_check sharding metrics paths writers report preemption "
  "processes command",
}
LAYER = {name: n for n, names in LAYERS.items() for name in names.split()}


def modules() -> dict[str, pathlib.Path]:
  """Returns the file of each module by its dotted name."""
  result = {}
  for file in sorted(PACKAGE.rglob("*.py")):
    *parts, last = file.relative_to(ROOT).with_suffix("").parts
    result[".".join(parts + [last] * (last != "__init__"))] = file
  return result


MODULES = modules()


def imports(file: pathlib.Path) -> set[str]:
  """Returns all that a file imports, dotted, also inside of functions."""
  result = set()
  for node in ast.walk(ast.parse(file.read_text("utf-8"))):
    if isinstance(node, ast.Import):
      result |= {alias.name for alias in node.names}
    elif isinstance(node, ast.ImportFrom):
      assert node.level == 0, f"{file}: relative import"
      result |= {f"{node.module}.{alias.name}" for alias in node.names}
  return result


IMPORTS = {name: imports(file) for name, file in MODULES.items()}


def importers(*packages: str) -> set[str]:
  """Returns our modules that import one of the packages or part of it."""
  return {
    name
    for name, found in IMPORTS.items()
    if any(f"{x}.".startswith(f"{p}.") for x in found for p in packages)
  }


def part(name: str) -> str:
  """Returns `models` for `vit_jax.models.vit`."""
  return name.split(".")[1]


def ours(name: str) -> set[str]:
  """Returns the parts of the package that a module imports."""
  return {part(x) for x in IMPORTS[name] if x.startswith("vit_jax.")}


def run(code: str, **environment: str) -> str:
  """Returns what a fresh interpreter prints."""
  done = subprocess.run(
    [sys.executable, "-c", code],
    cwd=ROOT,
    env={"PATH": "", "HOME": "/nowhere", **environment},
    capture_output=True,
    text=True,
    timeout=120,
  )
  assert done.returncode == 0, done.stderr
  return done.stdout


def loaded(code: str, names: str) -> list[str]:
  """Returns which of the modules (words) are there after the code ran."""
  found = f"(n for n in {names.split()} if n in sys.modules)"
  output = run(f"{code}\nimport sys\nprint(*{found})")
  return output.split()


def test_every_module_has_a_layer():
  parts = {part(name) for name in MODULES if name != "vit_jax"}
  assert parts == LAYER.keys()


@pytest.mark.parametrize("name", sorted(MODULES.keys() - {"vit_jax"}))
def test_imports_point_down(name):
  for other in ours(name):
    assert LAYER[other] <= LAYER[part(name)], f"{name} imports {other}"


def test_no_import_leads_back():
  graph = {p: set() for p in LAYER}
  for name in MODULES.keys() - {"vit_jax"}:
    graph[part(name)] |= ours(name) - {part(name)}
  while graph:
    leaves = {p for p, others in graph.items() if not others & graph.keys()}
    assert leaves, f"a circle among {sorted(graph)}"
    graph = {p: others for p, others in graph.items() if p not in leaves}


def test_models_and_data_never_see_each_other():
  for name in MODULES:
    if name.startswith("vit_jax.models"):
      assert "data" not in ours(name)
    if name.startswith("vit_jax.data"):
      assert "models" not in ours(name)


def test_models_know_nothing_of_devices():
  for name in MODULES:
    if name.startswith("vit_jax.models"):
      assert ours(name) <= {"models"}, name
      text = MODULES[name].read_text("utf-8")
      assert "jax.sharding" not in text
      assert "Mesh" not in text


def test_data_never_imports_jax():
  found = importers("jax", "flax", "optax", "clu", "orbax")
  assert not {name for name in found if name.startswith("vit_jax.data")}


def test_each_heavy_library_has_its_room():
  assert importers("orbax") == {"vit_jax.checkpoint"}
  assert importers("tensorflow") == set()
  for name in importers("tensorflow_datasets", "array_record", "cv2", "grain"):
    assert name.startswith("vit_jax.data.")
  assert importers("tensorboardX", "wandb") <= {"vit_jax.writers"}
  assert importers("matplotlib", "jinja2") == {"vit_jax.report"}


def test_flags_and_config_dicts_stay_with_commands_and_configs():
  assert importers("ml_collections") == {
    *("vit_jax.main", "vit_jax.spec", "vit_jax.config"),
  }
  assert importers("absl.flags") == {
    *("vit_jax.main", "vit_jax.command"),
    "vit_jax.data.pipeline",  # Grain's workers need them parsed.
  }


def test_the_step_is_jitted_and_nothing_else():
  for word in ("pjit", "pmap"):
    for name, file in MODULES.items():
      names = {
        node.attr if isinstance(node, ast.Attribute) else node.id
        for node in ast.walk(ast.parse(file.read_text("utf-8")))
        if isinstance(node, ast.Attribute | ast.Name)
      }
      assert word not in names, name
      assert not any(x.endswith(f".{word}") for x in IMPORTS[name]), name


def test_importing_everything_touches_no_device():
  # There is no such platform: whatever asks for a device fails.
  names = "\n".join(f"import {name}" for name in MODULES)
  run(f"{names}\nprint('done')", JAX_PLATFORMS="none_such")


def test_the_model_is_light_to_import():
  heavy = "tensorflow tensorflow_datasets orbax.checkpoint cv2 matplotlib grain"
  heavy += " ml_collections sklearn PIL.Image vit_jax.data vit_jax.config"
  assert loaded("import vit_jax.models.vit", heavy) == []


def test_what_a_data_worker_imports_is_light():
  """It imports the main module anew, the source and the transform.

  Grain is not asked here: it brings JAX by itself.
  """
  code = """
import vit_jax.main
from vit_jax.data import arrays, fake, folder, manifest, probe, subset
from vit_jax.data import tfds_source, transforms
"""
  heavy = "jax flax tensorflow tensorflow_datasets orbax matplotlib sklearn"
  assert loaded(code, heavy) == []


def test_help_is_there_at_once():
  done = subprocess.run(
    [sys.executable, "-X", "importtime", "-m", "vit_jax.main", "--help"],
    cwd=ROOT,
    capture_output=True,
    text=True,
    timeout=60,
  )
  assert "Folder of the run" in done.stdout
  assert "Trains or evaluates what a config describes." in done.stdout
  imported = {line.split("|")[-1].strip() for line in done.stderr.splitlines()}
  assert "vit_jax.command" in imported
  assert not imported & {"jax", "flax", "numpy", "cv2", "grain", "optax"}
