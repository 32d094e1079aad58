"""The report of one pipeline run: a single HTML file that loads nothing, readable in light and dark.

What ran, what was cached and why, how long it took, the training curves, the metrics of every split, where everything
lies, content digests and versions. All text is escaped; a link is made only to http(s) addresses and to files beside
the report.

This module is not in cli/, because a served run writes its report without a terminal: the run record imports this, and
the commands import the record through the pipeline; from cli/ that would be an import circle.
"""

from __future__ import annotations

import base64
import functools
import io
import math
import posixpath
import re
import threading
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import quote, urlsplit

import jinja2
from markupsafe import Markup

from flows.sizes import describe_bytes, describe_seconds
from trainer_lib.secrets import mask
from trainer_lib.storage import Store

if TYPE_CHECKING:
    from flows.report_facts import ReportFacts

REPORT = "report.html"
MAX_POINTS = 1500  # of one curve: more than a screen has pixels
COLORS = 5  # series colours in the template's style sheet; further series repeat them
PACKAGES = ("trainflow", "torch", "prefect", "mlflow", "accelerate", "numpy", "pyarrow", "fsspec", "safetensors")

# Matplotlib wants colours; the page wants style sheet variables, which follow light and dark. These stand for them.
_INK, _LINE = "#a10000", "#a100ff"
_SERIES = [f"#a1000{number + 1}" for number in range(COLORS)]
_NOT_CURVES = re.compile(r"(^|_)(runtime|samples_per_second|steps_per_second|epoch|step|time|total_flos|num_.*)$")
_drawing = threading.Lock()  # matplotlib's settings are global

Series = list[tuple[float, float]]


@dataclass(frozen=True)
class Chart:
    """One drawing and its legend: (series number, label, last value) each."""

    title: str
    svg: Markup
    legend: list[tuple[int, str, str]]
    note: str


def render_report(
    result: Mapping[str, Any],
    history: Sequence[Mapping[str, Any]] = (),
    *,
    facts: ReportFacts | None = None,
    refresh_s: int | None = None,
) -> str:
    """The report as HTML text.

    Args:
        result: a pipeline run as `PipelineResult.to_dict()` gives it. Used besides, when there: `started` (ISO time)
            and `versions` (package to version), and `compared` (rows of `flows.plan_record.compare`).
        history: the trainer's log, one mapping per entry with its `step` (`TrainerState.log_history`).
        facts: settings, machine, attempts; None leaves them out.
        refresh_s: the run is at work, and the page reloads itself after as many seconds; None: it has ended.
    """
    stages = [_stage_row(stage, result) for stage in result.get("stages", ())]
    longest = max((stage["seconds"] for stage in stages), default=0.0)
    for stage in stages:
        stage["share"] = round(100 * stage["seconds"] / longest, 1) if longest > 0 else 0.0
    return _template().render(
        name=result.get("name", "pipeline"),
        key=result.get("pipeline_key") or "",
        failed=bool(result.get("error")),
        error=result.get("error"),
        total=describe_seconds(float(result.get("seconds") or 0.0)),
        started=_moment(result.get("started")),
        stages=stages,
        charts=draw_charts(history),
        tables=_metric_tables(result),
        gates=[{**gate, "value": _shown(gate["value"])} for gate in result.get("gates") or ()],
        compared=[row.in_words() for row in result.get("compared") or ()],
        places=_places(result),
        files=_files(result),
        versions=result.get("versions") or _versions(),
        facts=facts,
        refresh_s=refresh_s,
        written=_moment(None),
    )


def write_page(folder: Store, name: str, page: str) -> None:
    """Write the report, in one step where readers may be: on a disk by way of a draft; a store's put is one step."""
    if not folder.is_local:
        folder.write_bytes(name, page.encode())
        return
    folder.write_bytes(f".{name}.draft", page.encode())
    (folder.local_path() / f".{name}.draft").replace(folder.local_path() / name)


