"""Pictures of a training, and of what its model gets right and wrong, as SVG: for report, card, MLflow and Prefect.

A drawing takes its colours from variables of the page's style sheet, so it follows light and dark; `as_file` adds
colours. Equal numbers give equal bytes.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from itertools import groupby
from typing import Any

from trainer_lib.base.suggestions import counted, number_words, to_html

COLORS = 5  # of series; further ones repeat them
MAX_POINTS = 1000  # of one curve: more than the picture has pixels
_SIZE = 460, 340  # of a drawing of points, in pixels
_LEFT, _BOTTOM, _EDGE = 64, 46, 12  # of the plane
_LETTER, _ROW = 6.5, 18  # pixels of the widest digit, and of a line of the legend
_MARKED_POINTS = 40  # of a curve; fewer have markers
_LARGEST = 1e300  # beyond it the width of a range overflows
_CELLS = 60, 40  # of the plane; the residuals of a cell are one point
_NAMED = 20  # classes of a confusion matrix with names and counts
_NAME_CHARS = 14
_STYLE = """<style>
:root { color: #5f6873; --ink: #1d2126; --page: #ffffff; --line: #dfe3e7;
  --series-1: #2b62b5; --series-2: #c4501b; --series-3: #1f7a4d; --series-4: #8a3fa8; --series-5: #a8820d; }
@media (prefers-color-scheme: dark) {
  :root { color: #9aa4ae; --ink: #e6e9ec; --page: #1c2024; --line: #343b42;
    --series-1: #82adf0; --series-2: #f0965f; --series-3: #63c794; --series-4: #cf93e6; --series-5: #dcbc55; }
}
</style><rect width="100%" height="100%" style="fill: var(--page)"/>"""


def draw_outcome(found: Mapping[str, Any], classes: Sequence[str], split: str) -> dict[str, str]:
    """The drawings of a split's outcomes by name: confusion, reliability, roc and precision-recall, or residuals.

    `found` is as `trainer_lib.evaluation.outcomes` gives it; `classes` is empty for numbers.
    """
    if found["kind"] == "several":
        return {}
    if found["kind"] != "classes":
        return {"residuals": draw_residuals(found["measured"], found["predicted"], f"Residuals of {split}")}
    drawn = {"confusion": draw_confusion(found["matrix"], classes, f"Confusion matrix of {split}")}
    if found.get("reliability"):
        drawn["reliability"] = draw_reliability(found["reliability"], f"Reliability diagram of {split}")
    if curves := found.get("curves"):
        mark = curves["threshold"]
        marks = [(mark["false_positive_rate"], mark["recall"]), (mark["recall"], mark["precision"])] if mark else []
        rates, precision = ("false positive rate", "true positive rate"), ("recall", "precision")
        drawn["roc"] = draw_curve(curves["roc"], marks[:1], rates, f"ROC curve of {split}")
        title = f"Precision-recall curve of {split}"
        drawn["precision-recall"] = draw_curve(curves["precision_recall"], marks[1:], precision, title)
    return drawn


def draw_series(series: Mapping[str, Sequence[tuple[float, float]]], title: str) -> str:
    """Curves of (optimizer step, value), with gaps where a value is not finite; above them names and last values."""
    steps = [step for points in series.values() for step, _ in points]
    values = [value for points in series.values() for _, value in points if _is_drawn(value)]
    rows = len(series) * _ROW
    plane = _Plane(_around(steps), _around(values or [0.0, 1.0]), ("optimizer step", ""), top=rows)
    parts = plane.axes(whole_x=True)
    for number, (name, points) in enumerate(series.items()):
        color = f"var(--series-{number % COLORS + 1})"
        gaps = sum(not _is_drawn(value) for _, value in points)
        note = f"; {counted(gaps, 'value')} not finite" if gaps else ""
        parts.append(f'<rect x="{_EDGE}" y="{number * _ROW + 5}" width="10" height="10" style="fill: {color}"/>')
        parts.append(_text(_EDGE + 16, number * _ROW + 14, f"{name} {number_words(points[-1][1])}{note}", "start"))
        for is_drawn, run in groupby(_thin(points), key=lambda point: _is_drawn(point[1])):
            placed = list(run) if is_drawn else []
            parts += [plane.line(placed, f"stroke: {color}; stroke-width: 1.6; fill: none")] if placed else []
            is_marked = len(points) < _MARKED_POINTS or len(placed) == 1
            parts += [plane.dot(point, 2, color) for point in placed] if is_marked else []
    return _svg(parts, (_SIZE[0], _SIZE[1] + rows), title)


def _thin(points: Sequence[tuple[float, float]]) -> Sequence[tuple[float, float]]:
    """At most `MAX_POINTS` of them, the last one included. Values that are not finite are kept, so that they show."""
    stride = math.ceil(len(points) / MAX_POINTS)
    last = len(points) - 1
    return [point for n, point in enumerate(points) if n % stride == 0 or n == last or not _is_drawn(point[1])]


def _is_drawn(value: float) -> bool:
    return abs(value) < _LARGEST  # not NaN


def draw_curve(
    points: Sequence[Sequence[float]], marks: Sequence[tuple[float, float]], labels: tuple[str, str], title: str
) -> str:
    """A curve between 0 and 1; the marks are the chosen threshold."""
    plane = _Plane((0.0, 1.0), (0.0, 1.0), labels)
    curve = plane.line([(x, y) for x, y in points], "stroke: var(--series-1); stroke-width: 1.6; fill: none")
    return _svg([*plane.axes(), curve, *(plane.dot(mark, 5) for mark in marks)], _SIZE, title)


def draw_residuals(measured: Sequence[float], predicted: Sequence[float], title: str) -> str:
    """Predicted minus measured over measured; the arguments are ``[rows]``.

    Points are those of a grid, and larger where more rows are: a picture does not hold the values of the rows.
    """
    residuals = [guess - value for guess, value in zip(predicted, measured, strict=True)]
    plane = _Plane(_around(measured), _around([0.0, *residuals]), ("measured", "predicted - measured"))
    cells = Counter(plane.cell(*point) for point in zip(measured, residuals, strict=True))
    most = max(cells.values())
    zero = plane.line([(plane.x_range[0], 0.0), (plane.x_range[1], 0.0)], "stroke: currentColor")
    wider = 3.5 if most > 1 else 0.5
    dots = [plane.dot(plane.middle(cell), 2 + wider * math.sqrt(rows / most)) for cell, rows in sorted(cells.items())]
    return _svg([*plane.axes(), zero, *dots], _SIZE, title)


def draw_reliability(bins: Sequence[Sequence[float]], title: str) -> str:
    """A reliability diagram of bins (mean confidence, accuracy, rows); a calibrated model is on the diagonal."""
    plane = _Plane((0.0, 1.0), (0.0, 1.0), ("confidence", "accuracy"))
    points = [(sure, right) for sure, right, _ in bins]
    most = max(rows for *_, rows in bins)
    dots = [plane.dot(point, 3 + 7 * math.sqrt(rows / most)) for point, (*_, rows) in zip(points, bins, strict=True)]
    diagonal = plane.line([(0.0, 0.0), (1.0, 1.0)], "stroke: currentColor; stroke-dasharray: 4 3")
    curve = plane.line(points, "stroke: var(--series-1); stroke-width: 1.6; fill: none")
    return _svg([*plane.axes(), diagonal, curve, *dots], _SIZE, title)


def draw_confusion(matrix: Sequence[Sequence[int]], classes: Sequence[str], title: str) -> str:
    """Counts of the true classes (rows) by predicted class (columns), shaded by their share of the row."""
    is_named = len(matrix) <= _NAMED
    names = [_shorten(name) for name in classes] if is_named else []
    cell = 34 if is_named else 400 / len(matrix)
    before = 24 + (7 * max(map(len, names)) if names else 0)
    side = cell * len(matrix)
    parts = []
    for y, row in enumerate(matrix):
        for x, count in enumerate(row):
            if not count:
                continue
            left, top, share = before + x * cell, before + y * cell, count / sum(row)
            place = f'x="{left:.2f}" y="{top:.2f}" width="{cell:.2f}" height="{cell:.2f}"'
            parts.append(f'<rect {place} style="fill: var(--series-1); fill-opacity: {0.55 * share:.3f}"/>')
            if is_named:
                parts.append(_text(left + cell / 2, top + cell / 2 + 4, str(count), "middle", color="var(--ink)"))
    for number, name in enumerate(names):
        middle = before + (number + 0.5) * cell
        parts.append(_text(before - 6, middle + 4, name, "end"))
        parts.append(_text(0, 0, name, "start", f"translate({middle + 4:.1f} {before - 6}) rotate(-90)"))
    place = f'x="{before}" y="{before}" width="{side:g}" height="{side:g}"'
    frame = f'<rect {place} style="fill: none; stroke: var(--line)"/>'
    parts += [frame, _text(before + side / 2, 14, "predicted", "middle")]
    parts.append(_text(0, 0, "true", "middle", f"translate(14 {before + side / 2:.1f}) rotate(-90)"))
    return _svg(parts, (math.ceil(before + side + _EDGE), math.ceil(before + side + _EDGE)), title)


def as_file(drawing: str) -> bytes:
    """A drawing as a file of its own, with colours for light and dark and a ground to be read on."""
    head, tag, body = drawing.partition(">")
    return f'{head} xmlns="http://www.w3.org/2000/svg"{tag}{_STYLE}{body}\n'.encode()


class _Plane:
    """Two axes below `top` pixels: values to pixels, and back to cells of a grid."""

    def __init__(
        self, x_range: tuple[float, float], y_range: tuple[float, float], labels: tuple[str, str], top: int = 0
    ) -> None:
        self.x_range, self.y_range, self._labels = x_range, y_range, labels
        self._x_ticks, self._y_ticks = _ticks(*x_range), _ticks(*y_range)
        self._top, self._left = top + _EDGE, max(_LEFT, 30 + _LETTER * max(map(len, self._y_ticks.values())))
        self._width, self._height = _SIZE[0] - self._left - _EDGE, _SIZE[1] - _BOTTOM - _EDGE

    def place(self, x: float, y: float) -> tuple[float, float]:
        across, up = self._shares(x, y)
        return self._left + across * self._width, self._top + (1 - up) * self._height

    def cell(self, x: float, y: float) -> tuple[int, int]:
        shares = zip(self._shares(x, y), _CELLS, strict=True)
        across, up = (min(int(share * cells), cells - 1) for share, cells in shares)
        return across, up

    def middle(self, cell: tuple[int, int]) -> tuple[float, float]:
        ends = zip(cell, _CELLS, (self.x_range, self.y_range), strict=True)
        x, y = (low + (number + 0.5) / cells * (high - low) for number, cells, (low, high) in ends)
        return x, y

    def dot(self, point: tuple[float, float], radius: float, color: str = "var(--series-1)") -> str:
        x, y = self.place(*point)
        return f'<circle cx="{x:.1f}" cy="{y:.1f}" r="{radius:.1f}" style="fill: {color}; fill-opacity: .65"/>'

    def line(self, points: Iterable[tuple[float, float]], style: str) -> str:
        placed = (self.place(*point) for point in points)
        return f'<polyline points="{" ".join(f"{x:.1f},{y:.1f}" for x, y in placed)}" style="{style}"/>'

    def axes(self, *, whole_x: bool = False) -> list[str]:
        """The grid, its numbers and the labels; with `whole_x` only whole numbers below it."""
        (left, right), (low, high) = self.x_range, self.y_range
        (left, bottom), (right, top) = self.place(left, low), self.place(right, high)
        parts = []
        for value, text in self._x_ticks.items():
            if not whole_x or value == round(value):
                x, _ = self.place(value, self.y_range[0])
                parts += [_grid_line(x, top, x, bottom), _text(x, bottom + 16, text, "middle")]
        for value, text in self._y_ticks.items():
            _, y = self.place(self.x_range[0], value)
            parts += [_grid_line(left, y, right, y), _text(left - 6, y + 4, text, "end")]
        parts.append(_text((left + right) / 2, bottom + _BOTTOM - 8, self._labels[0], "middle"))
        return [*parts, _text(0, 0, self._labels[1], "middle", f"translate(14 {(top + bottom) / 2:.1f}) rotate(-90)")]

    def _shares(self, x: float, y: float) -> tuple[float, float]:
        (left, right), (low, high) = self.x_range, self.y_range
        return (x - left) / (right - left), (y - low) / (high - low)


def _around(values: Sequence[float]) -> tuple[float, float]:
    """A range that holds the values, and a little more; one of a single value has a width, too."""
    low, high = min(values), max(values)
    spare = (high - low) * 0.04 or abs(low) * 0.1 or 0.5
    return low - spare, high + spare


def _ticks(low: float, high: float) -> dict[float, str]:
    """About five round numbers of a range, with as many digits as differ."""
    rough = (high - low) / 5
    unit = 10.0 ** math.floor(math.log10(rough))
    step = unit * next(factor for factor in (1, 2, 2.5, 5, 10) if factor * unit >= rough * 0.999)
    digits = max(6, 2 + math.ceil(math.log10(max(abs(low), abs(high)) / step)))
    first = math.ceil(low / step - 1e-9)
    values = (0.0 if number == 0 else number * step for number in range(first, math.floor(high / step + 1e-9) + 1))
    return {value: f"{value:.{digits}g}" for value in values}


def _grid_line(x: float, y: float, other_x: float, other_y: float) -> str:
    ends = f'x1="{x:.1f}" y1="{y:.1f}" x2="{other_x:.1f}" y2="{other_y:.1f}"'
    return f'<line {ends} style="stroke: var(--line)"/>'


def _text(x: float, y: float, text: str, anchor: str, transform: str | None = None, color: str = "currentColor") -> str:
    place = f'transform="{transform}"' if transform else f'x="{x:.1f}" y="{y:.1f}"'
    return f'<text {place} style="fill: {color}; text-anchor: {anchor}">{to_html(text)}</text>'


def _shorten(name: str) -> str:
    name = " ".join(name.split())
    return name if len(name) <= _NAME_CHARS else f"{name[: _NAME_CHARS - 1]}…"


def _svg(parts: Iterable[str], size: tuple[int, int], title: str) -> str:
    box = f'viewBox="0 0 {size[0]} {size[1]}" width="{size[0]}" height="{size[1]}"'
    style = f"max-width: {size[0]}px; font: 11px system-ui, sans-serif"
    return f'<svg {box} style="{style}" role="img" aria-label="{to_html(title)}">{"".join(parts)}</svg>'
