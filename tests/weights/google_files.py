"""The .npz files of Google Research as they are documented.

Names, shapes and forward passes in NumPy, float64, over arrays by those names:
nothing here comes from the rules of the package.
"""

import functools

import jax
import numpy as np
import scipy.special
from flax import traverse_util

from tests.models import numpy_convnet
from vit_jax.weights import adapt, layout, tensors

QUICK = {"xla_backend_optimization_level": 0}  # Compiles in half the time.

# How the layers of a block are numbered: norm, attention, norm, MLP.
BEFORE_LINEN = (
  *("LayerNorm_0", "MultiHeadDotProductAttention_1"),
  *("LayerNorm_2", "MlpBlock_3"),
)
LINEN = (
  *("LayerNorm_0", "MultiHeadDotProductAttention_0"),
  *("LayerNorm_1", "MlpBlock_0"),
)
OFFICIAL_POSEMB = "Transformer/posembed_input/pos_embedding"
SCALE_BIAS = ("scale", "bias")


def vit_shapes(
  *, patch, d, depth, heads, mlp, posemb, layers, channels=3, cls=True, rep=None
):
  """Returns shape by name; `posemb` is a name and a number of rows."""
  norm1, attention, norm2, mlp_block = layers
  shapes = {
    "embedding/kernel": (patch, patch, channels, d),
    "embedding/bias": (d,),
    "Transformer/encoder_norm/scale": (d,),
    "Transformer/encoder_norm/bias": (d,),
  }
  if posemb:
    name, rows = posemb
    shapes[name] = (1, rows, d)
  if cls:
    shapes["cls"] = (1, 1, d)
  if rep:
    shapes |= {"pre_logits/kernel": (d, rep), "pre_logits/bias": (rep,)}
  for i in range(depth):
    block = f"Transformer/encoderblock_{i}"
    shapes |= {
      f"{block}/{norm}/{leaf}": (d,)
      for norm in (norm1, norm2)
      for leaf in ("scale", "bias")
    }
    shapes |= attention_shapes(f"{block}/{attention}", d, heads)
    shapes |= mlp_shapes(f"{block}/{mlp_block}", d, mlp)
  return shapes


