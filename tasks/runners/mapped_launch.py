"""Map a stage's workers over a cluster: each is a task of Prefect that launches one worker where it runs.

The workers pull parts through the claims in the job's folder (`trainer_lib.locks.shared_parts`), so a few tasks do any
number of parts, and the bytes of the parts depend neither on the cluster nor on how many workers there are.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import Any

from prefect import task
from prefect.cache_policies import NO_CACHE
from prefect.client.schemas.objects import State
from prefect.states import Failed

from trainer_lib.base.json_text import parse_json
from trainer_lib.errors import ConfigError, InfrastructureError, Interrupted, TrainflowError, first_line, from_record
from trainer_lib.launch.pool import Owner, Progress, launch_reported, settle, would_meet_all
from trainer_lib.launch.settings.config import LaunchConfig
from trainer_lib.protocol.requests import Request
from trainer_lib.storage import Store
from trainflow.tasks.configs import LaunchSettings
from trainflow.tasks.prefect.prefect_internals import send_little
from trainflow.tasks.runners import Cluster, unreachable_api
from trainflow.tasks.settings import RunnerSettings

POLL_S = 0.3
END_S = 30.0  # seconds that a cluster has to end a task, beyond those that a worker has to save


@task(
    name="worker",
    task_run_name="worker {number}",
    cache_policy=NO_CACHE,
    persist_result=False,
    retries=0,  # what is lost is the other workers', and after them the stage's
)
def work_elsewhere(number: int, text: str) -> State[Any]:
    """Launch the worker of that number on this machine; the answer, or the failure, is JSON text in the state."""
    from prefect.states import Completed

    answer = launch_reported(text)
    failure = parse_json(answer).get("failure")
    return Completed(data=answer) if failure is None else Failed(message=failure["message"], data=answer)


def open_cluster(runner: RunnerSettings) -> AbstractContextManager[Cluster]:
    """Connect to the cluster, or start one on this machine, which ends with the block. Imports its package."""
    if runner.kind == "dask":
        from trainflow.tasks.runners import dask_tasks

        return dask_tasks.connect(runner)
    from trainflow.tasks.runners import ray_tasks

    return ray_tasks.connect(runner)


def launch_mapped(
    request: Request[Any],
    runner: RunnerSettings,
    launch: LaunchSettings,
    *,
    on_line: Callable[[str], None],
    on_event: Callable[[dict[str, Any]], None],
    should_cancel: Callable[[], bool],
) -> None:
    """Carry a request out in workers of a cluster that share its parts: one that is lost ends no other."""
    config = replace(launch.to_config(), kind="process", processes=1, threads=launch.threads or 1)
    with Owner(Store.open(request.output)) as owner, open_cluster(runner) as cluster:
        texts = [owner.job(request, config, number) for number in range(runner.workers)]
        futures = send_little(lambda: cluster.map(work_elsewhere, texts))
        mapped = _Mapped(cluster, dict(enumerate(futures)), owner, config, on_line, on_event)
        try:
            ends = mapped.wait(should_cancel)
        finally:
            mapped.end()  # also when a callback raises, or on Ctrl-C
    settle(ends, on_event)


@dataclass
class _Mapped:
    """The tasks of one launch, until all have ended. `left`: their futures, by number."""

    cluster: Cluster
    left: dict[int, Any]
    owner: Owner
    config: LaunchConfig
    on_line: Callable[[str], None]
    on_event: Callable[[dict[str, Any]], None]

    def __post_init__(self) -> None:
        self._progress = Progress(self.on_event)
        self._started: dict[int, str] = {}
        self._ends: list[Any] = []
        self._stopped: float | None = None

    def wait(self, should_cancel: Callable[[], bool]) -> list[Any]:
        """Pass on what the workers report until all have ended; return how, in the order of their ends."""
        start = time.monotonic()
        while self.left:
            if should_cancel():
                self._stop()
            if not self._started and time.monotonic() - start > self.config.join_timeout_s:
                what = f"No worker of the cluster has started within {self.config.join_timeout_s:.0f} s."
                remedy = "See whether the cluster has workers that are free, or wait longer."
                raise InfrastructureError(what, field="train.launch.join_timeout_s", remedy=remedy)
            self._look()
            time.sleep(POLL_S)
        self._look()  # what the last of them has reported
        return self._ends

    def end(self) -> None:
        """Have every worker end, and wait until they have."""
        self._stop()
        while self.left and time.monotonic() - (self._stopped or 0.0) < self.config.grace_s + END_S:
            for number, future in list(self.left.items()):
                if self.cluster.is_done(future):
                    del self.left[number]
            time.sleep(POLL_S)

    def _stop(self) -> None:
        if self._stopped is not None:
            return
        self._stopped = time.monotonic()
        self.owner.stop()
        for number, future in self.left.items():
            if number not in self._started:
                self.cluster.cancel(future)

    def _look(self) -> None:
        done = [number for number, future in self.left.items() if self.cluster.is_done(future)]
        for number, message in self.owner.read():  # after the look: all that those have reported
            if "line" in message:
                self.on_line(f"[worker {number}] {message['line']}")
            elif "event" in message:
                self._progress.event(number, message["event"])
            elif "started" in message:
                if number in self._started:
                    again = f"The worker {number} on {self._started[number]} was lost, and is started again"
                    self.on_event({"event": "warning", "message": f"{again} on {message['started']}."})
                self._started[number] = message["started"]
        for number in done:
            end = self._end_of(self.left.pop(number))
            self._ends.append(end)
            if would_meet_all(end):
                self._stop()

    def _end_of(self, future: Any) -> Any:
        """The end of a task: an answer, or the failure."""
        try:
            data: Any = self.cluster.state(future).data
            answer = parse_json(getattr(data, "result", data))  # in a record where Prefect has made one
        except Exception as error:  # of the cluster, of its transport, of Prefect on that machine
            if self._stopped is not None:
                return Interrupted("The work was stopped before this worker started.")
            return _explain(error)
        if "failure" in answer:
            return from_record(answer["failure"])
        return answer["result"]


def _explain(error: Exception) -> TrainflowError:
    """The failure of a task that brought no answer."""
    if isinstance(error, TrainflowError):
        return error
    if isinstance(error, ImportError | AttributeError):
        what = f"A machine of the cluster cannot import what this one sends: {first_line(error)}."
        remedy = "Use the same Python environment, with trainflow in it, on all machines."
        return ConfigError(what, field="prepare.runner", remedy=remedy)
    if "Failed to reach API" in str(error):
        return unreachable_api()
    what = f"A worker of the cluster was lost: {type(error).__name__}: {first_line(error)}"
    return InfrastructureError(what, remedy="Look at the cluster's own log of that machine.")
