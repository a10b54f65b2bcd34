import itertools
import logging
import os
import pathlib
import signal
import subprocess
import sys
import time

import numpy as np
import pytest

from vit_jax.data import arrays, example, fake, images, pipeline, transforms

SOURCE = fake.FakeSource(num_examples=21, size=(10, 12), encoded=True)
CROP = transforms.inception_train(size=(6, 8))
KEEP = transforms.resize(size=(10, 12))


def train(n, source: example.Source = SOURCE, transform=CROP, **kwargs):
  kwargs = {"batch_size": 8, "seed": 3, **kwargs}
  batches = pipeline.train_batches(source, transform, **kwargs)
  result = list(itertools.islice(batches, n))
  batches.close()  # Ends workers at once.
  return result


def evaluate(source: example.Source = SOURCE, transform=KEEP, **kwargs):
  kwargs = {"batch_size": 8, **kwargs}
  return list(pipeline.eval_batches(source, transform, **kwargs))


def train_one(source):
  return train(1, source)


def assert_equal(first, second):
  assert len(first) == len(second)
  for a, b in zip(first, second):
    assert a.keys() == b.keys() == {"image", "label", "mask", "index"}
    for key in a:
      assert type(a[key]) is type(b[key]) is np.ndarray
      assert a[key].dtype == b[key].dtype
      np.testing.assert_array_equal(a[key], b[key])


def joined(parts):
  """The global batches from the shares of the processes, in their order."""
  return [
    {key: np.concatenate([x[key] for x in share]) for key in share[0]}
    for share in zip(*parts, strict=True)
  ]


class ListSource:
  """A source over a list of examples; counts its reads."""

  num_classes = 3
  class_names = ("a", "b", "c")

  def __init__(self, images, labels=None):
    self.images = images
    self.labels = [0] * len(images) if labels is None else labels
    self.reads = 0

  def __len__(self):
    return len(self.images)

  def __getitem__(self, index: int) -> example.Example:
    self.reads += 1
    return {
      "image": self.images[index],
      "label": np.asarray(self.labels[index]),
      "id": f"pictures/{index}.png",
    }


GOOD = SOURCE[0]["image"]
BAD = GOOD[:50]


def test_train_batch_has_the_documented_types():
  (batch,) = train(1)
  assert batch["image"].shape == (8, 6, 8, 3)
  assert batch["image"].dtype == np.uint8
  assert (batch["label"].shape, batch["label"].dtype) == ((8,), np.int32)
  assert batch["mask"].tolist() == [1.0] * 8
  assert batch["mask"].dtype == np.float32
  assert (batch["index"].shape, batch["index"].dtype) == ((8,), np.int64)
  np.testing.assert_array_equal(batch["label"], batch["index"] % 10)


def test_train_order_and_pixels_are_a_function_of_the_seed():
  assert_equal(train(6), train(6))
  other = train(6, seed=4)
  assert not np.array_equal(other[0]["index"], train(1)[0]["index"])


@pytest.mark.parametrize("start_step", [0, 1, 2, 5, 11])
def test_train_restart_continues_exactly(start_step):
  assert_equal(train(3, start_step=start_step), train(start_step + 3)[-3:])


@pytest.mark.parametrize("process_count", [2, 4, 8])
def test_train_processes_share_the_same_global_batch(process_count):
  parts = [
    train(5, start_step=2, process_index=i, process_count=process_count)
    for i in range(process_count)
  ]
  assert_equal(joined(parts), train(5, start_step=2))


def test_workers_change_nothing():
  def share(num_workers):
    return train(
      5,
      start_step=1,
      process_index=1,
      process_count=2,
      num_workers=num_workers,
    )

  assert_equal(share(num_workers=2), share(num_workers=0))


@pytest.mark.slow
@pytest.mark.parametrize("num_workers", [1, 3])
def test_any_number_of_workers_changes_nothing(num_workers):
  assert_equal(train(7, num_workers=num_workers), train(7))


def test_train_position_draws_do_not_depend_on_the_batch_size():
  small = train(4, batch_size=4)
  large = train(2, batch_size=8)
  for key in ("index", "image"):
    np.testing.assert_array_equal(
      np.concatenate([x[key] for x in small]),
      np.concatenate([x[key] for x in large]),
    )