def attention_shapes(name, d, heads):
  inner = {
    f"{name}/{part}/{leaf}": shape
    for part in ("query", "key", "value")
    for leaf, shape in {
      "kernel": (d, heads, d // heads),
      "bias": (heads, d // heads),
    }.items()
  }
  out = {"kernel": (heads, d // heads, d), "bias": (d,)}
  return inner | {f"{name}/out/{leaf}": shape for leaf, shape in out.items()}


def mlp_shapes(name, d, mlp):
  return {
    f"{name}/Dense_0/kernel": (d, mlp),
    f"{name}/Dense_0/bias": (mlp,),
    f"{name}/Dense_1/kernel": (mlp, d),
    f"{name}/Dense_1/bias": (d,),
  }


def head_shapes(d, classes):
  return {"head/kernel": (d, classes), "head/bias": (classes,)}


def trunk_shapes(stages):
  """Returns the shapes of the ResNet of a hybrid."""
  shapes = {
    "conv_root/kernel": (7, 7, 3, 64),
    "gn_root/scale": (64,),
    "gn_root/bias": (64,),
  }
  inputs = 64
  for s, units in enumerate(stages, 1):
    n = 64 * 2 ** (s - 1)
    for u in range(1, units + 1):
      unit = f"block{s}/unit{u}"
      shapes |= {
        f"{unit}/conv1/kernel": (1, 1, inputs, n),
        f"{unit}/conv2/kernel": (3, 3, n, n),
        f"{unit}/conv3/kernel": (1, 1, n, 4 * n),
      }
      norms = {"gn1": n, "gn2": n, "gn3": 4 * n}
      if u == 1:
        shapes[f"{unit}/conv_proj/kernel"] = (1, 1, inputs, 4 * n)
        norms["gn_proj"] = 4 * n
      for norm, size in norms.items():
        shapes |= {f"{unit}/{norm}/{leaf}": (size,) for leaf in SCALE_BIAS}
      inputs = 4 * n
  return shapes


def draw(shapes, *, seed=0):
  """Returns float32 arrays where none is zero, one or symmetric."""
  rng = np.random.default_rng(seed)
  return {
    name: rng.normal(0.05, 0.3, shape).astype(np.float32)
    for name, shape in shapes.items()
  }


def write(path, arrays):
  """Writes a file, and not by the package."""
  np.savez(path, **arrays)
  return tensors.open_npz(path)


def load(fmt, opened, **hints):
  """Returns model, flat parameters and card of a file, by the package."""
  assert fmt.recognises(opened, {})
  card = fmt.describe(opened, {}, **hints)
  model = card.build_model()
  shapes = adapt.param_shapes(model, (*card.image_size, card.num_channels))
  rules = fmt.rules(card, shapes, opened.shapes)
  return model, layout.read(opened, rules, shapes), card


def save(fmt, params, card):
  """Returns the arrays of a file of flat parameters."""
  shapes = {path: x.shape for path, x in params.items()}
  return layout.write(params, fmt.rules(card, shapes, {}))


def logits(model, params, image):
  nested = traverse_util.unflatten_dict(params, sep="/")
  return np.asarray(_compiled(model)({"params": nested}, image).logits)


@functools.cache
def _compiled(model):
  return jax.jit(model.apply, compiler_options=QUICK)


# The models in NumPy: one example, one block and one head at a time.


def under(arrays, name):
  """Returns the arrays under a name."""
  return {
    key.removeprefix(f"{name}/"): x
    for key, x in arrays.items()
    if key.startswith(f"{name}/")
  }


def norm(p, x):
  x = x - x.mean(axis=-1, keepdims=True)
  x = x / np.sqrt((x**2).mean(-1, keepdims=True) + 1e-6)
  return x * p["scale"] + p["bias"]


def gelu(x):
  return x * (1 + np.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3))) / 2


def mlp(p, x):
  x = gelu(x @ p["Dense_0/kernel"] + p["Dense_0/bias"])
  return x @ p["Dense_1/kernel"] + p["Dense_1/bias"]


def attention(p, x, context):
  y = np.zeros(x.shape)
  for h, out in enumerate(p["out/kernel"]):
    q, k, v = (
      tokens @ p[f"{part}/kernel"][:, h] + p[f"{part}/bias"][h]
      for part, tokens in (("query", x), ("key", context), ("value", context))
    )
    weights = scipy.special.softmax(q @ k.T / np.sqrt(q.shape[1]), axis=1)
    y += weights @ v @ out
  return y + p["out/bias"]


def sincos2d(h, w, d):
  omega = 10_000 ** (-np.arange(d // 4) / (d // 4 - 1))
  return np.array(
    [
      np.concatenate(
        [f(position * omega) for position in (j, i) for f in (np.sin, np.cos)]
      )
      for i in range(h)
      for j in range(w)
    ]
  )


def patches(arrays, feature_map):
  """Returns the grid of tokens [h, w, D]."""
  kernel, size = arrays["embedding/kernel"], len(arrays["embedding/kernel"])
  windows = numpy_convnet.windows(feature_map, size, size)
  return np.tensordot(windows, kernel, 3) + arrays["embedding/bias"]


def trunk(arrays, image, stages):
  """Returns the feature map of a hybrid."""

  def conv(name):
    return {"kernel": arrays[f"{name}/kernel"]}

  def group_norm(name):
    return {leaf: arrays[f"{name}/{leaf}"].reshape(-1) for leaf in SCALE_BIAS}

  p = {"root": {"conv": conv("conv_root"), "norm": group_norm("gn_root")}}
  for s, units in enumerate(stages, 1):
    p[f"stage{s}"] = {}
    for u in range(1, units + 1):
      name = f"block{s}/unit{u}"
      unit = {f"conv{i}": conv(f"{name}/conv{i}") for i in (1, 2, 3)}
      unit |= {f"norm{i}": group_norm(f"{name}/gn{i}") for i in (1, 2, 3)}
      if u == 1:
        unit["conv_shortcut"] = conv(f"{name}/conv_proj")
        unit["norm_shortcut"] = group_norm(f"{name}/gn_proj")
      p[f"stage{s}"][f"unit{u}"] = unit
  return numpy_convnet.resnet(p, image, stages=stages)


def forward(arrays, image, *, layers, stages=None):
  """Returns the logits of a ViT or hybrid for each image.

  Positions that have a row for the class token are added after it, others
  before; there are fixed ones where there are none.
  """
  arrays = {name: np.asarray(x, np.float64) for name, x in arrays.items()}
  return np.stack([_forward(arrays, one, layers, stages) for one in image])


def _forward(a, image, layers, stages):
  norm1, attention1, norm2, mlp1 = layers
  x = patches(a, image if stages is None else trunk(a, image, stages))
  h, w, d = x.shape
  x = x.reshape(h * w, d)
  cls = a.get("cls", np.zeros((1, 0, d)))[0]
  if OFFICIAL_POSEMB in a:
    x = np.concatenate([cls, x]) + a[OFFICIAL_POSEMB][0]
  elif "pos_embedding" in a:
    x = np.concatenate([cls, x + a["pos_embedding"][0]])
  else:
    x = np.concatenate([cls, x + sincos2d(h, w, d)])
  depth = len({n.split("/")[1] for n in a if "/encoderblock_" in n})
  for i in range(depth):
    p = under(a, f"Transformer/encoderblock_{i}")
    y = norm(under(p, norm1), x)
    x = x + attention(under(p, attention1), y, y)
    x = x + mlp(under(p, mlp1), norm(under(p, norm2), x))
  x = norm(under(a, "Transformer/encoder_norm"), x)
  if p := under(a, "MAPHead_0"):
    attended = under(p, "MultiHeadDotProductAttention_0")
    x = attention(attended, p["probe"][0], x)
    x = (x + mlp(under(p, "MlpBlock_0"), norm(under(p, "LayerNorm_0"), x)))[0]
  else:
    x = x[0] if "cls" in a else x.mean(axis=0)
  if "pre_logits/kernel" in a:
    x = np.tanh(x @ a["pre_logits/kernel"] + a["pre_logits/bias"])
  return x @ a["head/kernel"] + a["head/bias"]
