"""The page of a run: curves, results, pictures and config in one HTML file.

The file asks for nothing from elsewhere and runs no script, so it can be
mailed, archived and opened in any browser, on a phone too.
"""

import base64
import dataclasses
import importlib.resources
import io
import json
import math
import os
import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from etils import epath

from vit_jax import paths

MAX_POINTS = 1_000  # Of a curve; more cannot be told apart on the page.
MAX_BARS = 50  # More classes than this: the worst and the best half of it.
MAX_SIDE = 384  # Pixels; larger pictures are reduced to keep the page small.
PIXELATED_BELOW = 96  # Pixels; smaller pictures are enlarged without blur.
COLORS = 6  # Of lines; --line-0 ... in the template.

# The metrics that come first, by the last part of their name, and how they
# are called; all others go under "More curves", sorted.
FIRST_CURVES = {
  "loss": "loss",
  "accuracy": "accuracy",
  "lr": "learning rate",
  "images_per_second": "images/s",
}

# Matplotlib writes these colours, the page replaces them by its own, which
# differ in the light and in the dark.
_INK, _GRID = "#010203", "#010204"


@dataclasses.dataclass(frozen=True)
class Picture:
  """An image with words under it.

  Attributes:
    image: [H, W, C] uint8 or uint16. One channel is shown grey, three as RGB;
      of two the first is shown, of more the first three, and the page says so.
    caption: what matters, e.g. its label.
    detail: smaller: loss, id.
    good: whether a prediction is right; None where there is none.
  """

  image: np.ndarray
  caption: str
  detail: str = ""
  good: bool | None = None


@dataclasses.dataclass(frozen=True)
class EvalSection:
  """What one evaluator found.

  Attributes:
    name: of the evaluator.
    metrics: by name; the first is the headline.
    class_names: the K names in label order; () without `per_class`.
    per_class: [K] accuracy in [0, 1], nan for a class without an example.
    per_class_count: [K] examples of each class.
    pictures: test images with predictions, worst first.
  """

  name: str
  metrics: Mapping[str, float]
  class_names: tuple[str, ...] = ()
  per_class: np.ndarray | None = None
  per_class_count: np.ndarray | None = None
  pictures: Sequence[Picture] = ()


def write_report(
  path: epath.PathLike,
  *,
  title: str,
  facts: Mapping[str, str],
  history: Sequence[Mapping[str, float]],
  evaluations: Sequence[EvalSection],
  train_pictures: Sequence[Picture],
  config_json: str,
) -> None:
  """Writes the page of a run; a reader never sees half of it.

  Args:
    path: of the HTML file; local (`~` is expanded) or one epath knows.
    title: of the page.
    facts: what the run was, by name: parameters, steps, devices, time.
    history: records with a "step", as in `metrics.jsonl`.
    evaluations: one section each, in this order.
    train_pictures: the first training batch as the model sees it.
    config_json: the whole config.

  Raises:
    ValueError: if a picture is not [H, W, C] integers, or an array of classes
      does not have as many entries as there are names.
  """
  import jinja2

  template = importlib.resources.files("vit_jax") / "templates/report.html"
  environment = jinja2.Environment(
    autoescape=True,  # Class names and ids come from outside.
    undefined=jinja2.StrictUndefined,
    trim_blocks=True,
    lstrip_blocks=True,
  )
  environment.filters["number"] = _number
  page = environment.from_string(template.read_text("utf-8")).render(
    title=title,
    facts=facts,
    curves=_curves(history),
    first_curves=set(FIRST_CURVES.values()),
    metric_names=list(dict.fromkeys(m for e in evaluations for m in e.metrics)),
    evaluations=[_evaluation(e) for e in evaluations],
    train_pictures=[_shown(picture) for picture in train_pictures],
    config=json.dumps(json.loads(config_json), indent=2, ensure_ascii=False),
  )
  _write_atomically(paths.expand(path), page)


def label_text(weights: np.ndarray, class_names: tuple[str, ...]) -> str:
  """Returns a soft label in words: "3", or "3 (70 %) + 8 (30 %)" if mixed.

  Args:
    weights: [K] the label as the loss sees it. Classes under 2 % are left
      out: what label smoothing spreads over all.
    class_names: the K names.
  """
  order = np.argsort(-weights, kind="stable")
  shown = [int(i) for i in order if weights[i] >= 0.02] or [int(order[0])]
  if len(shown) == 1 or np.all(weights[shown] >= 0.98):  # One, or multi-label.
    return " + ".join(class_names[i] for i in shown)
  return " + ".join(
    f"{class_names[i]} ({100 * weights[i]:.0f} %)" for i in shown
  )