def draw_charts(history: Sequence[Mapping[str, Any]]) -> list[Chart]:
    """Loss (training and evaluation), the other evaluation metrics, learning rate: those that have points."""
    series = _series(history)
    losses = _losses(series)
    metrics = {key: points for key, points in series.items() if key.startswith("eval_") and key not in losses}
    rate = {key: series[key] for key in ("learning_rate",) if key in series}
    charts = (("Loss", losses), ("Evaluation while training", metrics), ("Learning rate", rate))
    return [_draw(title, curves) for title, curves in charts if any(curves.values())]


def draw_image(history: Sequence[Mapping[str, Any]]) -> str | None:
    """The losses as a PNG in a data URL, on white; None without a point."""
    curves = {name: points for name, points in _losses(_series(history)).items() if points}
    if not curves:
        return None
    with _drawing:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure

        figure = Figure(figsize=(7.2, 3.8), dpi=100, layout="tight")
        axes = figure.add_subplot()
        for name, points in curves.items():
            kept = _thinned(points)
            values = [value if math.isfinite(value) else math.nan for _, value in kept]
            axes.plot(
                [step for step, _ in kept], values, label=name, marker="o" if len(kept) < 40 else "", markersize=3
            )
        axes.set_xlabel("optimizer step")
        axes.grid(linewidth=0.4)
        axes.legend()
        buffer = io.BytesIO()
        FigureCanvasAgg(figure).print_figure(buffer, format="png")
    return f"data:image/png;base64,{base64.b64encode(buffer.getvalue()).decode()}"


def _losses(series: Mapping[str, Series]) -> dict[str, Series]:
    # train_loss is the mean over the whole run: a number, not a curve.
    return {key: series[key] for key in series if key.endswith("loss") and key != "train_loss"}


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


def _draw(title: str, curves: Mapping[str, Series]) -> Chart:
    with _drawing:
        import matplotlib as mpl
        from matplotlib.backends.backend_svg import FigureCanvasSVG
        from matplotlib.figure import Figure
        from matplotlib.ticker import MaxNLocator

        with mpl.rc_context({"svg.fonttype": "none", "svg.hashsalt": title, "font.family": "sans-serif"}):
            figure = Figure(figsize=(6.4, 3.4), layout="tight")
            figure.patch.set_visible(False)
            axes = figure.add_subplot()
            axes.patch.set_visible(False)
            for index, points in enumerate(curves.values()):
                kept = _thinned(points)
                steps = [step for step, _ in kept]
                # Matplotlib leaves a gap for NaN; an infinity would stretch the axis.
                values = [value if math.isfinite(value) else math.nan for _, value in kept]
                marker = "o" if len(kept) < 40 else ""
                axes.plot(steps, values, color=_SERIES[index % COLORS], linewidth=1.6, marker=marker, markersize=3)
            axes.set_xlabel("optimizer step", color=_INK)
            axes.tick_params(colors=_INK, labelcolor=_INK)
            axes.xaxis.set_major_locator(MaxNLocator(integer=True, nbins=7))
            axes.grid(color=_LINE, linewidth=0.6)
            for side, spine in axes.spines.items():
                spine.set_visible(side in {"left", "bottom"})
                spine.set_color(_LINE)
            buffer = io.StringIO()
            # Matplotlib would write the date, and equal curves would be different files.
            no_metadata = dict.fromkeys(("Creator", "Date", "Format", "Type"))
            FigureCanvasSVG(figure).print_figure(buffer, format="svg", metadata=no_metadata)
    legend = [(index % COLORS + 1, key, _shown(points[-1][1])) for index, (key, points) in enumerate(curves.items())]
    gaps = sum(not math.isfinite(value) for points in curves.values() for _, value in points)
    note = f"{gaps} value{'s are' if gaps > 1 else ' is'} not finite (gaps in the curve)" if gaps else ""
    return Chart(title, _page_svg(buffer.getvalue(), title), legend, note)


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


def _thinned(points: Series) -> Series:
    """At most `MAX_POINTS` of them, the last one included. Values that are not finite are kept, so they show."""
    if len(points) <= MAX_POINTS:
        return points
    # Rounded up, or there would be more than MAX_POINTS.
    stride = math.ceil(len(points) / MAX_POINTS)
    last = len(points) - 1
    return [p for i, p in enumerate(points) if i % stride == 0 or i == last or not math.isfinite(p[1])]


