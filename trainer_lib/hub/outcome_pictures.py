"""Pictures of what a model gets right and wrong, as SVG, for the model card and the report: no library is needed.

A drawing takes its colours from variables of the page's style sheet, so it follows light and dark; `as_file` gives it
colours of its own. Equal numbers give equal bytes.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from trainer_lib.base.foreign_text import to_html

_SIZE = 460, 340  # of a drawing of points, in pixels
_LEFT, _BOTTOM, _EDGE = 64, 46, 12  # of the plane
_CELLS = 60, 40  # of the plane; the residuals of a cell are one point
_NAMED = 20  # classes of a confusion matrix with names and counts
_NAME_CHARS = 14
_STYLE = """<style>
:root { color: #5f6873; --ink: #1d2126; --page: #ffffff; --line: #dfe3e7; --series-1: #2b62b5; }
@media (prefers-color-scheme: dark) {
  :root { color: #9aa4ae; --ink: #e6e9ec; --page: #1c2024; --line: #343b42; --series-1: #82adf0; }
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


def draw_curve(
    points: Sequence[Sequence[float]],
    marks: Sequence[tuple[float, float]],
    labels: tuple[str, str],
    title: str,
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
    """A reliability diagram: accuracy over confidence; a calibrated model is on the diagonal.

    Args:
        bins: (mean confidence, accuracy, rows) of each; larger points have more rows.
    """
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
        total = max(1, sum(row))
        parts += [_cell(before + x * cell, before + y * cell, cell, count, count / total, is_named=is_named)
                  for x, count in enumerate(row) if count]  # fmt: skip
    for number, name in enumerate(names):
        middle = before + (number + 0.5) * cell
        parts.append(_text(before - 6, middle + 4, name, "end"))
        parts.append(_text(0, 0, name, "start", f"translate({middle + 4:.1f} {before - 6}) rotate(-90)"))
    frame = (
        f'<rect x="{before}" y="{before}" width="{side:g}" height="{side:g}" style="fill: none; stroke: var(--line)"/>'
    )
    parts += [frame, _text(before + side / 2, 14, "predicted", "middle")]
    parts.append(_text(0, 0, "true", "middle", f"translate(14 {before + side / 2:.1f}) rotate(-90)"))
    return _svg(parts, (math.ceil(before + side + _EDGE), math.ceil(before + side + _EDGE)), title)


def as_file(drawing: str) -> bytes:
    """A drawing as a file of its own, with colours for light and dark and a ground to be read on."""
    head, tag, body = drawing.partition(">")
    return f'{head} xmlns="http://www.w3.org/2000/svg"{tag}{_STYLE}{body}\n'.encode()


class _Plane:
    """Two axes: values to pixels, and back to cells of a grid."""

    def __init__(self, x_range: tuple[float, float], y_range: tuple[float, float], labels: tuple[str, str]) -> None:
        self.x_range, self.y_range, self._labels = x_range, y_range, labels
        self._width, self._height = _SIZE[0] - _LEFT - _EDGE, _SIZE[1] - _BOTTOM - _EDGE

    def place(self, x: float, y: float) -> tuple[float, float]:
        across, up = self._shares(x, y)
        return _LEFT + across * self._width, _EDGE + (1 - up) * self._height

    def cell(self, x: float, y: float) -> tuple[int, int]:
        shares = zip(self._shares(x, y), _CELLS, strict=True)
        across, up = (min(int(share * cells), cells - 1) for share, cells in shares)
        return across, up

    def middle(self, cell: tuple[int, int]) -> tuple[float, float]:
        ends = zip(cell, _CELLS, (self.x_range, self.y_range), strict=True)
        x, y = (low + (number + 0.5) / cells * (high - low) for number, cells, (low, high) in ends)
        return x, y

    def dot(self, point: tuple[float, float], radius: float) -> str:
        x, y = self.place(*point)
        return f'<circle cx="{x:.1f}" cy="{y:.1f}" r="{radius:.1f}" style="fill: var(--series-1); fill-opacity: .65"/>'

    def line(self, points: Iterable[tuple[float, float]], style: str) -> str:
        placed = (self.place(*point) for point in points)
        return f'<polyline points="{" ".join(f"{x:.1f},{y:.1f}" for x, y in placed)}" style="{style}"/>'

    def axes(self) -> list[str]:
        """The grid, its numbers and the labels."""
        (left, bottom), (right, top) = ((_LEFT, _SIZE[1] - _BOTTOM), (_SIZE[0] - _EDGE, _EDGE))
        parts = []
        for value in _ticks(*self.x_range):
            x, _ = self.place(value, self.y_range[0])
            parts += [_grid_line(x, top, x, bottom), _text(x, bottom + 16, f"{value:.6g}", "middle")]
        for value in _ticks(*self.y_range):
            _, y = self.place(self.x_range[0], value)
            parts += [_grid_line(left, y, right, y), _text(left - 6, y + 4, f"{value:.6g}", "end")]
        parts.append(_text((left + right) / 2, _SIZE[1] - 8, self._labels[0], "middle"))
        return [*parts, _text(0, 0, self._labels[1], "middle", f"translate(14 {(top + bottom) / 2:.1f}) rotate(-90)")]

    def _shares(self, x: float, y: float) -> tuple[float, float]:
        (left, right), (low, high) = self.x_range, self.y_range
        return (x - left) / (right - left), (y - low) / (high - low)


def _around(values: Sequence[float]) -> tuple[float, float]:
    """A range that holds the values, and a little more; one of a single value has a width, too."""
    low, high = min(values), max(values)
    spare = (high - low) * 0.04 or abs(low) * 0.1 or 0.5
    return low - spare, high + spare


def _ticks(low: float, high: float) -> list[float]:
    """About five round numbers of a range."""
    rough = (high - low) / 5
    unit = 10.0 ** math.floor(math.log10(rough))
    step = unit * next(each for each in (1, 2, 2.5, 5, 10) if each * unit >= rough * 0.999)
    first = math.ceil(low / step - 1e-9)
    return [0.0 if number == 0 else number * step for number in range(first, math.floor(high / step + 1e-9) + 1)]


def _cell(x: float, y: float, side: float, count: int, share: float, *, is_named: bool) -> str:
    style = f"fill: var(--series-1); fill-opacity: {0.55 * share:.3f}"
    ground = f'<rect x="{x:.2f}" y="{y:.2f}" width="{side:.2f}" height="{side:.2f}" style="{style}"/>'
    return (
        ground + _text(x + side / 2, y + side / 2 + 4, str(count), "middle", color="var(--ink)") if is_named else ground
    )


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
