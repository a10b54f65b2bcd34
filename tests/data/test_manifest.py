import pytest

from vit_jax.data import manifest


def write(tmp_path, text, images=("a.png", "b.png", "c.png"), name="list.csv"):
  for image in images:
    (tmp_path / image).parent.mkdir(parents=True, exist_ok=True)
    (tmp_path / image).write_bytes(image.encode())
  (tmp_path / name).write_text(text, encoding="utf-8")
  return str(tmp_path / name)


def labels(source):
  return [source[i]["label"].tolist() for i in range(len(source))]


def test_manifest_gives_bytes_label_and_path(tmp_path):
  path = write(tmp_path, "image,label\na.png,dog\nb.png,cat\nc.png,dog\n")
  source = manifest.ManifestSource(path=path)
  assert source.class_names == ("cat", "dog")
  assert source.num_classes == 2
  assert labels(source) == [1, 0, 1]
  assert source[1]["image"] == b"b.png"
  assert (source[1]["id"], source.example_id(1)) == ("b.png", "b.png")


def test_manifest_with_tabs_quotes_and_a_byte_order_mark(tmp_path):
  text = '\ufeffimage\tnote\tlabel\n"a.png"\tx,y\t"big\tcat"\n\nb.png\t\tdog\n'
  source = manifest.ManifestSource(path=write(tmp_path, text, name="list.tsv"))
  assert source.class_names == ("big\tcat", "dog")
  assert labels(source) == [0, 1]


SPLITS = "image,label,split\na.png,dog,train\nb.png,cat,train\nc.png,dog,val\n"


def test_manifest_split_has_the_classes_of_train(tmp_path):
  source = manifest.ManifestSource(path=write(tmp_path, SPLITS), split="val")
  assert source.class_names == ("cat", "dog")
  assert labels(source) == [1]
  assert source[0]["id"] == "c.png"


def test_manifest_class_only_in_another_split_is_an_error(tmp_path):
  path = write(tmp_path, SPLITS.replace("c.png,dog", "c.png,cow"))
  with pytest.raises(
    ValueError, match=r"known are 'cat', 'dog'.*\n  line 4: unknown label 'cow'"
  ):
    manifest.ManifestSource(path=path, split="val")
  assert len(manifest.ManifestSource(path=path, split="train")) == 2


def test_manifest_classes_can_come_from_another_split(tmp_path):
  source = manifest.ManifestSource(
    path=write(tmp_path, SPLITS), split="val", classes_from="val"
  )
  assert source.class_names == ("dog",)


def test_manifest_classes_can_come_from_another_file(tmp_path):
  train = write(
    tmp_path, "image,label\na.png,cat\nb.png,dog\n", name="train.csv"
  )
  path = write(tmp_path, "image,label\nc.png,dog\n", name="val.csv")
  source = manifest.ManifestSource(path=path, classes_path=train)
  assert source.class_names == ("cat", "dog")
  assert labels(source) == [1]


def test_manifest_with_several_labels_pads_with_minus_one(tmp_path):
  text = "image,label\na.png,dog|cat\nb.png,\nc.png, cow |dog|cat\n"
  source = manifest.ManifestSource(
    path=write(tmp_path, text), label_separator="|"
  )
  assert source.class_names == ("cat", "cow", "dog")
  assert labels(source) == [[2, 0, -1], [-1, -1, -1], [1, 2, 0]]


def test_manifest_lists_its_splits(tmp_path):
  assert manifest.splits(write(tmp_path, SPLITS)) == ("train", "val")
  whole = write(tmp_path, "image,label\na.png,dog\n", name="whole.csv")
  assert manifest.splits(whole) == ()


def test_manifest_splits_have_label_arrays_of_one_width(tmp_path):
  text = "image,label,split\na.png,x;y,train\nb.png,x,val\n"
  source = manifest.ManifestSource(
    path=write(tmp_path, text), split="val", label_separator=";"
  )
  assert labels(source) == [[0, -1]]


def test_manifest_root_and_absolute_paths(tmp_path):
  text = f"image,label\nx/a.png,dog\n{tmp_path}/pictures/b.png,cat\n"
  path = write(tmp_path, text, images=["pictures/x/a.png", "pictures/b.png"])
  source = manifest.ManifestSource(path=path, root=str(tmp_path / "pictures"))
  assert source[0]["image"] == b"pictures/x/a.png"
  assert source[1]["image"] == b"pictures/b.png"


def test_manifest_expands_the_home_directory(tmp_path, monkeypatch):
  monkeypatch.setenv("HOME", str(tmp_path))
  write(tmp_path, "image,label\na.png,dog\n")
  assert len(manifest.ManifestSource(path="~/list.csv", root="~")) == 1


