"""Ray: workers as its tasks, through Prefect's own runner. The only file that imports that.

Ray itself would run a lost task again under the number of the old one, so it does not: the others take the parts over.
"""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Iterator, Sequence
from typing import Any

from prefect import Task
from prefect.client.schemas.objects import State
from prefect_ray import RayTaskRunner
from prefect_ray.context import remote_options
from typing_extensions import override

from trainer_lib.engines.ray import NO_CLUSTER, join_cluster
from trainflow.tasks.runners import Cluster, no_cluster, require_api
from trainflow.tasks.settings import RunnerSettings

ANSWER_S = 20.0


class RayTasks(Cluster):
    """A Ray cluster that this process is a driver of."""

    def __init__(self, ray: Any, runner: RayTaskRunner[Any]) -> None:
        super().__init__(runner)
        self._ray = ray

    @override
    def map(self, work: Task[[int, str], State[Any]], texts: Sequence[str]) -> Sequence[Any]:
        with remote_options(num_cpus=1, max_retries=0, scheduling_strategy="SPREAD"):
            return super().map(work, texts)

    @override
    def is_done(self, future: Any) -> bool:
        return bool(self._ray.wait([future.wrapped_future], timeout=0)[0])

    @override
    def state(self, future: Any) -> State[Any]:
        state: State[Any] = self._ray.get(future.wrapped_future, timeout=ANSWER_S)
        return state

    @override
    def cancel(self, future: Any) -> None:
        self._ray.cancel(future.wrapped_future)


@contextlib.contextmanager
def connect(settings: RunnerSettings) -> Iterator[RayTasks]:
    """Join the cluster, or start one on this machine; the block's end leaves it, and ends that."""
    with no_cluster("Ray", settings.address, NO_CLUSTER):
        if settings.address is None:
            ray = join_cluster("local", num_cpus=settings.workers, include_dashboard=False)
        else:
            ray = join_cluster(settings.address)
    try:
        here = socket.gethostname()
        hosts = {node["NodeManagerHostname"] for node in ray.nodes() if node["Alive"] and node["Resources"].get("CPU")}
        require_api(sorted(hosts - {here}))
        # Prefect would start a cluster where it should join one (`auto`): this process is a driver already.
        with RayTaskRunner() as runner:
            yield RayTasks(ray, runner)
    finally:
        ray.shutdown()