def prediction(
  image: np.ndarray,
  *,
  truth: str,
  predicted: str,
  probability: float,
  loss: float,
  id: str,
) -> Picture:
  """Returns the picture of a test image and what the model said of it.

  Args:
    image: [H, W, C] uint8 or uint16.
    truth: its class, or its classes joined.
    predicted: the class, or the classes joined, that the model names.
    probability: of `predicted`, in [0, 1].
    loss: of the example.
    id: stable name of the example, e.g. its path.
  """
  return Picture(
    image,
    caption=f"true {truth}, predicted {predicted}",
    detail=f"p {probability:.3f}, loss {loss:.3g}\n{id}",
    good=truth == predicted,
  )


class _Line(NamedTuple):
  name: str
  color: int
  last: float  # The newest finite value, nan if there is none.


class _Curve(NamedTuple):
  title: str
  lines: list[_Line]
  svg: str


class _Bar(NamedTuple):
  name: str
  accuracy: float
  count: int | None


def _curves(history: Sequence[Mapping[str, float]]) -> list[_Curve]:
  """Returns a chart a metric, with a line for each prefix that has it."""
  names = dict.fromkeys(k for record in history for k in record if k != "step")
  groups: dict[str, list[str]] = {metric: [] for metric in FIRST_CURVES}
  for name in sorted(names):
    groups.setdefault(name.rpartition("/")[2], []).append(name)
  groups.pop("count", None)  # It does not change.
  curves = []
  for metric, members in groups.items():
    if not members:
      continue
    series = [_series(history, name) for name in members]
    lines = []
    for i, (name, (_, y)) in enumerate(zip(members, series, strict=True)):
      finite = y[np.isfinite(y)]
      last = float(finite[-1]) if finite.size else math.nan
      label = name.rpartition("/")[0] or name
      lines.append(_Line(label, i % COLORS, last))
    title = FIRST_CURVES.get(metric, metric.replace("_", " "))
    curves.append(_Curve(title, lines, _svg(series, index=len(curves))))
  return curves


def _series(
  history: Sequence[Mapping[str, float]], name: str
) -> tuple[np.ndarray, np.ndarray]:
  """Returns the steps and values of one metric, thinned to MAX_POINTS."""
  points = [(r["step"], r[name]) for r in history if name in r]
  x, y = np.asarray(points, float).T
  y = np.where(np.isfinite(y), y, np.nan)  # Infinity would spoil the axis.
  if len(x) > MAX_POINTS:
    kept = np.linspace(0, len(x) - 1, MAX_POINTS).round().astype(int)
    x, y = x[kept], y[kept]
  return x, y


def _svg(series: Sequence[tuple[np.ndarray, np.ndarray]], *, index: int) -> str:
  """Returns the chart as an <svg> element in the colours of the page."""
  import markupsafe
  import matplotlib
  from matplotlib import figure, ticker

  style: dict[Any, object] = {
    "svg.fonttype": "none",  # Text stays text.
    "svg.hashsalt": str(index),  # The same run gives the same bytes.
    "font.size": 8,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.edgecolor": _GRID,
    "axes.grid": True,
    "axes.grid.axis": "y",
    "grid.color": _GRID,
    "grid.linewidth": 0.6,
    "xtick.color": _GRID,
    "ytick.color": _GRID,
    "xtick.labelcolor": _INK,
    "ytick.labelcolor": _INK,
  }
  with matplotlib.rc_context(style):
    # Half the width of a desktop page or all of a phone's: type fits both.
    chart = figure.Figure(figsize=(4.4, 2.0), layout="constrained")
    axes = chart.add_subplot()
    for i, (x, y) in enumerate(series):
      axes.plot(
        x,
        y,
        color=_line_color(i % COLORS),
        linestyle="-" if i < COLORS else "--",
        linewidth=1.1,
        marker="o" if np.isfinite(y).sum() <= 30 else "",
        markersize=2.5,
      )
    points = np.concatenate([np.stack(pair) for pair in series], axis=1)
    _frame_one_point(axes, points[:, np.isfinite(points[1])])
    axes.xaxis.set_major_locator(ticker.MaxNLocator(5, integer=True))
    axes.xaxis.set_major_formatter(ticker.EngFormatter(sep=""))
    axes.yaxis.set_major_locator(
      ticker.MaxNLocator(5, steps=[1, 2, 2.5, 5, 10])
    )
    axes.yaxis.set_major_formatter(ticker.FuncFormatter(lambda v, _: f"{v:g}"))
    buffer = io.StringIO()
    chart.savefig(buffer, format="svg", transparent=True)
  svg = buffer.getvalue()
  svg = svg[svg.index("<svg") :]
  svg = re.sub(r"<metadata>.*?</metadata>", "", svg, flags=re.DOTALL)
  # The charts share one page, where an id is to be unique.
  svg = re.sub(r'(\bid="|href="#|url\(#)', rf"\g<1>chart{index}-", svg)
  svg = svg.replace(_INK, "var(--muted)").replace(_GRID, "var(--edge)")
  for i in range(COLORS):
    svg = svg.replace(_line_color(i), f"var(--line-{i})")
  return markupsafe.Markup(svg)  # Numbers only: nothing in it is from outside.


