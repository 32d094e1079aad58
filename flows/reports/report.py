"""The report of one pipeline run: a single HTML file that loads nothing, readable in light and dark.

What ran, what was cached and why, how long it took, the training curves, the metrics of every split, where everything
lies, content digests and versions. All text is escaped; a link is made only to http(s) addresses and to files beside
the report.

This module is not in cli/, because a served run writes its report without a terminal: the run record imports this, and
the commands import the record through the pipeline; from cli/ that would be an import circle.
"""

from __future__ import annotations

import functools
import posixpath
import re
from collections.abc import Iterable, Mapping, Sequence
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import quote, urlsplit

import jinja2
from markupsafe import Markup

from trainer_lib.base.durations import describe_bytes, describe_seconds
from trainer_lib.base.foreign_text import to_terminal
from trainer_lib.base.suggestions import counted, number_words
from trainer_lib.hub.metric_tables import compare_with_baselines, slice_tables, whole_metrics
from trainer_lib.hub.pictures import draw_series
from trainer_lib.secrets import mask
from trainer_lib.trackers.names import with_intervals

if TYPE_CHECKING:
    from trainer_lib.trackers.mlflow.mlflow_registry import Registered
    from trainflow.flows.reports.report_facts import ReportFacts

REPORT = "report.html"
_PAGE = Path(__file__).parent / "report.html.j2"
PACKAGES = ("trainflow", "torch", "prefect", "mlflow", "accelerate", "numpy", "pyarrow", "fsspec", "safetensors")
LOSS = "Loss"
_NOT_CURVES = re.compile(r"(^|_)(runtime|samples_per_second|steps_per_second|epoch|step|time|total_flos|words|num_.*)$")
Series = dict[str, list[tuple[float, float]]]


def draw_charts(history: Sequence[Mapping[str, Any]]) -> dict[str, str]:
    """Title -> SVG of the loss (training and evaluation), the other evaluation metrics, and the learning rate.

    Args:
        history: the trainer's log; a picture without points is left out.
    """
    series = _read_series(history)
    # train_loss is the mean over the whole run: a number, not a curve.
    losses = {key: series[key] for key in series if key.endswith("loss") and key != "train_loss"}
    losses |= {key: series[key] for key in series if key.startswith("loss_") and key != "loss_spikes"}  # by source
    metrics = {key: points for key, points in series.items() if key.startswith("eval_") and key not in losses}
    rate = {key: series[key] for key in ("learning_rate",) if key in series}
    charts = {LOSS: losses, "Evaluation while training": metrics, "Learning rate": rate}
    return {title: draw_series(curves, title) for title, curves in charts.items() if curves}


def number_text(value: Any) -> str:
    """A number in few digits; other values as text, None as nothing."""
    if value is None:
        return ""
    return str(value) if isinstance(value, bool) or not isinstance(value, int | float) else number_words(value)


def render_report(
    result: Mapping[str, Any],
    charts: Mapping[str, str] | None = None,
    *,
    facts: ReportFacts | None = None,
    refresh_s: int | None = None,
) -> str:
    """The report as HTML text.

    Args:
        result: a pipeline run as `PipelineResult.to_dict()` gives it. Used besides, when there: `started` (ISO time)
            and `versions` (package to version), `compared` (rows of `trainflow.flows.records.plan_record.compare`), and
            `registers` (the name that the registry was asked for) with `registered` (what came of it).
        charts: title -> SVG of the curves of the training (`draw_charts`).
        facts: settings, machine, attempts; None leaves them out.
        refresh_s: the run is at work, and the page reloads itself after as many seconds; None: it has ended.
    """
    stages = [_stage_row(stage, result) for stage in result.get("stages", ())]
    longest = max((stage["seconds"] for stage in stages), default=0.0)
    for stage in stages:
        stage["share"] = round(100 * stage["seconds"] / longest, 1) if longest > 0 else 0.0
    return load_template(_PAGE).render(
        name=result.get("name", "pipeline"),
        key=result.get("pipeline_key") or "",
        failed=bool(result.get("error")),
        error=result.get("error"),
        total=describe_seconds(float(result.get("seconds") or 0.0)),
        started=_moment(result.get("started")),
        stages=stages,
        charts={title: Markup(drawing) for title, drawing in (charts or {}).items()},  # noqa: S704 - its texts are escaped
        baselines=_baselines(result),
        registered=_registered(result.get("registered")),
        registers=result.get("registers"),
        tables=[*_metric_tables(result), *_slice_tables(result)],
        gates=[{**gate, "value": number_text(gate["value"])} for gate in result.get("gates") or ()],
        compared=[row.in_words() for row in result.get("compared") or ()],
        places=_places(result),
        files=_files(result),
        versions=result.get("versions") or _versions(),
        facts=facts,
        refresh_s=refresh_s,
        written=_moment(None),
    )


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
        texts = [_metric_texts(values) for values in columns.values()]  # slices have tables of their own
        if names := list(dict.fromkeys(name for each in texts for name in each)):
            rows = [(name, [each.get(name, "") for each in texts]) for name in names]
            tables.append({"stage": stage["stage"], "columns": list(columns), "rows": rows})
    return tables


