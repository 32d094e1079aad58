"""The commands `trainflow serve` and `trainflow deploy`: a pipeline on a schedule, here or on a work pool."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from flows.cli import terminal
from flows.cli.options import Debug, Overrides, Spec
from flows.server.api import quiet_environment
from flows.spec.spec import PipelineSpec, load_spec

if TYPE_CHECKING:
    from flows.server.serving import Schedule

Cron = Annotated[str | None, typer.Option(help='A schedule in cron\'s notation: "0 3 * * *" is daily at three.')]
Interval = Annotated[float | None, typer.Option(min=1.0, help="Seconds from one scheduled run to the next.")]
Timezone = Annotated[str | None, typer.Option(help="Time zone of --cron (Europe/Berlin); UTC if unset.")]
Name = Annotated[str | None, typer.Option(help="Name of the deployment; the pipeline's name if unset.")]


def serve(
    spec: Spec,
    overrides: Overrides = None,
    cron: Cron = None,
    interval: Interval = None,
    timezone: Timezone = None,
    name: Name = None,
    debug: Debug = False,
) -> None:
    """Run a pipeline on a schedule, in this process, on this machine, until Ctrl-C."""
    pipeline, schedule = _read_scheduled(spec, overrides, cron, interval, timezone)
    # After the spec is read: a mistake in it is shown before Prefect is imported.
    from flows.server import serving

    serving.serve(pipeline, schedule, name=name, say=terminal.console().print)


def deploy(
    spec: Spec,
    overrides: Overrides = None,
    pool: Annotated[str, typer.Option(metavar="NAME", help="The work pool that runs it.")] = "",
    create_pool: Annotated[bool, typer.Option("--create-pool", help="Create the pool if it does not exist.")] = False,
    cron: Cron = None,
    interval: Interval = None,
    timezone: Timezone = None,
    name: Name = None,
    debug: Debug = False,
) -> None:
    """Register a pipeline with a process work pool of a Prefect server, with or without a schedule."""
    pipeline, schedule = _read_scheduled(spec, overrides, cron, interval, timezone)
    from flows.server import serving

    terminal.show(serving.deploy(pipeline, schedule, pool=pool, create_pool=create_pool, name=name))


def _read_scheduled(
    spec: Path, overrides: list[str] | None, cron: str | None, interval: float | None, timezone: str | None
) -> tuple[PipelineSpec, Schedule]:
    """Read the spec and the schedule that both commands take, before Prefect is imported."""
    quiet_environment()
    pipeline = load_spec(spec, overrides or [])
    from flows.server.serving import Schedule

    return pipeline, Schedule(cron=cron, interval_s=interval, timezone=timezone)