def _stage_row(stage: Mapping[str, Any], result: Mapping[str, Any]) -> dict[str, Any]:
    manifest = stage.get("manifest") or {}
    seconds = float(stage.get("seconds") or 0.0)
    return {
        "name": stage["stage"],
        "status": stage["status"],
        "reason": stage.get("reason") or "",
        "seconds": seconds,
        "time": describe_seconds(seconds) if seconds or stage["status"] != "skipped" else "",
        "key": manifest.get("key") or "",
        "digest": manifest.get("content_digest") or "",
        "link": _link(manifest.get("url"), result),
    }


def _metric_tables(result: Mapping[str, Any]) -> list[dict[str, Any]]:
    """One table per stage with metrics: rows are metrics, columns are splits where the stage has several."""
    tables = []
    for stage in result.get("stages", ()):
        metrics = (stage.get("manifest") or {}).get("metrics") or {}
        nested = {split: values for split, values in metrics.items() if isinstance(values, Mapping)}
        flat = {name: value for name, value in metrics.items() if not isinstance(value, Mapping)}
        columns = ({"": flat} if flat else {}) | nested
        names = list(dict.fromkeys(name for values in columns.values() for name in values))
        if names:
            rows = [(name, [_shown(values.get(name)) for values in columns.values()]) for name in names]
            tables.append({"stage": stage["stage"], "columns": list(columns), "rows": rows})
    return tables


def _places(result: Mapping[str, Any]) -> list[dict[str, str | None]]:
    """Where the stages' results, the MLflow run and the storage are."""
    places: list[dict[str, str | None]] = []

    def add(what: str, url: str | None) -> None:
        if url:
            places.append({"what": what, "text": mask(url), "link": _link(url, result)})

    for stage in result.get("stages", ()):
        for label, url in (stage.get("places") or {}).items():
            add(label.capitalize(), url)
    run_id = result.get("mlflow_run_id")
    if run_id:
        add("MLflow run", result.get("run_url"))
        places.append({"what": "MLflow run id", "text": str(run_id), "link": None})
        add("MLflow store", result.get("tracking_uri"))
    add("Storage", result.get("storage"))
    return places


def _link(url: str | None, result: Mapping[str, Any]) -> str | None:
    """An address a reader may follow: http(s) as it is, a local path relative to the report (so a moved storage keeps
    its links), nothing else."""
    if not url:
        return None
    scheme = urlsplit(url).scheme
    if scheme in {"http", "https"}:
        return mask(url)
    report = str(result.get("report_url") or "")
    if scheme or urlsplit(report).scheme or not posixpath.isabs(url) or not posixpath.isabs(report):
        return None
    # Quoted, as it becomes an address: a folder's name may hold a space or '#'.
    return quote(posixpath.relpath(url, posixpath.dirname(report)))


def _files(result: Mapping[str, Any]) -> list[dict[str, Any]]:
    found = []
    for stage in result.get("stages", ()):
        files = (stage.get("manifest") or {}).get("files") or ()
        rows = [
            {"path": file["path"], "size": describe_bytes(file["size"]), "sha256": file["sha256"]} for file in files
        ]
        if rows:
            found.append({"stage": stage["stage"], "rows": rows})
    return found


def _versions() -> dict[str, str]:
    found = {}
    for package in PACKAGES:
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    return found


def _shown(value: Any) -> str:
    if value is None:
        return ""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return str(value)
    if isinstance(value, int) or not math.isfinite(value):
        return str(value)
    return f"{value:.4g}" if abs(value) < 1e5 else f"{value:.3e}"


def _moment(started: str | float | None) -> str:
    if isinstance(started, float):  # seconds since 1970
        moment = datetime.fromtimestamp(started, UTC)
    else:
        moment = datetime.fromisoformat(started) if started else datetime.now(UTC)
    return moment.astimezone(UTC).strftime("%Y-%m-%d %H:%M:%S UTC")


@functools.lru_cache(maxsize=1)
def _template() -> jinja2.Template:
    loader = jinja2.FileSystemLoader(Path(__file__).parent)
    environment = jinja2.Environment(
        loader=loader, autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    return environment.get_template("report.html.j2")
