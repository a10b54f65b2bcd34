import io
import logging

import numpy as np
import pytest
from PIL import Image

from vit_jax.data import folder


def write(path, file_format="PNG", value=7):
  path.parent.mkdir(parents=True, exist_ok=True)
  file = io.BytesIO()
  Image.new("RGB", (4, 3), (value,) * 3).save(file, file_format)
  path.write_bytes(file.getvalue())


def tree(root, *names):
  for name in names:
    write(root / name)
  return str(root)


def labels(source):
  return [int(source[i]["label"]) for i in range(len(source))]


def ids(source):
  return [source.example_id(i) for i in range(len(source))]


def test_folder_gives_bytes_label_and_path(tmp_path):
  root = tree(tmp_path, "train/cat/b.png", "train/cat/a.jpg", "train/dog/c.GIF")
  source = folder.FolderSource(root=root, split="train")
  assert source.class_names == ("cat", "dog")
  assert source.num_classes == 2
  assert ids(source) == [
    "train/cat/a.jpg",
    "train/cat/b.png",
    "train/dog/c.GIF",
  ]
  assert labels(source) == [0, 0, 1]
  assert source[2]["image"] == (tmp_path / "train/dog/c.GIF").read_bytes()
  assert source[2]["id"] == "train/dog/c.GIF"
  assert source[0]["label"].dtype == np.int32


def test_folder_classes_of_train_hold_for_a_split_that_lacks_some(tmp_path):
  root = tree(
    tmp_path, "train/a/1.png", "train/b/1.png", "train/c/1.png", "val/c/1.png"
  )
  source = folder.FolderSource(root=root, split="val")
  assert source.class_names == ("a", "b", "c")
  assert labels(source) == [2]


def test_folder_class_only_in_the_test_split_is_an_error(tmp_path):
  root = tree(tmp_path, "train/a/1.png", "test/a/1.png", "test/zebra/1.png")
  with pytest.raises(
    ValueError, match=r"split: got 'test' with the classes 'zebra'; .* only 'a'"
  ):
    folder.FolderSource(root=root, split="test")


def test_folder_classes_can_come_from_another_split(tmp_path):
  root = tree(tmp_path, "all/a/1.png", "all/b/1.png", "test/b/1.png")
  source = folder.FolderSource(root=root, split="test", classes_from="all")
  assert labels(source) == [1]


def test_folder_class_without_images_keeps_its_label(tmp_path):
  root = tree(tmp_path, "train/a/1.png", "train/c/1.png")
  (tmp_path / "train/b").mkdir()
  source = folder.FolderSource(root=root, split="train")
  assert source.class_names == ("a", "b", "c")
  assert labels(source) == [0, 2]


def test_folder_takes_nested_files_and_links(tmp_path):
  root = tree(tmp_path / "data", "train/a/x/y/1.png", "train/a/2.png")
  write(tmp_path / "elsewhere/3.png")
  (tmp_path / "data/train/b").symlink_to(tmp_path / "elsewhere")
  source = folder.FolderSource(root=root, split="train")
  assert ids(source) == ["train/a/2.png", "train/a/x/y/1.png", "train/b/3.png"]


def test_folder_leaves_out_hidden_and_other_files_and_says_so(tmp_path, caplog):
  root = tree(
    tmp_path,
    "train/a/1.png",
    "train/a/.hidden.png",
    "train/a/.cache/2.png",
    "train/.git/x/3.png",
  )
  (tmp_path / "train/a/notes.txt").write_text("x")
  (tmp_path / "train/a/Thumbs.db").write_text("x")
  (tmp_path / "train/README.md").write_text("x")
  with caplog.at_level(logging.INFO):
    source = folder.FolderSource(root=root, split="train")
  assert ids(source) == ["train/a/1.png"]
  assert source.class_names == ("a",)
  assert (
    "train: left out 2 files without an image suffix; the first is "
    "'train/a/Thumbs.db'"
  ) in caplog.text


def test_folder_notes_numbers_that_sort_as_text(tmp_path, caplog):
  names = [f"train/{i}/1.png" for i in range(11)]
  with caplog.at_level(logging.INFO):
    source = folder.FolderSource(root=tree(tmp_path, *names), split="train")
  assert source.class_names[:3] == ("0", "1", "10")
  assert "labels 0, 1, 2, ... are '0', '1', '10'" in caplog.text


@pytest.mark.parametrize("names", [["00", "01", "10"], ["1", "2"], ["1", "x9"]])
def test_folder_notes_nothing_when_the_orders_agree(tmp_path, caplog, names):
  root = tree(tmp_path, *[f"train/{name}/1.png" for name in names])
  with caplog.at_level(logging.INFO):
    folder.FolderSource(root=root, split="train")
  assert caplog.text == ""


def test_folder_without_the_split_lists_what_is_there(tmp_path):
  root = tree(tmp_path, "train/a/1.png", "validation/a/1.png")
  with pytest.raises(
    FileNotFoundError, match=r"split: got 'val'.* has 'train', 'validation'"
  ):
    folder.FolderSource(root=root, split="val")


def test_folder_of_classes_without_a_split_says_where_to_move_them(tmp_path):
  root = tree(tmp_path, "cat/1.png", "dog/1.png")
  with pytest.raises(
    FileNotFoundError, match=r"Move the class folders into .*/train\."
  ):
    folder.FolderSource(root=root, split="train")


def test_folder_without_root_says_so(tmp_path):
  with pytest.raises(FileNotFoundError, match=r"Nor is there .*nowhere"):
    folder.FolderSource(root=str(tmp_path / "nowhere"), split="train")


def test_folder_with_images_but_no_classes_says_what_is_expected(tmp_path):
  root = tree(tmp_path, "train/1.png")
  with pytest.raises(
    ValueError, match=r"no class folders\. Expected root/split"
  ):
    folder.FolderSource(root=root, split="train")


def test_folder_without_images_says_so(tmp_path):
  (tmp_path / "train/a").mkdir(parents=True)
  with pytest.raises(ValueError, match="there are no images in the 1 class"):
    folder.FolderSource(root=str(tmp_path), split="train")


def test_folder_expands_the_home_directory(tmp_path, monkeypatch):
  monkeypatch.setenv("HOME", str(tmp_path))
  tree(tmp_path / "pets", "train/a/1.png")
  assert len(folder.FolderSource(root="~/pets", split="train")) == 1


def test_folder_link_that_leads_back_is_not_followed(tmp_path):
  root = tree(tmp_path, "train/cat/a.png", "train/cat/more/b.png")
  (tmp_path / "train/cat/more/back").symlink_to("..")
  source = folder.FolderSource(root=root, split="train")
  assert ids(source) == ["train/cat/a.png", "train/cat/more/b.png"]


def test_folder_name_that_is_no_text_is_an_error(tmp_path):
  root = tree(tmp_path, "train/cat/a.png")
  try:
    (tmp_path / "train/cat/\udcff.png").write_bytes(b"x")
  except OSError:
    pytest.skip("this file system takes UTF-8 alone")
  with pytest.raises(ValueError, match="its name is not UTF-8"):
    folder.FolderSource(root=root, split="train")


def test_folder_on_a_storage_that_is_not_known_is_an_error():
  with pytest.raises(
    ValueError, match="path: got 'https://x/y'; must be local"
  ):
    folder.FolderSource(root="https://x/y", split="train")
