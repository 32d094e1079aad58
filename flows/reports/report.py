"""The report of one pipeline run: a single HTML file that loads nothing, readable in light and dark; and its summary.

What ran, what was cached and why, how long it took, the training curves, then sections: metrics of every split, what
the model gets wrong, settings, where everything is, digests and versions. All text is escaped; a link is made only to
http(s) addresses and to files next to the report.
"""

from __future__ import annotations

import contextlib
import functools
import os
import platform
import posixpath
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import quote, urlsplit

import jinja2
import psutil
from markupsafe import Markup, escape

from trainer_lib.arguments.configs.accelerator_config import describe_step
from trainer_lib.arguments.configs.parallelism_config import data_size
from trainer_lib.base.durations import describe_seconds
from trainer_lib.base.json_text import parse_json
from trainer_lib.base.suggestions import counted, number_words, to_markdown, to_terminal
from trainer_lib.errors import TrainflowError
from trainer_lib.hub.pictures import draw_series
from trainer_lib.protocol.requests import STATISTICS
from trainer_lib.secrets import mask
from trainer_lib.trackers.names import compare_with_baselines, slice_tables, whole_metrics, with_intervals
from trainflow.flows.planning.full_plan import read_conversations
from trainflow.flows.planning.plan import Plan
from trainflow.flows.records.results import PipelineResult
from trainflow.flows.records.run_logs import Attempt
from trainflow.tasks.model.model_lineage import find_versions
from trainflow.tasks.model.outcome_tables import Outcome, read_answers, read_outcomes
from trainflow.tasks.stage.goodput import Goodput
from trainflow.tasks.stage.manifest import StageManifest, stage_store
from trainflow.tasks.stage.retry import Ledger

if TYPE_CHECKING:
    from trainer_lib.trackers.mlflow.mlflow_registry import Registered

REPORT = "report.html"
LOSS = "Loss"
_SLICES = "Slices"
_PAGE = Path(__file__).parent / "report.html.j2"
_NOT_CURVES = re.compile(r"(^|_)(runtime|samples_per_second|steps_per_second|epoch|step|time|total_flos|words|num_.*)$")
_NUMBER = re.compile(r"(|nan|[-+]?(inf|[\d,.]+(e[-+]?\d+)?))([ %].*)?")
_PICTURE = "data:image/"
_HARDEST = 10  # rows of the report; MLflow has more
_COLUMNS = 40  # of which the report shows the statistics
_VALUES = 10  # of a column's counts
_STATISTICS_BYTES = 16 << 20
Series = dict[str, list[tuple[float, float]]]
Rows = list[tuple[str, str]]
Table = tuple[list[str], list[list[Any]]]
Ends = tuple[dict[str, Any], dict[str, Any]]
"""The beginning and the end of an attempt, as its stage's ledger has them."""


@dataclass(frozen=True)
class Panel:
    """A part of a section: HTML such as a drawing, a note, and a table."""

    title: str = ""
    note: str = ""
    content: Markup = field(default_factory=Markup)
    columns: Sequence[str] = ()  # the table's head; without one the rows are pairs of a name and a value
    rows: Sequence[Sequence[Any]] = ()  # the table's cells; text is escaped, markup is not

    @property
    def number_columns(self) -> set[int]:
        """The columns that hold numbers alone, with their units and intervals."""
        if not self.columns:
            return set()
        by_column = enumerate(zip(*self.rows, strict=True))
        return {number for number, cells in by_column if all(_NUMBER.fullmatch(str(cell)) for cell in cells)}


@dataclass(frozen=True)
class Section:
    """A headed part of the report; one without panels is left out."""

    title: str
    panels: Sequence[Panel] = ()
    note: str = ""

    @classmethod
    def of_pairs(cls, title: str, rows: Sequence[tuple[str, Any]]) -> Section:
        """A section of names and values."""
        return cls(title, [Panel(rows=rows)] if rows else [])


