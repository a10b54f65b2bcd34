"""The update rule against an independent NumPy one; schedules by the number."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from vit_jax import optim

L = 3
SCHEDULES = [optim.constant, optim.linear, optim.cosine, optim.rsqrt]
DECAYING = [optim.linear, optim.cosine, optim.rsqrt]
# Names and ranks as in a model; the leaves under blocks are stacked.
SHAPES = {
  "cls": (1, 1, 4),
  "cls_posemb": (1, 1, 4),
  "encoder/blocks/attention/query/bias": (L, 2, 2),
  "encoder/blocks/attention/query/kernel": (L, 4, 2, 2),
  "encoder/blocks/norm1/scale": (L, 4),
  "encoder/blocks/scale1": (L, 4),
  "encoder/norm/scale": (4,),
  "head/bias": (3,),
  "head/kernel": (4, 3),
  "map_head/probe": (1, 1, 4),
  "patch_embed/kernel": (2, 2, 3, 4),
  "posemb": (1, 6, 4),
  "registers": (1, 2, 4),
}


def _tree(seed, scale=1.0):
  rng = np.random.default_rng(seed)
  tree = {}
  for path, shape in SHAPES.items():
    *parents, name = path.split("/")
    node = tree
    for parent in parents:
      node = node.setdefault(parent, {})
    node[name] = (scale * rng.normal(size=shape)).astype(np.float32)
  return tree


def _rules(**changes) -> dict[str, Any]:
  return {
    "decay": ("kernel$",),
    "freeze": (),
    "freeze_blocks": 0,
    "layer_decay": 1.0,
    "lr_multipliers": (),
    **changes,
  }


def _flat(tree):
  leaves = jax.tree_util.tree_leaves_with_path(tree)
  return {optim.path_str(path): np.asarray(leaf) for path, leaf in leaves}


def _make(params, *, optimizer=None, lr=0.1, total_steps=10, **changes) -> Any:
  settings = _rules(**{"weight_decay": 0.1, "grad_clip_norm": 1.0} | changes)
  schedule = optim.linear(lr=lr, warmup_steps=1, total_steps=total_steps)
  return optim.make_tx(optimizer or optim.adamw(), schedule, params, **settings)


def _train(tx, params, grads) -> Any:
  @jax.jit
  def step(params, state, grad):
    updates, state = tx.update(grad, state, params)
    return optax.apply_updates(params, updates), state

  state = jax.jit(tx.init)(params)
  for grad in grads:
    params, state = step(params, state, grad)
  return params


# Schedules.


def test_schedules_equal_literal_numbers():
  def rates(schedule, total=7):
    return [float(schedule(step)) for step in range(total)]

  settings = {"lr": 2.0, "warmup_steps": 2, "total_steps": 7}
  np.testing.assert_allclose(
    rates(optim.constant(**settings)),
    [0.6666667, 1.3333333, 2, 2, 2, 2, 2],
    rtol=1e-6,
  )
  np.testing.assert_allclose(
    rates(optim.linear(**settings)),
    [0.6666667, 1.3333333, 2, 1.5, 1, 0.5, 0],
    rtol=1e-6,
  )
  np.testing.assert_allclose(
    rates(optim.cosine(**settings, end_lr=0.2)),
    [0.6666667, 1.3333333, 2, 1.7363961, 1.1, 0.46360390, 0.2],
    rtol=1e-6,
  )
  np.testing.assert_allclose(
    rates(optim.rsqrt(**settings, timescale=1, cooldown_steps=2)),
    [0.6666667, 1.3333333, 2, 1.4142136, 1.1547005, 0.5, 0],
    rtol=1e-6,
  )
  np.testing.assert_allclose(
    rates(optim.rsqrt(**settings, timescale=1, cooldown_steps=0)),
    [0.6666667, 1.3333333, 2, 1.4142136, 1.1547005, 1, 0.8944272],
    rtol=1e-6,
  )


@pytest.mark.parametrize("make", DECAYING)
@pytest.mark.parametrize("warmup_steps", [0, 1, 5, 98])
def test_rate_starts_above_zero_peaks_once_and_ends_at_zero(make, warmup_steps):
  schedule = make(lr=0.003, warmup_steps=warmup_steps, total_steps=100)
  rates = np.asarray(jax.vmap(schedule)(jnp.arange(100)))
  assert rates[0] > 0
  assert (rates == np.float32(0.003)).sum() == 1
  assert rates.argmax() == warmup_steps
  assert (np.diff(rates)[:warmup_steps] > 0).all()
  assert (np.diff(rates)[warmup_steps:] < 0).all()
  assert rates[-1] == 0


@pytest.mark.parametrize("make", SCHEDULES)
def test_a_single_update_is_at_the_peak(make):
  assert float(make(lr=0.5, total_steps=1)(0)) == 0.5


@pytest.mark.parametrize("make", SCHEDULES)
def test_the_last_update_may_be_the_peak(make):
  schedule = make(lr=0.5, warmup_steps=1, total_steps=2)
  np.testing.assert_allclose([schedule(0), schedule(1)], [0.25, 0.5])


@pytest.mark.parametrize("make", SCHEDULES)
@pytest.mark.parametrize(
  ("warmup_steps", "total_steps"), [(1, 1), (5, 5), (10_000, 5_000), (-1, 5)]
)
def test_a_warmup_that_never_peaks_is_refused(make, warmup_steps, total_steps):
  match = f"warmup_steps: got {warmup_steps}; must be .* = {total_steps}"
  with pytest.raises(ValueError, match=match):
    make(lr=0.1, warmup_steps=warmup_steps, total_steps=total_steps)


@pytest.mark.parametrize("make", SCHEDULES)
def test_rate_is_the_same_float32_for_python_and_traced_steps(make):
  schedule = make(lr=0.003, warmup_steps=3, total_steps=20)
  jitted = jax.jit(schedule)
  for step in (0, 3, 11, 19):
    got = jitted(jnp.int32(step))
    assert got.dtype == schedule(step).dtype == jnp.float32
    assert got.shape == ()
    np.testing.assert_allclose(got, schedule(step), rtol=1e-6, atol=1e-9)


def test_a_rate_after_the_last_update_stays_at_the_end():
  schedule = optim.cosine(lr=1.0, end_lr=0.25, total_steps=10)
  assert float(schedule(25)) == 0.25


def test_rsqrt_before_the_cooldown_does_not_depend_on_the_total():
  settings = {"lr": 1.0, "warmup_steps": 10, "timescale": 50}
  short = optim.rsqrt(**settings, cooldown_steps=20, total_steps=100)
  long = optim.rsqrt(**settings, cooldown_steps=20, total_steps=1000)
  for step in (5, 10, 60, 79):
    assert float(short(step)) == float(long(step))
  np.testing.assert_allclose(short(60), 2**-0.5, rtol=1e-6)


def test_rsqrt_cools_down_over_a_fifth_by_default_and_keeps_its_floor():
  schedule = optim.rsqrt(lr=1.0, timescale=10**9, total_steps=101)
  np.testing.assert_allclose(schedule(79), 1, rtol=1e-5)
  np.testing.assert_allclose(schedule(90), 10 / 21, rtol=1e-5)
  floor = optim.rsqrt(lr=1.0, timescale=1, end_lr=0.5, total_steps=101)
  assert [float(floor(s)) for s in (50, 95, 100)] == [0.5] * 3


@pytest.mark.parametrize(
  ("changes", "match"),
  [
    ({"lr": 0.0}, r"lr: got 0.0; must be > 0"),
    ({"lr": float("nan")}, r"lr: got nan; must be > 0"),
    ({"end_lr": 0.2}, r"end_lr: got 0.2; must be in \[0, lr = 0.1\]"),
    ({"total_steps": 0}, r"total_steps: got 0; must be >= 1"),
    ({"timescale": 0}, r"timescale: got 0; must be >= 1"),
    ({"cooldown_steps": 9}, r"cooldown_steps: got 9; must be in \[0, 7\]"),
  ],
)
def test_a_schedule_names_the_argument_that_is_wrong(changes, match):
  settings = {"lr": 0.1, "warmup_steps": 2, "total_steps": 10}
  with pytest.raises(ValueError, match=match):
    optim.rsqrt(**(settings | changes))


# Updates.


def _adam(grad, moments, n):
  m, v = moments
  m = 0.9 * m + 0.1 * grad
  v = 0.999 * v + 0.001 * grad**2
  return (m / (1 - 0.9**n)) / (np.sqrt(v / (1 - 0.999**n)) + 1e-8), (m, v)


def _momentum(grad, moments, n):
  del n
  m = grad + 0.9 * moments[0]
  return m, (m, moments[1])


@pytest.mark.parametrize(
  ("optimizer", "precondition"),
  [(optim.adamw(), _adam), (optim.sgd(), _momentum)],
  ids=["adamw", "sgd"],
)
def test_five_updates_equal_numpy(optimizer, precondition):
  start = _tree(0)
  grads = [_tree(10 + i, scale) for i, scale in enumerate([3, 0.01, 1, 0.1, 9])]
  tx = _make(
    start,
    optimizer=optimizer,
    weight_decay=0.3,
    grad_clip_norm=2.0,
    freeze=("^patch_embed/", "^registers$"),
    freeze_blocks=1,
    layer_decay=0.5,
    lr_multipliers=(("^head/", 10.0), ("kernel$", 2.0)),
  )
  got = _flat(_train(tx, start, grads))

  frozen = {"patch_embed/kernel", "registers"}
  # Layers: before the blocks 0, blocks 1 to 3, the rest 4; 0.5^(4 - layer).
  # The first block is frozen.
  block = np.array([0.0, 0.25, 0.5])
  factors = {
    "cls": 0.0625,
    "cls_posemb": 0.0625,
    "posemb": 0.0625,
    "encoder/blocks/attention/query/bias": block[:, None, None],
    "encoder/blocks/attention/query/kernel": 2 * block[:, None, None, None],
    "encoder/blocks/norm1/scale": block[:, None],
    "encoder/blocks/scale1": block[:, None],
    "encoder/norm/scale": 1.0,
    "map_head/probe": 1.0,
    "head/bias": 10.0,
    "head/kernel": 20.0,
  }
  params = {k: v.astype(np.float64) for k, v in _flat(start).items()}
  moments = {k: (np.zeros(SHAPES[k]),) * 2 for k in factors}
  rates = [0.05, 0.1, 0.0875, 0.075, 0.0625]  # 1 of warm-up, 10 in all
  for n, grad in enumerate(grads, start=1):
    grad = {
      k: v * (factors[k] != 0) for k, v in _flat(grad).items() if k in factors
    }
    norm = np.sqrt(
      sum((v.astype(np.float64) ** 2).sum() for v in grad.values())
    )
    for k, g in grad.items():
      step, moments[k] = precondition(g * min(1, 2.0 / norm), moments[k], n)
      if k.endswith("kernel"):
        step = step + 0.3 * params[k]
      params[k] = params[k] - rates[n - 1] * factors[k] * step
  for k in SHAPES:
    np.testing.assert_allclose(got[k], params[k], rtol=1e-4, atol=1e-5)
    if k in frozen:
      np.testing.assert_array_equal(got[k], _flat(start)[k])
    if "blocks" in k:
      np.testing.assert_array_equal(got[k][0], _flat(start)[k][0])
      assert (got[k][1:] != _flat(start)[k][1:]).all()


def test_weight_decay_is_multiplied_by_the_scheduled_rate():
  params = _tree(0)
  zero = jax.tree.map(np.zeros_like, params)
  got = _flat(_train(_make(params, weight_decay=0.3), params, [zero, zero]))
  for path, before in _flat(params).items():
    kept = (1 - 0.05 * 0.3) * (1 - 0.1 * 0.3) if path.endswith("kernel") else 1
    np.testing.assert_allclose(got[path], before * kept, rtol=1e-6)


def test_frozen_gradients_do_not_count_in_the_clipping_norm():
  params = _tree(0)
  grad = _tree(1, scale=0.01)
  huge = _tree(1, scale=0.01)
  huge["patch_embed"]["kernel"] = np.full((2, 2, 3, 4), np.inf, np.float32)
  huge["encoder"]["blocks"]["norm1"]["scale"][0] = np.nan
  tx = _make(
    params, optimizer=optim.sgd(), freeze=("^patch_embed/",), freeze_blocks=1
  )
  got = _train(tx, params, [huge])
  expected = _train(tx, params, [grad])
  jax.tree.map(np.testing.assert_array_equal, got, expected)


def test_clipping_scales_the_gradient_to_the_norm():
  params = {"w": np.zeros(2, np.float32)}
  tx = _make(
    params, optimizer=optim.sgd(), lr=1.0, decay=(), grad_clip_norm=1.0
  )
  updates, _ = tx.update(
    {"w": jnp.array([30.0, 40.0])}, tx.init(params), params
  )
  np.testing.assert_allclose(updates["w"], [-0.3, -0.4], rtol=1e-6)  # Rate 0.5.


def test_leaves_frozen_as_a_whole_have_no_moments():
  params = _tree(0)
  head = {k: v for k, v in SHAPES.items() if k.startswith("head/")}
  for optimizer, copies in ((optim.adamw(), 2), (optim.sgd(), 1)):
    tx = _make(params, optimizer=optimizer, freeze=(r"^(?!head/)",))
    state = jax.eval_shape(tx.init, params)
    sizes = [x.size for x in jax.tree.leaves(state) if x.ndim]  # No counters.
    assert sum(sizes) == copies * sum(np.prod(s) for s in head.values())


def test_freezing_every_block_is_freezing_their_leaves():
  params = _tree(0)
  by_count = _make(params, freeze_blocks=L)
  by_rule = _make(params, freeze=("^encoder/blocks/",))
  structure = jax.tree.structure(jax.eval_shape(by_rule.init, params))
  by_count_state = jax.eval_shape(by_count.init, params)
  assert jax.tree.structure(by_count_state) == structure
  grads = [_tree(1), _tree(2)]
  jax.tree.map(
    np.testing.assert_array_equal,
    _train(by_count, params, grads),
    _train(by_rule, params, grads),
  )


def test_frozen_updates_are_zero_and_negative_zeros_stay():
  params = _tree(0)
  params["registers"][:] = -0.0
  tx = _make(params, freeze=("^registers$",))
  got = _train(tx, params, [_tree(1)])
  assert np.signbit(got["registers"]).all()


def test_moments_have_the_dtype_that_was_asked_for():
  params = jax.tree.map(lambda x: jnp.asarray(x, jnp.bfloat16), _tree(0))

  def dtypes(optimizer):
    tx = _make(params, optimizer=optimizer)
    state = jax.eval_shape(tx.init, params)
    _, after = jax.eval_shape(tx.update, params, state, params)
    assert after == state  # Nothing is compiled again at the second update.
    leaves = jax.tree.leaves(state)
    return [str(x.dtype) for x in leaves if x.shape == SHAPES["posemb"]]

  assert dtypes(optim.adamw()) == ["float32", "float32"]
  assert dtypes(optim.adamw(mu_dtype="bfloat16")) == ["bfloat16", "float32"]
  assert dtypes(optim.sgd()) == ["float32"]
  assert dtypes(optim.sgd(accumulator_dtype="bfloat16")) == ["bfloat16"]


def test_sgd_without_momentum_is_the_gradient_and_takes_no_memory():
  params = _tree(0)
  tx = optim.sgd(momentum=0.0)
  assert not jax.tree.leaves(tx.init(params))
  updates, _ = tx.update(params, tx.init(params))
  jax.tree.map(np.testing.assert_array_equal, updates, params)


def test_nesterov_looks_one_step_ahead():
  tx: Any = optim.sgd(momentum=0.5, nesterov=True)
  one = {"w": jnp.ones(1)}
  first, state = tx.update(one, tx.init(one))
  second, _ = tx.update(one, state)
  assert [float(first["w"][0]), float(second["w"][0])] == [1.5, 1.75]


# Rules.


def test_kernels_alone_decay_by_default_whatever_their_rank():
  decayed = {r.path for r in optim.leaf_rules(_tree(0), **_rules()) if r.decay}
  assert decayed == {
    "encoder/blocks/attention/query/kernel",
    "head/kernel",
    "patch_embed/kernel",
  }


def test_rules_need_shapes_alone():
  shapes = jax.eval_shape(lambda: jax.tree.map(jnp.asarray, _tree(0)))
  rules = _rules(layer_decay=0.65, freeze_blocks=1)
  for one, other in zip(
    optim.leaf_rules(shapes, **rules), optim.leaf_rules(_tree(0), **rules)
  ):
    assert one[:4] == other[:4]
    np.testing.assert_array_equal(one.lr_multiplier, other.lr_multiplier)


def test_factors_of_all_matching_rules_multiply():
  rules = _rules(lr_multipliers=(("head", 10.0), ("^head/kernel", 0.5)))
  rates = {
    r.path: float(r.lr_multiplier)
    for r in optim.leaf_rules(_tree(0), **rules)
    if "head" in r.path
  }
  assert rates == {"head/bias": 10, "head/kernel": 5, "map_head/probe": 10}


@pytest.mark.parametrize("name", ["decay", "freeze"])
def test_a_rule_without_a_leaf_lists_the_paths(name):
  with pytest.raises(ValueError, match=f"{name}: got 'kernal\\$'") as error:
    optim.leaf_rules(_tree(0), **_rules(**{name: ("cls", "kernal$")}))
  assert all(path in str(error.value) for path in SHAPES)


@pytest.mark.parametrize(
  ("changes", "match"),
  [
    ({"lr_multipliers": (("haed", 2.0),)}, r"lr_multipliers: got 'haed'"),
    (
      {"lr_multipliers": (("head", 0.0),)},
      r"got \('head', 0.0\).* Use freeze",
    ),
    ({"decay": ("kernel(",)}, r"decay: got 'kernel\('; must be a regular"),
    ({"freeze_blocks": 4}, r"freeze_blocks: got 4; must be in \[0, 3\]"),
    ({"layer_decay": 0.0}, r"layer_decay: got 0.0; must be in \(0, 1\]"),
    ({"freeze": (".",)}, r"freeze: got \('.',\); .* nothing to train"),
    ({"weight_decay": -1.0}, r"weight_decay: got -1.0; must be >= 0"),
    ({"grad_clip_norm": 0.0}, r"grad_clip_norm: got 0.0; must be > 0"),
  ],
)
def test_a_wrong_setting_is_named(changes, match):
  with pytest.raises(ValueError, match=match):
    _make(_tree(0), **changes)


def test_layer_decay_needs_blocks():
  params = {"head": {"kernel": np.ones((2, 2), np.float32)}}
  with pytest.raises(ValueError, match=r"layer_decay: got 0.5; .*blocks"):
    optim.leaf_rules(params, **_rules(layer_decay=0.5))


@pytest.mark.parametrize("make", [optim.adamw, optim.sgd])
def test_an_unknown_dtype_is_refused(make):
  name = "mu_dtype" if make is optim.adamw else "accumulator_dtype"
  with pytest.raises(
    ValueError, match=f"{name}: got 'float16'; must be one of"
  ):
    make(**{name: "float16"})


def test_describe_is_a_table_of_every_leaf():
  table = optim.describe(
    _tree(0),
    decay=("kernel$",),
    freeze=("^patch_embed/", "posemb$"),
    freeze_blocks=1,
    layer_decay=0.5,
    lr_multipliers=(("^head/", 10.0),),
  )
  rows = {line.split()[0]: line.split() for line in table.splitlines()}
  assert next(iter(rows)) == "parameter"
  assert set(SHAPES) < set(rows)
  query = (
    "encoder/blocks/attention/query/kernel (3, 4, 2, 2) yes 0.25..0.5 first 1"
  )
  assert rows["encoder/blocks/attention/query/kernel"] == query.split()
  assert rows["head/kernel"] == ["head/kernel", "(4,", "3)", "yes", "10", "no"]
  assert rows["posemb"] == ["posemb", "(1,", "6,", "4)", "no", "-", "yes"]
  # cls 4, two of three blocks 4 + 16 + 4 + 4, norm 4, head 15, probe 4,
  # registers 8; frozen are 48 of patches, 24 + 4 of positions, a block's 28.
  assert table.splitlines()[-1] == "91 of 195 parameters trained"


# Placement.


def test_each_moment_gets_the_entry_of_its_parameter():
  params = _tree(0)
  names = jax.tree_util.tree_map_with_path(
    lambda path, _: optim.path_str(path), params
  )
  tx = _make(params, freeze=("^patch_embed/",), freeze_blocks=1)
  for state in (jax.jit(tx.init)(params), jax.eval_shape(tx.init, params)):
    placed = optim.opt_state_like(tx, state, names, default="other")
    assert jax.tree.structure(placed) == jax.tree.structure(state)
    for entry, leaf in zip(jax.tree.leaves(placed), jax.tree.leaves(state)):
      assert leaf.shape == SHAPES.get(entry, ())
    counts = [jax.tree.leaves(placed).count(n) for n in SHAPES]
    assert counts == [0 if n == "patch_embed/kernel" else 2 for n in SHAPES]


def test_moments_can_be_initialised_sharded_and_updated():
  params = _tree(0)
  mesh = jax.make_mesh(
    (4,), ("fsdp",), axis_types=(jax.sharding.AxisType.Auto,)
  )
  spec = jax.sharding.PartitionSpec

  def place(x):
    split = spec(*[None] * (x.ndim - 1), "fsdp") if x.shape[-1] == 4 else spec()
    return jax.sharding.NamedSharding(mesh, split)

  shardings = jax.tree.map(place, params)
  tx = _make(params, freeze=("^patch_embed/",), freeze_blocks=1)
  state_shardings = optim.opt_state_like(
    tx,
    jax.eval_shape(tx.init, params),
    shardings,
    default=jax.sharding.NamedSharding(mesh, spec()),
  )
  sharded = jax.device_put(params, shardings)
  state = jax.jit(tx.init, out_shardings=state_shardings)(sharded)
  grad = jax.device_put(_tree(1), shardings)
  update = jax.jit(tx.update, out_shardings=(shardings, state_shardings))
  updates, state = update(grad, state, sharded)
  moments = [x for x in jax.tree.leaves(state) if x.shape == (1, 6, 4)]
  assert [x.addressable_shards[0].data.shape for x in moments] == [
    (1, 6, 1)
  ] * 2
  expected = _flat(_train(tx, params, [_tree(1)]))
  for path, update in _flat(updates).items():
    before = _flat(params)[path]
    np.testing.assert_allclose(
      before + update, expected[path], rtol=1e-5, atol=1e-6
    )
