"""Facts of the report besides results: settings, machine, attempts, and the time of training by use."""

from __future__ import annotations

import os
import platform
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any

import psutil
from markupsafe import Markup

from trainer_lib.arguments.configs.accelerator_config import describe_step
from trainer_lib.arguments.configs.parallelism_config import data_size
from trainer_lib.base.durations import describe_seconds
from trainer_lib.base.foreign_text import to_terminal
from trainer_lib.base.json_text import parse_json
from trainer_lib.base.suggestions import counted
from trainer_lib.errors import TrainflowError
from trainer_lib.protocol.requests import STATISTICS
from trainer_lib.secrets import mask
from trainflow.flows.planning.full_plan import read_conversations
from trainflow.flows.planning.plan import Plan
from trainflow.flows.records.results import PipelineResult
from trainflow.flows.reports.report import number_text
from trainflow.tasks.model.outcome_tables import Outcome, read_answers, read_outcomes
from trainflow.tasks.stage.goodput import Goodput
from trainflow.tasks.stage.manifest import StageManifest, stage_store
from trainflow.tasks.stage.retry import Ledger

_PICTURE = "data:image/"
_HARDEST = 10  # rows of the report; MLflow has more
_CLASSES = 20  # of a confusion matrix that the report shows; MLflow's picture has more
_COLUMNS = 40  # of which the report shows the statistics
_VALUES = 10  # of a column's counts
_STATISTICS_BYTES = 16 << 20
Rows = list[tuple[str, str]]
Section = dict[str, Any]
"""The content of a place in the template."""


@dataclass(frozen=True)
class ReportFacts:
    """Sections of the report, each left out where it is empty.

    Attributes:
        settings: hyperparameters as the spec has them, by dotted name.
        warnings: what evaluate found wrong with the model.
        data: warnings about the prepared rows, and the statistics of their columns where sources were prepared.
        machine: where the command ran, and on what the model was trained.
        spec: the resolved spec as YAML.
        attempts: those of the stages that this command ran or found.
        goodput: where the time of training went.
        importances: of each evaluated split of a table its columns.
        weak: of each evaluated split the subgroups with the worst errors.
        hardest: of each evaluated split the rows that the model gets most wrong.
        samples: of each evaluated split up to twenty predictions, the first ones and some that are wrong.
        confusions: of each evaluated split with few classes.
        confused: of each evaluated split the rows behind the largest wrong cells of its confusion.
        calibrations: of each evaluated split with classes.
        curves: ROC and precision-recall of each evaluated split whose classes have scores.
        residuals: of each evaluated split with numbers.
        conversations: some of training, with what is trained.
        answers: to the prompts of `evaluate.options`, before and after training.
    """

    settings: Rows
    machine: Rows
    spec: str
    attempts: list[Section]
    goodput: Rows
    hardest: list[Section] = field(default_factory=list)
    confusions: list[Section] = field(default_factory=list)
    calibrations: list[Section] = field(default_factory=list)
    residuals: list[Section] = field(default_factory=list)
    curves: list[Section] = field(default_factory=list)
    data: Rows = field(default_factory=list)
    warnings: Rows = field(default_factory=list)
    samples: list[Section] = field(default_factory=list)
    confused: list[Section] = field(default_factory=list)
    importances: list[Section] = field(default_factory=list)
    weak: list[Section] = field(default_factory=list)
    conversations: list[Section] = field(default_factory=list)
    answers: list[Section] = field(default_factory=list)


def collect_facts(plan: Plan, result: PipelineResult) -> ReportFacts:
    """Collect what can be known now; what cannot be read is left out."""
    train = plan.spec.train
    given = {"args": train.args, "model": train.model, "options": train.options}
    found = _manifests(result)
    ledgers = _ledgers(plan, found)
    training = found.get("train")
    outcomes = _outcomes(found)
    return ReportFacts(
        settings=[row for name, values in given.items() for row in _flat(f"train.{name}", values)],
        machine=_machine(training, plan),
        spec=mask(plan.spec_text),
        attempts=[row for stage, ledger in ledgers.items() for row in _attempts(stage, ledger)],
        goodput=describe_goodput(ledgers.get("train"), training),
        **describe_outcomes(outcomes),
        data=describe_data(found.get("prepare-data")),
        warnings=describe_warnings(found.get("evaluate")),
        conversations=read_conversations(found.get("prepare-data")),
        answers=[
            {
                "split": "prompts",
                "columns": columns,
                "rows": [[to_terminal(str(value)) for value in row] for row in rows],
            }
            for columns, rows in read_answers(found.get("evaluate"))
        ],
    )


