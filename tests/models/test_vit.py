"""ViT against an independent NumPy forward pass, and its own laws."""

import operator
import os
import re
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.special

from vit_jax.models import vit

# A rectangular image (12 x 6) of rectangular patches (4 x 3): a 3 x 2 grid.
SMALL = {
  "num_classes": 5,
  "width": 12,
  "depth": 3,
  "num_heads": 3,
  "mlp_dim": 20,
  "patch_size": (4, 3),
}
IMAGE = np.random.default_rng(7).normal(size=(2, 12, 6, 3)).astype(np.float32)

QUICK = {"xla_backend_optimization_level": 0}  # Compiles in half the time.


def small(**fields):
  return vit.ViT(**(SMALL | fields))


def random_params(model, *, seed=0):
  """Parameters where no leaf is zero, one or symmetric."""
  shapes = jax.eval_shape(model.init, jax.random.key(0), IMAGE)["params"]
  rng = np.random.default_rng(seed)
  return jax.tree.map(
    lambda x: rng.normal(0.1, 0.4, x.shape).astype(np.float32), shapes
  )


def apply(model, params, image):
  f = jax.jit(model.apply, compiler_options=QUICK)
  return f({"params": params}, image)


def paths(tree):
  return {
    jax.tree_util.keystr(path, simple=True, separator="/"): leaf
    for path, leaf in jax.tree_util.tree_leaves_with_path(tree)
  }


# The NumPy model: float64, one example, one block and one head at a time.


def np_norm(p, x, epsilon):
  x = x - x.mean(axis=-1, keepdims=True)
  x = x / np.sqrt((x**2).mean(-1, keepdims=True) + epsilon)
  return x * p["scale"] + p["bias"]


def np_gelu(x, kind):
  if kind == "gelu_erf":
    return x * (1 + scipy.special.erf(x / np.sqrt(2))) / 2
  return x * (1 + np.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3))) / 2


def np_dense(p, x):
  return x @ p["kernel"] + p["bias"]


def np_mlp(p, x, kind):
  y = np_dense(p["fc1"], x)
  if kind == "swiglu":
    gate = np_dense(p["gate"], x)
    return np_dense(p["fc2"], gate / (1 + np.exp(-gate)) * y)
  return np_dense(p["fc2"], np_gelu(y, kind))


def np_attention(p, x, context, epsilon):
  y = np.zeros(x.shape)
  for h in range(p["out"]["kernel"].shape[0]):
    q = x @ p["query"]["kernel"][:, h] + p["query"]["bias"][h]
    k = context @ p["key"]["kernel"][:, h] + p["key"]["bias"][h]
    v = context @ p["value"]["kernel"][:, h] + p["value"]["bias"][h]
    if "query_norm" in p:
      q = np_norm(p["query_norm"], q, epsilon)
      k = np_norm(p["key_norm"], k, epsilon)
    logits = q @ k.T
    if "relative_posemb" in p:
      for i, j in np.ndindex(*logits.shape):
        logits[i, j] += q[i] @ p["relative_posemb"][j - i + len(q) - 1]
    weights = scipy.special.softmax(logits / np.sqrt(q.shape[1]), axis=1)
    y += weights @ v @ p["out"]["kernel"][h]
  return y + p["out"]["bias"]


def np_positions(p, grid):
  """Returns [1 + N, D]: for the class token, then for each patch."""
  positions = [p.get("cls_posemb", np.zeros((1, 1, SMALL["width"])))[0, 0]]
  for n, (row, column) in enumerate(np.ndindex(*grid)):
    if "posemb_rows" in p:
      x, y = p["posemb_columns"][0, column], p["posemb_rows"][0, row]
      positions.append(np.concatenate([x, y]))
    elif "posemb" in p:
      positions.append(p["posemb"][0, n])
    else:
      positions.append(np.zeros(SMALL["width"]))
  return np.stack(positions)


