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
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from typing import TYPE_CHECKING, Any

import psutil
from rich.text import Text

from trainer_lib.base.restore_process import variables_kept
from trainer_lib.base.suggestions import require_known
from trainer_lib.errors import ConfigError, InfrastructureError
from trainflow.flows.records.prefect_runs import FLOW
from trainflow.flows.server.api import prefect_api
from trainflow.flows.server.membership import server_folder
from trainflow.flows.server.schedule import EVERY_S, Schedule, Watch, show_firings
from trainflow.flows.spec.spec import PipelineSpec
from trainflow.flows.spec.spec_file import parse_override_value

if TYPE_CHECKING:
    from uuid import UUID

    from prefect.client.orchestration import SyncPrefectClient
    from prefect.deployments.runner import RunnerDeployment
    from prefect.events.schemas.automations import AutomationCore
    from prefect.runner import Runner
    from prefect.schedules import Schedule as PrefectSchedule

_ENTRYPOINT = "trainflow.flows.deployed.pipeline"
CRASHES = "TRAINFLOW_CRASH_RETRIES"
"""Variable of a run's process: how many of its crashes are followed by another try."""
# Set by `serve` for the processes of its runs; absent in those of a work pool's worker.
OWNER = "TRAINFLOW_SERVED_BY"
SERVER_FOLDER = "TRAINFLOW_SERVER_FOLDER"

# The folder a run is started in may hold packages called flows or tasks: `python -m` must not find them first.
_RUN_ENVIRONMENT = {"PYTHONSAFEPATH": "1"}
# Seconds that a run may take to save and end: longer than the stages' own grace.
_END_S = 90.0
# How many of the next firing times are shown, and seconds that the end waits for a look at watched data.
_SHOWN = 3
_WATCH_END_S = 5.0
# The types of work pools, and the options of their workers' commands apart from the pool's name.
_WORKERS = {
    "process": "",
    "docker": " --type docker   # needs pip install prefect-docker",
    "kubernetes": " --type kubernetes   # needs pip install prefect-kubernetes",
}


def serve(
    spec: PipelineSpec,
    schedule: Schedule,
    *,
    name: str | None,
    say: Callable[[str], object],
    watch: str | None = None,
    watch_every_s: float = EVERY_S,
    retry_crashed: int = 0,
) -> None:
    """Run the pipeline on its schedule in this process until it is interrupted; one run at a time.

    The schedule is paused when the process ends, so no runs pile up while no process would run them. New data under
    `watch` starts a run as well, and a crashed run runs again up to `retry_crashed` times.
    """
    when = schedule.prefect()
    name = name or spec.name
    watching = None if watch is None else Watch(watch, f"{FLOW}/{name}", spec, say)
    if watching is not None:
        watching.require_listable()
    with (
        prefect_api() as url,
        _environment(url, run_environment(retry_crashed)),
        tempfile.TemporaryDirectory(prefix="trainflow-serve-") as folder,
    ):
        from prefect.runner import Runner

        # At INFO every poll logs the runs that wait for their turn.
        logging.getLogger("prefect.runner").setLevel(logging.WARNING)
        runner = Runner(name=name, limit=1, pause_on_shutdown=True)
        # By its entrypoint: the flow object itself would be pickled into the runs' processes.
        _forget_planned_runs(name)
        deployment_id = runner.add_deployment(_deployment(spec, name, when))
        set_retries(deployment_id, name, retry_crashed, by_worker=False)
        say(f"Serving {FLOW}/{name}: {schedule}. Ctrl-C ends it.")
        if dates := schedule.next_firings(_SHOWN):
            say(show_firings(dates))
        elif watching is None:
            # The embedded server asks for a password, which its page has.
            page = f"trainflow ui SPEC, and on Prefect's page Deployments, {name}, Run."
            say(f"Start a run: {page if server_folder(url) else f'prefect deployment run {FLOW}/{name}'}")
        # A run starts in our working directory, and Prefect puts that first on the import path.
        watched = contextlib.nullcontext() if watching is None else _watched(watching, watch_every_s)
        with contextlib.chdir(folder), watched:
            asyncio.run(_until_signalled(runner, say))


