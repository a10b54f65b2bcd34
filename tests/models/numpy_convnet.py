"""Convolutional networks in NumPy, in float64, one image [h, w, C] at a time.

An implementation of its own, to compare with: no convolution but a product of
each window with the kernel.
"""

import numpy as np


def same(size, window, stride):
  """Returns the padding (before, after) that makes ceil(size / stride)."""
  total = max((-(-size // stride) - 1) * stride + window - size, 0)
  return total // 2, total - total // 2


def windows(x, window, stride):
  """Returns [h, w, window, window, C], the windows of a padded [H, W, C]."""
  rows, columns = (range(0, n - window + 1, stride) for n in x.shape[:2])
  return np.array(
    [[x[i : i + window, j : j + window] for j in columns] for i in rows]
  )


def conv(x, kernel, *, stride, padding):
  x = np.pad(x, (*padding, (0, 0)))
  return np.tensordot(windows(x, len(kernel), stride), kernel, 3)


def group_norm(p, x, epsilon):
  groups = x.reshape(-1, 32, x.shape[-1] // 32)
  groups = groups - groups.mean(axis=(0, 2), keepdims=True)
  variance = (groups**2).mean(axis=(0, 2), keepdims=True)
  normed = (groups / np.sqrt(variance + epsilon)).reshape(x.shape)
  return normed * p["scale"] + p["bias"]


def relu(x):
  return np.maximum(x, 0)


def resnet(p, image, *, stages, epsilon=1e-6):
  """Returns the map of a post-activation trunk with parameters `p`."""

  def std_conv(p, x, stride=1):
    w = p["kernel"]
    w = (w - w.mean((0, 1, 2))) / (w.std((0, 1, 2)) + 1e-5)
    padding = [same(n, len(w), stride) for n in x.shape[:2]]
    return conv(x, w, stride=stride, padding=padding)

  x = std_conv(p["root"]["conv"], image, 2)
  x = relu(group_norm(p["root"]["norm"], x, epsilon))
  padding = [same(n, 3, 2) for n in x.shape[:2]]
  x = np.pad(x, (*padding, (0, 0)), constant_values=-np.inf)
  x = windows(x, 3, 2).max(axis=(2, 3))
  for s, u in [(s, u) for s, n in enumerate(stages) for u in range(n)]:
    unit = p[f"stage{s + 1}"][f"unit{u + 1}"]
    stride = 2 if s > 0 and u == 0 else 1
    y = std_conv(unit["conv1"], x)
    y = relu(group_norm(unit["norm1"], y, epsilon))
    y = std_conv(unit["conv2"], y, stride)
    y = relu(group_norm(unit["norm2"], y, epsilon))
    y = group_norm(unit["norm3"], std_conv(unit["conv3"], y), epsilon)
    if u == 0:
      x = std_conv(unit["conv_shortcut"], x, stride)
      x = group_norm(unit["norm_shortcut"], x, epsilon)
    x = relu(x + y)
  return x


def bit(p, image, *, stages, epsilon=1e-5):
  """Returns the map of a pre-activation trunk with parameters `p`."""

  def std_conv(p, x, stride=1):
    w = p["kernel"]
    w = (w - w.mean((0, 1, 2))) / np.sqrt(w.var((0, 1, 2)) + 1e-10)
    pad = len(w) // 2
    return conv(x, w, stride=stride, padding=[(pad, pad)] * 2)

  x = std_conv(p["root"]["conv"], image, 2)
  x = windows(np.pad(x, ((1, 1), (1, 1), (0, 0))), 3, 2).max(axis=(2, 3))
  for s, u in [(s, u) for s, n in enumerate(stages) for u in range(n)]:
    unit = p[f"stage{s + 1}"][f"unit{u + 1}"]
    stride = 2 if s > 0 and u == 0 else 1
    y = relu(group_norm(unit["norm1"], x, epsilon))
    if u == 0:
      x = std_conv(unit["conv_shortcut"], y, stride)
    y = std_conv(unit["conv1"], y)
    y = relu(group_norm(unit["norm2"], y, epsilon))
    y = std_conv(unit["conv2"], y, stride)
    y = relu(group_norm(unit["norm3"], y, epsilon))
    x = x + std_conv(unit["conv3"], y)
  return relu(group_norm(p["norm"], x, epsilon))
