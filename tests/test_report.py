"""The page: what is on it, that nothing escapes it, and a real browser."""

import base64
import dataclasses
import html.parser
import io
import json
import math
import os
import pathlib
import re
import shutil
import subprocess

import numpy as np
import pytest
from PIL import Image

from vit_jax import report

EVIL = "<script>alert('x')</script>"


def picture(**kwargs) -> report.Picture:
  image = np.arange(8 * 8 * 1, dtype=np.uint8).reshape(8, 8, 1)
  return report.Picture(**{"image": image, "caption": "three", **kwargs})


def section(**kwargs) -> report.EvalSection:
  return report.EvalSection(
    **{
      "name": "val",
      "metrics": {"accuracy": 0.97224, "count": 10_000},
      "class_names": ("cat", "dog", EVIL),
      "per_class": np.array([0.75, 0.5, np.nan]),
      "per_class_count": np.array([4, 2, 0]),
      "pictures": [picture(good=False, detail="p 0.9, loss 2.1\nval/1.png")],
      **kwargs,
    }
  )


def history() -> list[dict[str, float]]:
  records: list[dict[str, float]] = [
    {"step": step, "train/loss": 2 / step, "train/lr": 1e-3}
    for step in range(10, 101, 10)
  ]
  return [*records, {"step": 100, "val/loss": 0.125, "val/count": 10.0}]


def page(path: pathlib.Path, **kwargs) -> str:
  arguments = {
    "title": "A run",
    "facts": {"parameters": "203,594"},
    "history": history(),
    "evaluations": [section()],
    "train_pictures": [picture()],
    "config_json": '{"batch_size": 64}',
  }
  report.write_report(path, **{**arguments, **kwargs})
  return path.read_text("utf-8")


class Words(html.parser.HTMLParser):
  """Collects the elements, their attributes and the words between them."""

  def __init__(self, text: str):
    super().__init__()
    self.tags: list[tuple[str, dict[str, str | None]]] = []
    self.words: list[str] = []
    self.feed(text)

  def handle_starttag(self, tag, attrs):
    self.tags.append((tag, dict(attrs)))

  def handle_data(self, data):
    if data.strip() and self.tags[-1][0] != "style":
      self.words.append(" ".join(data.split()))


def test_the_page_says_what_it_was_given(tmp_path):
  words = Words(page(tmp_path / "report.html")).words
  for expected in ("A run", "203,594", "0.9722", "10,000", "three", "loss"):
    assert expected in words
  assert "learning rate" in words
  assert "0.125" in words  # The last val/loss.
  assert " ".join(words).find("p 0.9, loss 2.1 val/1.png") > 0
  assert '{ "batch_size": 64 }' in words
  assert [p.name for p in tmp_path.iterdir()] == ["report.html"]


def test_classes_are_sorted_worst_first_and_those_without_example_last(
  tmp_path,
):
  words = Words(page(tmp_path / "report.html")).words
  at = [words.index(w) for w in ("dog", "50.0 %", "cat", "75.0 %", EVIL)]
  assert at == sorted(at)
  assert words[at[-1] + 1] == "no example"
  assert "3 classes, 1 without an example, worst first" in words


def test_a_class_is_never_both_among_the_worst_and_the_best(tmp_path):
  accuracy = np.full(60, np.nan)
  accuracy[:30] = np.linspace(0, 1, 30)
  few = section(
    class_names=tuple(f"class {i}" for i in range(60)),
    per_class=accuracy,
    per_class_count=None,
  )
  words = Words(page(tmp_path / "report.html", evaluations=[few])).words
  assert "worst 25" in words and "best 5" in words
  assert words.count("class 27") == words.count("class 2") == 2  # And in all.


def test_words_from_outside_stay_words(tmp_path):
  text = page(
    tmp_path / "report.html",
    title=EVIL,
    facts={EVIL: EVIL},
    history=[{"step": 1, f"{EVIL}/{EVIL}": 1.0}],
    evaluations=[
      section(
        name=EVIL,
        metrics={EVIL: 1.0},
        pictures=[picture(caption='" onload="x', detail=EVIL)],
      )
    ],
    train_pictures=[picture(caption=EVIL)],
    config_json=json.dumps({"name": "</pre>" + EVIL}),
  )
  parsed = Words(text)
  assert "script" not in {tag for tag, _ in parsed.tags}
  assert all("onload" not in attributes for _, attributes in parsed.tags)
  assert parsed.words.count(EVIL) >= 5


