"""What adaptation keeps equal, changes, says and refuses."""

import functools
import re
from typing import Any

import jax
import numpy as np
import pytest
from flax import traverse_util

from vit_jax.models import axial, axial_resnet, hybrid, mixer, resnet, vit
from vit_jax.weights import adapt, resample

QUICK = {"xla_backend_optimization_level": 0}  # Compiles in half the time.
RGB = (12, 8, 3)  # With patches of (4, 2) a 3 x 4 grid.
VIT = {
  "num_classes": 5,
  "width": 8,
  "depth": 2,
  "num_heads": 2,
  "mlp_dim": 12,
  "patch_size": (4, 2),
}


def small(**fields):
  return vit.ViT(**(VIT | fields))


def small_hybrid():
  fields: dict[str, Any] = VIT | {"patch_size": (1, 1)}
  return hybrid.Hybrid(**fields, stages=(1,))


shapes_of = functools.cache(adapt.param_shapes)


def random_params(model, image=RGB):
  """Parameters where no leaf is zero, one or symmetric."""
  rng = np.random.default_rng(0)
  return {
    path: rng.normal(0.1, 0.4, shape).astype(np.float32)
    for path, shape in shapes_of(model, image).items()
  }


def fit(old, new, old_image=RGB, new_image=RGB, *, params=None, **options):
  """Adapts random parameters of `old`, and returns those too."""
  params = random_params(old, old_image) if params is None else params
  return params, adapt.adapt(
    params,
    old=old,
    new=new,
    old_image=old_image,
    new_image=new_image,
    **options,
  )


def images(shape, *, seed=0):
  return np.random.default_rng(seed).normal(size=(2, *shape)).astype(np.float32)


@functools.cache
def compiled(model):
  return jax.jit(model.apply, compiler_options=QUICK)


def apply(model, params, image):
  params = traverse_util.unflatten_dict(params, sep="/")
  return compiled(model)({"params": params}, image)


def assert_equal_output(old, new, old_image=RGB, new_image=RGB, x=None, y=None):
  """Adapts, and compares `old` on `x` with `new` on `y`; returns the notes."""
  params, adapted = fit(old, new, old_image, new_image)
  x = images(RGB) if x is None else x
  expected = apply(old, params, x).logits
  actual = apply(new, adapted.params, x if y is None else y).logits
  # f32 through two blocks, logits of order 5.
  np.testing.assert_allclose(actual, expected, atol=2e-5)
  return adapted.notes


def assert_unchanged(before, after, *, but):
  """Checks that all paths but some are there, with equal bits."""
  assert after.keys() - set(but) == before.keys() - set(but)
  for path in before.keys() - set(but):
    np.testing.assert_array_equal(after[path], before[path])


@pytest.mark.parametrize(
  ("model", "image"),
  [
    (small(num_registers=2, layer_scale=0.1, qk_norm=True), RGB),
    (small(pool="map", posemb_at="every_layer", representation_size=6), RGB),
    (small(posemb="relative"), RGB),
    (small_hybrid(), (33, 32, 3)),
    (resnet.ResNet(num_classes=5, stages=(1,)), (32, 32, 3)),
  ],
  ids=["modern", "map", "relative", "hybrid", "resnet"],
)
def test_parameters_of_the_same_model_stay_bit_for_bit(model, image):
  params, adapted = fit(model, model, image, image)
  assert list(adapted.params) == list(shapes_of(model, image))
  assert_unchanged(params, adapted.params, but=())
  assert adapted.notes == ("head: 5 classes; kept",)


def test_input_is_not_changed():
  old, new = small(layer_scale=0.1), small(cls_posemb=False, num_classes=3)
  params = random_params(old)
  before = {path: x.copy() for path, x in params.items()}
  fit(old, new, new_image=(16, 16, 1), params=params)
  assert_unchanged(before, params, but=())


# The head.