def np_vit(model, params, image):
  """Returns logits, representation and tokens of one image."""
  p, eps = jax.tree.map(np.float64, params), model.norm_epsilon
  (ph, pw), x = model.patch_size, []
  for top in range(0, image.shape[0], ph):
    for left in range(0, image.shape[1], pw):
      patch = image[top : top + ph, left : left + pw]
      x.append(np.einsum("hwc,hwcd->d", patch, p["patch_embed"]["kernel"]))
  x = np.stack(x) + p["patch_embed"]["bias"]
  grid = image.shape[0] // ph, image.shape[1] // pw
  num_prefix = sum(p[k].shape[1] for k in ("cls", "registers") if k in p)
  for name in ("registers", "cls"):
    x = np.concatenate([p[name][0], x]) if name in p else x

  def add_positions(p, x):
    positions = np_positions(p, grid)
    x = x.copy()
    x[num_prefix:] += positions[1:]
    x[:1] += positions[0] if "cls_posemb" in p else 0.0
    return x

  shared = model.posemb_at == "every_layer_shared"
  x = x if shared else add_positions(p, x)
  for i in range(model.depth):
    b = jax.tree.map(operator.itemgetter(i), p["encoder"]["blocks"])
    x = add_positions(p if shared else b, x)
    y = np_norm(b["norm1"], x, eps)
    x = x + b.get("layer_scale1", 1.0) * np_attention(b["attention"], y, y, eps)
    y = np_mlp(b["mlp"], np_norm(b["norm2"], x, eps), model.activation)
    x = x + b.get("layer_scale2", 1.0) * y
  normed = np_norm(p["encoder"]["norm"], x, eps)
  tokens = normed[num_prefix:]
  if model.pool == "cls":
    pooled = normed[0]
  elif model.pool == "map":
    m = p["map_head"]
    y = np_attention(m["attention"], m["probe"][0], tokens, eps)
    z = np_mlp(m["mlp"], np_norm(m["norm"], y, eps), model.activation)
    pooled = (y + z)[0]
  elif model.pool == "cls_gap":
    pooled = np.concatenate([normed[0], tokens.mean(axis=0)])
  elif model.norm_after_pool:
    pooled = np_norm(p["encoder"]["norm"], x[num_prefix:].mean(axis=0), eps)
  else:
    pooled = tokens.mean(axis=0)
  if model.representation_size:
    pooled = np.tanh(np_dense(p["representation"], pooled))
  return np_dense(p["head"], pooled), pooled, tokens


@pytest.mark.parametrize(
  "fields",
  [
    {"pool": "cls", "representation_size": 4},
    {"cls_posemb": False, "num_registers": 2, "activation": "gelu_erf"},
    {"pool": "gap", "layer_scale": 0.1, "num_registers": 2},
    {"pool": "gap", "norm_after_pool": True, "posemb": "none"},
    {"pool": "map", "num_registers": 1, "representation_size": 20},
    {"pool": "cls_gap", "activation": "swiglu", "norm_epsilon": 0.1},
    {"posemb": "relative", "qk_norm": True, "num_registers": 1},
    {"posemb": "learned_2d"},
    {"posemb_at": "every_layer", "num_registers": 1},
    {"posemb_at": "every_layer", "posemb": "learned_2d", "pool": "gap"},
    {"posemb_at": "every_layer_shared", "num_registers": 1},
  ],
  ids=lambda fields: "-".join(f"{k}={v}" for k, v in fields.items()),
)
def test_forward_equals_numpy(fields):
  model = small(**fields)
  params = random_params(model)
  out = apply(model, params, IMAGE)
  for i, image in enumerate(IMAGE):
    logits, representation, tokens = np_vit(model, params, image)
    # f32 through 3 blocks of weights up to 1.5.
    np.testing.assert_allclose(out.logits[i], logits, atol=2e-5)
    np.testing.assert_allclose(out.representation[i], representation, atol=2e-5)
    np.testing.assert_allclose(out.tokens[i], tokens, atol=2e-5)


def permute_patches(image, order):
  """Moves the six 4 x 3 patches of each image."""
  x = image.reshape(-1, 3, 4, 2, 3, 3).transpose(0, 1, 3, 2, 4, 5)
  x = x.reshape(-1, 6, 4, 3, 3)[:, order].reshape(-1, 3, 2, 4, 3, 3)
  return x.transpose(0, 1, 3, 2, 4, 5).reshape(image.shape)


@pytest.mark.parametrize("posemb", ["none", "learned", "sincos2d"])
def test_only_gap_without_posemb_ignores_patch_order(posemb):
  model = small(pool="gap", posemb=posemb)
  params = random_params(model)
  moved = permute_patches(IMAGE, [3, 1, 5, 0, 2, 4])
  difference = np.abs(
    apply(model, params, IMAGE).logits - apply(model, params, moved).logits
  ).max()
  assert (difference < 2e-5) == (posemb == "none")


