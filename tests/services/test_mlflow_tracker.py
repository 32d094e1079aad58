"""The MLflow tracker against a real store: exactly once under kill -9, dead stores, resumes."""

from __future__ import annotations

import json
import logging
import math
import os
import signal
import subprocess
import sys
import textwrap
import threading
from pathlib import Path
from typing import Any

import pytest

from tests.support.mlflow_store import client, fresh_store, points, runs
from tests.support.repository import ROOT
from tests.support.toys import classification_rows
from tests.support.training import trainer
from trainer_lib.trackers import mlflow_client, shipper
from trainer_lib.trackers.mlflow import MLflowTracker
from trainer_lib.trackers.spool import own_spool


@pytest.fixture
def uri(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    uri = fresh_store(tmp_path / "store")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", uri)
    return uri


def _track(out: Path, steps: range, *, resume_step: int = 0, status: str = "FINISHED", value: float = 1.0) -> None:
    tracker = MLflowTracker(str(out))
    tracker.start(run_name="curve", params={"lr": 0.1}, resume_step=resume_step)
    for step in steps:
        tracker.log({"loss": value * step}, step)
    tracker.close(status)


def _killed(code: str, *argv: str, **environment: str) -> None:
    """Run `code` in a process of its own, which must end by SIGKILL."""
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code), *argv],
        capture_output=True,
        text=True,
        cwd=ROOT,
        env={**os.environ, **environment},
        timeout=60,
    )
    assert done.returncode == -signal.SIGKILL, done.stderr


def _left(out: Path) -> list[str]:
    return [path.name for path in own_spool(out / ".spool").iterdir() if path.is_dir()]


# -- a run of our own -------------------------------------------------------------------------------------------------


