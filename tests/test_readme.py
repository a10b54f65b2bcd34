"""Each command of the README is one that works."""

import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from tests import tiny_weights
from vit_jax.weights import resolve

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text("utf-8")


def commands() -> list[str]:
  """Returns the README's shell commands, each on one line."""
  blocks = re.findall(r"```bash\n(.*?)```", README, re.DOTALL)
  lines = "\n".join(blocks).replace("\\\n", " ").splitlines()
  return [re.sub(r"\s+#.*", "", line).strip() for line in lines if line.strip()]


# What a test here runs, or what .ci/run runs, of each command.
QUICKSTART = (
  "pip install -e . && python -m vit_jax.main --config=configs/quickstart.py "
  "--workdir=runs/quickstart"
)
DIGIT = (
  'python -c "from sklearn.datasets import load_digits as d; from PIL import '
  "Image; Image.fromarray((15 * d().images[0]).astype('uint8'))"
  ".save('digit.png')\""
)
AFTER_QUICKSTART = (
  "python -m vit_jax.predict --workdir=runs/quickstart digit.png",
  "python -m vit_jax.main --mode=eval --config=configs/quickstart.py "
  "--workdir=runs/quickstart",
)
OWN_IMAGES = (
  "python -m vit_jax.main --config=configs/folder.py:ROOT --workdir=runs/mine",
  "python -m vit_jax.predict --workdir=runs/mine photo.jpg",
  "python -m vit_jax.main --mode=eval --config=configs/folder.py:ROOT "
  "--workdir=runs/mine",
  "python -m vit_jax.main --config=configs/folder.py:ROOT "
  "--workdir=runs/longer --config.total_steps=2000 "
  "--config.schedule.lr=5e-4",
  "python -m vit_jax.main --config=configs/manifest.py:FILE.csv "
  "--workdir=runs/table",
)
IMAGENET = (
  "python -m vit_jax.main --config=configs/vit_l16.py --workdir=runs/vit_l16"
)
TESTS = 'pip install -e ".[test]" && pytest'
WEIGHTS = (
  "python -m vit_jax.weights list 'vit_b*'",
  "python -m vit_jax.convert runs/quickstart digits --format=timm",
  "python -m vit_jax.predict --checkpoint=digits digit.png",
)
PARITY = (
  "pip install torch==2.13.0 --index-url https://download.pytorch.org/whl/cpu",
  'pip install -e ".[parity]" && pip install --no-deps timm && pytest '
  "tests/parity",
)


def test_every_command_of_the_readme_is_run():
  known = {QUICKSTART, DIGIT, *AFTER_QUICKSTART, *OWN_IMAGES, IMAGENET, TESTS}
  known |= {*WEIGHTS, *PARITY}
  assert {" ".join(c.split()) for c in commands()} == known


@pytest.mark.slow
def test_the_quickstart_learns_digits_and_names_one(tmp_path):
  train = QUICKSTART.split(" && ")[1]
  output = _run(train, tmp_path)
  accuracy = float(re.findall(r"accuracy\s+│\s+([\d.]+)", output)[0])
  assert accuracy >= 0.96  # What README and recipe promise.
  _run(DIGIT, tmp_path)
  named, evaluated = (_run(line, tmp_path) for line in AFTER_QUICKSTART)
  assert re.search(r"digit\.png\s+\d+\.\d+%  0\b", named), named
  assert re.search(rf"accuracy\s+│\s+{accuracy}", evaluated)
  report = (tmp_path / "runs/quickstart/report.html").read_text("utf-8")
  assert "quickstart" in report
  listed, converted, named_again = (_run(line, tmp_path) for line in WEIGHTS)
  assert "vit_base_patch16_224.augreg_in21k" in listed
  assert "logits differ by" in converted
  shown = r"\d+\.\d+%  \d"  # The log says where the weights are from.
  assert re.findall(shown, named_again) == re.findall(shown, named)
  assert len(re.findall(shown, named)) == 5