def test_head_of_other_classes_starts_anew_with_its_initial_bias():
  params, adapted = fit(small(), small(num_classes=3, head_bias_init=-10.0))
  assert_unchanged(params, adapted.params, but=("head/kernel", "head/bias"))
  kernel, bias = (adapted.params[f"head/{x}"] for x in ("kernel", "bias"))
  np.testing.assert_array_equal(kernel, np.zeros((8, 3), np.float32))
  np.testing.assert_array_equal(bias, np.full(3, -10, np.float32))
  assert kernel.dtype == bias.dtype == np.float32
  assert adapted.notes == ("head: 5 classes there, 3 here; starts anew",)


def test_head_is_dropped_where_the_model_has_none_and_new_where_the_file_has():
  params, adapted = fit(small(), small(num_classes=0))
  assert_unchanged(params, adapted.params, but=("head/kernel", "head/bias"))
  assert "head/kernel" not in adapted.params
  assert adapted.notes == ("head: 5 classes there, none here; dropped",)
  _, back = fit(small(num_classes=0), small(), params=adapted.params)
  assert not back.params["head/kernel"].any()
  assert back.notes == ("head: none there; starts anew",)


@pytest.mark.parametrize("size", [6, 8])
def test_representation_is_dropped_with_the_head_that_reads_it(size):
  _, adapted = fit(small(representation_size=size), small())
  assert "representation/kernel" not in adapted.params
  assert not adapted.params["head/kernel"].any()
  assert adapted.notes == (
    "representation: none here; dropped",
    "head: reads the representation there, which is not here; starts anew",
  )


def test_representation_stays_where_only_the_head_goes():
  old = small(representation_size=6)
  params, adapted = fit(old, small(representation_size=6, num_classes=0))
  assert_unchanged(params, adapted.params, but=("head/kernel", "head/bias"))


def test_representation_is_not_invented():
  match = r"missing: representation/kernel \(8, 6\)"
  with pytest.raises(ValueError, match=match):
    fit(small(), small(representation_size=6))


def test_head_of_another_input_starts_anew():
  _, adapted = fit(small(), small(pool="cls_gap"))
  assert adapted.params["head/kernel"].shape == (16, 5)
  assert adapted.notes[0] == "head: reads 8 values there, 16 here; starts anew"


def test_head_is_reset_and_kept_on_demand():
  _, adapted = fit(small(), small(), head="reset")
  assert not adapted.params["head/kernel"].any()
  assert adapted.notes == ("head: 5 classes, to be reset; starts anew",)
  match = (
    r"head: got one that cannot be kept \(5 classes there, 3 here\). Use "
    'head="auto" to start it anew, or the model of the weights.'
  )
  with pytest.raises(ValueError, match=match):
    fit(small(), small(num_classes=3), head="keep")


def test_constant_head_is_pointed_out():
  params = random_params(small())
  params["head/kernel"] = np.zeros((8, 5), np.float32)
  _, adapted = fit(small(), small(), params=params)
  assert adapted.notes == (
    "head: 5 classes; kept",
    "head: its kernel is constant there, so it says nothing; train it",
  )


# Tokens.


def test_position_of_the_class_token_can_move_into_it():
  notes = assert_equal_output(small(), small(cls_posemb=False))
  assert notes[1:] == ("cls_posemb: none here; added to cls, for equal output",)


@pytest.mark.parametrize("place", ["stem", "every_layer"])
def test_position_of_the_class_token_can_start_as_zeros(place):
  notes = assert_equal_output(
    small(cls_posemb=False, posemb_at=place), small(posemb_at=place)
  )
  path = "encoder/blocks/cls_posemb" if place != "stem" else "cls_posemb"
  assert notes[1:] == (f"{path}: none there; zeros, for equal output",)


def test_position_that_is_added_at_each_block_cannot_move_into_the_token():
  shared = {"posemb_at": "every_layer_shared"}
  with pytest.raises(ValueError, match=r"unexpected: cls_posemb \(1, 1, 8\)"):
    fit(small(**shared), small(cls_posemb=False, **shared))


