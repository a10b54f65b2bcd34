"""Layouts: one list of rules that is read in both directions."""

import numpy as np
import pytest

from vit_jax.weights import layout, tensors

# Two blocks; each rule is another kind.
SHAPES = {
  "encoder/blocks/query": (2, 4, 3),
  "encoder/blocks/key": (2, 4, 3),
  "encoder/blocks/scale": (2, 4),
  "kernel": (1, 5, 3, 4),
  "bias": (4,),
}
RULES = (
  layout.Rule(
    *("block.{block}.both", ("encoder/blocks/query", "encoder/blocks/key")),
    np.concatenate,
    lambda x, _: np.split(x, 2),
  ),
  layout.transposed("conv", "kernel", 3, 2, 0, 1),
  layout.same("stacked_scale", "encoder/blocks/scale"),
  layout.reshaped("bias", "bias", (1, 1, 4)),
)
THERE = {
  "block.0.both": (8, 3),
  "block.1.both": (8, 3),
  "conv": (4, 3, 1, 5),
  "stacked_scale": (2, 4),
  "bias": (1, 1, 4),
}


def draw(shapes):
  rng = np.random.default_rng(0)
  return {k: rng.normal(size=v).astype(np.float32) for k, v in shapes.items()}


def test_arrays_are_made_as_the_rules_say():
  params = draw(SHAPES)
  arrays = layout.write(params, RULES)
  assert {name: x.shape for name, x in arrays.items()} == THERE
  query = params["encoder/blocks/query"]
  np.testing.assert_array_equal(arrays["block.1.both"][:4], query[1])
  key = params["encoder/blocks/key"]
  np.testing.assert_array_equal(arrays["block.0.both"][4:], key[0])
  for i, j in ((0, 0), (3, 2)):
    kernel = params["kernel"]
    np.testing.assert_array_equal(arrays["conv"][i, j], kernel[:, :, j, i])
  np.testing.assert_array_equal(arrays["bias"][0, 0], params["bias"])


def test_reading_undoes_writing():
  params = draw(SHAPES)
  opened = tensors.from_arrays(layout.write(params, RULES))
  again = layout.read(opened, RULES, SHAPES)
  assert again.keys() == params.keys()
  for path, x in params.items():
    np.testing.assert_array_equal(again[path], x, path)


def test_shapes_there_are_known_without_arrays():
  assert layout.expected_shapes(RULES, SHAPES) == THERE


@pytest.mark.parametrize("axes", [(), (1, 0), (2, 0, 1), (3, 2, 0, 1)])
def test_transposing_back_undoes_transposing(axes):
  rule = layout.transposed("there", "here", *axes)
  x = draw({"x": (2, 3, 4, 5)[: len(axes) or 3]})["x"]
  there = rule.pack([x])
  np.testing.assert_array_equal(there, x.transpose(axes or None))
  np.testing.assert_array_equal(rule.unpack(there, [x.shape])[0], x)


def test_arrays_of_other_types_are_read_as_float32():
  arrays = layout.write(draw(SHAPES), RULES)
  halves = {name: x.astype(np.float16) for name, x in arrays.items()}
  params = layout.read(tensors.from_arrays(halves), RULES, SHAPES)
  assert {x.dtype for x in params.values()} == {np.dtype(np.float32)}
  np.testing.assert_array_equal(params["bias"], np.ravel(halves["bias"]))


def test_everything_wrong_is_in_one_error_and_nothing_was_read():
  arrays = layout.write(draw(SHAPES), RULES)
  del arrays["block.1.both"]
  arrays["conv"] = arrays["conv"].T
  arrays["block.2.both"] = np.zeros((8, 3))

  def read(name):
    raise AssertionError(name)

  shapes = {name: x.shape for name, x in arrays.items()}
  with pytest.raises(ValueError, match=r"^weights: the arrays do not") as error:
    layout.read(tensors.Tensors(shapes, read), RULES, SHAPES)
  assert str(error.value).splitlines()[1:] == [
    "  missing: block.1.both (8, 3)",
    "  unexpected: block.2.both (8, 3)",
    "  shape: conv is (5, 1, 3, 4); expected (4, 3, 1, 5)",
  ]


def test_array_that_is_ignored_is_there_and_not_read():
  arrays = layout.write(draw(SHAPES), RULES)
  shapes = {name: x.shape for name, x in arrays.items()} | {"step": (7, 8)}
  opened = tensors.Tensors(shapes, arrays.__getitem__)
  with pytest.raises(ValueError, match=r"unexpected: step \(7, 8\)"):
    layout.read(opened, RULES, SHAPES)
  rules = (*RULES, layout.ignored("step", (7, 8)))
  layout.read(opened, rules, SHAPES)  # `step` would be a KeyError.