def draw_charts(history: Sequence[Mapping[str, Any]]) -> dict[str, str]:
    """Title -> SVG of the losses, the other evaluation metrics, and the learning rate in a trainer's log."""
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
    sections: Sequence[Section] = (),
    spec: str = "",
    is_over: bool = True,
) -> str:
    """The report as HTML text.

    Args:
        result: a pipeline run as `PipelineResult.to_dict()` gives it. Also used, when there: `started` (ISO time), and
            `registers` (the name that the registry was asked for) with `registered` (its answer).
        charts: title -> SVG of the curves of the training (`draw_charts`).
        sections: those that follow the results.
        spec: the resolved spec.
        is_over: the run has ended.
    """
    stages = [_stage_row(stage, result) for stage in result.get("stages", ())]
    longest = max((stage["seconds"] for stage in stages), default=0.0)
    for stage in stages:
        stage["share"] = round(100 * stage["seconds"] / longest, 1) if longest > 0 else 0.0
    drawings = [Panel(title, content=Markup(drawing)) for title, drawing in (charts or {}).items()]  # noqa: S704 - escaped
    return _load_template().render(
        name=result.get("name", "pipeline"),
        key=result.get("pipeline_key") or "",
        failed=bool(result.get("error")),
        error=result.get("error"),
        total=describe_seconds(float(result.get("seconds") or 0.0)),
        started=_moment(result.get("started")),
        stages=stages,
        sections=[
            Section("Training", drawings),
            *_sections_of_result(result),
            *sections,
            Section.of_pairs("Where things are", list(_places(result))),
        ],
        spec=spec,
        versions=find_versions(),
        is_over=is_over,
        written=_moment(None),
    )


def render_summary(result: PipelineResult) -> str:
    """The summary of a run as Markdown, for Prefect and MLflow: results but for slices, stages, places."""
    ended = "done" if result.error is None else f"{type(result.error).__name__}: {result.error}"
    stages = [(outcome.stage, outcome.status, outcome.took, outcome.reason) for outcome in result.stages]
    sections = [section for section in _sections_of_result(result.to_dict()) if section.title != _SLICES]
    sections.append(Section("Stages", [Panel(columns=("stage", "", "time", "why"), rows=stages)]))
    parts = [f"# {_markdown(result.name)}: {_markdown(ended)}"]
    for section in sections:
        for panel in filter(lambda panel: panel.rows, section.panels):
            head = panel.columns or ("",) * len(panel.rows[0])
            cells = [[_markdown(str(cell)) for cell in row] for row in (head, *panel.rows)]
            rows = [cells[0], ["---"] * len(head), *cells[1:]]
            parts += [f"## {section.title}", "\n".join(f"| {' | '.join(row)} |" for row in rows)]
    places = result.places
    if places.get("MLflow run") and not result.run_url:
        places["MLflow run"] += f"; trainflow ui --storage {result.storage}"
    return "\n\n".join([*parts, "\n".join(f"- {label}: {_markdown_link(url)}" for label, url in places.items())])


def _markdown_link(url: str) -> str:
    if re.match(r"https?://\S+$", url):
        return f"[{_markdown(url)}]({mask(url)})"
    return f"`{mask(url).replace('`', '')}`"


def _markdown(text: str) -> str:
    return to_markdown(mask(text))


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


def _sections_of_result(result: Mapping[str, Any]) -> Iterator[Section]:
    manifests = {stage["stage"]: stage.get("manifest") or {} for stage in result.get("stages", ())}
    yield _baselines(manifests)
    yield Section("Metrics", list(_metric_tables(manifests)))
    yield Section(_SLICES, list(_slice_tables(manifests)))
    noted = [(stage, (manifest.get("meta") or {}).get("warnings")) for stage, manifest in manifests.items()]
    warnings = [(stage, mask(str(text))) for stage, texts in noted if isinstance(texts, list) for text in texts]
    yield Section.of_pairs("Warnings", warnings)
    gates = [
        (
            gate["metric"],
            gate["requirement"],
            number_text(gate["value"]) or "not measured",
            "passed" if gate["passed"] else "failed",
        )
        for gate in result.get("gates") or ()
    ]
    yield Section("Gates", [Panel(columns=("metric", "required", "measured", ""), rows=gates)] if gates else [])
    if result.get("registers"):
        yield _registered(result["registers"], result.get("registered"))