def test_parameter_paths_are_the_documented_ones():
  model = small(
    pool="cls", representation_size=4, num_registers=2, layer_scale=0.1
  )
  shapes = jax.eval_shape(model.init, jax.random.key(0), IMAGE)["params"]
  block = {
    "attention/query/kernel": (12, 3, 4),
    "attention/query/bias": (3, 4),
    "attention/key/kernel": (12, 3, 4),
    "attention/key/bias": (3, 4),
    "attention/value/kernel": (12, 3, 4),
    "attention/value/bias": (3, 4),
    "attention/out/kernel": (3, 4, 12),
    "attention/out/bias": (12,),
    "mlp/fc1/kernel": (12, 20),
    "mlp/fc1/bias": (20,),
    "mlp/fc2/kernel": (20, 12),
    "mlp/fc2/bias": (12,),
    "norm1/scale": (12,),
    "norm1/bias": (12,),
    "norm2/scale": (12,),
    "norm2/bias": (12,),
    "layer_scale1": (12,),
    "layer_scale2": (12,),
  }
  assert {k: x.shape for k, x in paths(shapes).items()} == {
    "patch_embed/kernel": (4, 3, 3, 12),
    "patch_embed/bias": (12,),
    "cls": (1, 1, 12),
    "cls_posemb": (1, 1, 12),
    "posemb": (1, 6, 12),
    "registers": (1, 2, 12),
    **{f"encoder/blocks/{k}": (3, *v) for k, v in block.items()},
    "encoder/norm/scale": (12,),
    "encoder/norm/bias": (12,),
    "representation/kernel": (12, 4),
    "representation/bias": (4,),
    "head/kernel": (4, 5),
    "head/bias": (5,),
  }


def test_map_and_gap_have_no_class_token():
  for pool in ("map", "gap"):
    model = small(pool=pool)
    params = jax.eval_shape(model.init, jax.random.key(0), IMAGE)["params"]
    assert "cls" not in params and "cls_posemb" not in params
    assert ("map_head" in params) == (pool == "map")


def test_initial_values_are_the_published_ones():
  model = small(
    depth=2,
    width=192,
    mlp_dim=256,
    num_registers=4,
    layer_scale=1e-4,
    head_bias_init=-10.0,
    patch_size=(2, 2),
  )
  init = jax.jit(model.init, compiler_options=QUICK)
  params = init(jax.random.key(0), IMAGE)["params"]
  leaves = paths(params)
  blocks = "encoder/blocks"
  for path in ("cls", "patch_embed/bias", "head/kernel"):
    assert not leaves[path].any(), path
  for path, value in {
    "head/bias": -10.0,
    "encoder/norm/scale": 1.0,
    f"{blocks}/layer_scale1": 1e-4,
    f"{blocks}/layer_scale2": 1e-4,
  }.items():
    np.testing.assert_allclose(leaves[path], value, rtol=1e-6, err_msg=path)
  for path, std in {
    "posemb": 0.02,
    "cls_posemb": 0.02,
    "registers": 1e-6,
    "patch_embed/kernel": (2 * 2 * 3) ** -0.5,
    f"{blocks}/attention/query/kernel": (2 / (192 + 192)) ** 0.5,
    f"{blocks}/mlp/fc1/kernel": (2 / (192 + 256)) ** 0.5,
    f"{blocks}/mlp/fc1/bias": 1e-6,
  }.items():
    # 192 draws, the fewest here, estimate a deviation to 5 % (1 sigma).
    np.testing.assert_allclose(leaves[path].std(), std, rtol=0.15, err_msg=path)
  kernel = leaves[f"{blocks}/mlp/fc1/kernel"]
  assert not np.allclose(kernel[0], kernel[1])  # Each block draws its own.
  out = apply(model, params, IMAGE)
  np.testing.assert_array_equal(out.logits, np.full((2, 5), -10.0))


def test_scan_unroll_changes_neither_parameters_nor_result():
  model, unrolled = small(), small(scan_unroll=3)
  shapes, other = (
    jax.eval_shape(m.init, jax.random.key(0), IMAGE) for m in (model, unrolled)
  )
  assert shapes == other
  params = random_params(model)
  np.testing.assert_allclose(
    apply(model, params, IMAGE).logits,
    apply(unrolled, params, IMAGE).logits,
    atol=1e-5,  # f32, other fusions
  )


def test_bfloat16_never_exponentiates_or_averages_in_bfloat16():
  model = small(dtype="bfloat16", pool="map")
  params = random_params(model)
  text = jax.jit(model.apply).lower({"params": params}, IMAGE).as_text()
  # Operands are bfloat16 everywhere but in the head.
  dots = re.findall(r"dot_general.* : \(tensor<[\dx]+(\w+)>", text)
  assert (dots.count("f32"), set(dots)) == (1, {"f32", "bf16"})
  assert re.search(r"stablehlo.exponential.*xf32>", text)
  assert not re.search(r"stablehlo.(exponential|rsqrt|reduce).*xbf16>", text)


