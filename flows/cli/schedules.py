"""The commands `serve`, `deploy` and `watch`: a pipeline on a schedule or on new data, here or on a work pool."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Annotated

import typer

from trainer_lib.errors import Interrupted, Preempted
from trainflow.flows.cli import terminal
from trainflow.flows.cli.options import Debug, Json, Overrides, Quiet, Spec, print_json
from trainflow.flows.cli.signals import stoppable
from trainflow.flows.cli.spec_choice import choose_spec_file
from trainflow.flows.server.api import quiet_environment
from trainflow.flows.server.schedule import Schedule, read_interval
from trainflow.flows.spec.spec import PipelineSpec, load_spec

Cron = Annotated[str | None, typer.Option(help='A schedule in cron\'s notation: "0 3 * * *" is daily at three.')]
Interval = Annotated[str | None, typer.Option(help="Time from one scheduled run to the next: 3600 (seconds), 12h, 1d.")]
Rule = Annotated[str | None, typer.Option("--rrule", help='A recurrence rule: "FREQ=WEEKLY;BYDAY=MO;BYHOUR=3".')]
Timezone = Annotated[str | None, typer.Option(help="Time zone of --cron and --rrule (Europe/Berlin); UTC if unset.")]
Name = Annotated[str | None, typer.Option(help="Name of the deployment; the pipeline's name if unset.")]
WatchUrl = Annotated[
    str | None, typer.Option("--watch", metavar="URL", help="Folder or URL: new data under it starts a run.")
]
WatchEvery = Annotated[str, typer.Option("--watch-every", help="Time between two looks at --watch: 60 (seconds), 5m.")]
RetryCrashed = Annotated[
    int, typer.Option("--retry-crashed", min=0, max=100, help="How often a run that crashed runs again.")
]


def serve(
    spec: Spec = None,
    overrides: Overrides = None,
    cron: Cron = None,
    interval: Interval = None,
    rrule: Rule = None,
    timezone: Timezone = None,
    watch: WatchUrl = None,
    watch_every: WatchEvery = "60",
    retry_crashed: RetryCrashed = 0,
    name: Name = None,
    quiet: Quiet = False,
    debug: Debug = False,
) -> None:
    """Run a pipeline on a schedule or on new data, in this process, on this machine, until Ctrl-C."""
    schedule = Schedule(cron=cron, interval_s=read_interval(interval), timezone=timezone, rrule=rrule)
    every_s = read_interval(watch_every, option="--watch-every") or 0.0
    pipeline = _read(spec, overrides)
    # After the spec is read: a mistake in it is shown before Prefect is imported.
    from trainflow.flows.server import serving

    serving.serve(
        pipeline,
        schedule,
        name=name,
        # The console of that moment: from then on what it prints goes to the log as well.
        say=lambda line: terminal.console(quiet=quiet).print(line),
        watch=watch,
        watch_every_s=every_s,
        retry_crashed=retry_crashed,
    )


def deploy(
    spec: Spec = None,
    overrides: Overrides = None,
    pool: Annotated[str, typer.Option(metavar="NAME", help="The work pool that runs it.")] = "",
    create_pool: Annotated[bool, typer.Option("--create-pool", help="Create the pool if it does not exist.")] = False,
    pool_type: Annotated[
        str | None, typer.Option("--pool-type", help="What the pool starts: process, docker or kubernetes.")
    ] = None,
    image: Annotated[str | None, typer.Option(help="Image of the runs, for pools of docker and kubernetes.")] = None,
    job_variable: Annotated[
        list[str] | None, typer.Option(metavar="NAME=VALUE", help="A variable of the pool's jobs; repeatable.")
    ] = None,
    limit: Annotated[
        int | None, typer.Option("--limit-runs", min=1, help="Runs of it at once; the others wait.")
    ] = None,
    cron: Cron = None,
    interval: Interval = None,
    rrule: Rule = None,
    timezone: Timezone = None,
    watch: WatchUrl = None,
    retry_crashed: RetryCrashed = 0,
    name: Name = None,
    quiet: Quiet = False,
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """Register a pipeline with a work pool of a Prefect server, with or without a schedule."""
    schedule = Schedule(cron=cron, interval_s=read_interval(interval), timezone=timezone, rrule=rrule)
    pipeline = _read(spec, overrides)
    from trainflow.flows.server import serving

    target = serving.Target(pool, create_pool, pool_type, image, tuple(job_variable or ()), limit, retry_crashed, watch)
    deployed = serving.deploy(pipeline, schedule, target, name=name)
    if as_json:
        print_json({"ok": True, "exit_code": 0, **vars(deployed)})
    elif not quiet:
        terminal.show(deployed.lines())


def watch(
    url: Annotated[str, typer.Argument(metavar="URL", help="Folder or URL.")],
    deployment: Annotated[str, typer.Argument(metavar="DEPLOYMENT", help="What new data there starts: pipeline/NAME.")],
    every: Annotated[str, typer.Option(help="Time between two looks: 60 (seconds), 5m.")] = "60",
    quiet: Quiet = False,
    debug: Debug = False,
) -> None:
    """Start a deployment when data under a URL appear or change, until Ctrl-C."""
    quiet_environment()
    every_s = read_interval(every, option="--every") or 0.0
    from contextlib import suppress

    from trainflow.flows.server import serving

    say = terminal.console(quiet=quiet).print
    with suppress(Interrupted, Preempted), stoppable(lambda _: None, remedy=""):
        serving.watch_for(url, deployment, every_s=every_s, say=say, done=threading.Event())


def _read(spec: Path | None, overrides: list[str] | None) -> PipelineSpec:
    """Read the spec, before Prefect is imported."""
    quiet_environment()
    return load_spec(*choose_spec_file(spec, overrides), needs_sweep=False)