@contextlib.contextmanager
def _watched(watching: Watch, every_s: float) -> Iterator[None]:
    """Inside the block, look for new data in the background."""
    watching.say(f"Watching {watching.url}: new data there starts a run.")
    done = threading.Event()
    thread = threading.Thread(target=watching.run, args=(done, every_s), name="trainflow-watch", daemon=True)
    thread.start()
    try:
        yield
    finally:
        done.set()
        # A look at a store that is away takes as long as its timeouts; it changes nothing any more.
        thread.join(_WATCH_END_S)


async def _until_signalled(runner: Runner, say: Callable[[str], object]) -> None:
    """Serve until SIGINT or SIGTERM; then let its run save and end, before the runner itself ends."""
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


def _environment(url: str, more: Mapping[str, str]) -> contextlib.AbstractContextManager[None]:
    """Inside the block, set the variables that the processes of runs inherit."""
    folder = server_folder(url)
    own = {**_RUN_ENVIRONMENT, OWNER: str(os.getpid()), **({SERVER_FOLDER: str(folder)} if folder else {})}
    return variables_kept({**own, **more})


@dataclass(frozen=True)
class Deployed:
    """A pipeline that a work pool runs: its name with that of its flow, when it begins, a note, and what to do next."""

    name: str
    pool: str
    schedule: str
    next_runs: str
    note: str
    commands: Mapping[str, str]

    def lines(self) -> list[Text]:
        """For people."""
        notes = [Text(f"  {text}") for text in (self.next_runs, self.note) if text]
        commands = [Text(f"  {what:<10} {command}") for what, command in self.commands.items()]
        return [Text(f"Deployed {self.name} to the work pool {self.pool}: {self.schedule}."), *notes, *commands]


def deploy(
    spec: PipelineSpec,
    schedule: Schedule,
    *,
    name: str | None,
    pool: str,
    image: str | None = None,
    job_variables: Sequence[str] = (),
    limit: int | None = None,
    retry_crashed: int = 0,
) -> Deployed:
    """Register the pipeline with a work pool of the configured server. Raises ConfigError if that cannot work.

    Args:
        image: the container that runs it, for pools of type docker and kubernetes.
        job_variables: further ones, as NAME=VALUE.
        limit: how many of its runs may be running at once, the others wait; None: any number.
        retry_crashed: how often a run that crashed runs again.
    """
    when = schedule.prefect()
    name = name or spec.name
    from prefect.settings import get_current_settings

    if not get_current_settings().api.url:
        remedy = "Start one (prefect server start) and set PREFECT_API_URL; or use `trainflow serve` on one machine."
        raise ConfigError("A deployment needs a Prefect server that stays.", field="PREFECT_API_URL", remedy=remedy)
    with prefect_api():
        from prefect.client.orchestration import get_client

        with get_client(sync_client=True) as client:
            kind, template = _require_pool(client, pool)
        env = {**_RUN_ENVIRONMENT, **run_environment(retry_crashed)}
        variables = read_variables(job_variables, image, kind, template, env)
        _forget_planned_runs(name)
        deployed = _deployment(
            spec, name, when, work_pool_name=pool, job_variables=variables, concurrency_limit=limit
        ).apply(image=variables.get("image"))
        set_retries(deployed, name, retry_crashed, by_worker=True)
    commands = {
        "a worker": f"prefect worker start --pool {pool}{_WORKERS[kind]}",
        "a run now": f"prefect deployment run {FLOW}/{name}",
    }
    dates = schedule.next_firings(_SHOWN)
    places = f"its paths are those of the image: {spec.recipe}; the storage is {spec.storage}"
    note = "" if kind == "process" else places
    return Deployed(f"{FLOW}/{name}", pool, str(schedule), show_firings(dates) if dates else "", note, commands)


