"""AxialResNet against an independent NumPy forward pass, and its own laws."""

import functools

import jax
import numpy as np
import pytest
import scipy.special

from vit_jax.models import axial_resnet, resnet

# Maps of 6 x 3 cells in stage 1, and 3 x 2 in stage 2.
IMAGE = np.random.default_rng(7).normal(size=(2, 23, 12, 2)).astype(np.float32)
STAGES = (1, 1)

QUICK = {"xla_backend_optimization_level": 0}  # Compiles in half the time.


def random_params(module, x=IMAGE):
  """Parameters where no leaf is zero, one or symmetric."""
  shapes = jax.eval_shape(module.init, jax.random.key(0), x)["params"]
  rng = np.random.default_rng(0)
  return jax.tree.map(
    lambda x: rng.normal(0.1, 0.4, x.shape).astype(np.float32), shapes
  )


# The NumPy model: float64, one example, and one cell or line at a time.


def np_norm(p, x):
  """Returns [..., C], normed over all but the 32 groups of channels."""
  groups = x.reshape(-1, 32, x.shape[-1] // 32)
  mean = groups.mean(axis=(0, 2), keepdims=True)
  variance = groups.var(axis=(0, 2), keepdims=True)
  normed = ((groups - mean) / np.sqrt(variance + 1e-4)).reshape(x.shape)
  return normed * p["scale"] + p["bias"]


def np_conv(p, x, stride=1):
  """Returns a standardised convolution; the larger padding comes last."""
  kernel = p["kernel"] - p["kernel"].mean(axis=(0, 1, 2))
  kernel = kernel / (kernel.std(axis=(0, 1, 2)) + 1e-5)
  return np_windows(
    x, len(kernel), stride, 0.0, lambda w: np.einsum("yxc,yxcd->d", w, kernel)
  )


def np_windows(x, size, stride, fill, f):
  """Returns f of each window of size x size cells, as padding SAME says."""
  cells = [-(-n // stride) for n in x.shape[:2]]
  total = [
    max((c - 1) * stride + size - n, 0) for c, n in zip(cells, x.shape[:2])
  ]
  pad = [(n // 2, n - n // 2) for n in total]
  x = np.pad(x, (*pad, (0, 0)), constant_values=fill)
  rows = [
    [
      f(x[i * stride : i * stride + size, j * stride : j * stride + size])
      for j in range(cells[1])
    ]
    for i in range(cells[0])
  ]
  return np.array(rows)


def np_attention(p, line):
  """Returns Equation 4 of Axial-DeepLab for a line [T, n]."""
  t, n = line.shape
  d = n // 8
  qkv = np_norm(p["norm_qkv"], line @ p["qkv"]["kernel"]).reshape(t, 8, 2 * d)
  y = np.zeros((t, 8, d))
  for head in range(8):
    q, k, v = np.split(qkv[:, head], [d // 2, d], axis=1)
    for o in range(t):
      r = np.stack([p["relative_posemb"][i - o + t - 1] for i in range(t)])
      r_q, r_k, r_v = np.split(r, [d // 2, d], axis=1)
      logits = [q[o] @ k[i] + q[o] @ r_q[i] + k[i] @ r_k[i] for i in range(t)]
      y[o, head] = scipy.special.softmax(logits) @ (v + r_v)
  return np_norm(p["norm_out"], y.reshape(t, n))


def np_unit(p, x, stride):
  y = np.maximum(np_norm(p["norm1"], np_conv(p["conv1"], x)), 0)
  columns = [np_attention(p["height"], y[:, j]) for j in range(y.shape[1])]
  y = np.stack(columns, axis=1)
  y = np.stack([np_attention(p["width"], row) for row in y])
  if stride == 2:
    y = np_windows(y, 2, 2, np.nan, lambda w: np.nanmean(w, axis=(0, 1)))
  y = np_norm(p["norm3"], np_conv(p["conv3"], np.maximum(y, 0)))
  if "conv_shortcut" in p:
    x = np_norm(p["norm_shortcut"], np_conv(p["conv_shortcut"], x, stride))
  return np.maximum(x + y, 0)


def np_axial_resnet(params, image):
  """Returns logits, representation and tokens of one image."""
  p = jax.tree.map(np.float64, params)
  root = p["trunk"]["root"]
  x = np.maximum(np_norm(root["norm"], np_conv(root["conv"], image, 2)), 0)
  x = np_windows(x, 3, 2, -np.inf, lambda w: w.max(axis=(0, 1)))
  for s, num_units in enumerate(STAGES, 1):
    for u in range(1, num_units + 1):
      stride = 2 if s > 1 and u == 1 else 1
      x = np_unit(p["trunk"][f"stage{s}"][f"unit{u}"], x, stride)
  tokens = x.reshape(-1, x.shape[-1])
  pooled = tokens.mean(axis=0)
  return pooled @ p["head"]["kernel"] + p["head"]["bias"], pooled, tokens


def test_forward_equals_numpy():
  model = axial_resnet.AxialResNet(num_classes=5, stages=STAGES)
  params = random_params(model)
  out = jax.jit(model.apply, compiler_options=QUICK)({"params": params}, IMAGE)
  assert out.tokens.shape == (2, 3 * 2, 512)
  for i, image in enumerate(IMAGE):
    expected = np_axial_resnet(params, image)
    for actual, wanted in zip(out, expected, strict=True):
      # f32 through 2 units with weights up to 1.5, sums over 512 channels.
      np.testing.assert_allclose(actual[i], wanted, atol=1e-4)


@functools.cache
def line_attention():
  """Returns a function of parameters and lines, lines, and parameters."""
  module = axial_resnet.LineAttention(norm_epsilon=1e-4)
  x = np.random.default_rng(0).normal(size=(3, 5, 32)).astype(np.float32)
  params = random_params(module, x)
  apply = jax.jit(module.apply, compiler_options=QUICK)
  return lambda p, x: apply({"params": p}, x), params, x


def test_a_change_reaches_all_of_its_line_and_no_other_line():
  f, params, x = line_attention()
  changed = x.copy()
  changed[1, 3, 0] += 1.0
  difference = np.abs(f(params, changed) - f(params, x)).max(axis=-1)
  np.testing.assert_array_equal(difference[[0, 2]], np.zeros((2, 5)))
  assert difference[1].min() > 1e-3


def test_a_reversed_line_with_reversed_offsets_gives_the_reversed_result():
  f, params, x = line_attention()
  y = f(params, x)
  backwards = f(params, x[:, ::-1])[:, ::-1]
  assert np.abs(backwards - y).max() > 0.1
  table = params["relative_posemb"]
  backwards = f(params | {"relative_posemb": table[::-1]}, x[:, ::-1])[:, ::-1]
  np.testing.assert_allclose(backwards, y, atol=1e-5)  # f32, another order


def test_count_is_that_of_resnet_50_with_attention_for_its_3x3_convolutions():
  # ResNet-50 has 25,557,032 parameters, of which 9 n^2 + 2 n in each conv2
  # and its norm. Of maps of 56 to 7 cells a unit has two attentions instead.
  count = 25_557_032
  units = [(64, 56)] * 3 + [(128, 56)] + [(128, 28)] * 3 + [(256, 28)]
  units += [(256, 14)] * 5 + [(512, 14)] + [(512, 7)] * 2
  for n, t in units:
    attention = 2 * n**2 + 2 * (2 * n) + 2 * n + (2 * t - 1) * 2 * (n // 8)
    count += 2 * attention - (9 * n**2 + 2 * n)
  assert count == 19_373_640
  model = axial_resnet.AxialResNet(**resnet.sizes("R50"), num_classes=1000)
  image = jax.ShapeDtypeStruct((1, 224, 224, 3), np.float32)
  params = jax.eval_shape(model.init, jax.random.key(0), image)["params"]
  assert sum(x.size for x in jax.tree.leaves(params)) == count


def test_initial_deviations_are_those_of_scenic():
  module = axial_resnet.LineAttention(norm_epsilon=1e-4)
  params = jax.jit(module.init, compiler_options=QUICK)(
    jax.random.key(0), np.zeros((1, 9, 64), np.float32)
  )["params"]
  # 272 draws, the fewest here, estimate a deviation to 4 % (1 sigma).
  np.testing.assert_allclose(params["qkv"]["kernel"].std(), 1 / 64, rtol=0.05)
  np.testing.assert_allclose(params["relative_posemb"].std(), 1 / 8, rtol=0.15)


@pytest.mark.parametrize(
  ("size", "match"),
  [
    ((47, 12), "image: got a size that .* map of height 12; .* trained on 6."),
    ((23, 20), "image: got a size that .* map of width 5; .* trained on 3."),
  ],
)
def test_image_of_another_size_is_refused(size, match):
  model = axial_resnet.AxialResNet(num_classes=5, stages=STAGES)
  params = random_params(model)
  image = jax.ShapeDtypeStruct((1, *size, 2), np.float32)
  with pytest.raises(ValueError, match=match):
    jax.eval_shape(model.apply, {"params": params}, image)
