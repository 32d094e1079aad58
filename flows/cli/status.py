"""`trainflow status`: the runs of a storage, how each is, and where; runs that died are marked as ended."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.text import Text

from flows.cli import terminal
from flows.cli.options import Debug, Json, Overrides, print_json
from flows.cli.presentation import shown
from flows.server.api import prefect_api, quiet_environment
from flows.spec.spec import load_spec
from trainer_lib.errors import ConfigError, TrainflowError
from trainer_lib.storage import Store

if TYPE_CHECKING:
    from flows.run_status import RunStatus

_COLOURS = {"running": "green", "suspended": "yellow", "failed": "bold red", "died": "bold red", "stopped": "yellow"}
_SHORT_ID = 8


def status(
    spec: Annotated[Path | None, typer.Argument(help="A spec; unset: what is in this folder.")] = None,
    overrides: Overrides = None,
    storage: Annotated[str | None, typer.Option(metavar="URL", help="A storage root, instead of a spec.")] = None,
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """Show the runs of a storage and how each is; mark those whose process died as ended, in Prefect too."""
    quiet_environment()
    from flows.run_status import find_statuses

    root = _find_storage(spec, overrides or [], storage)
    out = terminal.console(stderr=True)
    found = find_statuses(root, lambda count: out.print(_waits_for(count)))
    warning = _swept(root, found, out) if any(not each.is_swept for each in found) else None
    if as_json:
        runs = [each.to_dict() for each in found]
        print_json({"ok": True, "exit_code": 0, "storage": root, "runs": runs, "warning": warning})
        return
    terminal.show(_lines(found, root))
    if warning is not None:
        out.print(Text(f"warning: {warning}", "yellow"))


def _find_storage(spec: Path | None, overrides: list[str], storage: str | None) -> str:
    if spec is not None and storage is not None:
        raise ConfigError("Give a spec or a storage, not both.", field="--storage", value=storage, remedy="Drop one.")
    if storage is not None:
        return Store.open(storage, field="--storage").url
    if spec is None and not Path("pipeline.yaml").is_file():
        if Path(".trainflow").is_dir():
            return Store.open(".trainflow").url
        raise ConfigError(
            "No runs were named, and this folder has neither pipeline.yaml nor .trainflow.",
            field="status",
            remedy="Name a spec (trainflow status SPEC) or a storage (trainflow status --storage URL).",
        )
    return load_spec(spec or Path("pipeline.yaml"), overrides).storage


def _waits_for(count: int) -> str:
    who = "a process" if count == 1 else f"{count} processes"
    return f"waiting half a minute for a sign of life of {who} on another machine"


def _swept(root: str, found: Sequence[RunStatus], out: Console) -> str | None:
    """Mark what died; returns why not, or None."""
    import httpx

    from flows.run_status import sweep

    try:
        with out.status("marking runs that died"), prefect_api():
            sweep(root, list(found))
    except (TrainflowError, httpx.HTTPError) as error:
        why = error.message if isinstance(error, TrainflowError) else f"its server does not answer ({error})"
        return f"Prefect's runs of dead processes are not marked: {why}"
    return None


def _lines(found: Sequence[RunStatus], root: str) -> list[Text]:
    if not found:
        return [Text(f"No run is recorded in {shown(root)}.")]
    rows = [("run", "pipeline", "state", "started", ""), *(_row(each) for each in found)]
    widths = [max(len(row[column]) for row in rows) for column in range(4)]
    lines = []
    for place, row in enumerate(rows):
        padded = [row[column].ljust(widths[column]) for column in range(4)]
        style = "dim" if place == 0 else _COLOURS.get(found[place - 1].state, "")
        lines.append(
            Text.assemble(*((f"{cell}  ", style if column == 2 else "") for column, cell in enumerate(padded)), row[4])
        )
    return lines


def _row(status: RunStatus) -> tuple[str, str, str, str, str]:
    run = status.run
    return run.id[:_SHORT_ID], run.name, status.state, run.started[:16].replace("T", " "), status.where
