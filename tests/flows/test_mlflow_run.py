"""One MLflow run per pipeline run: opened once, re-attached, never in the way."""

from __future__ import annotations

import hashlib
import json
import math
import subprocess
import textwrap
from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from tests.support.command import python
from tests.support.mlflow_store import client, fresh_store, points, runs
from trainer_lib.errors import ConfigError
from trainer_lib.storage import Store
from trainer_lib.trackers.mlflow.tracker import MLflowTracker
from trainflow.tasks.configs import TrackingConfig
from trainflow.tasks.tracking.mlflow_run import RunHandle, TrackedRun, default_tracking_uri, find_waiting, open_run

KEY = "k" * 64


@pytest.fixture
def storage(tmp_path: Path) -> Store:
    fresh_store(tmp_path / "storage")
    return Store.open(tmp_path / "storage")


@pytest.fixture
def opened() -> Iterator[list[TrackedRun]]:
    """The runs that a test has opened; their threads end with it."""
    runs: list[TrackedRun] = []
    yield runs
    for run in runs:
        run.finish("KILLED")


@pytest.fixture
def start(storage: Store, opened: list[TrackedRun]) -> Callable[..., TrackedRun]:
    """Open a run of the storage."""

    def start(*, resume: bool = True, **more: Any) -> TrackedRun:
        params = more.pop("params", {"train": {"args": {"learning_rate": 1e-3}}})
        config = more.pop("config", TrackingConfig())
        key = more.pop("pipeline_key", KEY)
        run = open_run(config, storage, name="digits", pipeline_key=key, params=params, resume=resume, **more)
        assert run is not None
        opened.append(run)
        return run

    return start


def _done(run: TrackedRun, status: str = "FINISHED") -> RunHandle:
    """End the run, and return where it is: everything has arrived."""
    run.finish(status)
    assert run.handle.run_id is not None
    return run.handle


def _run(handle: RunHandle) -> Any:
    return client(handle.tracking_uri).get_run(handle.run_id)


def _points(handle: RunHandle, key: str) -> list[tuple[int, float]]:
    return points(handle.tracking_uri, handle.run_id or "", key)


Start = Callable[..., TrackedRun]


def test_a_run_is_kept_beside_the_storage_with_name_parameters_and_tags(storage: Store, start: Start) -> None:
    opened = start(config=TrackingConfig(run_name="mine", tags={"team": "a"}), tags={"origin": "x"})
    opened.set_tags({"published": "https://me:s3cret@host/x"})
    handle = _done(opened)
    run = _run(handle)
    assert run.data.tags["published"] == "https://***@host/x"
    assert handle.tracking_uri == f"sqlite:///{storage.local_path('mlflow.db')}"
    assert (run.info.run_name, run.info.status) == ("mine", "FINISHED")
    assert run.data.params == {"train.args.learning_rate": "0.001"}
    assert {"team": "a", "origin": "x", "trainflow.pipeline_key": KEY}.items() <= run.data.tags.items()
    assert client(handle.tracking_uri).get_experiment(handle.experiment_id).name == "digits"
    assert run.info.artifact_uri.startswith(f"file://{storage.local_path('mlartifacts')}")
    assert run.info.start_time < run.info.end_time
    # A database has no page until a UI is started.
    assert handle.ui_url() is None
    assert handle.ui_path() == f"#/experiments/{handle.experiment_id}/runs/{handle.run_id}"


def test_the_projects_git_commit_is_noted(start: Start, tmp_path: Path) -> None:
    project = tmp_path / "project"
    commands = (["init", "-q"], ["-c", "user.name=a", "-c", "user.email=a@b", "commit", "-qm", "x", "--allow-empty"])
    for command in commands:
        subprocess.run(["git", "init", "-q", str(project)], check=True)
        subprocess.run(["git", "-C", str(project), *command], check=True)
    head = subprocess.run(["git", "-C", str(project), "rev-parse", "HEAD"], capture_output=True, text=True, check=True)
    assert _run(_done(start(project=project))).data.tags["mlflow.source.git.commit"] == head.stdout.strip()
    assert "mlflow.source.git.commit" not in _run(_done(start(resume=False, project=tmp_path))).data.tags


