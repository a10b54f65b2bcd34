"""ONNX without its packages; with them, see tests/parity."""

import sys

import pytest

from tests import commands
from vit_jax import export


@pytest.mark.parametrize("package", ["jax2onnx", "onnxruntime"])
def test_what_is_missing_is_named(monkeypatch, tmp_path, package):
  for name in ("jax2onnx", "onnx", "onnxruntime"):
    monkeypatch.setitem(sys.modules, name, object())
  monkeypatch.setitem(sys.modules, package, None)
  with pytest.raises(ModuleNotFoundError, match=r"-e .\.\[onnx\]."):
    export.export("any", tmp_path / "model.onnx")


def test_a_size_of_three_sides_is_told(tmp_path):
  printed = commands.run(
    tmp_path,
    *("any", "model.onnx", "--image_size", 1, 2, 3),
    module="vit_jax.export",
    code=1,
  )
  assert "image_size: got [1, 2, 3]" in printed
