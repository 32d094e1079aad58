"""The report's sections behind the results: outcomes, data, settings, machine, attempts, uses of time."""

from __future__ import annotations

import contextlib
import os
import platform
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import datetime
from typing import Any

import psutil
from markupsafe import Markup, escape

from trainer_lib.arguments.configs.accelerator_config import describe_step
from trainer_lib.arguments.configs.parallelism_config import data_size
from trainer_lib.base.durations import describe_seconds
from trainer_lib.base.json_text import parse_json
from trainer_lib.base.suggestions import counted, to_terminal
from trainer_lib.errors import TrainflowError
from trainer_lib.protocol.requests import STATISTICS
from trainer_lib.secrets import mask
from trainflow.flows.planning.full_plan import read_conversations
from trainflow.flows.planning.plan import Plan
from trainflow.flows.records.results import PipelineResult
from trainflow.flows.records.run_logs import Attempt
from trainflow.flows.reports.report import Panel, Section, number_text
from trainflow.tasks.model.outcome_tables import Outcome, read_answers, read_outcomes
from trainflow.tasks.stage.goodput import Goodput
from trainflow.tasks.stage.manifest import StageManifest, stage_store
from trainflow.tasks.stage.retry import Ledger

_PICTURE = "data:image/"
_HARDEST = 10  # rows of the report; MLflow has more
_COLUMNS = 40  # of which the report shows the statistics
_VALUES = 10  # of a column's counts
_STATISTICS_BYTES = 16 << 20
Rows = list[tuple[str, str]]
Ends = tuple[dict[str, Any], dict[str, Any]]
"""The beginning and the end of an attempt, as its stage's ledger has them."""
Table = tuple[list[str], list[list[Any]]]


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
