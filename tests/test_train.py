"""What the loop decides: when something is due, and which step is best."""

import jax
import jax.numpy as jnp
import pytest

from tests import tiny
from vit_jax import checkpoint, metrics, train, train_step


def test_due_is_every_nth_step_and_never_for_zero():
  assert [s for s in range(9) if train.due(s, 4)] == [4, 8]
  assert not any(train.due(s, 0) for s in range(9))


@pytest.mark.parametrize("bad, told", [(0, {}), (2, {"train/bad_examples": 2})])
def test_examples_left_out_are_told_if_there_are_any(bad, told):
  report = train_step.StepReport(
    loss=metrics.average(jnp.ones(4), jnp.array([1.0, 1.0, 0.0, 0.0])),
    grad_norm=jnp.float32(3),
    finite=jnp.array([True]),
    culprit=jnp.int32(-1),
  )
  assert train.summary(report, jnp.float32(0.5), bad=bad) == {
    **told,
    "train/loss": 1.0,
    "train/grad_norm": 3.0,
    "train/lr": 0.5,
    "train/images": 2,
  }


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