def test_line_that_loads_anyones_weights(tmp_path, monkeypatch):
  (block,) = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
  (name,) = re.findall(r'"(timm/.*?)"', block)
  path = tiny_weights.save(tmp_path, "timm")
  monkeypatch.setattr(resolve, "resolve", {name: path.parent}.__getitem__)
  names: dict[str, Any] = {}
  exec(block, names)
  assert names["model"].num_classes == 10
  assert names["params"]["head"]["kernel"].shape == (12, 10)
  assert (
    names["card"].history[0] == "head: 5 classes there, 10 here; starts anew"
  )


@pytest.mark.slow
def test_own_images_train_and_are_named(tmp_path):
  rng = np.random.default_rng(0)
  for split, count in (("train", 12), ("val", 4)):
    for name, colour in (("red", (220, 40, 40)), ("blue", (40, 40, 220))):
      folder = tmp_path / "ROOT" / split / name
      folder.mkdir(parents=True)
      for i in range(count):
        noise = rng.integers(-30, 30, (40, 60, 3)) + np.array(colour)
        image = Image.fromarray(noise.clip(0, 255).astype(np.uint8))
        image.save(folder / f"{i}.jpg")
  shutil.copy(tmp_path / "ROOT/val/blue/0.jpg", tmp_path / "photo.jpg")
  (tmp_path / "ROOT/train/red/broken.jpg").write_bytes(b"none")
  (tmp_path / "ROOT/train/red/notes.txt").write_text("none")
  files = sorted((tmp_path / "ROOT").rglob("[0-9]*.jpg"))
  rows = [f"{file.relative_to(tmp_path)},{file.parent.name}" for file in files]
  (tmp_path / "FILE.csv").write_text("\n".join(["image,label", *rows]))
  first, predict, evaluate, longer, table = OWN_IMAGES
  few = " --config.total_steps=6 --config.schedule.warmup_steps=1"
  shallow = " --config.model.depth=1"
  output = _run(first + few + shallow + " --config.data.max_bad=1", tmp_path)
  assert (
    output.count("without an image suffix; the first is 'train/red/no") == 1
  )
  assert "left out as undecodable: 1; the first is train/red/broken" in output
  assert '"train/bad_examples": 1' in _read(tmp_path, "mine/metrics.jsonl")
  assert "1 undecodable" in _read(tmp_path, "mine/report.html")
  assert "blue" in _run(predict, tmp_path)
  assert "blue" in _run(predict + " --checkpoint=best", tmp_path)
  assert re.search(r"count\s+│\s+8", _run(evaluate + shallow, tmp_path))
  (tmp_path / "ROOT/train/red/broken.jpg").unlink()
  longer = longer.replace("total_steps=2000", "total_steps=8")
  _run(longer + " --config.schedule.warmup_steps=1" + shallow, tmp_path)
  _run(table + few + shallow, tmp_path)


def test_missing_imagenet_gets_an_error_that_says_how_to_get_it(tmp_path):
  output = _run(IMAGENET, tmp_path, code=1, TFDS_DATA_DIR=str(tmp_path))
  assert "ILSVRC2012_img_train.tar" in output
  assert "Traceback" not in output


def _read(folder, name):
  return (folder / "runs" / name).read_text("utf-8")


def _run(command, folder, *, code=0, **environment):
  """Runs a README command; workdirs and images lie in `folder`."""
  python, *arguments = shlex.split(command)
  assert python == "python"
  arguments = [
    a.replace("configs/", f"{ROOT}/configs/")
    .replace(":ROOT", f":{folder / 'ROOT'}")
    .replace(":FILE", f":{folder / 'FILE'}")
    for a in arguments
  ]
  done = subprocess.run(
    [sys.executable, *arguments],
    cwd=folder,
    env={
      **{k: v for k, v in os.environ.items() if k != "XLA_FLAGS"},
      "JAX_PLATFORMS": "cpu",
      "JAX_COMPILATION_CACHE_DIR": str(folder / "compiled"),
      "PYTHONPATH": str(ROOT),
      **environment,
    },
    capture_output=True,
    text=True,
    timeout=600,
  )
  assert done.returncode == code, done.stdout + done.stderr
  return done.stdout + done.stderr
