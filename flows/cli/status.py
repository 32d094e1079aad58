"""`trainflow status`: the runs of a storage, how each is, and where; runs that died are marked as ended."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.text import Text

from flows.cli import terminal
from flows.cli.options import Debug, Json, Overrides, print_json
from flows.cli.presentation import shown
from flows.cli.ui import find_storage
from flows.server.api import prefect_api, quiet_environment
from tasks.configs import TrackingConfig
from tasks.tracking import deliver_waiting
from trainer_lib.errors import TrainflowError
from trainer_lib.storage import Store

if TYPE_CHECKING:
    from flows.run_status import RunStatus

_COLOURS = {
    "running": "green",
    "suspended": "yellow",
    "silent": "yellow",
    "failed": "bold red",
    "died": "bold red",
    "stopped": "yellow",
}
_SHORT_ID = 8
# Seconds that MLflow's server gets.
_PATIENCE_S = 10


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

    tracking, place = find_storage(spec, overrides or [], storage, command="status")
    root = place.url
    out = terminal.console(stderr=True)
    found = find_statuses(root, lambda count: out.print(_waits_for(count)))
    warnings = []
    if any(not each.is_swept for each in found):
        with out.status("marking runs that died"):
            warnings = [*_mark(root, found), *_deliver(tracking, place)]
    if as_json:
        runs = [each.to_dict() for each in found]
        print_json({"ok": True, "exit_code": 0, "storage": root, "runs": runs, "warnings": warnings})
        return
    terminal.show(_lines(found, root))
    for warning in warnings:
        out.print(Text(f"warning: {warning}", "yellow"))


def _waits_for(count: int) -> str:
    who = "a process" if count == 1 else f"{count} processes"
    return f"waiting half a minute for a sign of life of {who} on another machine"


def _mark(root: str, found: Sequence[RunStatus]) -> list[str]:
    """Mark what died, in Prefect and on the storage; returns what could not be done, and why."""
    import httpx

    from flows.run_status import sweep

    try:
        with prefect_api():
            return sweep(root, list(found))
    except (TrainflowError, httpx.HTTPError) as error:
        why = error.message if isinstance(error, TrainflowError) else f"its server does not answer ({error})."
        return [f"Prefect's runs of dead processes are not marked: {why}"]


def _deliver(tracking: TrackingConfig, place: Store) -> list[str]:
    """End the MLflow runs of what died, with all that they had logged; returns why it could not be done."""
    delivery = deliver_waiting(tracking, place)
    if delivery is None or delivery.close(stages=_PATIENCE_S):
        return []
    return ["MLflow did not take yet what waits for it: trainflow sync delivers the rest."]


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
