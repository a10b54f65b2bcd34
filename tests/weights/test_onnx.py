"""ONNX without the package onnx; with it, see tests/parity."""

import sys

import pytest

from vit_jax.weights import onnx


def test_what_is_missing_is_named(monkeypatch, tmp_path):
  monkeypatch.setitem(sys.modules, "onnx", None)
  with pytest.raises(ModuleNotFoundError, match=r"-e .\.\[onnx\]."):
    onnx.open_onnx(tmp_path / "model.onnx")
