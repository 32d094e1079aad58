"""How runs end: those whose process died without a word, and those that meet a signal after their last stage."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import shutil
import signal
import threading
import uuid
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
from prefect import context, flow, tags, task
from prefect.client.orchestration import SyncPrefectClient, get_client
from prefect.client.schemas.filters import FlowRunFilter
from prefect.client.schemas.objects import State, StateType
from prefect.states import AwaitingRetry, Pending, Running

from tests.support.command import answer, start_script
from tests.support.prefect_server import wait_for
from tests.support.recorded import leave_sign
from tests.support.runs import newest_state, run
from trainer_lib.errors import Interrupted, Preempted, TrainflowError
from trainer_lib.locks.lease import Holder
from trainer_lib.storage import Store
from trainflow.flows.cli.signals import stoppable
from trainflow.flows.records import prefect_runs
from trainflow.flows.records.ending import expect_ending
from trainflow.flows.reports.run_record import RunRecord
from trainflow.flows.runs import run_status
from trainflow.flows.runs.run_status import find_statuses, sweep
from trainflow.tasks.prefect.prefect_client import quick_client
from trainflow.tasks.stage.manifest import StageManifest

HERE = Holder.this_process(30.0)
GONE = replace(HERE, started="1")

# A flow as `trainflow.flows.pipeline` has it, that stays in its second task until it is killed or its standard input
# ends. Only with `--sweeps` it looks for dead runs in the background: on a slow machine it would do so before the test
# does.
PROGRAM = """
import json
import sys
from trainflow.flows.records import prefect_runs
from trainflow.flows.records.prefect_runs import created_by_this_process, own_flow_run
from trainflow.flows.server.api import prefect_api, quiet_environment
quiet_environment()
if "--sweeps" not in sys.argv:
    prefect_runs.sweep_dead_runs = list
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


@pytest.fixture(autouse=True)
def _patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """The server of a busy machine may take longer to answer than a command waits."""
    monkeypatch.setattr(prefect_runs, "quick_client", partial(quick_client, 60.0))


class Run:
    """A process in the middle of its flow; its id once it is in its second task."""

    def __init__(self, *arguments: str) -> None:
        self.process = start_script(PROGRAM, *arguments)
        self.id = uuid.UUID(int=0)

    def wait(self) -> None:
        self.id = uuid.UUID(json.loads(answer(self.process)))

    def kill(self) -> None:
        self.process.kill()
        self.process.communicate()


def states(begun: Run) -> tuple[str, list[str]]:
    """The state of a flow run, and those of its task runs in order."""
    with get_client(sync_client=True) as client:
        flow_run = client.read_flow_run(begun.id)
        mine = FlowRunFilter.model_validate({"id": {"any_": [begun.id]}})
        tasks = client.read_task_runs(flow_run_filter=mine)
    ordered = sorted(tasks, key=lambda task: task.expected_start_time or 0)
    return str(flow_run.state_name), [str(task.state_name) for task in ordered]


def read(run_id: uuid.UUID) -> Any:
    """A flow run as Prefect has it."""
    with get_client(sync_client=True) as client:
        return client.read_flow_run(run_id)


@pytest.mark.usefixtures("prefect_server")
def test_a_run_that_begins_ends_a_killed_one_and_its_tasks_and_lives_on_itself() -> None:
    killed = Run()
    killed.wait()
    # Task states travel as events: a kill that overtakes them leaves fewer.
    wait_for("the second task to run", lambda: states(killed) == ("Running", ["Completed", "Running"]))
    killed.kill()
    living = Run("--sweeps")
    try:
        living.wait()
        wait_for("the end of both", lambda: states(killed) == ("Crashed", ["Completed", "Crashed"]))
        assert f"(process {killed.process.pid} on " in read(killed.id).state.message
        assert states(living)[0] == "Running"
        living.process.communicate(timeout=60)
        assert living.process.returncode == 0
        wait_for("the end of the living one", lambda: states(living) == ("Completed", ["Completed", "Completed"]))
        assert prefect_runs.sweep_dead_runs() == []
    finally:
        living.kill()


def test_a_run_of_another_machine_or_of_no_known_process_is_not_judged() -> None:
    here = Holder.this_process()
    assert not Holder("", "elsewhere/boot/pid", 1, "1", here.since, 0.0).is_gone()
    with prefect_runs.created_by_this_process():
        marked: Any = SimpleNamespace(tags=context.TagsContext.get().current_tags)
    assert prefect_runs._holder_of(marked) == Holder("", here.machine, os.getpid(), here.started, here.since, 0.0)
    marked.tags = ["trainflow-process=not|a|mark"]
    assert prefect_runs._holder_of(marked) is None