def test_a_run_has_its_curve_parameters_name_and_end(uri: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLFLOW_EXPERIMENT_NAME", "digits")
    monkeypatch.setenv("MLFLOW_TAGS", json.dumps({"release.candidate": "RC1", "size": 3}))
    tracker = MLflowTracker(str(tmp_path / "out"))
    tracker.start(run_name="first", params={"lr": 0.1, "nested": {"hub_token": "s3cret"}}, resume_step=0)
    for step in range(1, 2501):  # more than one batch
        tracker.log({"loss": 1 / step, "eval/acc@5": 0.5}, step)
    tracker.log({"nan": math.nan, "up": math.inf, "down": -math.inf}, 2500)
    tracker.close()

    [run] = runs(uri)
    assert (run.info.run_name, run.info.status) == ("first", "FINISHED")
    assert client(uri).get_experiment(run.info.experiment_id).name == "digits"
    assert run.data.params == {"lr": "0.1", "nested.hub_token": "***"}
    assert (run.data.tags["release.candidate"], run.data.tags["size"]) == ("RC1", "3")
    assert points(uri, run.info.run_id, "loss") == [(step, 1 / step) for step in range(1, 2501)]
    assert len(points(uri, run.info.run_id, "eval/acc_5")) == 2500
    assert math.isnan(run.data.metrics["nan"])
    assert run.data.metrics["up"] > 1e308
    assert run.data.metrics["down"] < -1e308
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
    tracker = MLflowTracker(str(tmp_path / "out"))
    tracker.start(run_name=None, params={}, resume_step=0)
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
    assert points(uri, run.info.run_id, "loss") == [(step, float(step)) for step in range(1, 21)]
    _track(tmp_path / "out", range(1, 3))
    assert len(runs(uri)) == 2


def test_a_parameter_changed_on_resume_becomes_an_artifact(
    uri: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)  # MLflow keeps the artifacts of a database it is not told more about here
    monkeypatch.setenv("MLFLOW_EXPERIMENT_NAME", "another")
    _track(tmp_path / "out", range(1, 3), status="FAILED")
    tracker = MLflowTracker(str(tmp_path / "out"))
    tracker.start(run_name=None, params={"lr": 0.2, "new": 1}, resume_step=2)
    tracker.close()
    [run] = runs(uri)
    assert run.data.params == {"lr": "0.1", "new": "1"}
    changed = Path(run.info.artifact_uri.removeprefix("file://")) / "params" / "resumed-at-step-2.json"
    assert json.loads(changed.read_text()) == {"lr": {"was": "0.1", "is": "0.2"}}


def test_a_value_told_twice_in_a_step_is_one_point(uri: str, tmp_path: Path) -> None:
    tracker = MLflowTracker(str(tmp_path / "out"))
    tracker.start(run_name=None, params={}, resume_step=0)
    for step in (1, 2):
        tracker.log({"loss": 0.5, "epoch": 1.0}, step)
        tracker.log({"eval_loss": 0.5, "epoch": 1.0}, step)
    tracker.close()
    [run] = runs(uri)
    for key in ("loss", "eval_loss", "epoch"):
        assert [step for step, _ in points(uri, run.info.run_id, key)] == [1, 2]


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


def test_after_a_resume_what_the_server_has_is_not_written_again(
    uri: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Training died at step 10 with a checkpoint at 4: steps 5 to 10 come again, bit for bit."""
    run_id = client(uri).create_run("0").info.run_id
    monkeypatch.setenv("MLFLOW_RUN_ID", run_id)
    _track(tmp_path / "here", range(1, 11))
    _track(tmp_path / "another machine", range(5, 16), resume_step=4)
    assert points(uri, run_id, "loss") == [(step, float(step)) for step in range(1, 16)]


def test_a_run_that_was_deleted_is_said_once_and_training_goes_on(
    uri: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("MLFLOW_RUN_ID", "0" * 32)
    _track(tmp_path / "out", range(1, 4))
    assert [record.levelno for record in caplog.records] == [logging.WARNING]
    assert "not known there" in caplog.text
    [kept] = _left(tmp_path / "out")
    assert kept.endswith(".orphan")


def test_a_metric_the_server_refuses_is_left_out_and_the_others_arrive(
    uri: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    tracker = MLflowTracker(str(tmp_path / "out"))
    tracker.start(run_name=None, params={}, resume_step=0)
    tracker.log({"loss": 1.0, "a//b": 2.0}, 1)
    tracker.close()
    [run] = runs(uri)
    assert run.data.metrics == {"loss": 1.0}
    assert "refuses the metric 'a//b'" in caplog.text


# -- death ------------------------------------------------------------------------------------------------------------

KILLED_WHILE_SHIPPING = """
    import os, signal, sys
    from trainer_lib.trackers import mlflow, mlflow_client, shipper
    from trainer_lib.trackers.spool import Session
    noted = 0
    def save_state(self, save=Session.save_state):
        global noted
        if self.state.offset and not self.state.is_uncertain:  # sent, and not yet noted
            noted += 1
            if noted == 3:
                os.kill(os.getpid(), signal.SIGKILL)
        save(self)
    Session.save_state = save_state
    mlflow_client.BATCH = 100
    shipper.POLL_S = 0.01

    tracker = mlflow.MLflowTracker(sys.argv[1])
    tracker.start(run_name="curve", params={"lr": 0.1}, resume_step=0)
    for step in range(1, 1001):
        tracker.log({"loss": float(step), "lr": 0.1}, step)
    tracker.close()
"""


def test_killed_between_sending_and_noting_nothing_is_lost_or_twice(uri: str, tmp_path: Path) -> None:
    out = tmp_path / "out"
    _killed(KILLED_WHILE_SHIPPING, str(out))
    [run] = runs(uri)
    sent = len(points(uri, run.info.run_id, "loss"))
    assert 0 < sent < 1000
    _track(out, range(901, 1101), resume_step=900)  # resumed: sends what was left, then what is new
    [run] = runs(uri)
    assert points(uri, run.info.run_id, "loss") == [(step, float(step)) for step in range(1, 1101)]
    assert len(points(uri, run.info.run_id, "lr")) == 1000
    assert run.info.status == "FINISHED"
    assert _left(out) == []


def test_a_killed_training_that_is_not_resumed_ends_as_failed(uri: str, tmp_path: Path) -> None:
    out = tmp_path / "out"
    code = """
        import os, signal, sys, time
        from trainer_lib.trackers import mlflow, shipper
        shipper.POLL_S = 0.01
        tracker = mlflow.MLflowTracker(sys.argv[1])
        tracker.start(run_name="curve", params={}, resume_step=0)
        tracker.log({"loss": 1.0}, 1)
        state = tracker._session.path / "state.json"
        while not state.exists() or not __import__("json").loads(state.read_text())["offset"]:
            time.sleep(0.01)
        tracker.log({"loss": 2.0}, 2)
        os.kill(os.getpid(), signal.SIGKILL)
    """
    _killed(code, str(out))
    assert runs(uri)[0].info.status == "RUNNING"
    _track(out, range(1, 3))  # from scratch: another run
    dead, fresh = runs(uri)
    assert (dead.info.status, fresh.info.status) == ("FAILED", "FINISHED")
    assert points(uri, dead.info.run_id, "loss") == [(1, 1.0), (2, 2.0)]


def test_killed_before_the_server_was_ever_reached_the_run_is_made_later_and_once(uri: str, tmp_path: Path) -> None:
    out = tmp_path / "out"
    code = """
        import os, signal, sys
        from trainer_lib.trackers import mlflow, mlflow_client, shipper
        mlflow_client.connect = lambda uri: (_ for _ in ()).throw(ConnectionError("down"))
        tracker = mlflow.MLflowTracker(sys.argv[1])
        tracker.start(run_name="curve", params={"lr": 0.1}, resume_step=0)
        for step in range(1, 11):
            tracker.log({"loss": float(step)}, step)
        os.kill(os.getpid(), signal.SIGKILL)
    """
    _killed(code, str(out))
    assert runs(uri) == []
    _track(out, range(9, 13), resume_step=8)
    [run] = runs(uri)
    assert points(uri, run.info.run_id, "loss") == [(step, float(step)) for step in range(1, 13)]


# -- a store that is down ---------------------------------------------------------------------------------------------


def test_a_dead_store_costs_a_warning_and_loses_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "store").write_text("in the way")  # no database can be opened below a file
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{tmp_path}/store/mlflow.db")
    monkeypatch.setattr(shipper, "POLL_S", 0.01)
    _track(tmp_path / "out", range(1, 11))
    assert "cannot be reached" in caplog.text
    assert "the next training with it delivers it" in caplog.text
    assert len(caplog.records) == 2  # one while training, one at the end

    (tmp_path / "store").unlink()
    uri = fresh_store(tmp_path / "store")
    _track(tmp_path / "out", range(6, 16), resume_step=5)
    [run] = runs(uri)
    assert points(uri, run.info.run_id, "loss") == [(step, float(step)) for step in range(1, 16)]
    assert _left(tmp_path / "out") == []


def test_a_store_that_comes_back_during_training_gets_everything(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    uri = fresh_store(tmp_path / "store")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", uri)
    monkeypatch.setattr(shipper, "POLL_S", 0.01)
    failures = threading.Event()
    real = mlflow_client.send_points

    def send(*args: Any) -> None:
        if not failures.is_set():
            failures.set()
            raise ConnectionError("for a moment")
        real(*args)

    monkeypatch.setattr(mlflow_client, "send_points", send)
    tracker = MLflowTracker(str(tmp_path / "out"))
    tracker.start(run_name=None, params={}, resume_step=0)
    tracker.log({"loss": 1.0}, 1)
    assert failures.wait(30)
    tracker.log({"loss": 2.0}, 2)
    tracker.close()
    [run] = runs(uri)
    assert points(uri, run.info.run_id, "loss") == [(1, 1.0), (2, 2.0)]


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
