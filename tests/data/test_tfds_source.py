import io
import json
import pathlib
import pickle
import socket
import sys

import cv2
import numpy as np
import pytest
import tensorflow_datasets as tfds
from tensorflow_datasets.core import constants

from vit_jax.data import images, tfds_source


def png(value):
  pixels = np.full((4, 5, 3), value, np.uint8)
  return cv2.imencode(".png", pixels)[1].tobytes()


class TinyPets(tfds.core.GeneratorBasedBuilder):
  """Twenty training and five test images; made without TensorFlow."""

  VERSION = tfds.core.Version("1.2.0")

  def _info(self):
    return tfds.core.DatasetInfo(
      builder=self,
      features=tfds.features.FeaturesDict(
        {
          "image": tfds.features.Image(shape=(None, None, 3)),
          "mask": tfds.features.Image(shape=(None, None, 3)),
          "label": tfds.features.ClassLabel(names=["cat", "dog"]),
          "mood": tfds.features.ClassLabel(names=["bad", "ok", "good"]),
          "name": tfds.features.Text(),
        }
      ),
      disable_shuffling=True,
    )

  def _split_generators(self, dl_manager):
    del dl_manager
    return {
      "train": self._generate_examples(20),
      "test": self._generate_examples(5),
    }

  def _generate_examples(self, n):
    for i in range(n):
      yield (
        i,
        {
          "image": io.BytesIO(png(i)),
          "mask": io.BytesIO(png(0)),
          "label": i % 2,
          "mood": i % 3,
          "name": "Tom",
        },
      )


@pytest.fixture(scope="module")
def prepared(tmp_path_factory):
  path = tmp_path_factory.mktemp("tfds")
  builder = TinyPets(data_dir=path, file_format="array_record")
  builder.download_and_prepare()
  return str(path)


@pytest.fixture
def no_network(monkeypatch):
  def refuse(*args, **kwargs):
    raise AssertionError(f"opened a socket: {args} {kwargs}")

  monkeypatch.setattr(socket.socket, "connect", refuse)
  monkeypatch.setattr(socket.socket, "connect_ex", refuse)
  monkeypatch.setattr(socket, "getaddrinfo", refuse)
  monkeypatch.setattr(socket, "create_connection", refuse)


def test_prepared_data_is_read_without_network_and_tensorflow(
  prepared, no_network
):
  source = tfds_source.TfdsSource(
    name="tiny_pets", split="train", data_dir=prepared
  )
  assert (len(source), source.num_classes) == (20, 2)
  assert source.class_names == ("cat", "dog")
  example = source[7]
  assert example["image"] == png(7)  # Undecoded.
  assert (example["label"].tolist(), example["label"].dtype) == (1, np.int32)
  assert example["id"] == "tiny_pets/1.2.0/train/7"
  pixels = images.decode(example["image"], exif=True, background=255)
  np.testing.assert_array_equal(pixels, np.full((4, 5, 3), 7))
  assert "tensorflow" not in sys.modules


@pytest.mark.parametrize("name", ["tiny_pets:1.2.0", "tiny_pets:1.*.*"])
def test_version_can_be_pinned(prepared, name, no_network):
  source = tfds_source.TfdsSource(name=name, split="test", data_dir=prepared)
  assert len(source) == 5


def test_split_can_be_a_part(prepared):
  source = tfds_source.TfdsSource(
    name="tiny_pets", split="train[90%:]", data_dir=prepared
  )
  assert len(source) == 2
  assert source[1]["image"] == png(19)
  assert source[1]["id"] == "tiny_pets/1.2.0/train[90%:]/1"


def test_label_key_chooses_the_classes(prepared):
  source = tfds_source.TfdsSource(
    name="tiny_pets", split="train", data_dir=prepared, label_key="mood"
  )
  assert source.class_names == ("bad", "ok", "good")
  assert source[5]["label"] == 2


def test_source_survives_the_way_to_a_worker(prepared):
  source = tfds_source.TfdsSource(
    name="tiny_pets", split="train", data_dir=prepared
  )
  assert pickle.loads(pickle.dumps(source))[3]["image"] == png(3)


def test_data_dir_home_is_expanded(prepared, monkeypatch):
  monkeypatch.setenv("HOME", prepared)
  source = tfds_source.TfdsSource(name="tiny_pets", split="test", data_dir="~")
  assert len(source) == 5