def _require_pool(client: SyncPrefectClient, name: str) -> tuple[str, Any]:
    """The type and the base job template of a work pool. Raises ConfigError if it is absent, or of an unknown type."""
    from prefect.exceptions import ObjectNotFound

    try:
        found = client.read_work_pool(name)
    except ObjectNotFound as error:
        remedy = f"Create it: prefect work-pool create --type process {name}"
        raise ConfigError("This work pool does not exist.", field="--pool", value=name, remedy=remedy) from error
    if found.type not in _WORKERS:
        what = f"This work pool is of type {found.type}; trainflow deploys to pools of type {', '.join(_WORKERS)}."
        remedy = "Name another one: prefect work-pool create --type process NAME"
        raise ConfigError(what, field="--pool", value=name, remedy=remedy)
    return found.type, found.base_job_template


def read_variables(
    given: Sequence[str], image: str | None, pool_type: str, template: Mapping[str, Any], env: Mapping[str, str]
) -> dict[str, Any]:
    """The job variables of a deployment, from ``--job-variable NAME=VALUE`` and ``--image``. Raises ConfigError.

    Args:
        template: the pool's base job template, which says what variables there are.
        env: variables of the run's environment that the deployment needs.
    """
    known = template.get("variables", {}).get("properties", {})
    found = dict(_read_variable(text, known) for text in given)
    if image is not None:
        if pool_type == "process":
            remedy = "Leave --image out, or name a pool of type docker or kubernetes."
            raise ConfigError("A pool of processes starts no container.", field="--image", value=image, remedy=remedy)
        found["image"] = image
    if pool_type != "process" and not found.get("image"):
        what = "The run needs an image with trainflow and the project in it."
        remedy = "Build one from deployments/Dockerfile, and name it: --image registry.example/digits:1"
        raise ConfigError(what, field="--image", remedy=remedy)
    own = found.get("env") if isinstance(found.get("env"), dict) else {}
    return {**found, "env": {**(own or {}), **env}}


def _read_variable(text: str, known: Mapping[str, Any]) -> tuple[str, Any]:
    """The name and the value in ``NAME=VALUE``; where the pool says what it knows, one of its variables."""
    name, equals, value = text.partition("=")
    if not equals or not name:
        remedy = "Write for example --job-variable image_pull_policy=Always."
        raise ConfigError("A job variable has the form NAME=VALUE.", field="--job-variable", value=text, remedy=remedy)
    if known:
        require_known(name, sorted(known), "The work pool has no such variable.", field="--job-variable")
    try:
        return name, parse_override_value(value)
    except ValueError as error:
        raise ConfigError(
            f"This is not a value: {error}.", field="--job-variable", value=text, remedy="Quote it for the shell."
        ) from error


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

    from trainflow.flows.pipeline import pipeline

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
    # Prefect derives it from the flow, `trainflow.flows.pipeline.pipeline`; a run must enter through the prepared
    # process.
    deployment.entrypoint = _ENTRYPOINT
    return deployment


# -- crashed runs run again --------------------------------------------------------------------------------------------

# A run is Crashed when its process ended without a word: the worker sees the exit code, `trainflow status` the dead
# process. An automation puts such a run back into the queue. A worker reports a death twice, the second time after it
# has looked for hooks of the flow, and that report would take the run out of the queue again. So the run first gets the
# state CrashedAtWork, which no report replaces, and a second automation puts it into the queue some time later. A
# further one covers a worker or machine that is gone, too: a run whose heartbeat falls silent is set to Crashed. The
# crashes of a run are counted when it starts again; the last one that is allowed ends it as Failed.


HEARTBEAT_S = 30
# Four beats: a busy machine may miss one.
_SILENT = timedelta(seconds=4 * HEARTBEAT_S)
# A crash counts once the run has started; a run that never started would only crash again, immediately.
_LONGEST = timedelta(days=60)
# A worker's second report comes seconds after the first one, on a busy machine ten.
_REPORTED = timedelta(seconds=20)
_CRASHED, _AT_WORK, _QUEUED = "Crashed", "CrashedAtWork", "AwaitingRetry"
_BEGINNINGS = (_QUEUED, "Scheduled", "Pending", "Running", "Cancelled", "Failed")
_ENDS = ("Completed", "Failed", "Cancelled", _CRASHED, "Paused", "Suspended", _QUEUED)