def _metric_tables(manifests: Mapping[str, Mapping[str, Any]]) -> Iterator[Panel]:
    """A table for every stage with metrics: rows are metrics, columns are splits where the stage has several."""
    for stage, manifest in manifests.items():
        metrics = manifest.get("metrics") or {}
        nested = {split: values for split, values in metrics.items() if isinstance(values, Mapping)}
        flat = {name: value for name, value in metrics.items() if not isinstance(value, Mapping)}
        columns = ({"": flat} if flat else {}) | nested
        texts = [_metric_texts(values) for values in columns.values()]  # slices have tables of their own
        if names := list(dict.fromkeys(name for cells in texts for name in cells)):
            rows = [(name, *(cells.get(name, "") for cells in texts)) for name in names]
            yield Panel(stage, columns=("metric", *columns), rows=rows)


def _metric_texts(metrics: Mapping[str, Any]) -> dict[str, str]:
    """The metrics of all rows as texts with their intervals."""
    whole = whole_metrics(metrics)
    numbers = {name: value for name, value in whole.items() if isinstance(value, int | float)}
    intervals = with_intervals(numbers)
    shown = {name: value for name, value in whole.items() if name not in numbers or name in intervals}
    return {
        name: intervals[name] if intervals.get(name, "").endswith(")") else number_text(value)
        for name, value in shown.items()
    }


def _slice_tables(manifests: Mapping[str, Mapping[str, Any]]) -> Iterator[Panel]:
    """A table for every split and column of slices: rows are the values of the column, columns are metrics."""
    for manifest in manifests.values():
        for split, values in (manifest.get("metrics") or {}).items():
            for column, whole in slice_tables(values).items() if isinstance(values, Mapping) else ():
                table = whole.with_intervals()
                rows = [[number_text(value) for value in cells] for cells in table.cells]
                yield Panel(f"{split} by {column}", columns=(column, *table.columns), rows=rows)


def _baselines(manifests: Mapping[str, Mapping[str, Any]]) -> Section:
    """Metrics that have a margin over what needs no model."""
    evaluation, sizes = manifests.get("evaluate", {}), manifests.get("prepare-data", {}).get("metrics") or {}
    rows = []
    for split, values in (evaluation.get("metrics") or {}).items():
        numbers = {name: value for name, value in values.items() if isinstance(value, int | float)}
        size = sizes.get(f"{split}_rows")
        rows += [[split, "" if size is None else f"{size:,}", *row] for row in compare_with_baselines(numbers)]
    note = "Both were measured on the same rows. A margin above zero is in the model's favour."
    if (confidence := (evaluation.get("meta") or {}).get("confidence")) is not None:
        note += f" In brackets: the interval, by a bootstrap over the rows, with a probability of {confidence:.4g}."
    columns = ("split", "rows", "metric", "the model", "without a model", "margin")
    return Section("The model and what needs no model", [Panel(columns=columns, rows=rows)] if rows else [], note)


def _registered(asked: str, outcome: Registered | None) -> Section:
    """The outcome of the registration, and the comparison with the champion on the same rows if there was one."""
    if outcome is None:
        pending = "MLflow had not answered when this was written. trainflow models shows what came of it."
        return Section("Registered", [Panel(note=f"{asked}: {pending}")])
    verdict = outcome.verdict
    words = f"{outcome.name} version {outcome.version}. {verdict.reason}"
    if verdict.metric is None or outcome.value is None or outcome.best is None:
        return Section("Registered", [Panel(note=words)])
    interval = "not known"
    if verdict.low is not None and verdict.high is not None:
        interval = f"{number_text(verdict.low)} to {number_text(verdict.high)}"
    values = (number_text(value) for value in (outcome.value, outcome.best, verdict.difference))
    row = [verdict.champion, verdict.metric, *values, interval, "replaced" if verdict.promoted else "kept"]
    note = (
        f"{words} Both versions were measured on the same rows. The difference is positive where this model is better; "
        "from 5 % to 95 % of the resamples of these rows."
    )
    columns = ("champion", "metric", "this model", "the champion", "difference", "interval", "")
    return Section("Registered", [Panel(note=note, columns=columns, rows=[row])])