# No flow run is CANCELLED here: Prefect's server looks for those itself and cancels their tasks.
@pytest.mark.usefixtures("prefect_server")
@pytest.mark.parametrize(
    ("holder", "end", "left"),
    [(GONE, "COMPLETED", "COMPLETED"), (GONE, "FAILED", "FAILED"), (HERE, "FAILED", "RUNNING")],
)
def test_a_task_whose_end_was_lost_ends_as_its_flow_run_did_once_its_process_is_gone(
    holder: Holder, end: str, left: str
) -> None:
    @task(name="train")
    def stage() -> None: ...

    run_id = flow_run(holder, State(type=StateType(end)))
    with get_client(sync_client=True) as client:
        train = client.create_task_run(stage, run_id, dynamic_key="0", state=Running())
        ended = read(run_id).state
        swept = {dead.flow_run_id for dead in prefect_runs.sweep_dead_runs()}
        assert client.read_task_run(train.id).state_type == left
        assert swept == (set() if left == "RUNNING" else {run_id})
        assert read(run_id).state == ended, "the flow run stays as it is"
        client.set_task_run_state(train.id, State(type=StateType.COMPLETED), force=True)


def flow_run(holder: Holder, *states: Any) -> uuid.UUID:
    """A run of a flow `pipeline` that carries the tag of a process and went through states."""

    @flow(name="pipeline")
    def pipeline() -> None: ...

    with get_client(sync_client=True) as client:
        run_id = client.create_flow_run(pipeline).id
        for state in (Running(), *states):
            client.set_flow_run_state(run_id, state, force=True)
        tag = f"trainflow-process={holder.machine}|{holder.pid}|{holder.started}|{holder.since}"
        client.update_flow_run(run_id, tags={tag})
    return run_id


def state_of(run_id: uuid.UUID) -> str:
    state = read(run_id).state
    return "" if state is None else str(state.type.value)


def storage_with(folder: Path, flow_run_id: uuid.UUID, **signs: Holder) -> Path:
    """A storage with one run that is recorded as running, and signs of life in it; returns their folder."""
    alive = folder / "runs" / "a" / "alive"
    alive.mkdir(parents=True)
    (alive.parent / "run.json").write_text(json.dumps({"name": "toy", "status": "RUNNING", "started": "2026"}))
    for name, holder in signs.items():
        leave_sign(Store.open(alive.parent), holder, name=name, flow_run_id=str(flow_run_id))
    return alive


@pytest.mark.usefixtures("prefect_server")
def test_a_death_is_kept_until_the_server_that_knows_the_run_learns_of_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    alive = storage_with(tmp_path, uuid.uuid4(), before=GONE)
    about = json.loads((alive / "before.json").read_text())
    (alive / "before.json").write_text(json.dumps({**about, "api": "http://team:4200/api"}))
    for _ in range(2):
        [warning] = sweep(str(tmp_path), find_statuses(str(tmp_path)))
        assert "belongs to the server http://team:4200/api. Set PREFECT_API_URL to it" in warning
        assert warning.endswith(f"delete {alive.parent}/alive/before.json.")
    assert json.loads((alive.parent / "run.json").read_text())["status"] == "KILLED"
    # On that server it was deleted.
    monkeypatch.setattr("trainflow.flows.runs.run_status.configured_api", lambda: "http://team:4200/api")
    assert sweep(str(tmp_path), find_statuses(str(tmp_path))) == []
    assert not list(alive.iterdir())


def test_a_sign_names_the_server_that_was_configured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    recorded = Store.open(tmp_path)
    for url, api in ((None, None), ("https://me:secret-1@team/api", "https://***@team/api")):
        if url is not None:
            monkeypatch.setenv("PREFECT_API_URL", url)
        heart = run_status._Heart(recorded.child("alive"))
        heart.write()
        [sign] = run_status.read_signs(recorded)
        assert sign.api == api
        run_status.remove_sign(recorded, sign)


CRASHED = State(type=StateType.CRASHED)


@pytest.mark.usefixtures("prefect_server")
@pytest.mark.parametrize(
    ("labels", "went_through", "signs", "state", "left"),
    [
        (HERE, (), {"before": GONE, "now": HERE}, "RUNNING", ["now.json"]),
        (HERE, (), {"before": GONE}, "RUNNING", None),  # the sign of the process at work is not written yet
        (GONE, (CRASHED, AwaitingRetry()), {"before": GONE}, "SCHEDULED", None),
        (GONE, (CRASHED, Pending()), {"before": GONE}, "PENDING", ["before.json"]),  # it may have to be marked later
        (GONE, (CRASHED, Pending(), Running()), {"before": GONE}, "RUNNING", ["before.json"]),
    ],
    ids=["at work", "beginning", "waiting for a worker", "starting", "begun"],
)
def test_what_an_ended_process_left_does_not_end_its_run_that_is_retried(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    labels: Holder,
    went_through: Any,
    signs: Any,
    state: str,
    left: Any,
) -> None:
    run_id = flow_run(labels, *went_through)
    alive = storage_with(tmp_path, run_id, **signs)
    if labels is GONE:
        assert prefect_runs.sweep_dead_runs() == []
    sweep(str(tmp_path), find_statuses(str(tmp_path)))
    assert state_of(run_id) == state
    assert left is None or [path.name for path in alive.iterdir()] == left
    if (labels, state) == (GONE, "RUNNING"):  # once it should have written its labels
        monkeypatch.setattr(prefect_runs, "_START_S", 0.0)
        sweep(str(tmp_path), find_statuses(str(tmp_path)))
        assert state_of(run_id) == "CRASHED"
        assert not list(alive.iterdir())


