"""BiT against an independent NumPy forward pass, and its own laws."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.models import numpy_convnet
from vit_jax.models import bit, resnet

QUICK = {"xla_backend_optimization_level": 0}  # Compiles in half the time.

# Odd sizes, and even ones, for which "SAME" padding would be another.
ODD = np.random.default_rng(7).normal(size=(2, 35, 43, 3)).astype(np.float32)
EVEN = np.random.default_rng(8).normal(size=(1, 40, 34, 3)).astype(np.float32)


def small(**fields):
  return bit.BiT(**({"num_classes": 5, "stages": (2, 1)} | fields))


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
    feature_map = numpy_convnet.bit(
      *(p["trunk"], one), stages=model.stages, epsilon=model.norm_epsilon
    )
    tokens = feature_map.reshape(-1, feature_map.shape[-1])
    pooled = tokens.mean(axis=0)
    logits = pooled @ p["head"]["kernel"] + p["head"]["bias"]
    for actual, wanted in zip(out, (logits, pooled, tokens), strict=True):
      # f32 through 11 layers; logits are sums over up to 512 channels.
      np.testing.assert_allclose(actual[i], wanted, atol=3e-5)


def test_max_pool_of_the_root_sees_zeros_around_the_map():
  root = bit.Root(features=1, norm_epsilon=1e-5)
  # The kernel answers to the contrast of the pixel at its centre, and those
  # that it is centred on are dark: its answers are all negative.
  kernel = np.zeros((7, 7, 1, 1), np.float32)
  kernel[3, 3] = 1.0
  image = np.zeros((1, 24, 24, 1), np.float32)
  image[:, ::2, ::2] = -1.0
  y = root.apply({"params": {"conv": {"kernel": kernel}}}, image)
  y = np.asarray(y)[0, :, :, 0]
  assert not y[0].any() and not y[:, 0].any()
  assert (y[1:, 1:] < 0).all()


def test_standardisation_has_its_epsilon_inside_the_root():
  # Deviation 1e-5: inside, 1 / sqrt(2); outside, 1 / 2.
  kernel = np.array([1e-5, -1e-5] * 4, np.float32).reshape(1, 1, 8, 1)
  x = np.eye(8, dtype=np.float32)[0].reshape(1, 1, 1, 8)
  for module, expected in ((bit, 0.5**0.5), (resnet, 0.5)):
    conv = module.StdConv(features=1)
    y = conv.apply({"params": {"kernel": kernel}}, x)
    np.testing.assert_allclose(y, [[[[expected]]]], rtol=1e-6)  # f32


def test_gradient_of_equal_weights_is_finite():
  conv = bit.StdConv(features=4)
  x = np.random.default_rng(0).normal(size=(1, 2, 2, 8)).astype(np.float32)

  def loss(kernel):
    return jnp.sum(jnp.asarray(conv.apply({"params": {"kernel": kernel}}, x)))

  grad = jax.jit(jax.grad(loss), compiler_options=QUICK)
  gradient = grad(jnp.full((1, 1, 8, 4), 0.5))
  assert np.isfinite(gradient).all() and np.abs(gradient).max() > 0


def test_norms_start_as_normalisation_alone():
  model = small(stages=(1,), head_bias_init=-10.0)
  init = jax.jit(model.init, compiler_options=QUICK)
  params = init(jax.random.key(0), ODD)["params"]
  for path, x in jax.tree_util.tree_leaves_with_path(params["trunk"]):
    name = jax.tree_util.keystr(path, simple=True, separator="/")
    if name.endswith("kernel"):
      # 4,096 draws, the fewest here, estimate a deviation to 1 % (1 sigma).
      fan_in = np.prod(x.shape[:3])
      np.testing.assert_allclose(x.std(), fan_in**-0.5, rtol=0.05, err_msg=name)
    else:
      assert (x == name.endswith("scale")).all(), name
  assert not params["head"]["kernel"].any()
  np.testing.assert_array_equal(params["head"]["bias"], np.full(5, -10.0))


@pytest.mark.parametrize("width_factor", [1, 3])
def test_parameters_have_the_documented_names_and_widths(width_factor):
  w = width_factor
  model = small(stages=(1, 2), width_factor=w)
  params = jax.eval_shape(model.init, jax.random.key(0), ODD)["params"]
  assert params.keys() == {"trunk", "head"}
  trunk = params["trunk"]
  assert trunk.keys() == {"root", "stage1", "stage2", "norm"}
  assert trunk["root"].keys() == {"conv"}
  assert trunk["norm"]["scale"].shape == (512 * w,)
  names = {"conv1", "norm1", "conv2", "norm2", "conv3", "norm3"}
  assert trunk["stage2"]["unit1"].keys() == names | {"conv_shortcut"}
  assert trunk["stage2"]["unit2"].keys() == names
  unit = trunk["stage2"]["unit1"]
  assert unit["norm1"]["scale"].shape == (256 * w,)
  assert unit["norm3"]["scale"].shape == (128 * w,)
  assert unit["conv_shortcut"]["kernel"].shape == (1, 1, 256 * w, 512 * w)


def test_image_that_does_not_fit_is_refused():
  model = small(stages=())
  params = random_params(model)
  with pytest.raises(ValueError, match=r"3 channels and takes \[B, H, W, 3\]"):
    model.apply({"params": params}, ODD[..., :1])


def test_fields_that_make_no_model_are_named():
  with pytest.raises(ValueError, match=r"stages: got \(0,\); each must have"):
    small(stages=(0,))