def test_sizes_are_the_published_ones():
  assert vit.sizes("H/14") == {
    "patch_size": (14, 14),
    "width": 1280,
    "depth": 32,
    "mlp_dim": 5120,
    "num_heads": 16,
  }
  assert vit.sizes("g-opt/16x8")["patch_size"] == (16, 8)
  assert vit.sizes("g/14")["depth"] == 40
  assert vit.sizes("G/14")["depth"] == 48


@pytest.mark.parametrize(
  ("variant", "hint"),
  [
    ("b/16", "Did you mean 'B/16'"),
    ("ViT-B/32", "must be NAME/PATCH or NAME/HEIGHTxWIDTH"),
    ("So400/14", "Did you mean 'So400m/14'"),
    ("L", "Did you mean 'L/16'"),
    ("L/0", "must be NAME/PATCH"),
    ("L/16x", "must be NAME/PATCH"),
  ],
)
def test_unknown_variant_lists_the_known_and_the_closest(variant, hint):
  with pytest.raises(ValueError, match=re.escape(hint)) as error:
    vit.sizes(variant)
  assert f"variant: got {variant!r}" in str(error.value)
  assert "'mu', 'Ti', 'S'" in str(error.value)


@pytest.mark.parametrize(
  ("fields", "message"),
  [
    ({"width": 0}, "width: got 0; must be at least 1"),
    ({"num_classes": -1}, "num_classes: got -1; must be at least 0"),
    ({"dropout": 1.0}, r"dropout: got 1.0; must be in \[0, 1\)"),
    ({"pool": "tok"}, r"pool: got 'tok'; must be one of \['cls', 'gap'"),
    ({"posemb": "learnt"}, "Did you mean 'learned'"),
    ({"activation": "gelu"}, "activation: got 'gelu'.* 'gelu_erf'"),
    ({"posemb_at": "all"}, "posemb_at: got 'all'; must be one of"),
    ({"posemb": "none", "posemb_at": "every_layer"}, "adds nothing to the"),
    ({"width": 9, "num_heads": 3, "posemb": "learned_2d"}, "multiple of 2"),
    ({"norm_epsilon": 0.0}, r"norm_epsilon: got 0.0; must be > 0"),
    ({"dtype": "bf16"}, "Did you mean 'bfloat16'"),
    ({"patch_size": (16,)}, r"patch_size: got \(16,\); must be \(height"),
    ({"num_heads": 5}, r"num_heads: got 5; must divide width 12. Use one of"),
    ({"width": 9, "posemb": "sincos2d"}, "sincos2d.* with width 9; needs"),
    ({"norm_after_pool": True}, "norm_after_pool: got True with pool 'cls'"),
    ({"representation_size": 0}, "representation_size: got 0; must be at"),
  ],
  ids=str,
)
def test_fields_that_make_no_model_are_named(fields, message):
  with pytest.raises(ValueError, match=message):
    small(**fields)


def test_all_wrong_fields_are_named_at_once():
  with pytest.raises(ValueError, match=r"depth: got 0.*\n.*pool: got 'max'"):
    small(depth=0, pool="max")


@pytest.mark.parametrize(
  ("posemb", "match"),
  [
    ("learned", "a grid of 6x2 patches, which needs 12 .* trained on 6"),
    ("learned_2d", "posemb_rows: got a grid of 6x2 patches, .* trained on 3"),
    ("relative", "posemb: got 13 tokens; .* trained on 7"),
  ],
)
def test_image_of_another_grid_is_refused(posemb, match):
  model = small(posemb=posemb)
  params = random_params(model)
  with pytest.raises(ValueError, match=match):
    model.apply({"params": params}, jnp.zeros((1, 24, 6, 3)))


def test_import_is_light_and_touches_no_device():
  code = (
    "import sys, vit_jax.models.vit; print([m for m in ('tensorflow', "
    "'tensorflow_datasets', 'orbax', 'cv2', 'matplotlib', 'grain') "
    "if m in sys.modules])"
  )
  env = os.environ | {"JAX_PLATFORMS": "nowhere"}  # Using it would raise.
  out = subprocess.check_output([sys.executable, "-c", code], env=env)
  assert out.decode().strip() == "[]"
