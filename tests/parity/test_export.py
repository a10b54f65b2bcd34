"""ONNX graphs in onnxruntime, against the models that they were made of."""

import json

import jax.numpy as jnp
import numpy as np
import onnx
import onnxruntime
import pytest
from flax import traverse_util

from tests import commands, tiny_weights
from vit_jax import export, spec, weights
from vit_jax.models import bit, hybrid, mixer, output, vit
from vit_jax.weights import adapt

# Of jax2onnx and the libraries that it imports.
pytestmark = pytest.mark.filterwarnings("ignore")

SIZES = {"num_classes": 5, "width": 12, "depth": 2, "patch_size": (4, 4)}
VIT = SIZES | {"num_heads": 3, "mlp_dim": 20}
MODELS = {
  "vit": spec.spec(vit.ViT, **VIT, layer_scale=0.1, scan_unroll=2),
  "erf, gap, registers": spec.spec(
    vit.ViT, **VIT, pool="gap", num_registers=2, activation="gelu_erf"
  ),
  "map, QK norm, SwiGLU": spec.spec(
    vit.ViT, **VIT, pool="map", qk_norm=True, activation="swiglu"
  ),
  "relative, tanh": spec.spec(
    vit.ViT, **VIT, posemb="relative", representation_size=7
  ),
  "no head": spec.spec(vit.ViT, **VIT | {"num_classes": 0}),
  "hybrid": spec.spec(
    hybrid.Hybrid, **VIT | {"patch_size": (1, 1)}, stages=(1, 1)
  ),
  "bit": spec.spec(bit.BiT, num_classes=5, stages=(1, 1)),
  "mixer": spec.spec(
    mixer.Mixer, **SIZES, tokens_mlp_dim=8, channels_mlp_dim=20
  ),
}


@pytest.mark.parametrize("name", MODELS)
def test_a_graph_gives_the_outputs_of_its_model(tmp_path, monkeypatch, name):
  model = spec.build(MODELS[name])
  size = (16, 24)
  shapes = adapt.param_shapes(model, (*size, 3))
  rng = np.random.default_rng(0)
  flat = {
    path: rng.normal(0.1, 0.3, shape).astype(np.float32)
    for path, shape in shapes.items()
  }
  params = traverse_util.unflatten_dict(flat, sep="/")
  card = weights.Card(
    model=MODELS[name],
    image_size=size,
    num_channels=3,
    transform=None,
    normalize=tiny_weights.CARD.normalize,
  )
  monkeypatch.setattr(
    weights, "load", lambda *_, **__: weights.Loaded(model, params, card)
  )
  path = tmp_path / "model.onnx"
  assert export.export("any", path) <= 1e-5
  # Once more, by hand: five images, of which the graph has never heard.
  image = rng.integers(0, 256, (5, *size, 3)).astype(np.float32)
  session = onnxruntime.InferenceSession(
    str(path), providers=["CPUExecutionProvider"]
  )
  names = [x.name for x in session.get_outputs()]
  assert names == ["logits", "representation"][name == "no head" :]
  found = np.asarray(session.run(["representation"], {"image": image})[0])
  # CARD's normalize: minus the mean, over the standard deviation.
  normal = jnp.asarray((image - np.array([1, 2, 3])) / 127.5, "float32")
  expected = np.asarray(output.apply(model, params, normal).representation)
  scale = max(1.0, float(np.abs(expected).max()))
  np.testing.assert_allclose(found / scale, expected / scale, atol=1e-5)


def test_the_command_exports_a_file_with_its_card(tmp_path):
  source = tiny_weights.save(tmp_path, "npz")
  path = tmp_path / "there" / "model.onnx"
  printed = commands.run(
    tmp_path,
    *(source, path, "--image_size", 16, 8, "--num_classes", 0),
    *("--batch_size", 2),
    module="vit_jax.export",
  )
  assert "in onnxruntime the outputs differ by" in printed
  assert "Traceback" not in printed
  graph = onnx.load(str(path))
  (image,) = graph.graph.input
  dims = [d.dim_value for d in image.type.tensor_type.shape.dim]
  assert dims == [2, 16, 8, 3]
  metadata = {x.key: x.value for x in graph.metadata_props}
  assert json.loads(metadata["card"])["image_size"] == [16, 8]


def test_a_graph_that_gives_other_outputs_is_not_written(tmp_path, monkeypatch):
  source = tiny_weights.save(tmp_path, "npz")
  monkeypatch.setattr(export, "_difference", lambda *_: 0.1)
  path = tmp_path / "model.onnx"
  with pytest.raises(ValueError, match=r"differ by 0\.1\. Nothing was written"):
    export.export(source, path)
  assert not path.exists()


def test_what_does_not_fit_into_a_file_is_told(tmp_path, monkeypatch):
  source = tiny_weights.save(tmp_path, "npz")
  monkeypatch.setattr(export, "_MAX_BYTES", 1000)
  with pytest.raises(ValueError, match=r"params: got [\d,]+ bytes"):
    export.export(source, tmp_path / "model.onnx")


def test_arguments_that_make_no_graph_are_told(tmp_path):
  with pytest.raises(ValueError, match=r"destination: .* Use model\.onnx"):
    export.export("any", tmp_path / "model")
  with pytest.raises(ValueError, match="batch_size: got 0"):
    export.export("any", tmp_path / "model.onnx", batch_size=0)