def test_class_token_goes_and_comes_with_its_position():
  params, adapted = fit(small(), small(pool="gap"))
  assert_unchanged(params, adapted.params, but=("cls", "cls_posemb"))
  assert "cls" not in adapted.params
  assert "class token: none here; dropped" in adapted.notes
  _, back = fit(small(pool="gap"), small(), params=adapted.params)
  assert not back.params["cls"].any()
  assert not back.params["cls_posemb"].any()
  assert back.notes[1:] == (
    "class token: none there; starts as zeros and needs training",
    "pool: the weights were trained with 'gap', the model has 'cls', which "
    "changes its output",
  )


def test_registers_go_and_come():
  params, adapted = fit(small(num_registers=3), small())
  assert_unchanged(params, adapted.params, but=("registers",))
  assert adapted.notes[1:] == (
    "registers: none here; dropped, which changes the output",
  )
  _, back = fit(small(), small(num_registers=3), params=adapted.params)
  assert back.params["registers"].shape == (1, 3, 8)
  assert back.params["registers"].dtype == np.float32
  assert 0 < np.abs(back.params["registers"]).max() < 1e-5
  assert back.notes[1:] == (
    "registers: none there; start near zero and need training",
  )
  _, again = fit(small(), small(num_registers=3), params=adapted.params)
  assert_unchanged(back.params, again.params, but=())


def test_layer_scale_can_start_as_ones():
  notes = assert_equal_output(small(), small(layer_scale=1e-4))
  assert notes[1:] == tuple(
    f"encoder/blocks/layer_scale{i}: none there; ones, for equal output"
    for i in (1, 2)
  )


def test_layer_scale_can_move_into_the_layer_before_it():
  notes = assert_equal_output(small(layer_scale=0.1), small())
  assert notes[1:] == tuple(
    f"encoder/blocks/{scale}: none here; folded into encoder/blocks/{before}, "
    "for equal output"
    for scale, before in (
      ("layer_scale1", "attention/out"),
      ("layer_scale2", "mlp/fc2"),
    )
  )


def test_layer_scale_moves_in_the_rows_and_columns_of_an_axial_model():
  params, adapted = fit(
    axial.AxialViT(**VIT, layer_scale=0.1), axial.AxialViT(**VIT)
  )
  column = "encoder/blocks/column"
  scale = params[f"{column}/layer_scale2"]  # [L, D]
  for leaf, shape in (("kernel", (2, 1, 8)), ("bias", (2, 8))):
    path = f"{column}/mlp/fc2/{leaf}"
    expected = params[path] * scale.reshape(shape)
    np.testing.assert_array_equal(adapted.params[path], expected)


# Positions.


def test_positions_are_resized_on_a_rectangular_grid_and_the_prefix_kept():
  model = small(num_registers=2)
  new_image = (20, 12, 3)  # A 5 x 6 grid.
  params, adapted = fit(model, model, RGB, new_image)
  assert_unchanged(params, adapted.params, but=("posemb",))
  expected = resample.resize_posemb(params["posemb"], (3, 4), (5, 6))
  np.testing.assert_array_equal(adapted.params["posemb"], expected)
  assert adapted.notes[1:] == (
    "posemb: grid 3x4 there, 5x6 here; resized by corner_linear",
  )


def test_another_grid_of_as_many_patches_is_resized():
  params, adapted = fit(small(), small(), RGB, (24, 4, 3))  # A 6 x 2 grid.
  expected = resample.resize_posemb(params["posemb"], (3, 4), (6, 2))
  np.testing.assert_array_equal(adapted.params["posemb"], expected)