def _metric_texts(metrics: Mapping[str, Any]) -> dict[str, str]:
    """The metrics of all rows as texts, each with its interval."""
    whole = whole_metrics(metrics)
    numbers = {name: value for name, value in whole.items() if isinstance(value, int | float)}
    intervals = with_intervals(numbers)
    shown = {name: value for name, value in whole.items() if name not in numbers or name in intervals}
    return {
        name: intervals[name] if intervals.get(name, "").endswith(")") else number_text(value)
        for name, value in shown.items()
    }


def _baselines(result: Mapping[str, Any]) -> dict[str, Any]:
    """Each metric that has a margin over what needs no model, as rows of texts, and how sure its interval is."""
    manifests = {each["stage"]: each.get("manifest") or {} for each in result.get("stages", ())}
    sizes = manifests.get("prepare-data", {}).get("metrics") or {}
    rows = []
    for split, values in (manifests.get("evaluate", {}).get("metrics") or {}).items():
        numbers = {name: each for name, each in values.items() if isinstance(each, int | float)}
        size = sizes.get(f"{split}_rows")
        shown = "" if size is None else f"{size:,}"
        rows += [[split, shown, *row] for row in compare_with_baselines(numbers)]
    confidence = (manifests.get("evaluate", {}).get("meta") or {}).get("confidence")
    return {"rows": rows, "confidence": None if confidence is None else f"{confidence:.4g}"}


def _registered(outcome: Registered | None) -> dict[str, Any] | None:
    """The outcome of the registration, and the comparison with the champion on the same rows if there was one."""
    if outcome is None:
        return None
    verdict, row = outcome.verdict, None
    if verdict.metric is not None and outcome.value is not None and outcome.best is not None:
        interval = "not known"
        if verdict.low is not None and verdict.high is not None:
            interval = f"{number_text(verdict.low)} to {number_text(verdict.high)}"
        values = (number_text(each) for each in (outcome.value, outcome.best, verdict.difference))
        row = [verdict.champion, verdict.metric, *values, interval, "replaced" if verdict.promoted else "kept"]
    return {"name": outcome.name, "version": outcome.version, "reason": verdict.reason, "row": row}


def _slice_tables(result: Mapping[str, Any]) -> list[dict[str, Any]]:
    """One table per split and column of slices: rows are the values of the column, columns are metrics."""
    tables = []
    for stage in result.get("stages", ()):
        metrics = (stage.get("manifest") or {}).get("metrics") or {}
        for split, values in metrics.items():
            for column, whole in slice_tables(values).items() if isinstance(values, Mapping) else ():
                found = whole.with_intervals()
                rows = [(name, [number_text(value) for value in cells]) for name, *cells in found.cells]
                tables.append(
                    {"stage": f"{split} by {column}", "first": column, "columns": found.columns, "rows": rows}
                )
    return tables


def _places(result: Mapping[str, Any]) -> list[dict[str, str | None]]:
    """Addresses of the stages' results, the MLflow run and the storage."""
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
            found.append({"stage": stage["stage"], "count": counted(len(rows), "file"), "rows": rows})
    return found


def _versions() -> dict[str, str]:
    found = {}
    for package in PACKAGES:
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    return found


def _moment(started: str | float | None) -> str:
    if isinstance(started, float):  # seconds since 1970
        moment = datetime.fromtimestamp(started, UTC)
    else:
        moment = datetime.fromisoformat(started) if started else datetime.now(UTC)
    return moment.astimezone(UTC).strftime("%Y-%m-%d %H:%M:%S UTC")


def _finalize(value: Any) -> Any:
    # Not markup, which is a subclass of str.
    return to_terminal(value) if type(value) is str else value


@functools.cache
def load_template(path: Path) -> jinja2.Template:
    """Load the template of a page. What is put in is escaped, and a name that is not given is an error."""
    loader = jinja2.FileSystemLoader(path.parent)
    environment = jinja2.Environment(
        loader=loader,
        autoescape=True,
        finalize=_finalize,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    return environment.get_template(path.name)


def _read_series(history: Iterable[Mapping[str, Any]]) -> Series:
    series: Series = {}
    for entry in history:
        step = entry.get("step")
        if not isinstance(step, int | float):
            continue
        for key, value in entry.items():
            number = _read_number(value)
            if number is not None and not _NOT_CURVES.search(key):
                series.setdefault(key, []).append((float(step), number))
    return series


def _read_number(value: Any) -> float | None:
    """A float from a number or from the text that stands for one that is not finite; None for anything else."""
    if isinstance(value, str):
        return float(value) if value in {"NaN", "Infinity", "-Infinity"} else None
    return float(value) if isinstance(value, int | float) and not isinstance(value, bool) else None
