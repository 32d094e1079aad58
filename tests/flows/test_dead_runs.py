"""Prefect runs whose process died without a word: the next command ends them, and leaves those that live alone."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator

import pytest

from flows import prefect_runs
from trainer_lib.locks.lease import Holder

# A flow as `flows.pipeline` has it, that stays in its second task until it is killed or its standard input ends.
PROGRAM = """
import json
import sys
from flows.prefect_runs import created_by_this_process, own_flow_run
from flows.server.api import prefect_api, quiet_environment
quiet_environment()
with prefect_api():
    from prefect import flow, task
    from prefect.runtime import flow_run

    @task
    def first():
        return 1

    @task
    def second():
        print(json.dumps(flow_run.id), flush=True)
        sys.stdin.read()

    @flow(name="pipeline")
    def pipeline():
        with own_flow_run():
            first()
            second()

    with created_by_this_process():
        pipeline()
"""


class Run:
    """A process in the middle of its flow."""

    def __init__(self) -> None:
        pipe = subprocess.PIPE
        self.process = subprocess.Popen([sys.executable, "-c", PROGRAM], stdin=pipe, stdout=pipe, text=True)
        self.id = uuid.UUID(int=0)

    def wait(self) -> None:
        """Wait until it is in its second task."""
        assert self.process.stdout is not None
        self.id = uuid.UUID(json.loads(self.process.stdout.readline()))

    def kill(self) -> None:
        self.process.kill()
        self.process.communicate()

    def finish(self) -> int:
        self.process.communicate(timeout=60)
        return self.process.returncode


@pytest.fixture
def two_runs(prefect_server: str) -> Iterator[tuple[Run, Run]]:
    runs = Run(), Run()
    for run in runs:
        run.wait()
    yield runs
    for run in runs:
        if run.process.poll() is None:
            run.kill()


def states(run: Run, *, is_marked: bool | None = None) -> tuple[str, list[str]]:
    """The state of a flow run, and those of its task runs in order."""
    from prefect.client.orchestration import get_client
    from prefect.client.schemas.filters import FlowRunFilter

    with get_client(sync_client=True) as client:
        flow_run = client.read_flow_run(run.id)
        mine = FlowRunFilter.model_validate({"id": {"any_": [run.id]}})
        tasks = client.read_task_runs(flow_run_filter=mine)
    if is_marked is not None:
        assert bool(flow_run.tags) is is_marked
    ordered = sorted(tasks, key=lambda task: task.expected_start_time or 0)
    return str(flow_run.state_name), [str(task.state_name) for task in ordered]


def test_a_killed_run_and_its_tasks_are_ended_and_a_living_one_goes_on(two_runs: tuple[Run, Run]) -> None:
    killed, living = two_runs
    deadline = time.monotonic() + 60
    # Task states travel as events: a kill that overtakes them leaves fewer.
    while states(killed) != ("Running", ["Completed", "Running"]) and time.monotonic() < deadline:
        time.sleep(0.1)
    killed.kill()
    assert [run.flow_run_id for run in prefect_runs.sweep_dead_runs()] == [killed.id]
    flow, tasks = states(killed)
    assert flow == "Crashed"
    assert tasks == ["Completed", "Crashed"]
    assert f"(process {killed.process.pid} on " in _message(killed)
    assert states(living)[0] == "Running"
    assert living.finish() == 0
    # The mark of its first moments has become labels.
    assert states(living, is_marked=False) == ("Completed", ["Completed", "Completed"])
    assert prefect_runs.sweep_dead_runs() == []


def _message(run: Run) -> str:
    from prefect.client.orchestration import get_client

    with get_client(sync_client=True) as client:
        state = client.read_flow_run(run.id).state
    return str(state.message) if state is not None else ""


def test_a_run_of_another_machine_or_of_no_known_process_is_not_judged() -> None:
    here = Holder.this_process()
    elsewhere = Holder("", "elsewhere/boot/pid", 1, "1", here.since, 0.0)
    assert not elsewhere.is_gone()
    assert prefect_runs._decode("not|a|mark") is None
    assert prefect_runs._decode(prefect_runs._encode(here)) == Holder(
        "", here.machine, os.getpid(), here.started, here.since, 0.0
    )
