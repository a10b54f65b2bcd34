"""Imports timm without torchvision, and silences what the others print.

timm imports torchvision at its top, for the loading and augmentation of images
and for one class of norms. Its wheels want the very build of torch that they
were made for, and nothing here uses it: stand-ins do while timm is imported.
"""

import importlib
import importlib.util
import sys
import types
import warnings
from unittest import mock

import pytest
import torch

_STANDINS = (
  "torchvision",
  "torchvision.datasets",
  "torchvision.models",
  "torchvision.models.feature_extraction",
  "torchvision.ops",
  "torchvision.ops.misc",
  "torchvision.transforms",
  "torchvision.transforms.functional",
)


def _import_timm() -> types.ModuleType:
  missing = importlib.util.find_spec("torchvision") is None
  names = _STANDINS if missing else ()
  for name in names:
    sys.modules[name] = mock.MagicMock()
  if missing:  # timm asks of layers whether they are of this class.
    norm = type("FrozenBatchNorm2d", (torch.nn.Module,), {})
    sys.modules["torchvision.ops.misc"].FrozenBatchNorm2d = norm
  with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    result = importlib.import_module("timm")
  for name in names:  # Transformers looks for it, and must not find it.
    del sys.modules[name]
  return result


timm = _import_timm()


@pytest.fixture(autouse=True)
def no_gradients():
  with torch.no_grad():
    yield
