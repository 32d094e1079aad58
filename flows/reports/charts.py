"""Drawings of a run: curves as SVG for the report, pictures as PNG for Prefect and MLflow, from one set of series."""

from __future__ import annotations

import io
import math
import re
import threading
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from markupsafe import Markup

from trainer_lib.base.suggestions import number_words

LOSS = "loss"  # the name of its picture
MAX_POINTS = 1500  # of one curve: more than a screen has pixels
COLORS = 5  # series colours in the report's style sheet; further series repeat them

# Matplotlib wants colours; the page wants style sheet variables, which follow light and dark. These stand for them.
_INK, _LINE = "#a10000", "#a100ff"
_SERIES = [f"#a1000{number + 1}" for number in range(COLORS)]
_NOT_CURVES = re.compile(r"(^|_)(runtime|samples_per_second|steps_per_second|epoch|step|time|total_flos|words|num_.*)$")
_MARKED_POINTS = 40  # fewer have markers
_SVG_SIZE = (6.4, 3.4)  # inches
_LETTER = (6.6, 12.5)  # points of one at most: matplotlib's letters have 10 points
_drawing = threading.Lock()  # matplotlib's settings are global

Series = list[tuple[float, float]]


@dataclass(frozen=True)
class Chart:
    """One drawing and its legend: (series number, label, last value) each."""

    title: str
    svg: Markup
    legend: list[tuple[int, str, str]]
    note: str


def draw_charts(history: Sequence[Mapping[str, Any]]) -> list[Chart]:
    """Loss (training and evaluation), the other evaluation metrics, learning rate: those that have points."""
    return [_draw_svg(title, curves) for title, curves in _charts(history) if any(curves.values())]


def draw_images(history: Sequence[Mapping[str, Any]], only: str | None = None) -> dict[str, bytes]:
    """Draw these curves as PNG, on white, by name: loss, evaluation-while-training, learning-rate.

    Args:
        only: the name of the only one that is wanted.
    """
    charts = {title.lower().replace(" ", "-"): curves for title, curves in _charts(history) if any(curves.values())}
    return {name: _draw_png(curves) for name, curves in charts.items() if only in (None, name)}


def number_text(value: Any) -> str:
    """A number in few digits; other values as text, None as nothing."""
    if value is None:
        return ""
    return str(value) if isinstance(value, bool) or not isinstance(value, int | float) else number_words(value)


# -------------------------------------------------------------------------------------------------------------- series
def _charts(history: Sequence[Mapping[str, Any]]) -> list[tuple[str, dict[str, Series]]]:
    series = _series(history)
    # train_loss is the mean over the whole run: a number, not a curve.
    losses = {key: series[key] for key in series if key.endswith("loss") and key != "train_loss"}
    losses |= {key: series[key] for key in series if key.startswith("loss_") and key != "loss_spikes"}  # by source
    metrics = {key: points for key, points in series.items() if key.startswith("eval_") and key not in losses}
    rate = {key: series[key] for key in ("learning_rate",) if key in series}
    return [("Loss", losses), ("Evaluation while training", metrics), ("Learning rate", rate)]


def _series(history: Iterable[Mapping[str, Any]]) -> dict[str, Series]:
    series: dict[str, Series] = {}
    for entry in history:
        step = entry.get("step")
        if not isinstance(step, int | float):
            continue
        for key, value in entry.items():
            number = _number(value)
            if number is not None and not _NOT_CURVES.search(key):
                series.setdefault(key, []).append((float(step), number))
    return series


def _number(value: Any) -> float | None:
    """A float from a number or from the text that stands for one that is not finite; None for anything else."""
    if isinstance(value, str):
        return float(value) if value in {"NaN", "Infinity", "-Infinity"} else None
    return float(value) if isinstance(value, int | float) and not isinstance(value, bool) else None


def _thinned(points: Series) -> Series:
    """At most `MAX_POINTS` of them, the last one included. Values that are not finite are kept, so they show."""
    if len(points) <= MAX_POINTS:
        return points
    # Rounded up, or there would be more than MAX_POINTS.
    stride = math.ceil(len(points) / MAX_POINTS)
    last = len(points) - 1
    return [p for i, p in enumerate(points) if i % stride == 0 or i == last or not math.isfinite(p[1])]