@pytest.mark.usefixtures("prefect_server")
def test_the_tag_of_a_run_that_is_taken_up_again_is_written_until_it_is_there(monkeypatch: pytest.MonkeyPatch) -> None:
    write, tries = SyncPrefectClient.update_flow_run, list[set[str]]()

    def fails_once(client: SyncPrefectClient, run_id: uuid.UUID, *, tags: set[str]) -> None:
        tries.append(tags)
        if len(tries) == 1:
            raise httpx.ReadTimeout("too slow")
        write(client, run_id, tags=tags)

    monkeypatch.setattr(SyncPrefectClient, "update_flow_run", fails_once)

    @flow(name="pipeline")
    def pipeline() -> None:
        with prefect_runs.own_flow_run():
            wait_for("the second try", lambda: len(tries) == 2)

    with tags("mine"):
        pipeline()
    [tag] = tries[1] - {"mine"}
    assert tag.startswith(f"trainflow-process={HERE.machine}|{HERE.pid}|{HERE.started}|")


# -- a signal after the last stage ------------------------------------------------------------------------------------
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_after_the_last_commit_does_not_undo_the_run(
    folder: Path, number: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    write = RunRecord._write_report

    def signalled(record: RunRecord) -> None:
        os.kill(os.getpid(), number)
        write(record)

    monkeypatch.setattr(RunRecord, "_write_report", signalled)
    before = signal.getsignal(number)
    with stoppable(lambda _: None, remedy="") as stop:
        result = run(folder)
        assert signal.getsignal(number) is not before
        stop.too_late = True
        os.kill(os.getpid(), number)  # while the summary is shown
    assert result.ok
    assert signal.getsignal(number) is before
    assert newest_state() == "Completed"


@pytest.mark.parametrize("moment", ["as the last lease ends", "as the last task ends", "as the flow has ended"])
def test_a_signal_at_the_very_end_does_not_undo_the_run(
    folder: Path, moment: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.rmtree(folder / "store" / "stages" / "push-to-hub")

    def signal_once(owner: type, name: str, is_last: Callable[[Any], bool]) -> None:
        method = getattr(owner, name)
        sent: list[int] = []

        def signalled(self: Any, *args: Any, **options: Any) -> Any:
            if not sent and is_last(self):
                sent.append(signal.SIGINT)
                os.kill(os.getpid(), signal.SIGINT)
            return method(self, *args, **options)

        monkeypatch.setattr(owner, name, signalled)

    if moment == "as the last lease ends":
        committed = partial(folder.glob, "store/stages/push-to-hub/*/COMMIT.json")
        signal_once(threading.Thread, "join", lambda each: "-lease-" in each.name and any(committed()))
    elif moment == "as the last task ends":
        signal_once(StageManifest, "store", lambda manifest: manifest.stage == "push-to-hub")
    else:
        end = SimpleNamespace(close=partial(os.kill, os.getpid(), signal.SIGINT))
        monkeypatch.setattr("trainflow.flows.records.ending.signals_kept", lambda *_: contextlib.closing(end))
    with stoppable(lambda _: None, remedy="") as stop:
        result = run(folder, on_closing=stop.come_too_late)
    assert result.ok
    assert [outcome.status for outcome in result.stages][-1] == "ran"
    assert newest_state() == "Completed"
    assert [*folder.glob("store/stages/push-to-hub/*/lease/*.released")]
    [record] = folder.glob("store/runs/*/run.json")
    assert json.loads(record.read_text())["status"] == "FINISHED"


@pytest.mark.parametrize(
    ("number", "kind", "code"),
    [(signal.SIGINT, Interrupted, 130), (signal.SIGTERM, Preempted, 19), (signal.SIGUSR2, Preempted, 19)],
)
def test_a_signal_before_the_last_commit_stops_the_run(number: int, kind: type[TrainflowError], code: int) -> None:
    said: list[str] = []
    with pytest.raises(kind) as stopped, stoppable(said.append, remedy="The same command continues."), expect_ending():
        os.kill(os.getpid(), number)
    assert (stopped.value.exit_code, stopped.value.remedy) == (code, "The same command continues.")
    assert ["running work is saved first" in text for text in said] == [True]


def test_a_report_that_cannot_be_made_changes_nothing_about_the_run(
    folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def broken(record: RunRecord) -> None:
        raise ValueError("no such template")

    monkeypatch.setattr(RunRecord, "_write_report", broken)
    shutil.rmtree(folder / "store" / "stages" / "predict")
    with caplog.at_level(logging.WARNING):
        assert run(folder, "tracking.enabled=true").ok
    assert "The run's report could not be written: no such template" in caplog.text
    [record] = folder.glob("store/runs/*/run.json")
    assert json.loads(record.read_bytes())["status"] == "FINISHED"