def test_nothing_on_the_page_points_outside(tmp_path):
  parsed = Words(page(tmp_path / "report.html"))
  for tag, attributes in parsed.tags:
    for name in ("src", "href", "xlink:href", "srcset", "data"):
      target = attributes.get(name) or "#"
      assert target.startswith(("#", "data:")), (tag, target[:80])
  text = (tmp_path / "report.html").read_text("utf-8")
  assert not re.search(r"url\((?!#)|@import", text)
  ids = [a["id"] for _, a in parsed.tags if "id" in a]
  assert len(ids) == len(set(ids))


def test_the_same_run_gives_the_same_bytes(tmp_path):
  assert page(tmp_path / "a.html") == page(tmp_path / "b.html")


def images(text: str) -> list[np.ndarray]:
  sources = [a["src"] or "" for tag, a in Words(text).tags if tag == "img"]
  return [
    np.asarray(Image.open(io.BytesIO(base64.b64decode(s.split(",")[1]))))
    for s in sources
  ]


@pytest.mark.parametrize(
  ("channels", "shown", "note"),
  [
    (1, 0, None),
    (2, 0, "1 of 2 channels"),
    (3, slice(0, 3), None),
    (5, slice(0, 3), "3 of 5 channels"),
  ],
)
def test_the_pixels_on_the_page_are_the_pixels_given(
  tmp_path, channels, shown, note
):
  rng = np.random.default_rng(0)
  image = rng.integers(0, 256, (6, 9, channels), dtype=np.uint8)
  text = page(
    tmp_path / "report.html",
    evaluations=[],
    train_pictures=[report.Picture(image, "x")],
  )
  np.testing.assert_array_equal(images(text)[0], image[..., shown])
  assert (note in Words(text).words) == (note is not None)


def test_a_picture_of_16_bits_is_shown_in_8(tmp_path):
  image = np.array([[[0], [128], [129], [40000], [65535]]], np.uint16)
  text = page(
    tmp_path / "report.html",
    evaluations=[],
    train_pictures=[picture(image=image)],
  )
  np.testing.assert_array_equal(images(text)[0], [[0, 0, 1, 156, 255]])


def test_large_pictures_are_reduced_and_small_ones_are_pixelated(tmp_path):
  text = page(
    tmp_path / "report.html",
    evaluations=[],
    train_pictures=[
      picture(image=np.zeros((600, 1200, 3), np.uint8)),
      picture(),
    ],
  )
  assert [image.shape[:2] for image in images(text)] == [(192, 384), (8, 8)]
  classes = [a.get("class") for tag, a in Words(text).tags if tag == "img"]
  assert classes == [None, "pixelated"]


@pytest.mark.parametrize(
  "image",
  [
    np.zeros((8, 8), np.uint8),
    np.zeros((8, 8, 3), np.float32),
    np.zeros((0, 8, 3), np.uint8),
  ],
)
def test_a_picture_of_another_kind_is_refused(tmp_path, image):
  with pytest.raises(ValueError, match=r"picture 'three': got .* expected"):
    page(tmp_path / "report.html", train_pictures=[picture(image=image)])
  assert not (tmp_path / "report.html").exists()


@pytest.mark.parametrize("name", ["per_class", "per_class_count"])
def test_a_value_too_few_for_the_classes_is_refused(tmp_path, name):
  wrong = section(**{name: np.ones(2)})
  with pytest.raises(ValueError, match=rf"val\.{name}: got shape \(2,\);"):
    page(tmp_path / "report.html", evaluations=[wrong])


@pytest.mark.parametrize(
  "records",
  [
    [],
    [{"step": 1, "train/loss": 0.5}],
    [{"step": 1, "train/loss": math.nan}, {"step": 2, "train/loss": math.inf}],
    [{"step": s, f"e{s % 9}/accuracy": 0.1} for s in range(1, 40)],
  ],
  ids=["empty", "single point", "not finite", "more lines than colours"],
)
def test_any_history_makes_a_page(tmp_path, records):
  text = page(tmp_path / "report.html", history=records)
  assert ("No metrics were written" in text) == (not records)
  assert text.count("<svg") == (1 if records else 0)


def test_a_value_that_stands_alone_is_shown_from_zero(tmp_path):
  text = page(
    tmp_path / "report.html",
    history=[{"step": 12, "val/accuracy": 0.75}],
    evaluations=[],
  )
  ticks = [float(w) for w in Words(text).words if re.fullmatch(r"[\d.]+", w)]
  assert ticks.count(0) == 2  # Of both axes.
  assert max(ticks) <= 12


