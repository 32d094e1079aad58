"""The command `trainflow evaluate`: a labelled file through a trained model, perhaps beside another one."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.text import Text

from trainer_lib.base.suggestions import counted, number_words
from trainer_lib.errors import ConfigError, first_line
from trainer_lib.trackers.names import is_measurement, with_intervals
from trainflow.flows.cli import presentation
from trainflow.flows.cli.commands.predicting import ModelArgument, Trust, ask_worker, find_address, read_trust
from trainflow.flows.cli.options import Answer, Form, command
from trainflow.flows.cli.signals import stoppable

if TYPE_CHECKING:
    from trainer_lib.data.rows.row_sources import RowFile
    from trainer_lib.model_folder.locate import FoundModel
    from trainer_lib.protocol.requests import MeasureRowsResult


@command("""
    trainflow evaluate last new/labelled.csv
    trainflow evaluate last new/labelled.csv --report new.html
    trainflow evaluate models:/churn@champion march.csv --against models:/churn@candidate
""")
def evaluate(
    form: Form,
    model: ModelArgument,
    data: Annotated[
        list[str], typer.Argument(metavar="DATA", help="Files with labelled rows, as training had them; any URL.")
    ],
    against: Annotated[
        str | None, typer.Option(metavar="MODEL2", help="Another model, compared on the same rows by a paired test.")
    ] = None,
    confidence: Annotated[
        float, typer.Option(min=0.5, max=0.999, metavar="P", help="Probability that an interval holds its metric.")
    ] = 0.95,
    resamples: Annotated[int, typer.Option(min=100, max=5000, metavar="N", help="Resamples of the rows.")] = 1000,
    report: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Write what the report of a run shows, for these rows: one HTML file."),
    ] = None,
    trust: Trust = None,
) -> Answer:
    """Measure a trained model on a labelled file: metrics with intervals, beside the run's own test.

    With --against both models are measured on the same resampled rows, and the differences have intervals.
    """
    from trainer_lib.data.rows.row_sources import find_row_files
    from trainer_lib.model_folder.locate import find_model, require_trust

    addresses = [find_address(model), *([] if against is None else [find_address(against)])]
    found = [find_model(address) for address in addresses]
    for judged in found:
        require_trust(judged, read_trust(trust))
    files = tuple(find_row_files(data))
    _require_folder(report)
    out = form.console()
    with stoppable(out.print, remedy="Run it again."):
        measured = [
            _measure(judged, address, files, confidence, resamples, out, wants_outcomes=report is not None)
            for judged, address in zip(found, addresses, strict=True)
        ]
    own = _metrics_of_run(found[0])
    if report is not None:
        write_report(report, found[0], measured[0], own)
    record = _record(measured, own, confidence)
    names = [model, *([] if against is None else [against])]
    written = [] if report is None else [Text(), Text(f"  report  {report}")]
    return Answer(record, lambda: [*describe(record, names, confidence), *written])


def _measure(
    found: FoundModel,
    address: str,
    files: tuple[RowFile, ...],
    confidence: float,
    resamples: int,
    out: Any,
    *,
    wants_outcomes: bool,
) -> MeasureRowsResult:
    from trainer_lib.protocol.requests import MeasureRowsRequest

    with tempfile.TemporaryDirectory(prefix="trainflow-") as folder:
        request = MeasureRowsRequest(
            output=folder,
            model=address,
            digest=found.digest(),
            code=found.description.code_digest,
            sources=files,
            confidence=confidence,
            resamples=resamples,
            wants_outcomes=wants_outcomes,
            is_on_cpu=bool(found.description.args.get("use_cpu")),
        )
        return ask_worker(request, out)


def _record(measured: Sequence[MeasureRowsResult], own: Mapping[str, float], confidence: float) -> dict[str, Any]:
    first, *others = measured
    return {
        "rows": first.rows,
        "metrics": first.metrics,
        "test": own,
        "against": others[0].metrics if others else None,
        "differences": compare_measured(measured, confidence) if others else {},
    }


def _require_folder(report: Path | None) -> None:
    if report is not None and not report.parent.is_dir():
        remedy = "Name a file in a folder that exists."
        raise ConfigError("There is no such folder.", field="--report", value=str(report), remedy=remedy)


def write_report(path: Path, found: FoundModel, measured: MeasureRowsResult, own: Mapping[str, float]) -> None:
    """Write the report of a run with what was measured in place of its stages.

    Raises:
        ConfigError: the file cannot be written.
    """
    from trainflow.flows.reports.report import render_report
    from trainflow.flows.reports.report_facts import describe_outcomes
    from trainflow.tasks.model.outcome_tables import Outcome

    classes = found.description.info.get("classes")
    outcome = Outcome("these rows", measured.outcomes or {}, classes if isinstance(classes, list) else ())
    sections = describe_outcomes([outcome] if measured.outcomes else [])
    metrics = {"these rows": measured.metrics, **({"its own test": own} if own else {})}
    stage = {"stage": "evaluate", "status": "ran", "reason": counted(measured.rows, "row")}
    result = {"name": found.description.name, "stages": [{**stage, "manifest": {"metrics": metrics}}]}
    try:
        path.write_text(render_report(result, sections=sections), encoding="utf-8")
    except OSError as error:
        what, remedy = f"The report cannot be written: {first_line(error)}.", "Name another file."
        raise ConfigError(what, field="--report", value=str(path), remedy=remedy) from error


def _metrics_of_run(found: FoundModel) -> dict[str, float]:
    """The metrics of the test split in the run that trained the model; none where the address is another place."""
    from trainer_lib.errors import TrainflowError
    from trainer_lib.storage import Store
    from trainflow.flows.records.past_runs import read_record

    try:
        record = read_record(Store.open(found.url))
    except TrainflowError:
        return {}
    metrics = record.get("metrics")
    values = metrics if isinstance(metrics, Mapping) else {}
    return {str(name).removeprefix("test_"): value for name, value in values.items() if str(name).startswith("test_")}


def compare_measured(measured: Sequence[MeasureRowsResult], confidence: float) -> dict[str, list[float]]:
    """Metric -> [difference, low, high] of the first model and the second, on the rows and over the same resamples.

    Raises:
        ConfigError: the files have other rows for the second than for the first.
    """
    first, second = measured
    if first.digest != second.digest:
        what = "The files changed while the models were measured."
        raise ConfigError(what, field="DATA", remedy="Run it again.")
    differences = {}
    for name, values in first.resampled.items():
        others = second.resampled.get(name, ())
        if len(others) != len(values) or name not in first.metrics or name not in second.metrics:
            continue  # one of them measures something else
        apart = sorted(one - other for one, other in zip(values, others, strict=True))
        tail = int((1 - confidence) / 2 * len(apart))
        differences[name] = [first.metrics[name] - second.metrics[name], apart[tail], apart[-1 - tail]]
    return differences


def describe(record: Mapping[str, Any], names: Sequence[str], confidence: float) -> list[Text]:
    """The metrics as a table of at most 80 columns, and what the comparison says."""
    lines = [Text(f"{counted(record['rows'], 'row')}; intervals hold with a probability of {confidence:.4g}"), Text()]
    test, against, differences = record["test"], record["against"], record["differences"]
    other, metrics = against or test, record["metrics"]
    head = ("metric", "these rows", "other model" if against else "its own test" if test else "")
    rows: list[tuple[str, ...]] = [(*head, "difference") if against else head]
    texts, of_test = with_intervals(metrics), with_intervals(other or {})
    for name in filter(is_measurement, texts):
        if not against:
            rows.append((name, texts[name], of_test.get(name, "")))
            continue
        found = differences.get(name)
        apart = "" if found is None else "{} ({} to {})".format(*(number_words(number, sign="+") for number in found))
        both = [number_words(values[name]) if name in values else "" for values in (metrics, other)]
        rows.append((name, *both, apart))
    lines += presentation.table(rows, indent="  ")
    if against:
        clear = [name for name, (_, low, high) in differences.items() if low > 0 or high < 0]
        words = f"They differ beyond chance in {', '.join(clear)}." if clear else "No difference is beyond chance."
        lines += [Text(), Text(words), Text(f"  these rows   {names[0]}"), Text(f"  other model  {names[1]}")]
    return lines
