"""The MLflow tracker against a real store: exactly once under kill -9, dead stores, resumes; how databases are made."""

from __future__ import annotations

import json
import logging
import math
import os
import signal
import sqlite3
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import sqlalchemy.event

from tests.support.mlflow_store import client, fresh_store, points, runs
from tests.support.toy import project
from tests.support.toys import classification_rows
from tests.support.training import trainer
from trainer_lib.storage import Store
from trainer_lib.trackers.mlflow import delivery, mlflow_client
from trainer_lib.trackers.mlflow.tracker import MLflowTracker
from trainer_lib.trackers.spool import Session, own_spool
from trainflow.flows.planning.plan import Plan
from trainflow.flows.records.results import PipelineResult
from trainflow.flows.reports.run_record import RunRecord
from trainflow.flows.spec.spec import load_spec
from trainflow.tasks.configs import TrackingConfig
from trainflow.tasks.follow import Evaluation, RunPoints
from trainflow.tasks.tracking.mlflow_run import TrackedRun, find_waiting, open_run


@pytest.fixture
def uri(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    uri = fresh_store(tmp_path / "store")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", uri)
    return uri


def _started(out: Path, params: dict[str, Any] | None = None, resume_step: int = 0) -> MLflowTracker:
    tracker = MLflowTracker(str(out))
    tracker.start(run_name="curve", params={"lr": 0.1} if params is None else params, resume_step=resume_step)
    return tracker


def _track(out: Path, steps: range, *, resume_step: int = 0, status: str = "FINISHED") -> None:
    tracker = _started(out, resume_step=resume_step)
    for step in steps:
        tracker.log({"loss": float(step)}, step)
    tracker.close(status)


def _killed(work: Callable[[], None]) -> None:
    """Do the work in a process of its own, which must end by SIGKILL."""
    mlflow_client.load()
    child = os.fork()
    if child == 0:
        try:
            work()
        finally:
            os._exit(0)
    status = os.waitpid(child, 0)[1]
    assert os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL


def _curve(steps: range) -> list[tuple[int, float]]:
    return [(step, float(step)) for step in steps]


def _left(out: Path) -> list[str]:
    return [path.name for path in own_spool(out / ".spool").iterdir() if path.is_dir()]


# -- a run of our own -------------------------------------------------------------------------------------------------
def test_a_run_has_its_curve_parameters_name_and_end(
    uri: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("MLFLOW_EXPERIMENT_NAME", "digits")
    monkeypatch.setenv("MLFLOW_TAGS", json.dumps({"release.candidate": "RC1", "size": 3}))
    tracker = _started(tmp_path / "out", {"lr": 0.1, "nested": {"hub_token": "s3cret"}})
    for step in range(1, 2501):  # more than one batch
        tracker.log({"loss": 1 / step, "eval/acc@5": 0.5, "epoch": 1.0}, step)
        tracker.log({"eval_loss": 0.5, "epoch": 1.0}, step)
    tracker.log({"nan": math.nan, "up": math.inf, "down": -math.inf, "a//b": 2.0}, 2500)
    tracker.close()

    [run] = runs(uri)
    assert (run.info.run_name, run.info.status) == ("curve", "FINISHED")
    assert client(uri).get_experiment(run.info.experiment_id).name == "digits"
    assert run.data.params == {"lr": "0.1", "nested.hub_token": "***"}
    assert (run.data.tags["release.candidate"], run.data.tags["size"]) == ("RC1", "3")
    assert points(uri, run.info.run_id, "loss") == [(step, 1 / step) for step in range(1, 2501)]
    for name, value in (("eval/acc_5", 0.5), ("eval_loss", 0.5), ("epoch", 1.0)):  # a value of a step is one point
        assert points(uri, run.info.run_id, name) == [(step, value) for step in range(1, 2501)]
    assert math.isnan(run.data.metrics["nan"])
    assert run.data.metrics["up"] > 1e308
    assert run.data.metrics["down"] < -1e308
    assert "refuses the metric 'a//b'" in caplog.text
    assert set(run.data.metrics) == {"loss", "eval/acc_5", "eval_loss", "epoch", "nan", "up", "down"}
    assert _left(tmp_path / "out") == []


@pytest.mark.parametrize("text", ["release=1", "[1]", "[" * 100_000])
def test_tags_that_are_no_json_object_cost_a_warning(
    text: str, uri: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("MLFLOW_TAGS", text)
    _track(tmp_path / "out", range(1, 3))
    assert "MLFLOW_TAGS is not a JSON object" in caplog.text
    assert len(points(uri, runs(uri)[0].info.run_id, "loss")) == 2


def test_failed_is_failed_and_a_log_after_the_end_joins_the_run(uri: str, tmp_path: Path) -> None:
    tracker = _started(tmp_path / "out", {})
    tracker.log({"loss": 1.0}, 1)
    tracker.close("FAILED")
    tracker.log({"loss": 2.0}, 1)  # the same step, another value: new, not a repetition
    tracker.close("FAILED")
    [run] = runs(uri)
    assert run.info.status == "FAILED"
    assert points(uri, run.info.run_id, "loss") == [(1, 1.0), (1, 2.0)]


def test_another_training_is_another_run_and_a_resumed_one_is_not(uri: str, tmp_path: Path) -> None:
    _track(tmp_path / "out", range(1, 11), status="FAILED")
    _track(tmp_path / "out", range(6, 21), resume_step=5)
    [run] = runs(uri)
    assert run.info.status == "FINISHED"
    assert points(uri, run.info.run_id, "loss") == _curve(range(1, 21))
    _track(tmp_path / "out", range(1, 3))
    assert len(runs(uri)) == 2


# -- a run that somebody else owns ------------------------------------------------------------------------------------
def test_an_orchestrated_run_is_added_to_and_left_open(
    uri: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_id = client(uri).create_run("0").info.run_id
    monkeypatch.setenv("MLFLOW_RUN_ID", run_id)
    monkeypatch.setenv("TRAINFLOW_SPOOL_DIR", str(tmp_path / "spool"))
    _track(tmp_path / "out", range(1, 4))
    [run] = runs(uri)
    assert (run.info.run_id, run.info.status, run.data.params) == (run_id, "RUNNING", {})
    assert len(points(uri, run_id, "loss")) == 3
    assert not (tmp_path / "out").exists()


def test_a_run_that_was_deleted_is_said_once_and_training_goes_on(
    uri: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("MLFLOW_RUN_ID", "0" * 32)
    _track(tmp_path / "out", range(1, 4))
    assert [record.levelno for record in caplog.records] == [logging.WARNING]
    assert "not known there" in caplog.text
    [kept] = _left(tmp_path / "out")
    assert kept.endswith(".orphan")


# -- death ------------------------------------------------------------------------------------------------------------
def _kill() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def test_killed_between_sending_and_noting_nothing_is_lost_or_twice(uri: str, tmp_path: Path) -> None:
    out, noted, save = tmp_path / "out", iter(range(3)), Session.save_state

    def save_state(session: Session) -> None:
        if session.state.offset and next(noted) == 2:  # sent, and not yet noted
            _kill()
        save(session)

    def work() -> None:
        Session.save_state = save_state  # type: ignore[method-assign,assignment]
        mlflow_client.BATCH, delivery.POLL_S = 100, 0.01
        tracker = _started(out)
        for step in range(1, 1001):
            tracker.log({"loss": float(step), "lr": 0.1}, step)
        tracker.close()

    _killed(work)
    [run] = runs(uri)
    assert 0 < len(points(uri, run.info.run_id, "loss")) < 1000
    _track(out, range(901, 1101), resume_step=900)  # resumed: sends what was left, then what is new
    [run] = runs(uri)
    assert points(uri, run.info.run_id, "loss") == _curve(range(1, 1101))
    assert len(points(uri, run.info.run_id, "lr")) == 1000
    assert run.info.status == "FINISHED"
    assert _left(out) == []


def test_a_killed_training_that_is_not_resumed_ends_as_failed(uri: str, tmp_path: Path) -> None:
    out = tmp_path / "out"

    def work() -> None:
        delivery.POLL_S = 0.01
        tracker: Any = _started(out, {})
        tracker.log({"loss": 1.0}, 1)
        state = tracker._session.path / "state.json"
        while not state.exists() or not json.loads(state.read_text())["offset"]:
            time.sleep(0.01)
        tracker.log({"loss": 2.0}, 2)
        _kill()

    _killed(work)
    assert runs(uri)[0].info.status == "RUNNING"
    _track(out, range(1, 3))  # from scratch: another run
    dead, fresh = runs(uri)
    assert (dead.info.status, fresh.info.status) == ("FAILED", "FINISHED")
    assert points(uri, dead.info.run_id, "loss") == _curve(range(1, 3))
    assert "was killed" in dead.data.tags["trainflow.failure"]
    assert abs(dead.info.end_time - dead.info.start_time) < 60_000  # when it died, not when that was noticed


def test_a_run_is_recorded_as_finished_only_once_its_end_waits_for_mlflow(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A finished run is never taken up again: a process that died in between would leave it open in MLflow."""
    spec = load_spec(project(tmp_path / "project"), ("tracking.enabled=true", f"storage={tmp_path / 'store'}"))
    uri = fresh_store(tmp_path / "store")
    save = RunRecord._save

    def dying(record: RunRecord, content: dict[str, Any]) -> None:
        save(record, content)
        if content["status"] == "FINISHED" and record.tracked is not None and record.tracked._session is not None:
            record.tracked._session.close()  # nothing more is written, and every process may deliver it
            record.tracked._session = None

    monkeypatch.setattr(RunRecord, "_save", dying)
    with RunRecord(Plan.of(spec), PipelineResult(spec.name, "", spec.storage)):
        pass
    assert [run.info.status for run in runs(uri)] == ["FINISHED"]


# -- a store that is down ---------------------------------------------------------------------------------------------
def test_a_dead_store_costs_a_warning_and_loses_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "store").write_text("in the way")  # no database can be opened below a file
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{tmp_path}/store/mlflow.db")
    monkeypatch.setattr(delivery, "POLL_S", 0.01)
    _track(tmp_path / "out", range(1, 11))
    assert "cannot be reached" in caplog.text
    assert "the next training with it delivers it" in caplog.text
    assert len(caplog.records) == 2  # one while training, one at the end

    (tmp_path / "store").unlink()
    uri = fresh_store(tmp_path / "store")
    _track(tmp_path / "out", range(6, 16), resume_step=5)
    [run] = runs(uri)
    assert points(uri, run.info.run_id, "loss") == _curve(range(1, 16))
    assert _left(tmp_path / "out") == []


def test_a_spool_that_cannot_be_written_costs_the_tracking_not_the_training(
    uri: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "out").write_text("in the way")
    _track(tmp_path / "out", range(1, 4))
    assert len(caplog.records) == 1
    assert "do not go to MLflow" in caplog.text
    assert runs(uri) == []


def test_mlflow_by_name_writes_a_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    uri = fresh_store(tmp_path / "store")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", uri)
    trainer(tmp_path / "out", classification_rows(12), report_to="mlflow", run_name="mine", max_steps=2).train()
    (run,) = runs(uri)
    assert (run.info.run_name, run.info.status) == ("mine", "FINISHED")
    assert run.data.params["learning_rate"] == "0.01"
    assert "train_loss" in run.data.metrics


# -- how a database is made -------------------------------------------------------------------------------------------
def _run(database: Path, *statements: str) -> list[Any]:
    with closing(sqlite3.connect(database)) as connection, connection:
        return [connection.execute(statement).fetchall() for statement in statements][-1]


def _connect_killed_before(number: int, kind: str, database: Path) -> None:
    """Connect in a process that kills itself before its nth SQL statement, or its nth step on the disk."""
    left = iter(range(number - 1, -1, -1))

    def count(*_: object) -> None:
        if next(left) == 0:
            _kill()

    def work() -> None:
        if kind == "statement":
            sqlalchemy.event.listen(sqlalchemy.Engine, "before_cursor_execute", count)
        else:
            sys.addaudithook(lambda event, _: count() if event == kind else None)
        mlflow_client.connect(f"sqlite:///{database}")

    _killed(work)
    assert not database.exists(), (kind, number)


def test_a_database_whose_birth_was_killed_at_any_step_is_used_by_the_next_process_and_copied_for_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    first = tmp_path / "storage" / "mlflow.db"
    # Left as it was, the second could never be used again. The rename is of the tables that are kept.
    for kind, number in (("statement", 60), ("statement", 800), ("os.rename", 1)):
        _connect_killed_before(number, kind, first)
    template = mlflow_client.DATABASES.template()
    half = ("CREATE TABLE alembic_version (version_num TEXT)", "INSERT INTO alembic_version VALUES ('451aebb31d03')")
    _run(template, *half)  # kept half made, they are made again
    template.chmod(0o600)
    mlflow_client.connect(f"sqlite:///{first}")
    assert len(_run(template, "SELECT name FROM sqlite_master")) > 50
    schema = "SELECT type, name, sql FROM sqlite_master ORDER BY type, name"
    filled = "SELECT * FROM alembic_version UNION SELECT name FROM workspaces UNION SELECT name FROM experiments"
    for kind in ("os.link", "os.rename"):  # now as a copy
        copied = tmp_path / kind / "mlflow.db"
        _connect_killed_before(1, kind, copied)
        connected = client(f"sqlite:///{copied}")
        assert (_run(copied, schema), _run(copied, filled)) == (_run(first, schema), _run(first, filled))
        assert connected.create_run(connected.create_experiment("one")).info.run_id
    assert client(f"sqlite:///{first}").create_experiment("first")


# -- metrics of followed checkpoints, in the training's run -----------------------------------------------------------
@pytest.fixture
def storage(tmp_path: Path) -> Store:
    return Store.open(tmp_path / "storage")


@pytest.fixture
def run(uri: str, storage: Store, monkeypatch: pytest.MonkeyPatch) -> Iterator[TrackedRun]:
    monkeypatch.setattr(delivery, "POLL_S", 0.05)
    run = open_run(TrackingConfig(), storage, name="toy", pipeline_key="k" * 64, params={}, resume=True)
    assert run is not None
    yield run
    run.finish("FINISHED")


def evaluation(step: int, loss: float) -> Evaluation:
    metrics = {"eval_loss": loss, "eval_runtime": 0.1, "epoch": step / 4}
    return Evaluation(f"checkpoint-{step}", step, "c" * 64, metrics, 1_700_000_000_000 + step, 0.1)


def log(run: TrackedRun, *evaluations: Evaluation) -> None:
    followed = RunPoints(run.handle)
    assert all(followed.log(evaluation) for evaluation in evaluations)
    followed.close()


def test_points_of_followed_checkpoints_join_the_run_once_also_out_of_order_and_after_its_end(
    run: TrackedRun, uri: str, storage: Store
) -> None:
    with mock.patch.dict(os.environ, run.handle.worker_env()):
        inside = MLflowTracker(None)
        inside.start(run_name=None, params={}, resume_step=0)
        inside.log({"eval_loss": 0.5, "epoch": 1.0}, 4)  # the training has evaluated this step itself
        inside.close()
    log(run, evaluation(12, 0.3))
    # Another process was slower with an earlier checkpoint, and logs again what a killed one may have logged.
    log(run, evaluation(4, 0.5), evaluation(8, 0.4), evaluation(12, 0.3))
    run.finish("FINISHED")
    log(run, evaluation(12, 0.3), evaluation(16, 0.2))
    [found] = runs(uri)
    assert points(uri, found.info.run_id, "eval/loss") == [(4, 0.5), (8, 0.4), (12, 0.3), (16, 0.2)]
    assert found.info.status == "FINISHED"
    assert set(found.data.metrics) == {"eval/loss", "train/epoch"}
    assert find_waiting(storage) is None


def test_a_tracker_that_is_away_costs_a_follower_nothing_and_gets_everything_later(
    run: TrackedRun, uri: str, storage: Store
) -> None:
    run.finish("FINISHED")
    database = Path(uri.removeprefix("sqlite:///"))
    away = database.with_name("away.db")
    database.rename(away)
    database.mkdir()  # no database can be opened there
    began = time.monotonic()
    followed = RunPoints(run.handle)
    assert followed.log(evaluation(4, 0.5))
    assert time.monotonic() - began < 5
    followed.close()
    assert find_waiting(storage) is not None
    database.rmdir()
    away.rename(database)
    log(run, evaluation(8, 0.4))
    [found] = runs(uri)
    assert points(uri, found.info.run_id, "eval/loss") == [(4, 0.5), (8, 0.4)]