def describe_outcomes(outcomes: Sequence[Outcome]) -> dict[str, Any]:
    """The fields of `ReportFacts` that show single rows, classes and errors of evaluated splits."""
    return {
        "importances": list(tables_with_notes(outcomes, Outcome.importance, Outcome.describe_importance)),
        "weak": list(tables_with_notes(outcomes, Outcome.weak_groups, Outcome.describe_weak_groups)),
        "hardest": list(tables_of_rows(outcomes, Outcome.hardest, most=_HARDEST)),
        "samples": list(tables_of_rows(outcomes, Outcome.samples)),
        "confused": list(tables_of_rows(outcomes, Outcome.confusions)),
        **tables_of_classes(outcomes),
        "curves": list(draw_curves(outcomes)),
        "residuals": list(draw_residuals(outcomes)),
    }


def describe_goodput(ledger: Ledger | None, training: StageManifest | None) -> Rows:
    """The time of training by use, as rows of a table; none before an attempt has ended."""
    goodput = Goodput() if ledger is None else Goodput.of(ledger)
    rows = goodput.rows()
    facts = None if training is None else training.facts
    if (mfu := getattr(facts, "mfu", None)) is not None:
        rows.append(("MFU", f"{mfu:.1%} of the devices' peak"))
    elif rows and facts is not None:
        rows.append(("MFU", "not known: the peak of this device is not in the table"))
    return rows


def describe_warnings(manifest: StageManifest | None) -> Rows:
    """The warnings in a stage's facts, as rows of a table."""
    return [("warning", mask(text)) for text in getattr(getattr(manifest, "facts", None), "warnings", ())]


def describe_data(prepared: StageManifest | None) -> Rows:
    """Warnings about prepared data and the statistics of its columns, as rows of a table; none where there are none."""
    if prepared is None:
        return []
    rows = describe_warnings(prepared)
    rows += [("summary", mask(str(text))) for text in getattr(prepared.facts, "info", {}).get("summary", ())]
    try:
        return rows + _describe_columns(prepared)
    except (TrainflowError, ArithmeticError, AttributeError, LookupError, TypeError, ValueError):
        return rows  # the file is damaged, or another stage's


def _describe_columns(prepared: StageManifest) -> Rows:
    if not any(entry.path == STATISTICS for entry in prepared.files):
        return []
    splits = parse_json(prepared.store().read_bytes(STATISTICS, limit=_STATISTICS_BYTES))
    columns = [(f"{split}.{name}", one) for split, found in splits.items() for name, one in found.items()]
    columns = [(name, one) for name, one in columns if not name.endswith(".row_id")]
    rows = [(name, mask(_describe_column(one))) for name, one in columns[:_COLUMNS]]
    left = len(columns) - _COLUMNS
    return rows if left <= 0 else [*rows, (STATISTICS, f"has {left:,} more columns")]


def _describe_column(found: Mapping[str, Any]) -> str:
    """The statistics of a column (`trainer_lib.data.source_parts`) in words."""
    rows = int(found["rows"])
    texts = [counted(rows, "row")]
    if "longest" in found:
        mean = number_text(found["elements"] / rows)
        texts.append(f"length {found['shortest']:,} to {found['longest']:,}, on average {mean}")
    if "counts" in found:
        counts = sorted(found["counts"].items(), key=lambda one: (-one[1], one[0]))
        more = f" and {len(counts) - _VALUES:,} more" if len(counts) > _VALUES else ""
        texts.append(", ".join(f"{value}: {count:,}" for value, count in counts[:_VALUES]) + more)
    elif "sum" in found:
        least, most, mean = (number_text(each) for each in (found["min"], found["max"], found["sum"] / rows))
        texts.append(f"{least} to {most}, on average {mean}")
    return "; ".join(texts)


def _outcomes(found: Mapping[str, StageManifest]) -> list[Outcome]:
    evaluation, data = found.get("evaluate"), found.get("prepare-data")
    if evaluation is None or data is None:
        return []
    return list(read_outcomes(evaluation, getattr(data.facts, "info", {})))


def tables_of_rows(
    outcomes: Iterable[Outcome], choose: Callable[[Outcome], tuple[list[str], list[list[Any]]]], most: int | None = None
) -> Iterator[Section]:
    """Some rows of each split as a table, with their inputs where these are shown."""
    for outcome in outcomes:
        columns, chosen = choose(outcome)
        if chosen:
            shown = ["input"] if outcome.found.get("inputs") else []
            rows = [
                [*map(number_text, row), *(_show_input(outcome.input_of(row[0])) for _ in shown)]
                for row in chosen[:most]
            ]
            yield {"split": outcome.split, "columns": [*columns, *shown], "rows": rows}