def test_manifest_reports_all_bad_rows_with_their_lines(tmp_path):
  text = "image,label\na.png,dog\n,cat\nb.png\nc.png,\na.png,dog,3\n"
  with pytest.raises(ValueError, match=r"got .* with 4 wrong rows") as error:
    manifest.ManifestSource(path=write(tmp_path, text))
  for line in (
    "line 3: image is empty",
    "line 4: fewer cells than columns",
    "line 5: label is empty",
    "line 6: more cells than columns",
  ):
    assert line in str(error.value)


def test_manifest_lists_the_first_20_bad_rows(tmp_path):
  path = write(tmp_path, "image,label\n" + ",x\n" * 30)
  with pytest.raises(ValueError, match="with 30 wrong rows") as error:
    manifest.ManifestSource(path=path)
  assert str(error.value).count("\n  line") == 20


def test_manifest_with_an_open_quote_is_an_error(tmp_path):
  path = write(tmp_path, 'image,label\na.png,"dog\n')
  with pytest.raises(ValueError, match="after line 1: unexpected end of data"):
    manifest.ManifestSource(path=path)


def test_manifest_that_is_not_utf_8_is_an_error(tmp_path):
  path = tmp_path / "list.csv"
  path.write_bytes("image,label\na.png,gr\u00fcn\n".encode("latin-1"))
  with pytest.raises(ValueError, match="it is not UTF-8"):
    manifest.ManifestSource(path=str(path))


def test_manifest_with_a_label_twice_is_an_error(tmp_path):
  path = write(tmp_path, "image,label\na.png,x|x\n")
  with pytest.raises(ValueError, match="line 2: a label is there twice"):
    manifest.ManifestSource(path=path, label_separator="|")


def test_manifest_lists_missing_images(tmp_path):
  text = "image,label\na.png,x\nno/b.png,x\nd.png,x\n"
  with pytest.raises(FileNotFoundError, match="2 of 3 images are not") as error:
    manifest.ManifestSource(path=write(tmp_path, text))
  assert f"line 3: {tmp_path}/no/b.png" in str(error.value)
  assert f"line 4: {tmp_path}/d.png" in str(error.value)


def test_manifest_looks_for_images_of_its_split_only(tmp_path):
  text = SPLITS + "gone.png,dog,test\n"
  assert len(manifest.ManifestSource(path=write(tmp_path, text), split="val"))


@pytest.mark.parametrize(
  ("text", "kwargs", "match"),
  [
    ("image;label\na;b\n", {}, r"columns \['image;label'\], separated by ','"),
    ("", {}, r"columns \[\].*one 'image' and one 'label'"),
    ("image,label\n", {}, "without rows; needs at least one image"),
    ("image,label\na.png,x\n", {"split": "val"}, "has no column 'split'"),
    (SPLITS, {"split": "test"}, "split: got 'test'; the .* are 'train', 'val'"),
    (SPLITS, {}, "split: got None; the splits in .* are 'train', 'val'"),
    (
      SPLITS,
      {"split": "val", "classes_from": "no"},
      "classes_from: got 'no'; there are no rows",
    ),
  ],
)
def test_manifest_that_does_not_fit_is_an_error(tmp_path, text, kwargs, match):
  with pytest.raises(ValueError, match=match):
    manifest.ManifestSource(path=write(tmp_path, text), **kwargs)


def test_manifest_that_is_not_there_is_an_error(tmp_path):
  with pytest.raises(FileNotFoundError, match=r"path: got .*no such file"):
    manifest.ManifestSource(path=str(tmp_path / "no.csv"))


def test_manifest_labels_have_no_space_around_them(tmp_path):
  path = write(tmp_path, "image,label\na.png,dog\nb.png, dog \nc.png,cat\n")
  source = manifest.ManifestSource(path=path)
  assert source.class_names == ("cat", "dog")
  assert labels(source) == [1, 1, 0]


def test_manifest_repeats_a_row_but_does_not_contradict_it(tmp_path):
  text = "image,label,split\na.png,dog,train\na.png,dog,train\na.png,cat,val\n"
  path = write(tmp_path, text + "b.png,cat,train\n")
  assert len(manifest.ManifestSource(path=path, split="train")) == 3
  path = write(tmp_path, text + "a.png,cat,train\n")
  match = "line 5: 'a.png' has other labels in line 2"
  with pytest.raises(ValueError, match=match):
    manifest.ManifestSource(path=path, split="train")


def test_manifest_with_a_column_twice_is_an_error(tmp_path):
  path = write(tmp_path, "image,label,label\na.png,dog,cat\n")
  with pytest.raises(ValueError, match="needs one 'image' and one 'label'"):
    manifest.ManifestSource(path=path)


def test_manifest_that_is_a_folder_is_an_error(tmp_path):
  with pytest.raises(FileNotFoundError, match="there is no such file"):
    manifest.ManifestSource(path=str(tmp_path))


def test_manifest_separator_is_some_text(tmp_path):
  with pytest.raises(ValueError, match="label_separator: got ''; must be None"):
    manifest.ManifestSource(path=str(tmp_path), label_separator="")