def test_resized_positions_are_used_in_the_forward_pass():
  params = random_params(small())
  x = images((24, 16, 3))
  methods = ("corner_linear", "transformers")
  fitted = [
    fit(
      *(small(), small(), RGB, x.shape[1:]), params=params, posemb_resize=method
    )[1]
    for method in methods
  ]
  first, second = (apply(small(), a.params, x).logits for a in fitted)
  assert np.abs(first - second).max() > 1e-3
  assert fitted[1].notes[1].endswith("6x8 here; resized by transformers")


def test_tables_of_every_block_are_resized():
  model = small(posemb_at="every_layer")
  params, adapted = fit(model, model, RGB, (20, 12, 3))
  path = "encoder/blocks/posemb"
  assert_unchanged(params, adapted.params, but=(path,))
  for before, after in zip(params[path], adapted.params[path], strict=True):
    expected = resample.resize_posemb(before, (3, 4), (5, 6))
    np.testing.assert_allclose(after, expected, atol=1e-6)


@pytest.mark.parametrize("method", resample.METHODS)
def test_rows_and_columns_are_resized_as_the_table_they_make(method):
  def full(p):
    y, x = p["posemb_rows"][0], p["posemb_columns"][0]
    shape = (len(y), len(x), 4)
    both = [np.broadcast_to(x, shape), np.broadcast_to(y[:, None], shape)]
    return np.concatenate(both, axis=-1).reshape(1, -1, 8)

  model = small(posemb="learned_2d")
  params, adapted = fit(model, model, RGB, (20, 12, 3), posemb_resize=method)
  expected = resample.resize_posemb(full(params), (3, 4), (5, 6), method=method)
  np.testing.assert_allclose(full(adapted.params), expected, atol=1e-6)


def test_grid_of_a_hybrid_is_that_of_its_feature_map():
  model = small_hybrid()
  params, adapted = fit(model, model, (33, 32, 3), (16, 20, 3))
  assert_unchanged(params, adapted.params, but=("posemb",))
  assert adapted.notes[1:] == (
    "posemb: grid 9x8 there, 4x5 here; resized by corner_linear",
  )


@pytest.mark.parametrize(
  ("model", "path"),
  [
    (small(posemb="relative"), "encoder/blocks/attention/relative_posemb"),
    (
      axial.AxialViT(**VIT, posemb="relative"),
      "encoder/blocks/row/attention/relative_posemb",
    ),
    (
      axial_resnet.AxialResNet(num_classes=5, stages=(1,)),
      "trunk/stage1/unit1/height/relative_posemb",
    ),
    (
      mixer.Mixer(
        num_classes=5,
        width=8,
        depth=1,
        tokens_mlp_dim=6,
        channels_mlp_dim=6,
        patch_size=(4, 2),
      ),
      "encoder/blocks/token_mlp/fc1/kernel",
    ),
  ],
  ids=["relative", "axial", "axial_resnet", "mixer"],
)
def test_parameters_of_one_image_size_are_not_resized(model, path):
  match = (
    f"image_size: got 24x16 for weights trained at 12x8; .*{path[-15:]}.* "
    "belongs to that size and cannot be resized: it is .*, expected .*. Use "
    "images of 12x8."
  )
  with pytest.raises(ValueError, match=match):
    fit(model, model, RGB, (24, 16, 3))


# Pixels.


def test_grey_images_give_what_they_gave_as_rgb():
  grey = images((12, 8, 1))
  notes = assert_equal_output(
    *(small(), small(), RGB, (12, 8, 1)), x=grey.repeat(3, axis=3), y=grey
  )
  assert notes[1:] == ("patch_embed/kernel: 3 channels there, 1 here; summed",)


def test_model_of_other_patches_gives_equal_output_on_enlarged_patches():
  x = images(RGB)
  patches = x.reshape(2, 3, 4, 4, 2, 3).transpose(0, 1, 3, 2, 4, 5)
  bigger = jax.image.resize(patches, (2, 3, 4, 6, 5, 3), "linear")
  y = np.asarray(bigger).transpose(0, 1, 3, 2, 4, 5).reshape(2, 18, 20, 3)
  notes = assert_equal_output(
    *(small(), small(patch_size=(6, 5)), RGB, (18, 20, 3)), x=x, y=y
  )
  assert notes[1:] == (
    "patch_embed/kernel: patches of 4x2 there, 6x5 here; resized by "
    "pseudo-inverse",
  )