def _frame_one_point(axes: Any, points: np.ndarray) -> None:
  """Shows a value that stands alone from zero on, not magnified around it."""
  for values, limit in zip(points, (axes.set_xlim, axes.set_ylim)):
    if len(np.unique(points[0])) == 1 and len(np.unique(values)) == 1:
      low, high = sorted((0.0, 1.1 * values[0] or 1.0))
      limit(low, high)


def _line_color(i: int) -> str:
  return f"#0506{i:02d}"


def _evaluation(section: EvalSection) -> dict[str, object]:
  """Returns what the template shows of one evaluator."""
  bars = _bars(section)
  known = [bar for bar in bars if not math.isnan(bar.accuracy)]
  parts = {"": bars}
  if len(bars) > MAX_BARS:
    half = MAX_BARS // 2
    worst, best = known[:half], known[half:][-half:]
    parts = {f"worst {len(worst)}": worst, f"best {len(best)}": best}
  return {
    "name": section.name,
    "metrics": section.metrics,
    "bar_parts": parts,
    "all_bars": bars if len(bars) > MAX_BARS else [],
    "num_classes": len(bars),
    "num_absent": len(bars) - len(known),
    "name_width": min(max((len(bar.name) for bar in bars), default=0), 30),
    "pictures": [_shown(picture) for picture in section.pictures],
  }


def _bars(section: EvalSection) -> list[_Bar]:
  """Returns one bar a class, the worst first, classes without example last."""
  if section.per_class is None:
    return []
  k = len(section.class_names)
  arrays = {
    "per_class": section.per_class,
    "per_class_count": section.per_class_count,
  }
  for name, array in arrays.items():
    if array is not None and np.shape(array) != (k,):
      raise ValueError(
        f"{section.name}.{name}: got shape {np.shape(array)}; class_names has"
        f" {k} entries, so it must be ({k},). Pass one value a class."
      )
  counts = section.per_class_count
  bars = [
    _Bar(name, float(accuracy), None if counts is None else int(counts[i]))
    for i, (name, accuracy) in enumerate(
      zip(section.class_names, section.per_class, strict=True)
    )
  ]
  return sorted(bars, key=lambda bar: (math.isnan(bar.accuracy), bar.accuracy))


def _shown(picture: Picture) -> dict[str, object]:
  """Returns what the template shows of a picture, the image as data URI."""
  from PIL import Image

  pixels = picture.image
  known = pixels.dtype in (np.uint8, np.uint16)
  if pixels.ndim != 3 or not known or 0 in pixels.shape:
    raise ValueError(
      f"picture {picture.caption!r}: got {pixels.dtype} {pixels.shape};"
      " expected uint8 or uint16 [H, W, C]. Scale to 0..255 and add the channel"
      " axis."
    )
  channels = pixels.shape[-1]
  shown = 1 if channels < 3 else 3
  pixels = pixels[..., 0] if shown == 1 else pixels[..., :3]
  if pixels.dtype == np.uint16:
    pixels = np.rint(pixels / 257).astype(np.uint8)  # 65535 / 255
  image = Image.fromarray(np.ascontiguousarray(pixels))
  pixelated = max(image.size) < PIXELATED_BELOW
  image.thumbnail((MAX_SIDE, MAX_SIDE))
  buffer = io.BytesIO()
  image.save(buffer, format="PNG", optimize=True)
  data = base64.b64encode(buffer.getvalue()).decode("ascii")
  return {
    "source": f"data:image/png;base64,{data}",
    "width": image.width,
    "height": image.height,
    "pixelated": pixelated,
    "caption": picture.caption,
    "detail": [_with_whole_end(x) for x in picture.detail.splitlines()],
    "note": f"{shown} of {channels} channels" if shown != channels else "",
    "good": picture.good,
  }


def _with_whole_end(line: str) -> tuple[str, str]:
  """Returns a line in two parts; the second, a suffix, must not be broken."""
  found = re.search(r"\S{0,6}\.\w{1,5}$", line)
  start = found.start() if found else len(line)
  return line[:start], line[start:]


def _number(value: float) -> str:
  """Returns four digits, or a whole number where that is enough."""
  if not math.isfinite(value):
    return str(float(value))
  if value == int(value) or abs(value) >= 1_000:
    return f"{value:,.0f}"
  return f"{value:.4g}"


def _write_atomically(path: epath.Path, text: str) -> None:
  path.parent.mkdir(parents=True, exist_ok=True)
  if "://" in os.fspath(path):  # An object appears only when complete.
    path.write_text(text)
    return
  temporary = path.with_name(path.name + ".tmp")
  temporary.write_text(text)
  temporary.replace(path)
