"""Files of arrays: lazily read, never trusted, damaged ones told in a line."""

import io
import json
import struct
import zipfile

import ml_dtypes
import numpy as np
import pytest

from vit_jax.weights import tensors

ARRAYS = {
  "a/kernel": np.arange(600, dtype=np.float32).reshape(20, 30),
  "b": np.arange(5, dtype=np.int32),
  "scalar": np.float32(3.0).reshape(()),
}


def opened(path):
  if path.suffix == ".npz":
    return tensors.open_npz(path)
  return tensors.open_safetensors([path])


@pytest.fixture(params=["file.npz", "file.safetensors"])
def file(request, tmp_path):
  """A file of `ARRAYS`, in each of the two kinds."""
  path = tmp_path / request.param
  write = (
    tensors.write_npz if path.suffix == ".npz" else tensors.write_safetensors
  )
  write(path, ARRAYS)
  return path


def test_what_is_written_is_read_as_it_was(file):
  found = opened(file)
  assert set(found) == set(ARRAYS) and len(found) == 3
  assert found.shapes == {"a/kernel": (20, 30), "b": (5,), "scalar": ()}
  for name, x in ARRAYS.items():
    assert found[name].dtype == x.dtype
    np.testing.assert_array_equal(found[name], x)
  with pytest.raises(KeyError):
    found["c"]


@pytest.mark.parametrize("part", [0.02, 0.3, 0.9, 0.99])
def test_truncated_file_is_refused_with_its_name(file, part):
  content = file.read_bytes()
  file.write_bytes(content[: int(part * len(content))])
  with pytest.raises(ValueError, match=r"got '.*file\.\w+'; the file is dam"):
    opened(file)


def test_file_of_another_kind_is_refused(file):
  file.write_bytes(b"<html>404: this is no file of arrays</html>" * 40)
  with pytest.raises(ValueError, match=r"damaged or of another kind .*Get it"):
    opened(file)


def test_array_that_was_changed_on_the_way_is_refused_when_read(tmp_path):
  path = tmp_path / "file.npz"
  large = np.arange(40_000)  # More than a header is read with.
  tensors.write_npz(path, {"a": ARRAYS["b"], "large": large})
  content = bytearray(path.read_bytes())
  content[content.index(large.tobytes()) + 100_000] ^= 1
  path.write_bytes(content)
  found = tensors.open_npz(path)
  np.testing.assert_array_equal(found["a"], ARRAYS["b"])
  with pytest.raises(ValueError, match=r"damaged .*CRC.* 'large"):
    found["large"]


def test_python_objects_are_refused_unread(tmp_path):
  class Bomb:
    def __reduce__(self):
      return exit, (3,)

  path = tmp_path / "file.npz"
  bomb = np.array([Bomb()], dtype=object)
  np.savez(path, good=ARRAYS["b"], bomb=bomb)
  with pytest.raises(ValueError, match="it holds Python objects"):
    tensors.open_npz(path)


def test_array_that_hides_objects_from_the_first_look_is_refused(tmp_path):
  # Two entries of one name: the shape is read of one, the array of the other.
  plain, objects = io.BytesIO(), io.BytesIO()
  np.save(plain, ARRAYS["b"])
  np.save(objects, np.array([{}], dtype=object), allow_pickle=True)
  path = tmp_path / "file.npz"
  with zipfile.ZipFile(path, "w") as archive:
    archive.writestr("b.npy", plain.getvalue())
    with pytest.warns(UserWarning, match="Duplicate name"):
      archive.writestr("b.npy", objects.getvalue())
  with pytest.raises(ValueError, match=r"objects|pickle"):
    tensors.open_npz(path)["b"]


def test_bfloat16_comes_back_from_numpy_by_its_bits(tmp_path):
  x = np.array([1.0, -2.5, 3e38, 1e-40]).astype(ml_dtypes.bfloat16)
  path = tmp_path / "file.npz"
  np.savez(path, x=x)
  with np.load(path) as plain:
    assert plain["x"].dtype == np.dtype("V2")  # What NumPy makes of it.
  found = tensors.open_npz(path)["x"]
  assert found.dtype == ml_dtypes.bfloat16
  np.testing.assert_array_equal(found.view(np.uint16), x.view(np.uint16))
  path = tmp_path / "file.safetensors"
  tensors.write_safetensors(path, {"x": x})
  found = tensors.open_safetensors([path])["x"]
  np.testing.assert_array_equal(np.float32(found), np.float32(x))


def test_parts_of_one_safetensors_are_read_as_one(tmp_path):
  paths = [tmp_path / "1.safetensors", tmp_path / "2.safetensors"]
  for path, name in zip(paths, ("a/kernel", "b")):
    tensors.write_safetensors(path, {name: ARRAYS[name]})
  found = tensors.open_safetensors(paths)
  assert set(found) == {"a/kernel", "b"}
  np.testing.assert_array_equal(found["b"], ARRAYS["b"])
  assert found.metadata == {"format": "pt"}  # As PyTorch's readers want it.


def test_array_in_another_order_is_written_as_it_reads(tmp_path):
  x = ARRAYS["a/kernel"].T
  path = tmp_path / "file.safetensors"
  tensors.write_safetensors(path, {"x": x})
  np.testing.assert_array_equal(tensors.open_safetensors([path])["x"], x)


def test_header_of_safetensors_that_is_no_json_is_refused(tmp_path):
  path = tmp_path / "file.safetensors"
  header = json.dumps({"x": 1}).encode()[:-1]
  path.write_bytes(struct.pack("<Q", len(header)) + header)
  with pytest.raises(ValueError, match="the file is damaged"):
    opened(path)


def test_renamed_arrays_are_those_of_the_old_names():
  found = tensors.from_arrays(ARRAYS).renamed({"new": "b"})
  assert found.shapes == {"new": (5,)}
  np.testing.assert_array_equal(found["new"], ARRAYS["b"])
  with pytest.raises(KeyError):
    found["b"]
