"""The commands `trainflow predict` and `export`: new rows predicted; a model written for other programs."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal, TypeVar

import typer
from rich.text import Text

from trainer_lib.base.foreign_text import to_cell
from trainer_lib.base.suggestions import counted
from trainer_lib.errors import ConfigError
from trainer_lib.secrets import mask
from trainflow.flows.cli import terminal
from trainflow.flows.cli.options import Answer, Form, command
from trainflow.flows.cli.presentation import same_command, shown
from trainflow.flows.cli.run_choice import use_registry_here
from trainflow.flows.cli.signals import stoppable
from trainflow.flows.spec.spec import storage_here

if TYPE_CHECKING:
    from rich.console import Console

    from trainer_lib.protocol.requests import Request
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
_Set = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="COLUMN=VALUE", help="A column that every row gets, with this value; repeatable."),
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


@command("""
    trainflow predict .trainflow/runs/3fa9c1d2e4b50617 "new/*.csv" --to predictions
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
    constants: _Set = None,
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
        ignored=ignore or (),
        constants=_read_constants(constants or ()),
        format=file_format,
        rows_per_file=rows_per_file,
        batch_size=batch_size,
        sort_by=sort_by,
        max_errors=max_errors,
    )
    return _run(asked, form, workers=workers, threads=threads)


def _read_constants(given: Sequence[str]) -> dict[str, str]:
    """The columns of `--set`, with the texts of their values. Raises ConfigError for one without a value."""
    for text in given:
        if not text.partition("=")[1]:
            remedy = "Write --set COLUMN=VALUE."
            raise ConfigError("There is no value.", field="--set", value=text, remedy=remedy)
    return {name: value for name, _, value in (text.partition("=") for text in given)}


def read_trust(trust: str | None) -> bool | str:
    """The code that `--trust` trusts: all, that of a digest, or none."""
    return (trust == "any" or trust) if trust else False


def ask_worker(request: Request[R], out: Console) -> R:
    """The result of a worker process, whose lines are printed."""
    from trainer_lib.launch import LaunchConfig, launch

    def show(line: str) -> None:
        out.print(mask(line), markup=False)

    config = LaunchConfig(kind="process", processes=1)
    return launch(request, config, env={}, on_line=show, on_event=lambda event: None)


def find_address(model: str) -> str:
    """The address of a model; of the id, name or tag of a run, its folder on the storage of this folder.

    Raises:
        ConfigError: this folder has a storage, and no such run is recorded there.
    """
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
            names = ", ".join(map(to_cell, others[:_FEW]))
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
