"""The commands `trainflow predict`, `export`, `evaluate` and `chat`: a trained model used, exported and measured."""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeVar

import typer
from rich.text import Text

from trainer_lib.base.suggestions import counted, number_words, to_cell
from trainer_lib.errors import ConfigError, TrainflowError, first_line
from trainer_lib.secrets import mask
from trainer_lib.trackers.names import is_measurement, with_intervals
from trainflow.flows.cli import presentation, terminal
from trainflow.flows.cli.options import Answer, BareForm, Form, command, use_registry_here
from trainflow.flows.cli.presentation import same_command, shown, table
from trainflow.flows.cli.signals import stoppable
from trainflow.flows.spec.spec import storage_here

if TYPE_CHECKING:
    from rich.console import Console

    from trainer_lib.data.rows.row_sources import RowFile
    from trainer_lib.model_folder.chat import Chat, Spoken
    from trainer_lib.model_folder.locate import FoundModel
    from trainer_lib.protocol.requests import MeasureRowsResult, Request
    from trainflow.tasks.new_rows import NewRows

R = TypeVar("R")
_SHOWN = "predict"
_FEW = 8  # columns that a line names
ModelArgument = Annotated[
    str,
    typer.Argument(metavar="MODEL", help="A run (its id, name or tag, or last), a checkpoint, a publication, hf://…"),
]
_NewData = Annotated[
    list[str],
    typer.Argument(metavar="NEW_DATA", help="Files, folders or patterns: CSV, JSON lines, Parquet, Arrow; any URL."),
]
Trust = Annotated[
    str | None,
    typer.Option(metavar="SHA256", help="Execute published code: its SHA-256, once you have read it, or 'any'."),
]
_SortBy = Annotated[
    str | None,
    typer.Option(metavar="COLUMN", help="Rows share batches by the length of this column; their order stays."),
]
_Workers = Annotated[
    int, typer.Option(min=1, metavar="N", help="Processes that share the files; on GPUs each has one.")
]
_Threads = Annotated[
    int | None, typer.Option(min=1, metavar="N", help="CPU threads of a worker; unset: the cores, shared out.")
]
_MaxErrors = Annotated[
    int, typer.Option(min=0, metavar="N", help="Rows that may be bad; the column 'error' says what is wrong with each.")
]
_WORDS = "/reset and /system TEXT begin again, /exit ends; Ctrl-C ends an answer"
_Prompt = Annotated[
    str | None, typer.Option(metavar="TEXT", help="Answer this alone; unset: what is piped in, or talk.")
]
_System = Annotated[str | None, typer.Option(metavar="TEXT", help="First turn; unset: that of training; empty: none.")]
_Base = Annotated[bool, typer.Option("--base", help="Answer with the base model as well, to compare.")]
_NewTokens = Annotated[int, typer.Option(min=1, metavar="N", help="The most tokens of an answer.")]
_Temperature = Annotated[float, typer.Option(min=0.0, metavar="T", help="0: the likeliest token each time.")]


@command("""
    trainflow predict last "new/*.csv" --to predictions
    trainflow predict models:/digits@champion new.parquet --to s3://bucket/out --workers 4
""")
def predict(
    form: Form,
    model: ModelArgument,
    new_data: _NewData,
    to: Annotated[
        str | None, typer.Option(metavar="URL", help="Folder of the predictions; unset: predictions/<key> here.")
    ] = None,
    row_id: Annotated[
        str | None,
        typer.Option("--id", metavar="COLUMN", help="Column with the rows' ids; unset: row_id or id, else a number."),
    ] = None,
    ignore: Annotated[
        list[str] | None, typer.Option(metavar="COLUMN", help="A column that is not for the model; repeatable.")
    ] = None,
    trust: Trust = None,
    file_format: Annotated[str, typer.Option("--format", help="parquet or jsonl.")] = "parquet",
    rows_per_file: Annotated[int, typer.Option(min=1, metavar="N", help="Rows of each file.")] = 10_000,
    batch_size: Annotated[
        int | None, typer.Option(min=1, metavar="N", help="Rows of a forward pass; unset: as while training.")
    ] = None,
    sort_by: _SortBy = None,
    workers: _Workers = 1,
    threads: _Threads = None,
    max_errors: _MaxErrors = 0,
) -> Answer:
    """Predict new rows with a trained model, as files of predictions with the rows' ids.

    Rows are streamed. Interrupt it or kill it: the same command continues, and each row is there exactly once. Run it
    on several machines at a time: they share the work.
    """
    from trainflow.tasks.new_rows import NewRows

    asked = NewRows(
        model=find_address(model),
        data=new_data,
        to=to,
        trust=read_trust(trust),
        id_column=row_id,
        ignored=tuple(ignore or ()),
        file_format=file_format,
        rows_per_file=rows_per_file,
        batch_size=batch_size,
        sort_by=sort_by,
        max_errors=max_errors,
    )
    return _run(asked, form, workers=workers, threads=threads)


def read_trust(trust: str | None) -> bool | str:
    """The code that `--trust` trusts: all, that of a digest, or none."""
    return (trust == "any" or trust) if trust else False