def test_every_epoch_has_all_examples_in_a_new_order_and_new_crops():
  batches = train(21)  # 168 rows: 8 epochs of 21.
  epochs = np.concatenate([x["index"] for x in batches]).reshape(8, 21)
  for epoch in epochs:
    assert sorted(epoch) == list(range(21))
  assert len({tuple(epoch) for epoch in epochs}) == 8
  pixels = np.concatenate([x["image"] for x in batches])
  of_one = pixels[epochs.ravel() == 5]
  assert len({x.tobytes() for x in of_one}) == 8


def test_class_sorted_data_is_mixed():
  labels = np.repeat(np.arange(10), 100)
  source = arrays.ArraySource(
    np.zeros((1000, 2, 2), np.uint8), labels, class_names=list("abcdefghij")
  )
  (batch,) = train(1, source, transforms.resize(size=(2, 2)), batch_size=200)
  counts = np.bincount(batch["label"], minlength=10)
  assert counts.min() >= 8  # 20 expected, standard deviation 4.
  assert counts.max() <= 34


def test_source_smaller_than_the_batch_wraps():
  source = fake.FakeSource(num_examples=3, size=(2, 2))
  (batch,) = train(1, source, transforms.resize(size=(2, 2)), batch_size=9)
  assert sorted(batch["index"]) == [0, 0, 0, 1, 1, 1, 2, 2, 2]
  assert batch["mask"].sum() == 9


def test_train_keeps_few_batches_in_memory():
  source = ListSource([np.zeros((4, 4, 3), np.uint8)] * 10_000)
  resize = transforms.resize(size=(4, 4))
  train(6, source, resize, batch_size=64)
  # The six taken, four being prepared, and the one that tells the shapes.
  assert source.reads <= (6 + 4) * 64 + 1