def _places(result: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Addresses of the stages' results, the MLflow run and the storage."""
    named = [place for stage in result.get("stages", ()) for place in (stage.get("places") or {}).items()]
    if run_id := result.get("mlflow_run_id"):
        named.append(("MLflow run", result.get("run_url")))
        named += [("MLflow run id", str(run_id)), ("MLflow store", result.get("tracking_uri"))]
    for what, url in [*named, ("storage", result.get("storage"))]:
        if url:
            link, text = _link(url, result), to_terminal(mask(url))
            yield what[0].upper() + what[1:], text if link is None else Markup('<a href="{}">{}</a>').format(link, text)


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


def _moment(started: str | float | None) -> str:
    if isinstance(started, float):  # seconds since 1970
        moment = datetime.fromtimestamp(started, UTC)
    else:
        moment = datetime.fromisoformat(started) if started else datetime.now(UTC)
    return moment.astimezone(UTC).strftime("%Y-%m-%d %H:%M:%S UTC")


@functools.cache
def _load_template() -> jinja2.Template:
    """Load the page's template. What is put in is escaped, and a name that is not given is an error."""
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(_PAGE.parent),
        autoescape=True,
        # Not of markup, which is a subclass of str.
        finalize=lambda value: to_terminal(value) if type(value) is str else value,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    return environment.get_template(_PAGE.name)


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


# -- sections behind the results ---------------------------------------------------------------------------------------


def collect_sections(plan: Plan, result: PipelineResult) -> list[Section]:
    """The sections that can be filled now; what cannot be read is left out."""
    train = plan.spec.train
    settings = {"args": train.args, "model": train.model, "options": train.options}
    manifests = result.manifests()
    ledgers = _read_ledgers(plan, manifests)
    prepared, training = manifests.get("prepare-data"), manifests.get("train")
    attempts = [_attempt_row(Attempt.of(stage, *ends)) for stage, records in ledgers.items() for ends in records]
    columns = ("stage", "attempt", "started", "took", "by", "ended", "why")
    answers = [Panel("prompts", columns=head, rows=rows) for head, rows in read_answers(manifests.get("evaluate"))]
    hyperparameters = [row for name, values in settings.items() for row in _flat(f"train.{name}", values)]
    return [
        *describe_outcomes(_outcomes(manifests)),
        Section("Answers", answers),
        Section.of_pairs("Data", describe_data(prepared)),
        describe_conversations(read_conversations(prepared)),
        Section.of_pairs("Hyperparameters", hyperparameters),
        Section.of_pairs("Where the time of training went", describe_goodput(ledgers.get("train", ()), training)),
        Section.of_pairs("Machine", _machine(training, plan)),
        Section("Attempts", [Panel(columns=columns, rows=attempts)] if attempts else []),
    ]


def describe_outcomes(outcomes: Sequence[Outcome]) -> list[Section]:
    """The sections of single rows, classes and errors of evaluated splits."""
    drawn = [(outcome, outcome.drawings()) for outcome in outcomes]

    def draw(name: str, note: Callable[[Outcome], str] = lambda _: "", **more: Any) -> list[Panel]:
        found = [(outcome, drawings[name]) for outcome, drawings in drawn if name in drawings]
        return [Panel(outcome.split, note(outcome), Markup(svg), **more) for outcome, svg in found]  # noqa: S704 - escaped

    curves = [*draw("roc", Outcome.describe_curves), *draw("precision-recall")]
    sure = "How often a prediction is right, by how sure the model is of it. They are equal where it is calibrated."
    threshold = "By the threshold of the probability; the point is the threshold of the predictions."
    off = "What is predicted minus what was measured. Larger points have more rows."
    return [
        Section("Confusion", draw("confusion"), "Rows are the true classes, columns the predicted ones."),
        Section("Calibration", draw("reliability", Outcome.describe_calibration), sure),
        Section("ROC and precision-recall", curves, threshold),
        Section("Residuals", draw("residuals", Outcome.describe_residuals), off),
        Section("Importance of columns", _tables(outcomes, Outcome.importance, Outcome.describe_importance)),
        Section("Weakest subgroups", _tables(outcomes, Outcome.weak_groups, Outcome.describe_weak_groups)),
        Section("Hardest rows", _tables(outcomes, Outcome.hardest, most=_HARDEST, shows_input=True)),
        Section("Most frequent confusions", _tables(outcomes, Outcome.confusions, shows_input=True)),
        Section("Sample predictions", _tables(outcomes, Outcome.samples, shows_input=True)),
    ]


def _tables(
    outcomes: Iterable[Outcome],
    choose: Callable[[Outcome], Table],
    describe: Callable[[Outcome], str] = lambda _: "",
    *,
    most: int = _COLUMNS,
    shows_input: bool = False,
) -> list[Panel]:
    """Some rows of the splits, below sentences about them, with their inputs where these are shown."""
    panels = []
    for outcome in outcomes:
        columns, rows = choose(outcome)
        note = describe(outcome)
        with_input = shows_input and bool(outcome.found.get("inputs"))
        cells = [
            [*map(number_text, row), *([_show_input(outcome.input_of(row[0]))] if with_input else [])]
            for row in rows[:most]
        ]
        if note or cells:
            head = [*columns, "input"] if with_input else columns
            panels.append(Panel(outcome.split, note, columns=head, rows=cells))
    return panels


def describe_conversations(shown: Sequence[Mapping[str, Any]]) -> Section:
    """Conversations of training, with what is trained marked."""
    panels = []
    for conversation in shown:
        parts = (
            Markup("<mark>{}</mark>").format(to_terminal(text)) if is_trained else escape(to_terminal(text))
            for text, is_trained in conversation["parts"]
        )
        content = Markup("<pre>{}</pre>").format(Markup("").join(parts))
        panels.append(Panel(conversation["place"], content=content))
    note = "The first conversations of training; what is trained is marked."
    return Section("What is trained", panels, note)


def describe_goodput(attempts: Sequence[Ends], training: StageManifest | None) -> Rows:
    """The time of training by use, as rows of a table; none before an attempt has ended."""
    rows = Goodput.of(attempts).rows()
    facts = None if training is None else training.facts
    if (mfu := getattr(facts, "mfu", None)) is not None:
        rows.append(("MFU", f"{mfu:.1%} of the devices' peak"))
    elif rows and facts is not None:
        rows.append(("MFU", "not known: the peak of this device is not in the table"))
    return rows


def describe_data(prepared: StageManifest | None) -> Rows:
    """The summary of prepared data and the statistics of its columns, as rows of a table; none where there are none."""
    if prepared is None:
        return []
    rows = [("summary", mask(str(text))) for text in getattr(prepared.facts, "info", {}).get("summary", ())]
    try:
        return rows + _describe_columns(prepared)
    except (TrainflowError, ArithmeticError, AttributeError, LookupError, TypeError, ValueError):
        return rows  # the file is damaged, or another stage's


def _describe_columns(prepared: StageManifest) -> Rows:
    if not any(entry.path == STATISTICS for entry in prepared.files):
        return []
    splits = parse_json(prepared.store().read_bytes(STATISTICS, limit=_STATISTICS_BYTES))
    columns = [(f"{split}.{name}", statistics) for split, found in splits.items() for name, statistics in found.items()]
    columns = [(name, statistics) for name, statistics in columns if not name.endswith(".row_id")]
    rows = [(name, mask(_describe_column(statistics))) for name, statistics in columns[:_COLUMNS]]
    left = len(columns) - _COLUMNS
    return rows if left <= 0 else [*rows, (STATISTICS, f"has {left:,} more columns")]


def _describe_column(found: Mapping[str, Any]) -> str:
    """The statistics of a column (`trainer_lib.data.rows.source_parts`) in words."""
    rows = int(found["rows"])
    texts = [counted(rows, "row")]
    if "longest" in found:
        mean = number_text(found["elements"] / rows)
        texts.append(f"length {found['shortest']:,} to {found['longest']:,}, on average {mean}")
    if "counts" in found:
        counts = sorted(found["counts"].items(), key=lambda pair: (-pair[1], pair[0]))
        more = f" and {len(counts) - _VALUES:,} more" if len(counts) > _VALUES else ""
        texts.append(", ".join(f"{value}: {count:,}" for value, count in counts[:_VALUES]) + more)
    elif "sum" in found:
        least, most, mean = (number_text(number) for number in (found["min"], found["max"], found["sum"] / rows))
        texts.append(f"{least} to {most}, on average {mean}")
    return "; ".join(texts)


def _outcomes(found: Mapping[str, StageManifest]) -> list[Outcome]:
    evaluation, data = found.get("evaluate"), found.get("prepare-data")
    if evaluation is None or data is None:
        return []
    return list(read_outcomes(evaluation, getattr(data.facts, "info", {})))


def _show_input(shown: Mapping[str, str]) -> str:
    text, image = to_terminal(str(shown.get("text", ""))), str(shown.get("image", ""))
    return Markup('<img src="{}" alt=""> {}').format(image, text) if image.startswith(_PICTURE) else text


def _read_ledgers(plan: Plan, manifests: Mapping[str, StageManifest]) -> dict[str, Sequence[Ends]]:
    """The attempts of stages whose keys are known: of those that are done, and of the one after them."""
    found: dict[str, Sequence[Ends]] = {}
    for name, stage in plan.stages.items():
        with contextlib.suppress(TrainflowError):
            if name in manifests:
                found[name] = Ledger(manifests[name].store()).records()
            elif all(source in manifests or source not in plan.stages for source in stage.stage.inputs.values()):
                found[name] = Ledger(stage_store(plan.spec.storage, plan.key_of(name, manifests))).records()
    return found


def _attempt_row(attempt: Attempt) -> tuple[str, ...]:
    began, ended = attempt.started, attempt.ended
    took = (datetime.fromisoformat(ended) - datetime.fromisoformat(began)).total_seconds() if began and ended else None
    outcome = "no end was recorded" if attempt.outcome == "open" else attempt.outcome
    why = str(attempt.error.get("message") or attempt.reason)
    words = (str(attempt.number), began.replace("T", " "), "" if took is None else describe_seconds(took))
    return attempt.stage, *words, attempt.where, outcome, why


def _machine(training: StageManifest | None, plan: Plan) -> Rows:
    rows = [
        ("host", platform.node()),
        ("system", platform.platform(terse=True)),
        ("processor", f"{platform.machine()}, {os.cpu_count()} cores"),
        ("memory", f"{psutil.virtual_memory().total / 2**30:.1f} GiB"),
        ("Python", platform.python_version()),
    ]
    facts = None if training is None else training.facts
    if device := getattr(facts, "device", None):
        rows.append(("trained on", f"{getattr(facts, 'world_size', None) or 1} × {device}"))
    args, micro_batch = plan.stages["train"].arguments, getattr(facts, "micro_batch", None)
    if args is not None and micro_batch is not None:
        processes = getattr(facts, "world_size", None) or 1
        shares = data_size(args, processes)
        rows.append(("batch", describe_step(args, data_parallel_size=shares, micro_batch=micro_batch)))
    return rows


def _flat(name: str, value: Any) -> Rows:
    if isinstance(value, Mapping):
        return [row for key, inner in value.items() for row in _flat(f"{name}.{key}", inner)]
    return [(name, mask(str(value)))]
