"""How another library names, shapes and fuses the parameters of a model.

A layout is a list of rules. Each says which parameters here make one array
there, and how; it is read in both directions, so that what a format can load it
can also save.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from vit_jax.weights.tensors import Shape, Tensors

Params = dict[str, np.ndarray]  # By slashed path; all blocks stacked.
BLOCKS = "encoder/blocks/"


class Rule(NamedTuple):
  """One array there, and what it is made of here.

  Attributes:
    theirs: its name there. `{block}` stands for the number of a block: then
      there is one array for each, and the parameters here are stacked.
    ours: paths here, of one or more parameters.
    pack: from the parameters here (of one block) to the array there.
    unpack: from the array there to the parameters here, given their shapes.
  """

  theirs: str
  ours: tuple[str, ...]
  pack: Callable[[Sequence[np.ndarray]], np.ndarray]
  unpack: Callable[[np.ndarray, Sequence[Shape]], Sequence[np.ndarray]]


def same(theirs: str, ours: str) -> Rule:
  """Returns the rule for an array that only has another name."""
  return Rule(theirs, (ours,), lambda xs: xs[0], lambda x, _: [x])


def transposed(theirs: str, ours: str, *axes: int) -> Rule:
  """Returns the rule for an array whose axes are in another order there.

  Args:
    theirs: its name there.
    ours: path here.
    *axes: for each axis there, the axis here; none for all reversed.
  """
  back = tuple(int(i) for i in np.argsort(axes)) if axes else ()
  return Rule(
    theirs,
    (ours,),
    lambda xs: xs[0].transpose(*axes),
    lambda x, _: [x.transpose(*back)],
  )


def reshaped(theirs: str, ours: str, shape: Shape) -> Rule:
  """Returns the rule for an array that has another shape there."""
  return Rule(
    *(theirs, (ours,)),
    lambda xs: xs[0].reshape(shape),
    lambda x, shapes: [x.reshape(shapes[0])],
  )


def ignored(theirs: str, shape: Shape) -> Rule:
  """Returns the rule for an array that is no parameter; it is not read."""
  return Rule(
    *(theirs, ()),
    lambda _: np.broadcast_to(False, shape),
    lambda x, shapes: [],
  )


def read(
  tensors: Tensors, rules: Sequence[Rule], shapes: Mapping[str, Shape]
) -> Params:
  """Returns the parameters of a model from the arrays of a file, as float32.

  Args:
    tensors: all arrays of the file.
    rules: the layout; their paths are those of `shapes`.
    shapes: of the model's parameters.

  Raises:
    ValueError: listing every array that is missing, unexpected or of another
      shape. Nothing is read before that check.
  """
  check(tensors.shapes, expected_shapes(rules, shapes))
  params = {path: np.empty(shape, np.float32) for path, shape in shapes.items()}
  for rule in rules:
    if not rule.ours:
      continue
    for index, names in _blocks(rule, shapes):
      targets = [params[path][index] for path in rule.ours]
      parts = rule.unpack(tensors[names], [x.shape for x in targets])
      for target, part in zip(targets, parts):
        target[...] = part.reshape(target.shape)
  return params


def write(
  params: Mapping[str, np.ndarray], rules: Sequence[Rule]
) -> dict[str, np.ndarray]:
  """Returns the arrays of a file, by the names there."""
  shapes = {path: x.shape for path, x in params.items()}
  return {
    name: rule.pack([params[path][index] for path in rule.ours])
    for rule in rules
    for index, name in _blocks(rule, shapes)
  }


def expected_shapes(
  rules: Sequence[Rule], shapes: Mapping[str, Shape]
) -> dict[str, Shape]:
  """Returns the shape of each array that a file of this layout has."""
  result = {}
  for rule in rules:
    # One byte an element is as cheap as finding the shape gets.
    parts = [np.zeros(_one(rule, shapes[path]), bool) for path in rule.ours]
    shape = tuple(rule.pack(parts).shape)
    result |= {name: shape for _, name in _blocks(rule, shapes)}
  return result


def check(found: Mapping[str, Shape], expected: Mapping[str, Shape]) -> None:
  """Compares the arrays of a file with those of a layout.

  Raises:
    ValueError: listing every one missing, unexpected or of another shape.
  """
  problems = [
    f"missing: {k} {v}" for k, v in expected.items() if k not in found
  ]
  problems += [
    f"unexpected: {k} {v}" for k, v in found.items() if k not in expected
  ]
  problems += [
    f"shape: {k} is {found[k]}; expected {v}"
    for k, v in expected.items()
    if k in found and found[k] != v
  ]
  if problems:
    lines = "\n  ".join(problems)
    raise ValueError(f"weights: the arrays do not fit the model:\n  {lines}")


def _blocks(
  rule: Rule, shapes: Mapping[str, Shape]
) -> Iterator[tuple[int | slice, str]]:
  """Yields for each array there its place in the stack, and its name."""
  if "{block}" not in rule.theirs:
    yield slice(None), rule.theirs
    return
  for i in range(shapes[rule.ours[0]][0]):
    yield i, rule.theirs.replace("{block}", str(i))


def _one(rule: Rule, shape: Shape) -> Shape:
  """Returns the shape of a parameter, of one block if it is stacked."""
  return shape[1:] if "{block}" in rule.theirs else shape
