"""What the loop decides: when something is due, and which step is best."""

import jax
import pytest

from tests import tiny
from vit_jax import checkpoint, train


def test_due_is_every_nth_step_and_never_for_zero():
  assert [s for s in range(9) if train.due(s, 4)] == [4, 8]
  assert not any(train.due(s, 0) for s in range(9))


@pytest.fixture(scope="module")
def state():
  run = tiny.run(tiny.experiment(), tiny.mesh(1, 8))
  with jax.set_mesh(run.mesh):
    return run.place(tiny.random_params(0))


@pytest.mark.parametrize(
  ("metric", "values", "kept"),
  [("val/accuracy", [0.2, 0.5, 0.4], 2), ("val/loss", [0.5, 0.2, 0.4], 2)],
)
def test_the_best_step_is_kept_with_what_a_continuation_needs(
  tmp_path, state, metric, values, kept
):
  evals = {"val": {"fn": dict}}
  experiment = tiny.experiment().model_copy(
    update={"best_metric": metric, "evals": evals}
  )
  with checkpoint.Checkpointer(tmp_path / "best") as best:
    for step, value in enumerate(values, start=1):
      now = state.replace(step=state.step + step)
      train.keep_best(experiment, best, now, {metric: value}, info={"seed": 7})
    best.wait()
    assert best.steps() == [kept]
    info = best.info(kept)
  assert info["seed"] == 7
  assert info["evaluated"] == kept
  assert info["value"] == values[kept - 1]


def test_a_metric_that_no_evaluator_gives_is_refused(tmp_path, state):
  experiment = tiny.experiment().model_copy(update={"best_metric": "val/f1"})
  with (
    checkpoint.Checkpointer(tmp_path / "best") as best,
    pytest.raises(ValueError, match="best_metric: got 'val/f1'"),
  ):
    train.keep_best(experiment, best, state, {"val/accuracy": 1.0}, info={})
