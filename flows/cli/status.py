"""`trainflow status`: the runs of a storage, how each is, and where; runs that died are marked as ended."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Group
from rich.text import Text

from trainer_lib.errors import ConfigError, Interrupted, Preempted, TrainflowError
from trainer_lib.storage import Store
from trainflow.flows.cli import terminal
from trainflow.flows.cli.options import Bare, Debug, Json, Overrides, print_json
from trainflow.flows.cli.presentation import shown
from trainflow.flows.cli.signals import stoppable
from trainflow.flows.cli.tables import table
from trainflow.flows.cli.ui import find_storage
from trainflow.flows.server.api import prefect_api, quiet_environment
from trainflow.tasks.configs import TrackingConfig
from trainflow.tasks.stage.progress import duration
from trainflow.tasks.tracking.mlflow_run import deliver_waiting

if TYPE_CHECKING:
    from trainflow.flows.runs.run_status import RunStatus

_COLOURS = {
    "running": "green",
    "suspended": "yellow",
    "silent": "yellow",
    "failed": "bold red",
    "died": "bold red",
    "stopped": "yellow",
    "pruned": "dim",
}
_SHORT_ID = 8
_BAR = 20
_WATCH_EVERY_S = 2.0
# Seconds that MLflow's server gets.
_PATIENCE_S = 10


def status(
    spec: Annotated[Path | None, typer.Argument(help="A spec; unset: what is in this folder.")] = None,
    overrides: Overrides = None,
    storage: Annotated[str | None, typer.Option(metavar="URL", help="A storage root, instead of a spec.")] = None,
    watch: Annotated[
        bool, typer.Option("--watch", "-w", help="Follow the runs at work, stage by stage, until they have ended.")
    ] = False,
    bare: Bare = False,
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """Show the runs of a storage and how each is; mark those whose process died as ended, in Prefect too."""
    quiet_environment()
    from trainflow.flows.runs.run_status import find_statuses

    if watch and as_json:
        raise ConfigError("--json prints one object, so it cannot watch.", field="--watch", remedy="Drop one.")
    tracking, place = find_storage(spec, overrides or [], storage, command="status")
    root = place.url
    out = terminal.console(stderr=True, quiet=bare)
    if watch:
        _watch(root)
    found = find_statuses(root, lambda count: out.print(_waits_for(count)))
    warnings = []
    if any(not each.is_swept for each in found):
        with out.status("marking runs that died"):
            warnings = [*_mark(root, found), *_deliver(tracking, place)]
    if as_json:
        runs = [{**each.to_dict(), **_progress(each, found)} for each in found]
        print_json({"ok": True, "exit_code": 0, "storage": root, "runs": runs, "warnings": warnings})
        return
    terminal.show(_lines(found, root, bare=True) if bare else [*_lines(found, root), *_stages(found)])
    for warning in warnings:
        terminal.console(stderr=True).print(Text(f"warning: {warning}", "yellow"))


def _waits_for(count: int) -> str:
    who = "a process" if count == 1 else f"{count} processes"
    return f"waiting half a minute for a sign of life of {who} on another machine"


def _mark(root: str, found: Sequence[RunStatus]) -> list[str]:
    """Mark what died, in Prefect and on the storage; returns what could not be done, and why."""
    import httpx

    from trainflow.flows.runs.run_status import sweep

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


def _watch(root: str) -> None:
    """Draw the runs at work, and draw them again, until none is at work or Ctrl-C."""
    from rich.live import Live

    from trainflow.flows.runs.run_status import look

    with (
        contextlib.suppress(Interrupted, Preempted),
        stoppable(lambda _: None, remedy=""),
        Live(console=terminal.console(), auto_refresh=False, transient=True) as live,
    ):
        found = look(root)
        while at_work := [each for each in found if each.is_at_work]:
            live.update(Group(*_lines(at_work, root), *_stages(found)), refresh=True)
            time.sleep(_WATCH_EVERY_S)
            # What is drawn last and the list below it are of one moment.
            found = look(root, closely={each.run.id for each in at_work})


def _progress(status: RunStatus, found: Sequence[RunStatus]) -> dict[str, Any]:
    from trainflow.flows.runs.run_progress import describe_progress, estimate_rest

    if not status.is_at_work:
        return {}
    stages = describe_progress(status, [each.run for each in found])
    return {"stage_progress": [each.to_dict() for each in stages], "rest_s": estimate_rest(stages)}


def _stages(found: Sequence[RunStatus]) -> list[Text]:
    """The stages of each run at work: a bar, how long it took or takes, and when it is likely to end."""
    from trainflow.flows.runs.run_progress import describe_progress, estimate_rest

    lines: list[Text] = []
    for status in found:
        if not status.is_at_work:
            continue
        stages = describe_progress(status, [each.run for each in found])
        rest = estimate_rest(stages)
        left = "" if rest is None else f", about {duration(rest)} left"
        lines += [Text(), Text(f"{status.run.id[:_SHORT_ID]} {status.run.title}{left}", "bold")]
        rows = [("stage", "state", "", "time", "left", "")]
        for each in stages:
            took, eta = ("" if number is None else duration(number) for number in (each.seconds, each.eta_s))
            rows.append((each.stage, each.state, _bar(each.share), took, eta, each.text))
        lines += table(rows, [("", _COLOURS.get(each.state, "dim")) for each in stages], right=frozenset({3, 4}))
    return lines


def _bar(share: float | None) -> str:
    if share is None:
        return ""
    full = round(share * _BAR)
    return f"{'━' * full}{'╌' * (_BAR - full)} {share:4.0%}"


def _lines(found: Sequence[RunStatus], root: str, *, bare: bool = False) -> list[Text]:
    if not found:
        return [] if bare else [Text(f"No run is recorded in {shown(root)}.")]
    rows = [("run", "pipeline", "state", "started", ""), *(_row(each) for each in found)]
    return table(rows, [("", "", _COLOURS.get(each.state, "")) for each in found], bare=bare)


def _row(status: RunStatus) -> tuple[str, str, str, str, str]:
    run = status.run
    return run.id[:_SHORT_ID], run.name, status.state, run.started[:16].replace("T", " "), status.where
