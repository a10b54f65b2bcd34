"""The catalog: facts that have a source, found by name."""

import json
import re

import pytest

from vit_jax.weights import __main__ as main
from vit_jax.weights import catalog

ENTRIES = catalog.entries()


def test_names_and_addresses_are_unique():
  assert len({entry.name for entry in ENTRIES}) == len(ENTRIES)
  assert len({entry.where for entry in ENTRIES}) == len(ENTRIES)


@pytest.mark.parametrize("entry", ENTRIES, ids=lambda entry: entry.name)
def test_an_entry_has_its_facts_and_their_source(entry):
  assert re.match("https://|hf-hub:[^/]+/|timm/", entry.where)
  assert entry.format in ("npz", "mixer", "bit", "timm", "transformers")
  assert entry.classes in (0, 1_000, 21_843)
  assert entry.resolution in (None, 224, 384, 480, 518)
  assert entry.model
  assert entry.preprocessing
  assert entry.source
  assert (entry.expected_top1 is None) == (not entry.top1_source)
  # Only a head of ImageNet has an accuracy on ImageNet.
  assert entry.expected_top1 is None or entry.classes == 1_000
  assert re.fullmatch("([0-9a-f]{64})?", entry.sha256)


def test_a_name_agrees_with_the_columns():
  for entry in ENTRIES:
    pixels = re.search(r"(?:_|-res_|-)(224|384)(?:[.-]|$)", entry.name)
    if pixels:
      assert entry.resolution == int(pixels[1]), entry.name
    if entry.expected_top1 is not None:
      assert 70 < entry.expected_top1 < 90, entry.name


@pytest.mark.parametrize(
  ("model", "top1"),
  [
    *(("L/16", 85.59), ("B/16", 85.49), ("S/16", 83.73), ("R50+L/32", 85.99)),
    *(("R26+S/32", 83.85), ("Ti/16", 78.22), ("B/32", 83.59)),
    *(("S/32", 79.58), ("R+Ti/16", 75.40)),
  ],
)
def test_the_recommended_checkpoints_are_there(model, top1):
  found = catalog.find("augreg/*")
  tuned = [x for x in found if x.model == model and x.classes == 1_000]
  start = [x for x in found if x.model == model and x.classes == 21_843]
  assert [(x.expected_top1, x.resolution) for x in tuned] == [(top1, 384)]
  assert tuned[0].name.startswith(f"{start[0].name}--imagenet2012-")


def test_a_pattern_matches_names_and_addresses_in_any_case():
  names = {entry.name for entry in catalog.find("VIT_B*")}
  assert "vit_base_patch16_224.augreg_in21k" in names
  assert all(name.startswith("vit_b") for name in names)
  assert catalog.find("hf-hub:google/*")
  assert [x.name for x in catalog.find("imagenet21k/vit-h_14")] == [
    "imagenet21k/ViT-H_14"
  ]
  assert catalog.find("*.pt") == ()


def test_the_plus_of_a_bucket_is_escaped_in_its_address():
  (entry,) = catalog.find("imagenet21k+imagenet2012/R50+ViT-B_16")
  assert entry.where == (
    "https://storage.googleapis.com/vit_models/imagenet21k%2Bimagenet2012/"
    "R50%2BViT-B_16.npz"
  )


def test_near_names_are_suggested():
  suggested = catalog.closest("google/vit-base-16-224")
  assert suggested.startswith(" Did you mean google/vit-base-patch16-224 or ")
  assert "imagenet21k/ViT-H_14" in catalog.closest("vit-h_14")
  assert catalog.closest("??") == ""


@pytest.mark.parametrize("columns", ["40", "80", "100"])
def test_the_list_has_names_in_one_piece_and_no_space_for_nothing(
  capsys, monkeypatch, columns
):
  monkeypatch.setenv("COLUMNS", columns)
  assert main.main(["list"]) == 0
  lines = capsys.readouterr().out.splitlines()
  assert (
    max(map(len, lines)) <= max(len(e.name) for e in catalog.entries()) + 48
  )
  (row,) = [x for x in lines if "│ vit_base_patch16_224.augreg_in21k " in x]
  cells = [cell.strip() for cell in row.strip("│").split("│")]
  assert cells[1:] == ["B/16", "224", "21,843", "-"]
  for entry in catalog.entries():
    assert any(f"│ {entry.name} " in line for line in lines)


def test_the_list_of_plain_names_fits_a_hundred_columns(capsys, monkeypatch):
  monkeypatch.setenv("COLUMNS", "100")
  assert main.main(["list", "vit_*"]) == 0
  assert max(map(len, capsys.readouterr().out.splitlines())) <= 100


def test_the_list_for_machines_has_every_column(capsys):
  assert main.main(["list", "vit_b*", "--json"]) == 0
  rows = json.loads(capsys.readouterr().out)
  names = [row["name"] for row in rows]
  assert "vit_base_patch16_224.augreg_in21k" in names
  (row,) = [x for x in rows if x["name"].endswith("384.orig_in21k_ft_in1k")][:1]
  assert row["expected_top1"] == 84.2
  assert "results-imagenet.csv" in row["top1_source"]


def test_a_pattern_without_a_match_exits_with_1(capsys):
  assert main.main(["list", "vit_bse_patch16*"]) == 1
  error = capsys.readouterr().err
  assert "got 'vit_bse_patch16*'; no published file matches" in error
  assert "Did you mean vit_base_patch16" in error
