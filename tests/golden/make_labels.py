"""Writes the files under vit_jax/weights/class_names from those in timm.

  python tests/golden/make_labels.py

timm 1.0 carries the synsets of each ImageNet in the order of the classes, and
the words of each synset from WordNet. Its files are read without importing it.
"""

import importlib.util
import pathlib

ROOT = pathlib.Path(__file__).parents[2]
TARGET = ROOT / "vit_jax/weights/class_names"
SYNSETS = {
  "imagenet.txt": "imagenet_synsets.txt",
  # Of the published heads of 21,843 classes.
  "imagenet21k.txt": "imagenet21k_goog_synsets.txt",
}


def main() -> None:
  spec = importlib.util.find_spec("timm")
  if spec is None or spec.origin is None:
    raise SystemExit("make_labels: needs timm. Run pip install timm.")
  folder = pathlib.Path(spec.origin).parent / "data/_info"
  lines = (folder / "imagenet_synset_to_lemma.txt").read_text("utf-8")
  words = dict(line.split("\t") for line in lines.splitlines())
  for name, source in SYNSETS.items():
    synsets = (folder / source).read_text("utf-8").split()
    text = "".join(f"{words[synset]}\n" for synset in synsets)
    (TARGET / name).write_text(text, "utf-8")


if __name__ == "__main__":
  main()
