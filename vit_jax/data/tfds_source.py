"""A source over TensorFlow Datasets, without TensorFlow.

Reads ArrayRecord files at random. Only preparing or converting data needs
TensorFlow; the error messages say when and with which command.
"""

from typing import Any

import numpy as np

from vit_jax import paths
from vit_jax.data.example import Example

_READ_NEEDS = 'pip install -e ".[tfds]"'
_PREPARE_NEEDS = 'pip install -e ".[tf]"'  # TensorFlow itself, once.


class TfdsSource:
  """A split of a dataset prepared by TFDS, images undecoded.

  Prepared data is read from its folder alone and opens no socket. Ids are
  `name/version/split/position`.
  """

  def __init__(
    self,
    *,
    name: str,
    split: str,
    data_dir: str | None = None,
    download: bool = False,
    image_key: str = "image",
    label_key: str = "label",
  ) -> None:
    """Finds the data; prepares it if asked to.

    Args:
      name: as TFDS writes it: "cifar10", "cifar10:3.0.2", "imagenet2012:5.*.*",
        "name/config:version". Without a version the newest prepared one.
      split: "train", "test", or a part such as "train[:98%]".
      data_dir: folder of all datasets; TFDS's own (`TFDS_DATA_DIR`, else
        ~/tensorflow_datasets) if not given.
      download: whether to download and prepare what is not there. Let one
        process do this before many start.
      image_key: the feature with the image.
      label_key: the feature with the class.

    Raises:
      ModuleNotFoundError: if a package is missing; it is named.
      FileNotFoundError: if the dataset is not prepared and `download` not set.
      ValueError: if there is no such split or feature, or no ArrayRecord.
    """
    tfds = _import_tfds()
    if data_dir is not None:
      data_dir = str(paths.expand(data_dir))
    builder = _find(name, data_dir)
    if builder is None:
      if not download:
        raise FileNotFoundError(_how_to_prepare(name, data_dir))
      _prepare(name, data_dir)
      builder = _find(name, data_dir)
      assert builder is not None
    _check_format(builder, name)
    features = dict(builder.info.features.items())
    _check_feature(features, "image_key", image_key, tfds.features.Image)
    _check_feature(features, "label_key", label_key, tfds.features.ClassLabel)
    skipped = {  # Decoding an image would need TensorFlow.
      key: tfds.decode.SkipDecoding()
      for key, feature in features.items()
      if isinstance(feature, tfds.features.Image)
    }
    try:
      self._data = builder.as_data_source(
        split, decoders=skipped, file_format="array_record"
      )
    except ValueError as error:
      raise ValueError(
        f"split: got {split!r}; {name} has {', '.join(builder.info.splits)}. "
        f"Use one of these or a part, such as 'train[:98%]' ({error})."
      ) from error
    self._image_key = image_key
    self._label_key = label_key
    self._prefix = f"{builder.info.full_name}/{split}"
    self.class_names = tuple(features[label_key].names)
    self.num_classes = len(self.class_names)

  def __len__(self) -> int:
    return len(self._data)

  def __getitem__(self, index: int) -> Example:
    record = self._data[index]
    return {
      "image": record[self._image_key],
      "label": np.asarray(record[self._label_key], np.int32),
      "id": self.example_id(index),
    }

  def example_id(self, index: int) -> str:
    """Returns the id of the example at `index`."""
    return f"{self._prefix}/{index}"


def _import_tfds() -> Any:
  """Returns the module; it takes half a second, so not at the top."""
  try:
    import array_record  # noqa: F401  # TFDS asks for it only when it reads.
    import tensorflow_datasets as tfds
  except ModuleNotFoundError as error:
    raise ModuleNotFoundError(
      f"tfds: got no module {error.name!r}; this source needs it. Run: "
      f"{_READ_NEEDS}"
    ) from error
  return tfds


def _find(name: str, data_dir: str | None) -> Any:
  """Returns a read-only builder over prepared files, or None."""
  from tensorflow_datasets.core import read_only_builder, registered

  try:
    return read_only_builder.builder_from_files(name, data_dir=data_dir)
  except registered.DatasetNotFoundError:
    return None


def _prepare(name: str, data_dir: str | None) -> None:
  import tensorflow_datasets as tfds

  try:
    builder = tfds.builder(name, data_dir=data_dir, file_format="array_record")
    builder.download_and_prepare()
  except ModuleNotFoundError as error:
    raise ModuleNotFoundError(
      f"download: got True for {name!r}; TFDS needs the module {error.name!r} "
      f"to prepare it (not to read it). Run: {_PREPARE_NEEDS}"
    ) from error


def _how_to_prepare(name: str, data_dir: str | None) -> str:
  from tensorflow_datasets.core.utils import file_utils

  folders = [str(x) for x in file_utils.list_data_dirs(data_dir)]
  manual = ""
  if name.split(":")[0].split("/")[0] == "imagenet2012":
    manual = (
      " TFDS may not download ImageNet: get ILSVRC2012_img_train.tar and "
      "ILSVRC2012_img_val.tar from https://image-net.org/download-images and "
      f"put them, not unpacked, into {folders[0]}/downloads/manual/. Then:"
    )
  return (
    f"name: got {name!r}; it is not prepared in {', '.join(folders)}. Set "
    f"data_dir to the folder that has it, or prepare it.{manual}\n"
    f"  {_PREPARE_NEEDS}\n"
    '  python -c "import tensorflow_datasets as tfds; '
    f"tfds.builder('{name}', data_dir='{folders[0]}', "
    "file_format='array_record').download_and_prepare()\""
  )


def _check_format(builder: Any, name: str) -> None:
  there = sorted(x.value for x in builder.info.available_file_formats())
  if "array_record" not in there:
    raise ValueError(
      f"name: got {name!r}; {builder.data_path} has it as {', '.join(there)} "
      "only, which cannot be read at random. Add ArrayRecord files to it:\n"
      f"  {_PREPARE_NEEDS}\n"
      "  python -m tensorflow_datasets.scripts.convert_format "
      f"--dataset_version_dir={builder.data_path} "
      "--out_file_format=array_record"
    )


def _check_feature(
  features: dict[str, Any], name: str, key: str, kind: type
) -> None:
  if not isinstance(features.get(key), kind):
    there = ", ".join(f"{k} ({type(features[k]).__name__})" for k in features)
    raise ValueError(
      f"{name}: got {key!r}; must name a feature of type {kind.__name__}. The "
      f"dataset has {there}."
    )