@pytest.mark.parametrize("ending", ["FAILED", "KILLED"])
def test_an_unfinished_run_of_this_pipeline_is_taken_up_again_without_its_tag_of_a_failure(
    start: Start, ending: str
) -> None:
    run = start()
    run.set_tags({"trainflow.failure": "CodeError: it broke"})
    first = _done(run, ending)
    assert _run(first).info.status == ending
    assert _run(first).data.tags["trainflow.failure"] == "CodeError: it broke"
    assert _done(start(pipeline_key="o" * 64)).run_id != first.run_id
    run = start()  # found by the pipeline's key
    run.set_tags({"trainflow.failure": None, "trainflow.failed_stage": None})
    second = _done(run)
    third = _done(start(token=first.token, resume=False))  # found by its token, although it has finished
    assert first.run_id == second.run_id == third.run_id
    assert _run(first).info.status == "FINISHED"
    assert "trainflow.failure" not in _run(first).data.tags
    assert _done(start()).run_id != first.run_id, "it has finished"


def test_parameters_that_changed_are_an_artifact_and_never_an_error(
    storage: Store, start: Start, caplog: pytest.LogCaptureFixture
) -> None:
    handle = _done(start(), "FAILED")
    _done(start(params={"train": {"args": {"learning_rate": 2e-3, "new": 1}}}))
    assert _run(handle).data.params == {"train.args.learning_rate": "0.001", "train.args.new": "1"}
    [changed] = list(storage.local_path("mlartifacts").rglob("params/*.json"))
    assert json.loads(changed.read_text()) == {"train.args.learning_rate": {"was": "0.001", "is": "0.002"}}
    assert not caplog.records


