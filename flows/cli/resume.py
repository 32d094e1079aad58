"""`trainflow resume`: go on with a run that is recorded in a storage, from this machine or another one."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from trainer_lib.errors import ConfigError
from trainflow.flows.cli import presentation, terminal
from trainflow.flows.cli.execution import execute
from trainflow.flows.cli.options import Debug, Json, Quiet
from trainflow.flows.server.api import quiet_environment
from trainflow.flows.spec.spec import storage_here

if TYPE_CHECKING:
    from trainflow.flows.records.past_runs import PastRun

_SPEC_ENDINGS = (".yaml", ".yml", ".json")


def resume(
    run: Annotated[
        str | None,
        typer.Argument(
            metavar="RUN",
            help="Id of the run, or the beginning of it; unset: the newest that did not finish.",
            show_default=False,
        ),
    ] = None,
    storage: Annotated[
        str | None,
        typer.Option(metavar="URL", help="The storage; unset: that of pipeline.yaml here, else .trainflow here."),
    ] = None,
    debug: Debug = False,
    quiet: Quiet = False,
    as_json: Json = False,
) -> None:
    """Go on with a run that failed, was stopped or died: with its own spec and overrides, on any machine.

    The recipe is the project's, as it is now; where the project is not on this machine, the one that the run kept.
    """
    quiet_environment()
    from trainflow.flows.runs.resumption import prepare_resumption

    out = terminal.console(stderr=as_json, quiet=quiet)

    def say(line: str) -> None:
        out.print(line, markup=False, highlight=False)

    past = _choose(place := storage or _storage_here(), run, say)
    ready = prepare_resumption(place, past, say)
    spec = ready.spec
    named = [*([run] if run else []), *(["--storage", storage] if storage else [])]
    execute(
        spec,
        title=f"{spec.name}: run {past.id} -> {presentation.shown(spec.storage)}",
        again=["trainflow", "resume", *named],
        place=["--storage", spec.storage],
        debug=debug,
        quiet=quiet,
        as_json=as_json,
        **ready.choice,
    )


def _storage_here() -> str:
    if (found := storage_here()) is not None:
        return found
    raise ConfigError(
        "No storage was named, and this folder has neither a single spec nor .trainflow.",
        field="--storage",
        remedy="Name the storage of the run: trainflow resume --storage URL.",
    )


def _choose(storage: str, run: str | None, say: Callable[[str], object]) -> PastRun:
    from trainflow.flows.records.past_runs import NEWEST, find_run, newest_unfinished
    from trainflow.flows.runs.resumption import require_unfinished
    from trainflow.flows.runs.run_status import find_statuses

    if run is not None:
        _refuse_other_words(run)
    statuses = find_statuses(storage, lambda count: say(f"waiting half a minute for a sign of life of {count} runs"))
    at_work = {each.run.id: each for each in statuses if each.state in ("running", "suspended")}
    if run is None or run == NEWEST:
        return newest_unfinished(storage, at_work=at_work)
    past = find_run(storage, run, field="RUN")
    require_unfinished(past, at_work.get(past.id), named=run)
    return past


def _refuse_other_words(run: str) -> None:
    """Raises ConfigError for what people give in place of a run's id."""
    if "=" in run:
        raise ConfigError(
            "A run goes on with the settings that it was recorded with.",
            field="RUN",
            value=run,
            remedy=f"To go on with others: trainflow run SPEC {run} --from-run ID.",
        )
    if run.endswith(_SPEC_ENDINGS) and Path(run).is_file():
        raise ConfigError(
            "This is a spec, not the id of a run.",
            field="RUN",
            value=run,
            remedy=f"A spec goes on by the command that started it: trainflow run {run}.",
        )