def test_channels_of_a_resnet_change_at_its_root():
  model = resnet.ResNet(num_classes=5, stages=(1,))
  image = (16, 16, 3)
  params, adapted = fit(model, model, image, (16, 16, 4))
  path = "trunk/root/conv/kernel"
  assert_unchanged(params, adapted.params, but=(path,))
  expected = resample.change_channels(params[path], 4)
  np.testing.assert_array_equal(adapted.params[path], expected)
  assert adapted.notes[1:] == (
    f"{path}: 3 channels there, 4 here; shared, which changes the scale of its "
    "result",
  )


# What no change of parameters can mend.


def test_differences_in_what_is_computed_are_said():
  old = small(pool="gap", activation="gelu_erf", norm_epsilon=1e-12)
  _, adapted = fit(old, small(pool="gap", norm_after_pool=True))
  changes = ", which changes its output"
  assert adapted.notes[1:] == (
    "activation: the weights were trained with 'gelu_erf', the model has "
    "'gelu_tanh'" + changes,
    "norm_epsilon: the weights were trained with 1e-12, the model has 1e-06"
    + changes,
    "norm_after_pool: the weights were trained with False, the model has True"
    + changes,
  )


def test_all_that_does_not_fit_is_in_one_error():
  old = small(qk_norm=True)
  new = small(mlp_dim=10, posemb="sincos2d", pool="map")
  with pytest.raises(ValueError, match="do not fit the model") as error:
    fit(old, new)
  lines = str(error.value).split("\n  ")[1:]
  fc1 = (
    "shape: encoder/blocks/mlp/fc1/kernel is (2, 8, 12); expected (2, 8, 10)"
  )
  assert fc1 in lines
  assert "unexpected: posemb (1, 12, 8)" in lines
  assert "unexpected: encoder/blocks/attention/key_norm/bias (2, 4)" in lines
  assert "missing: map_head/probe (1, 1, 8)" in lines
  of_old, of_new = (set(adapt.param_shapes(m, RGB)) for m in (old, new))
  # Not among them: the class token and its position, which are dropped.
  assert len(lines) == len(of_new - of_old) + len(of_old - of_new) - 2 + 3


def test_patterns_allow_what_is_missing_or_unexpected():
  old = small(posemb="learned")
  new = small(posemb="sincos2d", pool="map")
  allow = ("map_head/*", "posemb")
  params, adapted = fit(old, new, allow=allow)
  assert_unchanged(
    {k: x for k, x in params.items() if "cls" not in k and k != "posemb"},
    {k: x for k, x in adapted.params.items() if "map_head" not in k},
    but=(),
  )
  probe = adapted.params["map_head/probe"]
  assert isinstance(probe, np.ndarray)
  assert probe.any()
  assert "map_head/probe: none there; initialised" in adapted.notes
  assert "posemb: none here; dropped" in adapted.notes
  with pytest.raises(ValueError, match="missing: map_head/probe"):
    fit(old, new, allow=("posemb",))


@pytest.mark.parametrize(
  ("option", "message"),
  [
    (
      {"posemb_resize": "bicubic"},
      f"posemb_resize: got 'bicubic'; must be one of {list(resample.METHODS)}.",
    ),
    (
      {"head": "keeep"},
      "head: got 'keeep'; must be one of ['auto', 'keep', 'reset']. Did you "
      "mean 'keep'?",
    ),
  ],
)
def test_unknown_options_are_refused_with_the_choices(option, message):
  with pytest.raises(ValueError, match=re.escape(message)):
    fit(small(), small(), **option)
