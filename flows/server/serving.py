"""Pipelines on a schedule: `serve` (one machine, one process, nothing to operate) and `deploy` (a work pool's workers).

The deployment's one parameter is the validated spec with absolute paths, and its entrypoint the installed module, so a
run depends neither on a checkout nor on the folder it is started in.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any
from zoneinfo import ZoneInfo, ZoneInfoNotFoundError

import psutil
from rich.text import Text

from flows.server.api import prefect_api, server_folder
from flows.server.embedded import SERVED_TAG
from flows.server.run_process import OWNER, SERVER_FOLDER
from flows.spec.spec import PipelineSpec
from trainer_lib.errors import ConfigError
from trainer_lib.launch.in_process import set_environment

if TYPE_CHECKING:
    from prefect.client.orchestration import SyncPrefectClient
    from prefect.deployments.runner import RunnerDeployment
    from prefect.runner import Runner
    from prefect.schedules import Schedule as PrefectSchedule

_POOL_TYPE = "process"
_ENTRYPOINT = "flows.deployed.pipeline"
# The folder a run is started in may hold packages called flows or tasks: `python -m` must not find them first.
_RUN_ENVIRONMENT = {"PYTHONSAFEPATH": "1"}
# Seconds that a run may take to save and end: longer than the stages' own grace.
_END_S = 90.0


@dataclass(frozen=True)
class Schedule:
    """When a deployment runs by itself: by `cron`, every `interval_s` seconds, or never.

    Raises:
        ConfigError: both are given, or the time zone is unknown. (That `cron` can be read is checked by `prefect`.)
    """

    cron: str | None = None
    interval_s: float | None = None
    timezone: str | None = None

    def __post_init__(self) -> None:
        if self.cron is not None and self.interval_s is not None:
            raise ConfigError(
                "A schedule is either by cron or by interval.",
                field="--interval",
                value=self.interval_s,
                remedy="Drop one.",
            )
        if self.timezone is not None:
            try:
                ZoneInfo(self.timezone)
            except (ZoneInfoNotFoundError, ValueError) as error:
                raise ConfigError(
                    "This time zone does not exist.",
                    field="--timezone",
                    value=self.timezone,
                    remedy="Name one of the IANA database, such as Europe/Berlin.",
                ) from error

    def __str__(self) -> str:
        if self.cron is not None:
            return f"cron {self.cron} ({self.timezone or 'UTC'})"
        return f"every {self.interval_s:g} s" if self.interval_s is not None else "no schedule"

    def prefect(self) -> PrefectSchedule | None:
        """This schedule as Prefect's own object; None without a schedule.

        Raises:
            ConfigError: `cron` cannot be read.
        """
        from prefect.client.schemas.schedules import CronSchedule
        from prefect.schedules import Cron, Interval

        if self.interval_s is not None:
            return Interval(self.interval_s, timezone=self.timezone)
        if self.cron is None:
            return None
        try:
            CronSchedule(cron=self.cron)
        except ValueError as error:
            raise ConfigError(
                "This is not a schedule in cron's notation.",
                field="--cron",
                value=self.cron,
                remedy="Five fields: minute hour day-of-month month day-of-week, such as '0 3 * * *'.",
            ) from error
        return Cron(self.cron, timezone=self.timezone)


def serve(spec: PipelineSpec, schedule: Schedule, *, name: str | None, say: Callable[[str], object]) -> None:
    """Run the pipeline on its schedule in this process until it is interrupted; one run at a time.

    The schedule is paused when the process ends, so no runs pile up while no process would run them.
    """
    when = schedule.prefect()
    name = name or spec.name
    with prefect_api() as url, _environment(url), tempfile.TemporaryDirectory(prefix="trainflow-serve-") as folder:
        from prefect.runner import Runner

        # At INFO each poll logs the runs that wait for their turn.
        logging.getLogger("prefect.runner").setLevel(logging.WARNING)
        runner = Runner(name=name, limit=1, pause_on_shutdown=True)
        # By its entrypoint: the flow object itself would be pickled into each run's process.
        _forget_planned_runs(name)
        runner.add_deployment(_deployment(spec, name, when, tags=[SERVED_TAG] if server_folder(url) else []))
        say(f"Serving pipeline/{name}: {schedule}. Ctrl-C ends it.")
        # A run starts in our working directory, and Prefect puts that first on the import path.
        with contextlib.chdir(folder):
            asyncio.run(_until_signalled(runner, say))


async def _until_signalled(runner: Runner, say: Callable[[str], object]) -> None:
    """Serve until SIGINT or SIGTERM; then let the run that is at work save and end, before the runner itself ends."""
    loop = asyncio.get_running_loop()
    serving = asyncio.create_task(runner.start())
    ending: list[asyncio.Task[None]] = []

    def end() -> None:
        if ending:
            serving.cancel()  # the second signal does not wait
            return
        say("Ending. Running work is saved first; press Ctrl-C again to end at once.")
        ending.append(asyncio.create_task(_end_runs(serving)))

    await asyncio.sleep(0)  # the runner sets a handler of its own when it starts
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, end)
    with contextlib.suppress(asyncio.CancelledError):
        await serving


async def _end_runs(serving: asyncio.Task[None]) -> None:
    signalled: set[psutil.Process] = set()
    deadline = time.monotonic() + _END_S
    while (runs := _runs()) and time.monotonic() < deadline and not serving.done():
        for run in runs - signalled:
            with contextlib.suppress(psutil.NoSuchProcess):
                run.terminate()
        signalled |= runs
        await asyncio.sleep(0.1)
    serving.cancel()


def _runs() -> set[psutil.Process]:
    """The processes of the runs that this one started."""
    found = set()
    for process in psutil.Process().children():
        with contextlib.suppress(psutil.NoSuchProcess):
            if process.status() != psutil.STATUS_ZOMBIE and "prefect.engine" in process.cmdline():
                found.add(process)
    return found


@contextlib.contextmanager
def _environment(url: str) -> Iterator[None]:
    """Inside the block, set the variables that the process of each run inherits."""
    folder = server_folder(url)
    own = {**_RUN_ENVIRONMENT, OWNER: str(os.getpid()), **({SERVER_FOLDER: str(folder)} if folder else {})}
    with set_environment(own):
        yield


def deploy(spec: PipelineSpec, schedule: Schedule, *, pool: str, create_pool: bool, name: str | None) -> list[Text]:
    """Register the pipeline with a work pool of the configured server; return what to do next, in lines.

    Raises:
        ConfigError: no server is configured, or the pool is absent or not of processes on the worker's machine.
    """
    when = schedule.prefect()
    name = name or spec.name
    _require_server()
    with prefect_api():
        from prefect.client.orchestration import get_client

        with get_client(sync_client=True) as client:
            _require_pool(client, pool, create=create_pool)
        _forget_planned_runs(name)
        _deployment(spec, name, when, work_pool_name=pool, job_variables={"env": _RUN_ENVIRONMENT}).apply()
    return [
        Text(f"Deployed pipeline/{name} to the work pool {pool}: {schedule}."),
        Text(f"  a worker   prefect worker start --pool {pool}"),
        Text(f"  a run now  prefect deployment run pipeline/{name}"),
    ]


def _require_server() -> None:
    from prefect.settings import get_current_settings

    if not get_current_settings().api.url:
        raise ConfigError(
            "A deployment needs a Prefect server that stays.",
            field="PREFECT_API_URL",
            remedy="Start one (prefect server start) and set PREFECT_API_URL; or use `trainflow serve` on one machine.",
        )


def _require_pool(client: SyncPrefectClient, name: str, *, create: bool) -> None:
    from prefect.client.schemas.actions import WorkPoolCreate
    from prefect.exceptions import ObjectNotFound
    from prefect.workers.process import ProcessWorker

    try:
        found = client.read_work_pool(name)
    except ObjectNotFound as error:
        if not create:
            raise ConfigError(
                "This work pool does not exist.",
                field="--pool",
                value=name,
                remedy=f"Add --create-pool, or: prefect work-pool create --type {_POOL_TYPE} {name}",
            ) from error
        template = ProcessWorker.get_default_base_job_template()
        client.create_work_pool(WorkPoolCreate(name=name, type=_POOL_TYPE, base_job_template=template))
        return
    if found.type != _POOL_TYPE:
        raise ConfigError(
            f"This work pool is of type {found.type}; trainflow deploys to {_POOL_TYPE} pools.",
            field="--pool",
            value=name,
            remedy=f"Name another one: prefect work-pool create --type {_POOL_TYPE} NAME",
        )


def _forget_planned_runs(name: str) -> None:
    """Delete the runs that an earlier deployment of that name has planned: they hold its spec, not the new one.

    Prefect forgets those of the future when a deployment is replaced, but not those already late.
    """
    from prefect.client.orchestration import get_client
    from prefect.client.schemas.filters import DeploymentFilter, DeploymentFilterId, FlowRunFilter
    from prefect.exceptions import ObjectNotFound

    with get_client(sync_client=True) as client:
        try:
            deployment = client.read_deployment_by_name(f"pipeline/{name}").id
        except ObjectNotFound:
            return
        client.pause_deployment(deployment)
        planned = FlowRunFilter.model_validate({"state": {"type": {"any_": ["SCHEDULED"]}}})
        its_own = DeploymentFilter(id=DeploymentFilterId(any_=[deployment]))
        kept = 0
        while runs := client.read_flow_runs(flow_run_filter=planned, deployment_filter=its_own, offset=kept, limit=200):
            # Deleted runs move the following page up; only those that stay have to be skipped.
            kept += sum(not run.auto_scheduled for run in runs)
            for run in runs:
                if run.auto_scheduled:
                    with contextlib.suppress(ObjectNotFound):
                        client.delete_flow_run(run.id)


def _deployment(spec: PipelineSpec, name: str, schedule: PrefectSchedule | None, **more: Any) -> RunnerDeployment:
    from prefect.deployments.runner import RunnerDeployment
    from prefect.types.entrypoint import EntrypointType

    from flows.pipeline import pipeline

    deployment = RunnerDeployment.from_flow(
        pipeline,
        name=name,
        schedule=schedule,
        parameters={"spec": spec.model_dump(mode="json")},
        description=f"{spec.name}: prepare, train, evaluate, predict and publish; kept in {spec.storage}",
        entrypoint_type=EntrypointType.MODULE_PATH,
        paused=False,
        **more,
    )
    # Prefect derives it from the flow, `flows.pipeline.pipeline`; a run must enter through the prepared process.
    deployment.entrypoint = _ENTRYPOINT
    return deployment
