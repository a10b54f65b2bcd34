"""ResNets against an independent NumPy forward pass, and their own laws."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.models import numpy_convnet
from vit_jax.models import resnet

QUICK = {"xla_backend_optimization_level": 0}  # Compiles in half the time.

# Odd sizes, and even ones, for which the padding differs from side to side.
ODD = np.random.default_rng(7).normal(size=(2, 35, 43, 3)).astype(np.float32)
EVEN = np.random.default_rng(8).normal(size=(1, 40, 34, 3)).astype(np.float32)


def small(**fields):
  return resnet.ResNet(**({"num_classes": 5, "stages": (2, 1)} | fields))


def random_params(model, *, seed=0):
  """Parameters where no leaf is zero, one or symmetric."""
  shapes = jax.eval_shape(model.init, jax.random.key(0), ODD)["params"]
  rng = np.random.default_rng(seed)
  return jax.tree.map(
    lambda x: rng.normal(0.1, 0.4, x.shape).astype(np.float32), shapes
  )


def apply(model, params, image):
  f = jax.jit(model.apply, compiler_options=QUICK)
  return f({"params": params}, image)


@pytest.mark.parametrize(
  ("fields", "image"),
  [
    ({}, ODD),
    ({"stages": (1,), "width_factor": 2, "norm_epsilon": 0.1}, EVEN),
  ],
  ids=["odd", "even"],
)
def test_forward_equals_numpy(fields, image):
  model = small(**fields)
  params = random_params(model)
  out = apply(model, params, image)
  p = jax.tree.map(np.float64, params)
  for i, one in enumerate(image):
    feature_map = numpy_convnet.resnet(
      *(p["trunk"], one), stages=model.stages, epsilon=model.norm_epsilon
    )
    tokens = feature_map.reshape(-1, feature_map.shape[-1])
    pooled = tokens.mean(axis=0)
    logits = pooled @ p["head"]["kernel"] + p["head"]["bias"]
    for actual, wanted in zip(out, (logits, pooled, tokens), strict=True):
      # f32 through 11 layers; logits are sums over up to 512 channels.
      np.testing.assert_allclose(actual[i], wanted, atol=3e-5)


def test_convolution_ignores_scale_and_mean_of_its_kernel():
  # 8 inputs, so that 1e-5 is small beside a deviation of 0.4.
  conv = resnet.StdConv(features=4, size=3)
  rng = np.random.default_rng(0)
  x = rng.normal(size=(1, 5, 6, 8)).astype(np.float32)
  kernel = rng.normal(0.1, 0.4, size=(3, 3, 8, 4)).astype(np.float32)
  scale = np.array([0.5, 1.0, 2.0, 8.0], np.float32)
  shift = np.array([0.1, -1.0, 0.0, 3.0], np.float32)
  expected, other = (
    np.asarray(conv.apply({"params": {"kernel": k}}, x))
    for k in (kernel, kernel * scale + shift)
  )
  # 1e-5 in the denominator, times outputs up to 40.
  np.testing.assert_allclose(other, expected, atol=2e-3)


def test_gradient_of_equal_weights_is_finite():
  # The deviation is zero there, and the slope of its root infinite.
  conv = resnet.StdConv(features=4)
  x = np.random.default_rng(0).normal(size=(1, 2, 2, 8)).astype(np.float32)

  def loss(kernel):
    return jnp.sum(jnp.asarray(conv.apply({"params": {"kernel": kernel}}, x)))

  grad = jax.jit(jax.value_and_grad(loss), compiler_options=QUICK)
  value, gradient = grad(jnp.full((1, 1, 8, 4), 0.5))
  assert value == 0
  assert np.isfinite(gradient).all() and np.abs(gradient).max() > 0


def test_initial_values_are_the_published_ones():
  model = small(stages=(1,), head_bias_init=-10.0)
  init = jax.jit(model.init, compiler_options=QUICK)
  params = init(jax.random.key(0), ODD)["params"]
  trunk = params["trunk"]
  unit = trunk["stage1"]["unit1"]
  for conv, fan_in in (
    (trunk["root"]["conv"], 7 * 7 * 3),
    (unit["conv2"], 3 * 3 * 64),
    (unit["conv_shortcut"], 64),
  ):
    # 9,408 draws, the fewest here, estimate a deviation to 0.7 % (1 sigma).
    np.testing.assert_allclose(conv["kernel"].std(), fan_in**-0.5, rtol=0.03)
  for norms, name, scale in (
    (trunk["root"], "norm", 1),
    (unit, "norm1", 1),
    (unit, "norm2", 1),
    (unit, "norm3", 0),
    (unit, "norm_shortcut", 1),
  ):
    assert (norms[name]["scale"] == scale).all(), name
    assert not norms[name]["bias"].any(), name
  assert not params["head"]["kernel"].any()
  np.testing.assert_array_equal(params["head"]["bias"], np.full(5, -10.0))


@pytest.mark.parametrize("width_factor", [1, 3])
def test_parameters_have_the_documented_names_and_widths(width_factor):
  w = width_factor
  model = small(stages=(1, 2, 1), width_factor=w)
  params = jax.eval_shape(model.init, jax.random.key(0), ODD)["params"]
  shapes = {
    jax.tree_util.keystr(path, simple=True, separator="/"): x.shape
    for path, x in jax.tree_util.tree_leaves_with_path(params)
  }
  assert shapes["trunk/root/conv/kernel"] == (7, 7, 3, 64 * w)
  assert shapes["trunk/root/norm/scale"] == (64 * w,)
  unit = "trunk/stage2/unit1"
  assert shapes[f"{unit}/conv1/kernel"] == (1, 1, 256 * w, 128 * w)
  assert shapes[f"{unit}/conv2/kernel"] == (3, 3, 128 * w, 128 * w)
  assert shapes[f"{unit}/conv3/kernel"] == (1, 1, 128 * w, 512 * w)
  assert shapes[f"{unit}/norm3/bias"] == (512 * w,)
  assert shapes[f"{unit}/conv_shortcut/kernel"] == (1, 1, 256 * w, 512 * w)
  assert shapes[f"{unit}/norm_shortcut/scale"] == (512 * w,)
  assert "trunk/stage2/unit2/conv3/kernel" in shapes
  assert "trunk/stage2/unit2/conv_shortcut/kernel" not in shapes
  assert shapes["trunk/stage3/unit1/conv3/kernel"] == (1, 1, 256 * w, 1024 * w)
  assert shapes["head/kernel"] == (1024 * w, 5)


@pytest.mark.parametrize(
  ("stages", "pixels"), [((), 4), ((1,), 4), ((1, 1, 1), 16)]
)
def test_map_has_a_cell_for_each_stride_begun(stages, pixels):
  assert resnet.stride(stages) == pixels
  trunk = resnet.Trunk(stages=stages)
  for height, width in ((1, pixels), (pixels + 1, 2 * pixels - 1), (67, 99)):
    image = jax.ShapeDtypeStruct((1, height, width, 3), np.float32)
    x, _ = jax.eval_shape(trunk.init_with_output, jax.random.key(0), image)
    assert x.shape[1:3] == (-(-height // pixels), -(-width // pixels))


def on_the_mesh(x):
  mesh = jax.make_mesh(
    (8,), ("data",), axis_types=(jax.sharding.AxisType.Auto,)
  )
  spec = jax.sharding.PartitionSpec("data")
  return jax.lax.with_sharding_constraint(
    x, jax.sharding.NamedSharding(mesh, spec)
  )


def test_constrain_pins_the_input_of_each_unit():
  model = small(stages=(2, 1), constrain=on_the_mesh)
  image = jax.ShapeDtypeStruct((8, 16, 16, 3), np.float32)
  params = jax.eval_shape(model.init, jax.random.key(0), image)
  text = jax.jit(model.apply).lower(params, image).as_text()
  shapes = re.findall(
    r"sharding_constraint.*\"data\".*tensor<8x4x4x(\d+)xf32>", text
  )
  assert shapes == ["64", "256", "256"]


@pytest.mark.parametrize(
  ("image", "match"),
  [
    (ODD[0], r"image: got shape \(35, 43, 3\); must be \[B, H, W, C\]"),
    (ODD.astype(np.uint8), "image: got dtype uint8; must be floating"),
    (ODD[..., :1], r"3 channels and takes \[B, H, W, 3\]"),
    (ODD.transpose(0, 3, 1, 2), r"This looks like \[B, C, H, W\]"),
    (ODD[:, :0], r"image: got height 0 in shape \(2, 0, 43, 3\)"),
  ],
  ids=["rank", "dtype", "channels", "order", "empty"],
)
def test_image_that_does_not_fit_is_refused(image, match):
  model = small(stages=())
  f = functools.partial(model.apply, {"params": random_params(model)})
  with pytest.raises(ValueError, match=match):
    jax.eval_shape(f, image)


@pytest.mark.parametrize(
  ("fields", "message"),
  [
    ({"stages": (3, 0)}, r"stages: got \(3, 0\); each must have at least 1"),
    ({"width_factor": 0}, "width_factor: got 0; must be at least 1"),
    ({"num_classes": -1}, "num_classes: got -1; must be at least 0"),
    ({"norm_epsilon": 0.0}, "norm_epsilon: got 0.0; must be > 0"),
    ({"dtype": "bf16"}, "dtype: got 'bf16'.*Did you mean 'bfloat16'"),
    ({"width_factor": 0, "num_classes": -1}, "width_factor.*\nnum_classes"),
  ],
  ids=str,
)
def test_fields_that_make_no_model_are_named(fields, message):
  with pytest.raises(ValueError, match=message):
    small(**fields)


def test_sizes_are_those_of_the_name():
  assert resnet.sizes("R50") == {"stages": (3, 4, 6, 3), "width_factor": 1}
  assert resnet.sizes("R152x4") == {"stages": (3, 8, 36, 3), "width_factor": 4}


@pytest.mark.parametrize(
  ("variant", "hint"),
  [
    ("R51x2", " Did you mean 'R50'?"),
    ("r101", " Did you mean 'R101'?"),
    ("R50x0", " Did you mean 'R50'?"),
    ("ViT-B/16", "at least 1."),
  ],
)
def test_unknown_variant_suggests_the_closest(variant, hint):
  message = f"variant: got {variant!r}; must be NAME or NAMExWIDTH with a NAME"
  match = f"^{re.escape(message)}.*{re.escape(hint)}$"
  with pytest.raises(ValueError, match=match):
    resnet.sizes(variant)
