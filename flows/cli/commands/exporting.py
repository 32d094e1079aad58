"""The command `trainflow export`: a trained model in the form of another program."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer
from rich.text import Text

from trainer_lib.base.suggestions import counted
from trainer_lib.errors import ConfigError
from trainflow.flows.cli.commands.predicting import ModelArgument, Trust, ask_worker, find_address, read_trust
from trainflow.flows.cli.options import Answer, Form, command
from trainflow.flows.cli.signals import stoppable


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