@pytest.mark.parametrize("process_count", [1, 2, 3, 8])
@pytest.mark.parametrize("num_examples", [1, 7, 23, 24, 25])
def test_eval_processes_see_every_example_once(process_count, num_examples):
  source = fake.FakeSource(num_examples=num_examples, size=(2, 2))
  parts = [
    evaluate(
      source,
      transforms.resize(size=(2, 2)),
      batch_size=24,
      process_index=i,
      process_count=process_count,
    )
    for i in range(process_count)
  ]
  lengths = {len(part) for part in parts}
  assert lengths == {-(-num_examples // 24)}
  rows = 24 // process_count
  assert {x["image"].shape for part in parts for x in part} == {(rows, 2, 2, 3)}
  batches = joined(parts)
  index = np.concatenate([x["index"] for x in batches])
  padding = len(index) - num_examples
  assert index.tolist() == [*range(num_examples), *[-1] * padding]
  mask = np.concatenate([x["mask"] for x in batches])
  np.testing.assert_array_equal(mask, index >= 0)
  pixels = np.concatenate([x["image"] for x in batches])
  last = num_examples - 1
  np.testing.assert_array_equal(pixels[last], source[last]["image"])
  assert pixels[num_examples:].sum() == 0


@pytest.mark.slow
def test_eval_with_workers_changes_nothing():
  assert_equal(evaluate(num_workers=2), evaluate())


def test_eval_draws_depend_on_the_example_alone():
  first = np.concatenate([x["image"] for x in evaluate(transform=CROP)])
  other = np.concatenate(
    [x["image"] for x in evaluate(transform=CROP, batch_size=3)]
  )
  np.testing.assert_array_equal(first[:21], other)
  assert len({x.tobytes() for x in first[:21]}) == 21


def test_multi_label_rows_may_be_padded_or_empty():
  source = ListSource([GOOD] * 3, [[0, 2], [1, -1], [-1, -1]])
  (batch,) = evaluate(source, batch_size=4)
  expected = [[0, 2], [1, -1], [-1, -1], [-1, -1]]  # The last is no example.
  assert batch["label"].tolist() == expected
  assert batch["mask"].tolist() == [1, 1, 1, 0]


@pytest.mark.parametrize("run", [evaluate, train_one])
@pytest.mark.parametrize(
  ("labels", "match"),
  [
    ([0, 3, 1], r"label: got 3 for example 'pictures/1.png'; .* for 3 classes"),
    ([0, -1, 1], r"label: got -1 for example 'pictures/1.png'; .*\[0, 3\)"),
    ([[0, 1], [1, 7], [0, -1]], r"label: got \[1, 7\] .*'pictures/1.png'"),
    ([[0, 1], [1, -2], [0, -1]], r"label: got \[1, -2\] .*\[-1, 3\)"),
    ([0, 0.5, 1], r"float64 for example 'pictures/1.png'; must be one integer"),
  ],
)
def test_label_out_of_range_names_example_and_classes(run, labels, match):
  with pytest.raises(ValueError, match=match):
    run(ListSource([GOOD] * 3, labels))


@pytest.mark.parametrize("run", [evaluate, train_one])
@pytest.mark.parametrize("position", [0, 2])
def test_bad_file_fails_with_its_path(run, position):
  files = [GOOD] * 4
  files[position] = BAD
  with pytest.raises(
    images.DecodeError, match=rf"pictures/{position}.png: image: .* be decoded"
  ):
    run(ListSource(files))


def test_bad_files_are_skipped_up_to_a_limit_and_named_once(caplog):
  source = ListSource([BAD, GOOD, GOOD, BAD, GOOD])
  with caplog.at_level(logging.WARNING):
    batches = train(10, source, KEEP, batch_size=4, max_bad=2)
  for batch in batches:
    is_bad = np.isin(batch["index"], [0, 3])
    np.testing.assert_array_equal(batch["mask"], ~is_bad)
    assert batch["image"][is_bad].sum() == 0
    assert batch["image"][~is_bad].min() > 0
  # 40 rows are 8 epochs, each with 3 good examples.
  assert sum(batch["mask"].sum() for batch in batches) == 24
  warnings = [x.getMessage() for x in caplog.records]
  assert len(warnings) == 2
  expected = "Skipped a bad example: pictures/0.png: image: got 50"
  assert expected in "".join(warnings)


def test_bad_files_that_are_known_count_and_are_not_named_again(caplog):
  source = ListSource([BAD, GOOD, GOOD, BAD, GOOD])
  bad = {3: "known"}
  train(5, source, KEEP, batch_size=4, max_bad=2, bad=bad)
  assert sorted(bad) == [0, 3]
  assert bad[3] == "known" and bad[0].startswith("pictures/0.png: image")
  assert len(caplog.records) == 1
  with pytest.raises(ValueError, match="got 3 bad examples with max_bad=2"):
    train(5, source, KEEP, batch_size=4, max_bad=2, bad={1: "one", 2: "two"})


def test_eval_skips_bad_files_up_to_the_limit():
  source = ListSource([GOOD, BAD, GOOD])
  batches = evaluate(source, batch_size=2, max_bad=1)
  assert [x["mask"].tolist() for x in batches] == [[1, 0], [1, 0]]
  assert [x["index"].tolist() for x in batches] == [[0, 1], [2, -1]]


def test_batch_of_bad_files_alone_keeps_its_shape():
  source = ListSource([GOOD, GOOD, BAD, BAD])
  batches = evaluate(source, batch_size=2, max_bad=2)
  assert batches[1]["image"].shape == (2, 10, 12, 3)
  assert batches[1]["mask"].sum() == 0


def test_more_bad_files_than_the_limit_are_an_error_that_lists_them():
  source = ListSource([GOOD, BAD, BAD, GOOD])
  with pytest.raises(
    ValueError, match="got 2 bad examples with max_bad=1"
  ) as e:
    evaluate(source, batch_size=4, max_bad=1)
  assert "pictures/1.png: image" in str(e.value)
  assert "pictures/2.png: image" in str(e.value)


def test_source_of_bad_files_alone_is_an_error():
  with pytest.raises(ValueError, match="got 3 bad examples with max_bad=2"):
    evaluate(ListSource([BAD] * 4), max_bad=2)


def test_channels_first_array_names_the_example():
  source = ListSource([np.zeros((3, 8, 8), np.uint8)])
  with pytest.raises(ValueError, match=r"pictures/0.png: image: .*transpose"):
    evaluate(source)


def test_images_of_several_shapes_are_an_error():
  source = ListSource([np.zeros((8, 8, c), np.uint8) for c in (3, 1)])
  with pytest.raises(ValueError, match="transform: got image and label of"):
    evaluate(source)


def test_images_of_another_type_are_an_error():
  def as_stored(row, rng):
    return row

  for types in ((np.uint8, np.uint16), (np.float32,)):
    source = ListSource([np.zeros((8, 8, 3), dtype) for dtype in types])
    with pytest.raises(ValueError, match="must be of uint8 or uint16, all"):
      evaluate(source, as_stored)


def test_16_bits_reach_the_batch():
  image = np.arange(300, dtype=np.uint16).reshape(10, 6, 5) * 200
  keep = transforms.resize(size=(10, 6), bits=16)
  source = ListSource([image] * 3)
  (batch,) = evaluate(source, keep, batch_size=4)
  assert batch["image"].dtype == np.uint16
  np.testing.assert_array_equal(batch["image"][:3], [image] * 3)


def test_labels_of_several_shapes_are_an_error():
  source = ListSource([GOOD] * 2, [[0, 1], [0, 1, 2]])
  with pytest.raises(ValueError, match="transform: got image and label of"):
    evaluate(source)


@pytest.mark.parametrize(
  "make", [pipeline.train_batches, pipeline.eval_batches]
)
@pytest.mark.parametrize(
  ("kwargs", "match"),
  [
    ({"batch_size": 0}, "batch_size: got 0; must be positive"),
    ({"process_count": 3}, r"batch_size: got 8; .* 3 processes. Try 9"),
    ({"process_index": 1}, r"process_index: got 1; must be in \[0, 1\)"),
    ({"num_workers": -1}, "num_workers, max_bad: got -1, 0"),
    ({"max_bad": -1}, "num_workers, max_bad: got 0, -1"),
  ],
)
def test_arguments_out_of_range_fail_at_the_call(make, kwargs, match):
  kwargs = {"batch_size": 8, **kwargs}
  if make is pipeline.train_batches:
    kwargs["seed"] = 0
  with pytest.raises(ValueError, match=match):
    make(SOURCE, CROP, **kwargs)


@pytest.mark.parametrize("run", [evaluate, train_one])
def test_empty_source_fails_with_the_three_numbers(run):
  with pytest.raises(
    ValueError, match=r"got 0 examples \(batch_size 8, 1 proc"
  ):
    run(ListSource([]))


@pytest.mark.parametrize(
  ("kwargs", "match"),
  [
    ({"seed": -1}, r"seed: got -1; must be in \[0, 2\*\*32\)"),
    ({"start_step": -1}, "start_step: got -1; must be >= 0"),
  ],
)
def test_seed_and_start_step_are_checked(kwargs, match):
  with pytest.raises(ValueError, match=match):
    train(1, **kwargs)


RUN_WITH_WORKERS = """
import multiprocessing
from vit_jax.data import fake, pipeline, transforms

if __name__ == "__main__":
  batches = pipeline.train_batches(
    fake.FakeSource(), transforms.resize(size=(8, 8)), batch_size=8, seed=0,
    num_workers=2)
  next(batches)
  print(*[x.pid for x in multiprocessing.active_children()], flush=True)
  for line in open(0):  # A batch for each line from the test.
    print(next(batches)["image"].shape, flush=True)
"""


def is_alive(pid):
  """Whether the process runs; a dead one that nobody waits for does not."""
  try:
    stat = pathlib.Path(f"/proc/{pid}/stat").read_text()
  except FileNotFoundError:
    return False
  return stat.rsplit(")", 1)[1].split()[0] != "Z"


@pytest.mark.slow
@pytest.mark.skipif(not pathlib.Path("/proc").is_dir(), reason="needs /proc")
def test_workers_outlive_sigterm_but_not_their_parent(tmp_path):
  script = tmp_path / "run.py"
  script.write_text(RUN_WITH_WORKERS)
  with subprocess.Popen(
    [sys.executable, str(script)],
    stdin=subprocess.PIPE,
    stdout=subprocess.PIPE,
    text=True,
    env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
  ) as parent:
    assert parent.stdin is not None
    assert parent.stdout is not None
    workers = [int(pid) for pid in parent.stdout.readline().split()]
    assert len(workers) == 2
    for worker in workers:  # One of them is still starting.
      os.kill(worker, signal.SIGTERM)
      os.kill(worker, signal.SIGINT)
    for _ in range(20):  # More than was ready before.
      parent.stdin.write("\n")
      parent.stdin.flush()
      assert parent.stdout.readline() == "(8, 8, 8, 3)\n"
    parent.kill()
  deadline = time.monotonic() + 20
  while any(map(is_alive, workers)) and time.monotonic() < deadline:
    time.sleep(0.05)
  assert not any(map(is_alive, workers))
