"""The command `trainflow sync`: MLflow gets what an earlier command could not deliver."""

from __future__ import annotations

import threading
import time
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from trainer_lib.errors import StorageError
from trainer_lib.secrets import mask
from trainer_lib.trackers.delivery import Delivery
from trainer_lib.trackers.shipper import shorten
from trainer_lib.trackers.spool import Waiting, count_waiting
from trainflow.flows.cli import terminal
from trainflow.flows.cli.options import Debug, Json, Overrides, Quiet, print_json
from trainflow.flows.cli.signals import stoppable
from trainflow.flows.cli.ui import find_storage
from trainflow.flows.server.api import quiet_environment
from trainflow.tasks.tracking.mlflow_run import spool_dirs, tracking_uri

_SAY_EVERY_S = 10.0
_LOOK_EVERY_S = 0.2  # while another process delivers


def sync(
    spec: Annotated[Path | None, typer.Argument(help="A spec; unset: what is in this folder.")] = None,
    overrides: Overrides = None,
    storage: Annotated[
        str | None, typer.Option(metavar="URL", help="A storage root, or the output_dir of a Trainer, instead.")
    ] = None,
    drop: Annotated[
        bool, typer.Option("--drop", help="Remove what waits for another server than this one: a wrong address.")
    ] = False,
    quiet: Quiet = False,
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """Deliver to MLflow what waits on this machine because the server was out of reach. Runs nothing."""
    quiet_environment()
    config, place = find_storage(spec, overrides or [], storage, command="sync")
    out = terminal.console(stderr=True, quiet=quiet)
    found: dict[Path, Waiting | None] = {
        root: waiting for root in spool_dirs(place) if (waiting := count_waiting(root)) is not None
    }
    with stoppable(out.print, remedy="The same command delivers the rest."):
        for root in found:
            if drop:
                Delivery(root, tracking_uri(config, place)).drop_foreign()
                found[root] = count_waiting(root)
            if found[root] is not None:
                _deliver(root, tracking_uri(config, place), out)
    waited = [str(waiting) for waiting in found.values() if waiting is not None]
    if as_json:
        print_json({"ok": True, "exit_code": 0, "delivered": waited})
    else:
        terminal.console(quiet=quiet).print(
            f"MLflow has everything: {', '.join(waited)} delivered." if waited else "Nothing waits."
        )


def _deliver(root: Path, uri: str, out: Console) -> None:
    """Deliver one spool; say every ten seconds what still waits.

    Raises:
        StorageError: the server does not take it.
    """
    delivery = Delivery(root, uri)
    failures: list[Exception] = []

    def work() -> None:
        try:
            while not delivery.deliver() and delivery.is_elsewhere:
                time.sleep(_LOOK_EVERY_S)
        except Exception as error:  # whatever mlflow raises
            failures.append(error)

    thread = threading.Thread(target=work, name="sync", daemon=True)  # Ctrl-C does not wait for a request
    thread.start()
    while thread.is_alive():
        out.print(f"{waiting} -> {_servers(waiting, uri)}" if (waiting := count_waiting(root)) else "")
        thread.join(_SAY_EVERY_S)
    waiting = count_waiting(root)
    if waiting is None and not failures:
        return
    reason = shorten(failures[0]) if failures else delivery.obstacle or "its server did not take it."
    raise StorageError(
        f"{waiting} still waits for MLflow in {root}: {reason}",
        field="tracking",
        value=_servers(waiting, uri),
        remedy="Run the same command again when the server answers. Was its address wrong? Correct tracking.uri, and "
        "remove what waits for the other one: trainflow sync --drop.",
    )


def _servers(waiting: Waiting | None, uri: str) -> str:
    """The servers that a spool waits for, which may be others than that of the spec by now."""
    return mask(", ".join(waiting.servers) if waiting is not None and waiting.servers else uri)