def test_the_suffix_of_a_long_name_is_not_broken(tmp_path):
  name = "train/red_fox/a-long-name-of-many-words-0123456789.jpeg"
  shown = picture(detail=f"p 0.9, loss 2\n{name}")
  text = page(tmp_path / "report.html", train_pictures=[shown])
  start, end = name[:-11], name[-11:]
  assert f'{start}<span class="whole">{end}</span>' in text


def test_a_run_without_results_makes_a_page(tmp_path):
  text = page(
    tmp_path / "report.html",
    facts={},
    history=[],
    evaluations=[report.EvalSection("empty", {})],
    train_pictures=[],
  )
  assert "empty" in Words(text).words


def test_a_long_history_keeps_its_first_and_last_point(tmp_path):
  long = [{"step": s, "train/loss": 1.0 / s} for s in range(1, 50_001)]
  text = page(tmp_path / "report.html", history=long)
  assert len(text) < 150_000
  assert "2e-05" in Words(text).words


@pytest.mark.parametrize("k", [1, 51, 21_843])
def test_many_classes_show_the_worst_and_best_and_fold_the_rest(tmp_path, k):
  many = section(
    class_names=tuple(f"class {i} " + "long" * 9 for i in range(k)),
    per_class=np.linspace(0, 1, k),
    per_class_count=None,
  )
  parsed = Words(page(tmp_path / "report.html", evaluations=[many]))
  rows = sum(tag == "li" for tag, _ in parsed.tags)
  assert rows == (k if k <= 50 else 50 + k)
  assert (f"All {k:,} classes" in parsed.words) == (k > 50)


@pytest.mark.parametrize(
  ("weights", "expected"),
  [
    ([0, 1, 0], "b"),
    ([0.3, 0, 0.7], "c (70 %) + a (30 %)"),
    ([0.01, 0.98, 0.01], "b"),  # Label smoothing.
    ([1, 0, 1], "a + c"),  # Multi-label.
  ],
)
def test_a_label_in_words(weights, expected):
  assert report.label_text(np.array(weights), ("a", "b", "c")) == expected


def test_a_prediction_is_good_when_it_names_the_truth():
  def said(predicted: str) -> report.Picture:
    return report.prediction(
      np.zeros((2, 2, 1), np.uint8),
      truth="7",
      predicted=predicted,
      probability=0.25,
      loss=1.3863,
      id="val/3.png",
    )

  wrong = said("2")
  assert wrong.caption == "true 7, predicted 2" and wrong.good is False
  assert wrong.detail == "p 0.250, loss 1.39\nval/3.png"
  assert said("7").good is True


@dataclasses.dataclass
class Browser:
  """What headless Chromium made of a page."""

  dom: str
  console: list[str]


def browse(path: pathlib.Path, profile: pathlib.Path) -> Browser:
  chromium = shutil.which("chromium") or shutil.which("chromium-browser")
  if chromium is None:
    if os.environ.get("CI"):
      pytest.fail("chromium is missing; CI must install it")
    pytest.skip("needs chromium")
  done = subprocess.run(
    [
      chromium,
      "--headless",
      "--no-sandbox",
      "--disable-gpu",
      "--no-first-run",
      "--disable-background-networking",
      "--disable-component-update",
      "--disable-sync",
      "--enable-logging=stderr",
      "--window-size=390,800",
      f"--user-data-dir={profile}",
      "--dump-dom",
      path.as_uri(),
    ],
    capture_output=True,
    text=True,
    timeout=120,
    check=True,
  )
  lines = done.stderr.splitlines()
  return Browser(done.stdout, [line for line in lines if "CONSOLE" in line])


def test_chromium_renders_the_page_without_a_complaint(tmp_path):
  page(tmp_path / "report.html")
  browser = browse(tmp_path / "report.html", tmp_path / "profile")
  assert browser.console == []
  words = Words(browser.dom).words
  for expected in ("A run", "0.9722", "dog", "50.0 %", EVIL, "✗"):
    assert expected in words
  assert browser.dom.count("<svg") == 2


def test_chromium_refuses_what_would_leave_the_page(tmp_path):
  text = page(tmp_path / "report.html")
  smuggled = '<img src="http://127.0.0.1:9/x.png"><script>document.title=1'
  (tmp_path / "report.html").write_text(
    text.replace("</main>", smuggled + "</script></main>")
  )
  browser = browse(tmp_path / "report.html", tmp_path / "profile")
  assert len(browser.console) == 2
  assert all("Content Security Policy" in line for line in browser.console)