def tables_with_notes(
    outcomes: Iterable[Outcome],
    choose: Callable[[Outcome], tuple[list[str], list[list[Any]]]],
    describe: Callable[[Outcome], str],
) -> Iterator[Section]:
    """A table of each split below the sentences about it; none where there are no sentences."""
    for outcome in outcomes:
        if note := describe(outcome):
            columns, rows = choose(outcome)
            shown = [list(map(number_text, row)) for row in rows[:_COLUMNS]]
            yield {"split": outcome.split, "columns": columns, "rows": shown, "note": note}


def _show_input(shown: Mapping[str, str]) -> str:
    text, image = to_terminal(str(shown.get("text", ""))), str(shown.get("image", ""))
    return Markup('<img src="{}" alt=""> {}').format(image, text) if image.startswith(_PICTURE) else text


def tables_of_classes(outcomes: Iterable[Outcome]) -> dict[str, Any]:
    """`ReportFacts.confusions` and `ReportFacts.calibrations` of the splits that have classes."""
    of_classes = [outcome for outcome in outcomes if outcome.is_classes]
    return {
        "confusions": [_confusion(outcome) for outcome in of_classes if len(outcome.classes) <= _CLASSES],
        "calibrations": [_calibration(outcome) for outcome in of_classes if outcome.found.get("reliability")],
    }


def _confusion(outcome: Outcome) -> Section:
    """The true classes with their cells, as counts and as percent of their row."""
    rows = []
    for name, counts in zip(outcome.classes, outcome.found["matrix"], strict=True):
        total = max(1, sum(counts))
        rows.append((name, [(count, round(100 * count / total)) for count in counts]))
    return {"split": outcome.split, "classes": outcome.classes, "rows": rows}


def _calibration(outcome: Outcome) -> Section:
    """Confidence, accuracy and rows, in words."""
    bins = [[f"{sure:.2f}", f"{right:.2f}", f"{rows:,}"] for sure, right, rows in outcome.found["reliability"]]
    note = outcome.describe_calibration()
    return {"split": outcome.split, "bins": bins, "drawing": _drawing(outcome, "reliability"), "note": note}


def draw_curves(outcomes: Iterable[Outcome]) -> Iterator[Section]:
    """`ReportFacts.curves` of the splits whose classes have scores; the words are below the first drawing of two."""
    for outcome in outcomes:
        for name in ("roc", "precision-recall") if outcome.found.get("curves") else ():
            note = outcome.describe_curves() if name == "roc" else ""
            yield {"split": outcome.split, "drawing": _drawing(outcome, name), "note": note}


def draw_residuals(outcomes: Iterable[Outcome]) -> Iterator[Section]:
    """`ReportFacts.residuals` of the splits that have numbers."""
    for outcome in outcomes:
        if not outcome.is_classes and (drawing := _drawing(outcome, "residuals")):
            yield {"split": outcome.split, "drawing": drawing, "note": outcome.describe_residuals()}


def _drawing(outcome: Outcome, name: str) -> Markup:
    return Markup(outcome.drawings().get(name, ""))  # noqa: S704 - texts of users in it are escaped


def _manifests(result: PipelineResult) -> dict[str, StageManifest]:
    records = (outcome.manifest for outcome in result.stages)
    return {found.stage: found for record in records if record for found in [StageManifest.from_dict(record)]}


def _ledgers(plan: Plan, manifests: Mapping[str, StageManifest]) -> dict[str, Ledger]:
    """The attempts of each stage whose key is known: of those that are done, and of the one after them."""
    found: dict[str, Ledger] = {}
    for name, stage in plan.stages.items():
        try:
            if name in manifests:
                found[name] = Ledger(manifests[name].store())
            elif all(each in manifests or each not in plan.stages for each in stage.stage.inputs.values()):
                found[name] = Ledger(stage_store(plan.spec.storage, plan.key_of(name, manifests)))
        except TrainflowError:
            continue
    return found


def _attempts(stage: str, ledger: Ledger) -> list[Section]:
    try:
        records = ledger.records()
    except TrainflowError:
        return []
    return [_attempt(stage, start, end) for start, end in records]


def _attempt(stage: str, start: Mapping[str, Any], end: Mapping[str, Any]) -> Section:
    error = end.get("error") or {}
    began, ended = str(start.get("started") or ""), end.get("ended")
    took = describe_seconds((_time(str(ended)) - _time(began)).total_seconds()) if began and ended else ""
    why = str(error.get("message") or start.get("reason") or "")
    outcome = str(end.get("outcome") or "no end was recorded")
    host = f"{start.get('host', '')} ({start.get('pid', '')})"
    return {
        "stage": stage,
        "number": int(start.get("attempt") or 0),
        "started": began.replace("T", " "),
        "took": took,
        "host": host,
        "outcome": outcome,
        "why": why,
    }


def _time(text: str) -> datetime:
    return datetime.fromisoformat(text)


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