def test_tfrecord_only_data_names_the_conversion_command(
  prepared, tmp_path, no_network
):
  folder = tmp_path / "tiny_pets" / "1.2.0"
  folder.mkdir(parents=True)
  from_folder = pathlib.Path(prepared) / "tiny_pets" / "1.2.0"
  for name in ("features.json", "label.labels.txt", "mood.labels.txt"):
    (folder / name).write_bytes((from_folder / name).read_bytes())
  info = json.loads((from_folder / "dataset_info.json").read_text())
  info["fileFormat"] = "tfrecord"
  (folder / "dataset_info.json").write_text(json.dumps(info))
  with pytest.raises(ValueError, match="has it as tfrecord only") as error:
    tfds_source.TfdsSource(
      name="tiny_pets", split="train", data_dir=str(tmp_path)
    )
  assert (
    "python -m tensorflow_datasets.scripts.convert_format "
    f"--dataset_version_dir={folder} --out_file_format=array_record"
  ) in str(error.value)


def test_data_that_is_not_there_names_folder_and_command(tmp_path, no_network):
  with pytest.raises(FileNotFoundError, match="not prepared in") as error:
    tfds_source.TfdsSource(
      name="cifar10:3.0.2", split="train", data_dir=str(tmp_path)
    )
  message = str(error.value)
  assert (
    f"name: got 'cifar10:3.0.2'; it is not prepared in {tmp_path}" in message
  )
  assert (
    f"tfds.builder('cifar10:3.0.2', data_dir='{tmp_path}', "
    "file_format='array_record').download_and_prepare()"
  ) in message
  assert "ILSVRC2012" not in message


def test_other_version_than_the_prepared_one_is_not_there(prepared, no_network):
  with pytest.raises(FileNotFoundError, match=r"tiny_pets:2.* not prepared"):
    tfds_source.TfdsSource(
      name="tiny_pets:2.*.*", split="train", data_dir=prepared
    )


def test_missing_imagenet_says_where_the_archives_go(tmp_path, no_network):
  with pytest.raises(
    FileNotFoundError, match=r"ILSVRC2012_img_train.tar and"
  ) as e:
    tfds_source.TfdsSource(
      name="imagenet2012:5.*.*", split="train", data_dir=str(tmp_path)
    )
  assert f"{tmp_path}/downloads/manual/" in str(e.value)


def test_default_folder_is_named(tmp_path, monkeypatch, no_network):
  monkeypatch.setattr(constants, "DATA_DIR", str(tmp_path / "home"))
  with pytest.raises(
    FileNotFoundError, match=f"not prepared in {tmp_path}/home"
  ):
    tfds_source.TfdsSource(name="cifar10", split="train")


def test_download_prepares_as_array_record(tmp_path, no_network):
  source = tfds_source.TfdsSource(
    name="tiny_pets", split="test", data_dir=str(tmp_path), download=True
  )
  assert source[4]["image"] == png(4)
  names = [path.name for path in (tmp_path / "tiny_pets/1.2.0").iterdir()]
  assert "tiny_pets-test.array_record-00000-of-00001" in names


def test_download_without_tensorflow_names_the_missing_module(
  tmp_path, monkeypatch
):
  def prepare(*args, **kwargs):
    raise ModuleNotFoundError("No module named 'x'", name="tensorflow")

  monkeypatch.setattr(TinyPets, "download_and_prepare", prepare)
  with pytest.raises(
    ModuleNotFoundError, match="needs the module 'tensorflow'"
  ):
    tfds_source.TfdsSource(
      name="tiny_pets", split="test", data_dir=str(tmp_path), download=True
    )


def test_without_tfds_the_error_says_what_to_install(monkeypatch):
  monkeypatch.setitem(sys.modules, "tensorflow_datasets", None)
  with pytest.raises(ModuleNotFoundError, match=r'pip install -e "\.\[tfds\]"'):
    tfds_source.TfdsSource(name="tiny_pets", split="train")


@pytest.mark.parametrize(
  ("kwargs", "match"),
  [
    ({"split": "val"}, "split: got 'val'; tiny_pets has train, test"),
    (
      {"split": "train", "image_key": "picture"},
      r"image_key: got 'picture'; must name a feature of type Image.*Text",
    ),
    (
      {"split": "train", "label_key": "name"},
      "label_key: got 'name'; must name a feature of type ClassLabel",
    ),
  ],
)
def test_wrong_split_or_feature_lists_what_is_there(prepared, kwargs, match):
  with pytest.raises(ValueError, match=match):
    tfds_source.TfdsSource(name="tiny_pets", data_dir=prepared, **kwargs)
