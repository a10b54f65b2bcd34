"""Attention against NumPy, and the laws it obeys."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from vit_jax.models import attention

D, HEADS = 12, 3


def apply(module, variables, x, context) -> Any:
  return module.apply(variables, x, context, train=False)


def random_params(module, *args, seed=0):
  """Parameters where no leaf is zero, one or symmetric."""
  shapes = jax.eval_shape(
    lambda: module.init(jax.random.key(0), *args, train=False)
  )
  rng = np.random.default_rng(seed)
  return jax.tree.map(
    lambda x: rng.normal(0.1, 0.5, x.shape).astype(np.float32), shapes
  )


def tokens(n, *, seed, d=D):
  return np.random.default_rng(seed).normal(size=(2, n, d)).astype(np.float32)


def numpy_attention(params, x, context):
  """Equations 5 to 7, one example and one head at a time."""
  out = np.zeros(x.shape)
  for b in range(len(x)):
    for h in range(params["query"]["kernel"].shape[1]):
      q, k, v = (
        y @ params[name]["kernel"][:, h] + params[name]["bias"][h]
        for name, y in (
          ("query", x[b]),
          ("key", context[b]),
          ("value", context[b]),
        )
      )
      weights = np.exp(q @ k.T / np.sqrt(q.shape[-1]))
      weights /= weights.sum(axis=1, keepdims=True)
      out[b] += weights @ v @ params["out"]["kernel"][h]
  return out + params["out"]["bias"].reshape(1, 1, -1)


def test_attention_equals_numpy():
  module = attention.Attention(num_heads=HEADS)
  x, context = tokens(4, seed=1), tokens(5, seed=2)
  variables = random_params(module, x, context)
  y = apply(module, variables, x, context)
  expected = numpy_attention(variables["params"], x, context)
  np.testing.assert_allclose(y, expected, atol=2e-5)  # f32, values up to 10


def test_order_of_the_context_does_not_matter():
  module = attention.Attention(num_heads=HEADS)
  x, context = tokens(4, seed=1), tokens(5, seed=2)
  variables = random_params(module, x, context)
  y = apply(module, variables, x, context)
  z = apply(module, variables, x, context[:, ::-1])
  np.testing.assert_allclose(y, z, atol=1e-5)  # f32, another order of sums


def test_query_kernel_is_xavier_over_the_width_not_the_head():
  module = attention.Attention(num_heads=3)
  x = jnp.zeros((1, 2, 192))
  params: Any = module.init(jax.random.key(0), x, x, train=False)["params"]
  for name in ("query", "key", "value", "out"):
    kernel = params[name]["kernel"]
    # sqrt(2 / (192 + 192)) = 0.0722; over the head size it would be 0.0884.
    np.testing.assert_allclose(kernel.std(), 0.0722, rtol=0.02)
    assert not params[name]["bias"].any()


def test_dropout_drops_attention_weights_and_keeps_their_mean():
  module = attention.Attention(num_heads=1, dropout=0.5)
  x = jnp.ones((1, 4096, 1))
  one, zero = jnp.ones((1, 1, 1)), jnp.zeros((1, 1))
  params = {
    "query": {"kernel": 0 * one, "bias": zero},
    "key": {"kernel": 0 * one, "bias": zero},
    "value": {"kernel": one, "bias": zero},
    "out": {"kernel": one, "bias": zero[0]},
  }
  y = module.apply(
    {"params": params},
    x,
    x[:, :4],
    train=True,
    rngs={"dropout": jax.random.key(0)},
  )
  # Of 4 weights of 1/4, k stay and count double: 0, 0.5, 1, 1.5 or 2.
  values, counts = np.unique(np.asarray(y), return_counts=True)
  np.testing.assert_array_equal(values, [0, 0.5, 1, 1.5, 2])
  np.testing.assert_allclose(  # 4 sigma of 4096 draws is 0.031
    counts / 4096, np.array([1, 4, 6, 4, 1]) / 16, atol=0.031
  )


def test_softmax_is_float32_when_computing_in_bfloat16():
  module = attention.Attention(num_heads=HEADS, dtype="bfloat16")
  x = tokens(4, seed=1)
  variables = random_params(module, x, x)
  jaxpr = jax.make_jaxpr(lambda x: apply(module, variables, x, x))(x)
  exps = [e for e in jaxpr.eqns if e.primitive.name == "exp"]
  assert [e.outvars[0].aval.dtype for e in exps] == [jnp.float32]
  assert apply(module, variables, x, x).dtype == jnp.bfloat16