# ------------------------------------------------------------------------------------------------------------- drawing
def _plot(axes: Any, curves: Mapping[str, Series], colors: Sequence[str] | None = None) -> None:
    """Draw every curve over the optimizer steps.

    Args:
        colors: of the series in turn; None: matplotlib's.
    """
    from matplotlib.ticker import MaxNLocator

    for index, (name, points) in enumerate(curves.items()):
        kept = _thinned(points)
        # Matplotlib leaves a gap for NaN; an infinity would stretch the axis.
        values = [value if math.isfinite(value) else math.nan for _, value in kept]
        style = {} if colors is None else {"color": colors[index % len(colors)]}
        marker = "o" if len(kept) < _MARKED_POINTS else ""
        axes.plot([step for step, _ in kept], values, label=name, linewidth=1.6, marker=marker, markersize=3, **style)
    axes.set_xlabel("optimizer step")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True, nbins=7))


def load_matplotlib() -> None:
    """Import what drawing takes, which is most of the time that the first picture takes."""
    with _drawing:
        import matplotlib.backends.backend_agg
        import matplotlib.backends.backend_svg
        import matplotlib.figure  # noqa: F401


def _draw_png(curves: Mapping[str, Series]) -> bytes:
    with _drawing:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure

        figure = Figure(figsize=(7.2, 3.8), dpi=100, layout="tight")
        axes = figure.add_subplot()
        _plot(axes, curves)
        axes.grid(linewidth=0.4)
        axes.legend()
        buffer = io.BytesIO()
        FigureCanvasAgg(figure).print_figure(buffer, format="png")
    return buffer.getvalue()


def _draw_svg(title: str, curves: Mapping[str, Series]) -> Chart:
    with _drawing:
        import matplotlib as mpl
        from matplotlib.backends.backend_svg import FigureCanvasSVG
        from matplotlib.figure import Figure

        with mpl.rc_context({"svg.fonttype": "none", "svg.hashsalt": title, "font.family": "sans-serif"}):
            figure = Figure(figsize=_SVG_SIZE)
            figure.patch.set_visible(False)
            axes = figure.add_subplot()
            axes.patch.set_visible(False)
            _plot(axes, curves, _SERIES)
            axes.xaxis.label.set_color(_INK)
            axes.tick_params(colors=_INK, labelcolor=_INK)
            axes.grid(color=_LINE, linewidth=0.6)
            for side, spine in axes.spines.items():
                spine.set_visible(side in {"left", "bottom"})
                spine.set_color(_LINE)
            _set_margins(figure, axes)
            buffer = io.StringIO()
            # Matplotlib would write the date, and equal curves would be different files.
            no_metadata = dict.fromkeys(("Creator", "Date", "Format", "Type"))
            FigureCanvasSVG(figure).print_figure(buffer, format="svg", metadata=no_metadata)
    legend = [
        (index % COLORS + 1, key, number_text(points[-1][1])) for index, (key, points) in enumerate(curves.items())
    ]
    gaps = sum(not math.isfinite(value) for points in curves.values() for _, value in points)
    note = f"{gaps} value{'s are' if gaps > 1 else ' is'} not finite (gaps in the curve)" if gaps else ""
    return Chart(title, _page_svg(buffer.getvalue(), title), legend, note)


def _set_margins(figure: Any, axes: Any) -> None:
    """Leave room for the labels, by their letters: matplotlib would draw everything once more to measure them."""
    formatter = axes.yaxis.get_major_formatter()
    letters = max((len(label) for label in formatter.format_ticks(axes.get_yticks())), default=0)
    width, height = (72 * side for side in _SVG_SIZE)
    above = _LETTER[1] * (1.5 if formatter.get_offset() else 0.5)
    figure.subplots_adjust(
        left=(letters * _LETTER[0] + 12) / width,
        right=1 - 2 * _LETTER[0] / width,
        bottom=3.2 * _LETTER[1] / height,
        top=1 - above / height,
    )


def _page_svg(svg: str, title: str) -> Markup:
    """Matplotlib's document as an element of a page: no prologue, fluid size, colours from the style sheet."""
    svg = svg[svg.index("<svg") :]
    svg = re.sub(r'(<svg[^>]*?) width="[^"]*"', rf'\1 role="img" aria-label="{title}"', svg, count=1)
    svg = re.sub(r'(<svg[^>]*?) height="[^"]*"', r"\1", svg, count=1)
    svg = re.sub(r'<g id="[a-z0-9.]+_\d+">', "<g>", svg)  # the next drawing has the same names
    svg = svg.replace(_INK, "currentColor").replace(_LINE, "var(--line)")
    for number, color in enumerate(_SERIES, start=1):
        svg = svg.replace(color, f"var(--series-{number})")
    return Markup(svg)  # noqa: S704 - made above from numbers; no text of a user is in it