def ask_worker(request: Request[R], out: Console) -> R:
    """The result of a worker process, whose lines are printed."""
    from trainer_lib.launch.base import launch
    from trainer_lib.launch.settings.config import LaunchConfig

    def show(line: str) -> None:
        out.print(mask(line), markup=False)

    config = LaunchConfig(kind="process", processes=1)
    return launch(request, config, env={}, on_line=show, on_event=lambda event: None)


def find_address(model: str) -> str:
    """The address of a model; of a run's id, name or tag its folder on the storage here. Raises ConfigError."""
    use_registry_here(model, command="predict")
    storage = None if "/" in model or Path(model).exists() else storage_here()
    if storage is None:
        return model
    from trainflow.flows.records.past_runs import find_run, run_folder

    return run_folder(storage, find_run(storage, model, field="MODEL", needs="train").id).url


def _run(asked: NewRows, form: Form, *, workers: int, threads: int | None) -> Answer:
    from trainflow.tasks.new_rows import RowsJob, predict_new_rows

    out = form.console()
    with stoppable(out.print, remedy=f"The same command continues: {same_command()}"):
        job = RowsJob.of(asked)
        configs = job.workers(workers, threads)
        unused = job.find_unused()
        if job.answer in unused:
            out.print(f"The column '{job.answer}' is what the model predicts; it is left aside.")
        if others := [name for name in unused if name != job.answer]:
            more = f" and {len(others) - _FEW:,} more" if len(others) > _FEW else ""
            names = ", ".join(to_cell(name) if name else "one without a name" for name in others[:_FEW])
            out.print(f"Training left these columns out, and so do predictions: {names}{more}", markup=False)
        out.print(f"{counted(len(job.files), 'file')} -> {shown(job.url)}")
        with terminal.progress(out, plain=form.debug) as display:
            source = job.model.registered or shown(job.model.url)
            display({"event": "stage", "stage": _SHOWN, "status": "started", "reason": f"model {source}"})
            manifest, was_done = predict_new_rows(
                job,
                workers=configs,
                on_line=lambda line: display({"event": "line", "stage": _SHOWN, "message": mask(line)}),
                on_event=lambda event: display({**event, "stage": _SHOWN}),
            )
    facts, place = manifest.facts, f"{manifest.url}/predictions"
    record = {
        "rows": facts.rows,
        "errors": facts.errors,
        "id_column": facts.id_column,
        "was_done": was_done,
        "url": place,
        "files": [f"{manifest.url}/{entry.path}" for entry in manifest.files],
    }
    rows, was = counted(facts.rows, "row"), "was" if facts.rows == 1 else "were"
    lines = [Text(f"{rows} {was} predicted before" if was_done else f"{rows} predicted", "green")]
    if facts.errors:
        lines.append(Text(f"  bad    {facts.errors:,} of them: the column 'error' says why", "yellow"))
    ids = f"column '{facts.id_column}'" if facts.id_column else "numbered from 0"
    lines += [Text(f"  ids    {ids}"), Text(f"  where  {shown(place)}")]
    return Answer(record, lambda: lines)


@command("""
    trainflow export last exported --to torch-export
    trainflow export hf://organisation/name llama --to transformers
""")
def export(
    form: Form,
    model: ModelArgument,
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="A new folder for the exported model.")],
    to: Annotated[
        Literal["torch-export", "onnx", "transformers", "gguf"], typer.Option(help="The form of the exported model.")
    ],
    rows: Annotated[
        list[str] | None, typer.Option(metavar="FILE", help="New rows to compare outputs on; unset: rows at random.")
    ] = None,
    trust: Trust = None,
) -> Answer:
    """Write a trained model for another program, and compare its outputs of 32 rows with the model's."""
    from trainer_lib.data.rows.row_sources import find_row_files
    from trainer_lib.model_folder.locate import find_model, require_trust
    from trainer_lib.protocol.requests import ExportRequest

    if folder.exists() and any(folder.iterdir()):
        raise ConfigError("The folder is not empty.", field="DIR", value=str(folder), remedy="Name a new folder.")
    address = find_address(model)
    found = find_model(address)
    require_trust(found, read_trust(trust))
    request = ExportRequest(
        output=str(folder.absolute()),
        model=address,
        code=found.description.code_digest,
        form=to,
        sources=tuple(find_row_files(rows)) if rows else (),
    )
    out = form.console()
    with stoppable(out.print, remedy="Run it again."):
        result = ask_worker(request, out)
    record = {"folder": str(folder), "files": list(result.files), "rows": result.rows, "apart": result.apart}
    words = f"{counted(result.rows, 'row')} compared; outputs differ by {result.apart:.1g} of the largest at most"
    return Answer(record, lambda: [Text(f"{counted(len(result.files), 'file')} -> {folder}"), Text(words)])


