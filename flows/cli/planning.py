"""`trainflow plan`: what a run will do and take, and what of it cannot work, before it is started."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import TYPE_CHECKING, Annotated, Any

import typer

from flows.cli import plan_text, presentation, terminal
from flows.cli.options import Debug, Json, Overrides, Spec, print_json
from flows.spec.spec import load_spec
from tasks.stage.resolver import Resolver
from trainer_lib.errors import StorageError, TrainflowError

if TYPE_CHECKING:
    from flows.forecast import Forecast, Found
    from flows.obstacles import Obstacle
    from flows.plan import Plan
    from tasks.stage.facts import PrepareFacts
    from tasks.stage.manifest import StageManifest

ProbeOption = Annotated[
    bool,
    typer.Option("--probe", help="Prepare the data if it is not, train a few real steps, and measure time and memory."),
]


def plan(
    spec: Spec, overrides: Overrides = None, probe: ProbeOption = False, as_json: Json = False, debug: Debug = False
) -> None:
    """Show what a run will do and take: stages, steps, memory of a rank, time, room; and what of it cannot work.

    The exit code is 2 if something cannot work.
    """
    parsed = load_spec(spec, overrides or [], Resolver())
    from flows.forecast import forecast
    from flows.obstacles import find_obstacles
    from flows.plan import Plan

    out = terminal.console(stderr=True)
    made = Plan.of(parsed, debug=debug)
    if probe and made.reasons["prepare-data"].manifest is None:
        with out.status("preparing the data"):
            made = _prepared(made)
    with out.status("building the model without values" + (", then training a few steps" if probe else "")):
        found = forecast(made, ask=lambda data: _ask(made, data, probe=probe))
    obstacles = find_obstacles(made, found)
    _keep(made, found, obstacles)
    warnings = [each for several in made.warnings.values() for each in several]
    fatal = any(each.is_fatal for each in obstacles)
    if as_json:
        print_json({"ok": not fatal, "exit_code": 2 if fatal else 0, **_as_json(made, found, obstacles, warnings)})
    else:
        terminal.show(presentation.reasons(list(made.reasons.values()), warnings))
        terminal.show(plan_text.describe(made, found, obstacles))
    if fatal:
        raise typer.Exit(2)


def _prepared(made: Plan) -> Plan:
    """The plan after its data was prepared, which a run would do first."""
    from flows.plan import Plan

    stage = made.stages["prepare-data"]
    # The stage itself, without an engine: it is committed as by a run.
    stage.stage.load_task().fn(stage.config, made.context)
    return Plan.of(made.spec, debug=made.context.debug)


def _ask(made: Plan, data: StageManifest[PrepareFacts], *, probe: bool) -> Found:
    """What workers find out; a failure of the recipe's own code is kept as what cannot work."""
    from flows.forecast import Found
    from tasks.stage.rehearsal import estimate_training, probe_training

    config, found = made.stages["train"].config, Found()
    try:
        found.estimate = estimate_training(config, made.context, data)
        if probe:
            found.probe = probe_training(config, made.context, data, on_line=lambda line: None)
    except TrainflowError as error:
        found.error = error
    return found


def _keep(made: Plan, found: Forecast, obstacles: list[Obstacle]) -> None:
    """Keep the plan where the run will be recorded, so that its report can compare both."""
    from flows.past_runs import run_folder
    from flows.plan_record import write_half
    from flows.results import RUN_ID_CHARS

    if found.length is None or any(each.field == "storage" for each in obstacles):
        return
    planned = {"made": datetime.now(UTC).isoformat(timespec="seconds"), "probe": found.probe is not None}
    try:
        folder = run_folder(made.spec.storage, made.pipeline_key[:RUN_ID_CHARS])
        write_half(folder, "planned", {**planned, "stages": {"train": found.planned()}})
    except StorageError:
        return  # the plan is shown all the same


def _as_json(made: Plan, found: Forecast, obstacles: list[Obstacle], warnings: list[str]) -> dict[str, Any]:
    return {
        "name": made.spec.name,
        "limit": made.spec.limit,
        "stages": [reason.to_dict() for reason in made.reasons.values()],
        "arguments": plan_text.effective_arguments(made),
        **found.to_dict(),
        "obstacles": [vars(each) for each in obstacles],
        "warnings": warnings,
    }