def run_environment(retries: int) -> dict[str, str]:
    """The variables with which the runs of such a deployment start."""
    return {CRASHES: str(retries), "PREFECT_FLOWS_HEARTBEAT_FREQUENCY": str(HEARTBEAT_S)} if retries else {}


def set_retries(deployment_id: Any, name: str, retries: int, *, by_worker: bool) -> None:
    """Create, replace or remove (for 0 retries) the automations of the deployment `name`.

    Args:
        by_worker: whether a pool's worker starts its runs; they send heartbeats, those of `serve` do not.
    """
    from prefect.client.orchestration import get_client

    known = set(_names(name))
    with get_client(sync_client=True) as client:
        for automation in client.read_automations():
            if automation.name in known:
                client.delete_automation(automation.id)
        for wanted in _automations(deployment_id, name, by_worker=by_worker) if retries else []:
            client.create_automation(wanted)


def require_another_try(environ: dict[str, str] | os._Environ[str] | None = None) -> None:
    """In the body of a flow: raise InfrastructureError in a run that has crashed more often than it may."""
    environ = os.environ if environ is None else environ
    allowed = int(environ.get(CRASHES) or 0)
    if not allowed:
        return
    from prefect.client.orchestration import get_client
    from prefect.context import FlowRunContext

    context = FlowRunContext.get()
    run = context.flow_run if context is not None else None
    if run is None or run.run_count <= allowed + 1:
        return
    with get_client(sync_client=True) as client:
        crashes = sum(state.name == _CRASHED for state in client.read_flow_run_states(run.id))
    if crashes > allowed:
        what = f"This run has crashed {crashes} times, and is not tried again."
        remedy = "Read its logs, then start another run: it continues from the last commit."
        raise InfrastructureError(what, field="--retry-crashed", value=allowed, remedy=remedy)


def _names(name: str) -> tuple[str, str, str]:
    run = f"runs of pipeline/{name}"
    return f"trainflow: crashed {run} run again", f"trainflow: crashed {run} wait", f"trainflow: silent {run} crash"


def _automations(deployment_id: UUID, name: str, *, by_worker: bool) -> list[AutomationCore]:
    again, wait, silent = _names(name)
    make = partial(_automation, deployment_id)
    crashes = partial(make, after="Running", expect=(_CRASHED,), within=_LONGEST)
    if not by_worker:
        return [crashes(again, _QUEUED, "It crashed.")]
    rests = partial(make, after=_AT_WORK, expect=_BEGINNINGS, within=_REPORTED, is_absence=True)
    beat = "heartbeat"
    falls_silent = partial(make, after=beat, expect=(beat, *_ENDS), within=_SILENT, is_absence=True)
    return [
        crashes(wait, _AT_WORK, "It crashed, and runs again soon."),
        rests(again, _QUEUED, "It crashed."),
        falls_silent(silent, _CRASHED, "Its heartbeat fell silent."),
    ]


def _automation(
    deployment_id: UUID,
    name: str,
    state: str,
    message: str,
    *,
    after: str,
    expect: Sequence[str],
    within: timedelta,
    is_absence: bool = False,
) -> AutomationCore:
    """Give a run of the deployment a state when an event comes some time after another one, or does not come."""
    from prefect.client.schemas.objects import StateType
    from prefect.events.actions import ChangeFlowRunState
    from prefect.events.schemas.automations import AutomationCore, EventTrigger, Posture

    kind = StateType.SCHEDULED if state == _QUEUED else StateType.CRASHED
    return AutomationCore(
        name=name,
        description="Made by `trainflow deploy --retry-crashed`.",
        trigger=EventTrigger(
            match={"prefect.resource.id": "prefect.flow-run.*"},
            match_related={
                "prefect.resource.id": f"prefect.deployment.{deployment_id}",
                "prefect.resource.role": "deployment",
            },
            for_each={"prefect.resource.id"},
            threshold=1,
            after={f"prefect.flow-run.{after}"},
            expect={f"prefect.flow-run.{expected}" for expected in expect},
            posture=Posture.Proactive if is_absence else Posture.Reactive,
            within=within,
        ),
        actions=[ChangeFlowRunState(state=kind, name=state, message=message, force=True)],
    )