# -- evaluate ----------------------------------------------------------------------------------------------------------


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
    """Measure a trained model on a labelled file: metrics with intervals, next to those of the run's own test.

    With --against both models are measured on the same resampled rows, and the differences have intervals.
    """
    from trainer_lib.data.rows.row_sources import find_row_files
    from trainer_lib.model_folder.locate import find_model, require_trust

    addresses = [find_address(model), *([] if against is None else [find_address(against)])]
    found = [find_model(address) for address in addresses]
    for judged in found:
        require_trust(judged, read_trust(trust))
    files = tuple(find_row_files(data))
    if report is not None and not report.parent.is_dir():
        remedy = "Name a file in a folder that exists."
        raise ConfigError("There is no such folder.", field="--report", value=str(report), remedy=remedy)
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
    return Answer(record, lambda: [*_describe_measured(record, names, confidence), *written])


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


def write_report(path: Path, found: FoundModel, measured: MeasureRowsResult, own: Mapping[str, float]) -> None:
    """Write the report of a run with what was measured in place of its stages. Raises ConfigError."""
    from trainflow.flows.reports.report import describe_outcomes, render_report
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
    """Metric -> [difference, low, high] of the first model and the second, on the rows and over the same resamples."""
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


def _describe_measured(record: Mapping[str, Any], names: Sequence[str], confidence: float) -> list[Text]:
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
    lines += table(rows, indent="  ")
    if against:
        clear = [name for name, (_, low, high) in differences.items() if low > 0 or high < 0]
        words = f"They differ beyond chance in {', '.join(clear)}." if clear else "No difference is beyond chance."
        lines += [Text(), Text(words), Text(f"  these rows   {names[0]}"), Text(f"  other model  {names[1]}")]
    return lines


@command("""
    trainflow chat last
    trainflow chat models:/helper@champion --base --prompt "What is a closure?"
""")
def chat(
    form: BareForm,
    model: ModelArgument,
    prompt: _Prompt = None,
    system: _System = None,
    base: _Base = False,
    new_tokens: _NewTokens = 512,
    temperature: _Temperature = 0.0,
    trust: Trust = None,
) -> Answer | None:
    """Talk with a model that was trained on conversations, by its template and system prompt.

    Nothing of the conversation is logged or written.
    """
    from trainer_lib.model_folder.locate import find_model, require_trust

    asked = prompt if prompt is not None or sys.stdin.isatty() else sys.stdin.read()
    if (asked is None and form.as_json) or (asked is not None and not asked.strip()):
        remedy = "Give --prompt TEXT, or pipe a text in."
        raise ConfigError("There is nothing to answer.", field="--prompt", value=asked, remedy=remedy)
    address, out = find_address(model), terminal.console(stderr=form.as_json)
    described = find_model(address)
    require_trust(described, read_trust(trust))
    if not described.description.info.get("tokenizer"):  # known without executing its code
        remedy = "Ask it with trainflow predict."
        raise ConfigError("The model reads no texts.", field="MODEL", value=model, remedy=remedy)
    with stoppable(out.print, remedy="Run it again."):
        from trainer_lib.model_folder.chat import Chat
        from trainer_lib.model_folder.loaded import load_model

        loaded = load_model(address, trust_code=described.description.code_digest)
        talk = Chat(loaded, system, new_tokens=new_tokens, temperature=temperature)
    if asked is None:
        converse(talk, out, with_base=base, bare=form.quiet, debug=form.debug)
        return None
    spoken, base_answer = _answer(talk, asked, terminal.console(quiet=form.as_json), base)
    others = {} if base_answer is None else {"base": _record_answer(base_answer)}
    return Answer({**_record_answer(spoken), **others, "system": talk.system or None}, list)


def _record_answer(spoken: Spoken) -> dict[str, Any]:
    return {"answer": spoken.text, "tokens": spoken.tokens, "whole": spoken.is_whole}


def _answer(talk: Chat, text: str, out: Console, with_base: bool) -> tuple[Spoken, Spoken | None]:
    """Show an answer piece by piece; with that of the base above it, both have a heading."""

    def show(piece: str) -> None:
        out.print(Text(piece), end="")

    return talk.answer(text, show, heading=(lambda name: out.print(Text(name, "dim"))) if with_base else None)


def converse(
    talk: Chat,
    out: Console,
    *,
    with_base: bool,
    bare: bool = False,
    debug: bool = False,
    read: Callable[[str], str] | None = None,
) -> None:
    """Answer lines until /exit or the end of the input; a failure is shown, and the conversation stays."""
    read = read or _read_line
    if not bare:
        out.print(Text(_WORDS, "dim"))
    while True:
        try:
            line = read("> ").strip()
        except EOFError:
            return
        except KeyboardInterrupt:
            out.print()
            continue
        word, _, text = line.partition(" ")
        if word == "/exit":
            return
        if word in ("/reset", "/system"):
            talk.turns, talk.system = [], text.strip() if word == "/system" else talk.system
            continue
        try:
            if line.startswith("/"):
                out.print(Text(f"There is no {word}: {_WORDS}", "yellow"))
            elif line:
                _answer(talk, line, out, with_base)
        except TrainflowError as error:
            terminal.show(presentation.failure(error, debug=debug))


def _read_line(prompt: str) -> str:
    import readline  # noqa: F401 - lines can be edited, and earlier ones called back while it runs

    return input(prompt)