def test_a_worker_adds_its_curve_to_the_run(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    run = start()
    for name, value in run.handle.worker_env().items():
        monkeypatch.setenv(name, value)
    tracker = MLflowTracker(None)
    tracker.start(run_name="ignored", params={"ignored": 1}, resume_step=0)
    tracker.log({"loss": 0.5}, 10)
    tracker.close("FAILED")
    run.log_metrics({"train/loss": 0.5, "accuracy": 1.0}, 10)  # the stage's result repeats the last point
    handle = _done(run)
    assert _points(handle, "train/loss") == [(10, 0.5)]
    assert _points(handle, "accuracy") == [(10, 1.0)]
    assert _run(handle).info.status == "FINISHED"
    assert "ignored" not in _run(handle).data.params


def test_metrics_files_and_a_dataset_arrive_once_by_however_many_retries(
    storage: Store, start: Start, tmp_path: Path
) -> None:
    run, digest = start(), hashlib.sha256(b"data").hexdigest()
    for _ in range(3):
        run.log_metrics({"test_accuracy": 0.98, "test f1@5": 0.5}, 100)
        run.log_dataset("train", "s3://bucket/data", digest, {"label": "int64"}, 3)
    run.log_metrics({"test_accuracy": 0.99}, 100)  # measured again
    run.log_metrics({"bad": math.nan}, 100)
    (tmp_path / "x").write_bytes(b"file")
    run.log_file("<html>", "report.html")
    run.log_file(b"bytes", "evaluate/samples.txt")
    run.log_file(tmp_path / "x", "evaluate/deep/x.bin")
    handle = _done(run)
    assert _points(handle, "test_accuracy") == [(100, 0.98), (100, 0.99)]
    assert _points(handle, "test f1_5") == [(100, 0.5)]
    assert find_waiting(storage) is None
    assert not [path for path in Path(handle.spool_dir).iterdir() if path.is_dir()]
    recorded = _run(handle)
    artifacts = Path(recorded.info.artifact_uri.removeprefix("file://"))
    kept = [artifacts / name for name in ("report.html", "evaluate/samples.txt", "evaluate/deep/x.bin")]
    assert [path.read_bytes() for path in kept] == [b"<html>", b"bytes", b"file"]
    [used] = recorded.inputs.dataset_inputs
    assert used.dataset.digest == digest[:36]
    assert json.loads(used.dataset.source) == {"uri": "s3://bucket/data"}
    assert recorded.data.tags["data.train"] == digest


def test_switched_off_nothing_is_recorded(storage: Store) -> None:
    config = TrackingConfig(enabled=False)
    assert open_run(config, storage, name="digits", pipeline_key=KEY, params={}, resume=True) is None
    assert find_waiting(storage) is None


def test_a_discarded_run_is_deleted_unless_it_has_trained(start: Start) -> None:
    gone, kept = start(), start(pipeline_key="o" * 64)
    kept.log_metrics({"train/loss": 0.5}, 1)  # by an earlier command that was taken up
    gone.end("DISCARDED")
    kept.end("DISCARDED")
    deleted, handle = _done(gone), _done(kept)
    [left] = runs(handle.tracking_uri)
    assert (left.info.run_id, left.info.status) == (handle.run_id, "FAILED")
    assert _run(deleted).info.lifecycle_stage == "deleted"
    again = _done(start())  # the next command with the key makes another one
    assert again.run_id != deleted.run_id


def test_a_run_that_goes_on_after_the_clock_was_put_back_ends_as_its_last_command_did(start: Start) -> None:
    first = start()
    ahead = datetime.now(UTC) + timedelta(hours=1)
    handle = _done(first, "FAILED")
    client(handle.tracking_uri).set_terminated(handle.run_id, "FAILED", int(ahead.timestamp() * 1000))
    again = _done(start(after=ahead.isoformat()))
    assert again.run_id == handle.run_id
    assert _run(again).info.status == "FINISHED"


def test_a_spec_with_credentials_is_refused_and_they_are_not_shown(storage: Store) -> None:
    config = TrackingConfig(uri="postgresql://me:s3cret@db/mlflow")
    with pytest.raises(ConfigError, match=r"tracking\.uri.*MLFLOW_TRACKING_URI") as caught:
        open_run(config, storage, name="d", pipeline_key=KEY, params={}, resume=True)
    assert "s3cret" not in str(caught.value)


def test_remote_storage_has_a_store_of_the_users_own(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path))
    one, two = (default_tracking_uri(Store.open(f"memory://{name}/x")) for name in ("a", "b"))
    assert one.startswith(f"sqlite:///{tmp_path}/trainflow/tracking/")
    assert one != two
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://tracking:5000")
    assert default_tracking_uri(Store.open("memory://a/x")) == "http://tracking:5000"


def test_a_whole_run_imports_no_torch(tmp_path: Path) -> None:
    """MLflow's flavours would import it when asked; nothing here asks."""
    fresh_store(tmp_path / "storage")
    (tmp_path / "storage" / "model").mkdir()
    (tmp_path / "storage" / "model" / "model.safetensors").write_bytes(b"x")
    code = """
        import sys
        from trainflow.tasks.tracking import mlflow_run as tracking
        from trainflow.tasks.configs import TrackingConfig
        from trainer_lib.storage import Store
        assert "mlflow" not in sys.modules
        storage = Store.open(sys.argv[1])
        run = tracking.open_run(TrackingConfig(), storage, name="d", pipeline_key="k", params={"a": 1}, resume=True)
        run.log_metrics({"a": 1.0}, 1)
        run.log_file(storage.local_path("model/model.safetensors"), "model/model.safetensors")
        run.log_dataset("d", "u", "d" * 64, {}, 1)
        run.finish("FINISHED")
        assert "mlflow" in sys.modules and "torch" not in sys.modules
    """
    done = python("-c", textwrap.dedent(code), tmp_path / "storage")
    assert (done.stderr, done.stdout) == ("", "")
    [run] = runs(f"sqlite:///{tmp_path}/storage/mlflow.db")
    assert run.info.status == "FINISHED"
