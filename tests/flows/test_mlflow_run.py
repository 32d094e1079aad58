"""One MLflow run per pipeline run: opened once, re-attached, never in the way."""

from __future__ import annotations

import hashlib
import json
import logging
import math
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest

from tasks import tracking as _mlflow
from tasks.configs import TrackingConfig
from tasks.tracking import RunHandle, finish, log_dataset, log_file, log_folder, log_metrics, open_run, set_tags
from tests.support.mlflow_store import client, fresh_store, points, runs
from tests.support.repository import ROOT
from trainer_lib.errors import ConfigError
from trainer_lib.storage import Store
from trainer_lib.trackers.mlflow import MLflowTracker

KEY = "k" * 64


@pytest.fixture
def storage(tmp_path: Path) -> Store:
    fresh_store(tmp_path / "storage")
    return Store.open(tmp_path / "storage")


def _open(storage: Store, *, resume: bool = True, **more: Any) -> RunHandle:
    params = more.pop("params", {"train": {"args": {"learning_rate": 1e-3}}})
    config = more.pop("config", TrackingConfig())
    handle = open_run(config, storage, name="digits", pipeline_key=KEY, params=params, resume=resume, **more)
    assert handle is not None
    return handle


def _run(handle: RunHandle) -> Any:
    return client(handle.tracking_uri).get_run(handle.run_id)


def test_a_run_is_kept_beside_the_storage_with_name_parameters_and_tags(storage: Store) -> None:
    handle = _open(storage, config=TrackingConfig(run_name="mine", tags={"team": "a"}), tags={"origin": "x"})
    run = _run(handle)
    assert handle.tracking_uri == f"sqlite:///{storage.local_path('mlflow.db')}"
    assert (run.info.run_name, run.info.status) == ("mine", "RUNNING")
    assert run.data.params == {"train.args.learning_rate": "0.001"}
    assert {"team": "a", "origin": "x", "trainflow.pipeline_key": KEY}.items() <= run.data.tags.items()
    assert client(handle.tracking_uri).get_experiment(handle.experiment_id).name == "digits"
    assert run.info.artifact_uri.startswith(f"file://{storage.local_path('mlartifacts')}")


def test_the_projects_git_commit_is_noted(storage: Store, tmp_path: Path) -> None:
    project = tmp_path / "project"
    commands = (["init", "-q"], ["-c", "user.name=a", "-c", "user.email=a@b", "commit", "-qm", "x", "--allow-empty"])
    for command in commands:
        subprocess.run(["git", "init", "-q", str(project)], check=True)
        subprocess.run(["git", "-C", str(project), *command], check=True)
    head = subprocess.run(["git", "-C", str(project), "rev-parse", "HEAD"], capture_output=True, text=True, check=True)
    assert _run(_open(storage, project=project)).data.tags["mlflow.source.git.commit"] == head.stdout.strip()
    assert "mlflow.source.git.commit" not in _run(_open(storage, resume=False, project=tmp_path)).data.tags


@pytest.mark.parametrize("ending", [None, "FAILED", "KILLED"])
def test_an_unfinished_run_is_taken_up_again(storage: Store, ending: str | None) -> None:
    first = _open(storage)
    if ending is not None:
        finish(first, ending)
    assert _open(storage) == first
    assert _run(first).info.status == "RUNNING"


def test_a_finished_run_is_not_taken_up_and_neither_is_one_of_another_pipeline(storage: Store) -> None:
    first = _open(storage)
    other = open_run(TrackingConfig(), storage, name="digits", pipeline_key="o" * 64, params={}, resume=True)
    finish(first, "FINISHED")
    assert len({first.run_id, other.run_id if other else "", _open(storage).run_id}) == 3


def test_parameters_that_changed_are_an_artifact_and_never_an_error(
    storage: Store, caplog: pytest.LogCaptureFixture
) -> None:
    handle = _open(storage)
    _open(storage, params={"train": {"args": {"learning_rate": 2e-3, "new": 1}}})
    run = _run(handle)
    assert run.data.params == {"train.args.learning_rate": "0.001", "train.args.new": "1"}
    [changed] = list(storage.local_path("mlartifacts").rglob("params/*.json"))
    assert json.loads(changed.read_text()) == {"train.args.learning_rate": {"was": "0.001", "is": "0.002"}}
    assert not caplog.records


def test_a_worker_adds_its_curve_to_the_run(storage: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    handle = _open(storage)
    for name, value in handle.worker_env().items():
        monkeypatch.setenv(name, value)
    tracker = MLflowTracker(None)
    tracker.start(run_name="ignored", params={"ignored": 1}, resume_step=0)
    tracker.log({"loss": 0.5}, 10)
    tracker.close("FAILED")
    assert points(handle.tracking_uri, handle.run_id, "loss") == [(10, 0.5)]
    assert _run(handle).info.status == "RUNNING"
    assert "ignored" not in _run(handle).data.params


def test_metrics_are_written_once_by_however_many_retries(storage: Store) -> None:
    handle = _open(storage)
    for _ in range(3):
        log_metrics(handle, {"test_accuracy": 0.98, "test f1@5": 0.5}, 100)
    log_metrics(handle, {"test_accuracy": 0.99}, 100)  # measured anew
    log_metrics(handle, {"bad": math.nan}, 100)
    assert points(handle.tracking_uri, handle.run_id, "test_accuracy") == [(100, 0.98), (100, 0.99)]
    assert points(handle.tracking_uri, handle.run_id, "test f1_5") == [(100, 0.5)]
    assert list(Path(handle.spool_dir).iterdir()) == []


@pytest.mark.parametrize("kind", ["local", "memory"])
def test_a_model_folder_arrives_byte_for_byte(storage: Store, tmp_path: Path, kind: str) -> None:
    handle = _open(storage)
    source = Store.open(tmp_path / "model" if kind == "local" else "memory://test-mlflow/model")
    files = {"model.safetensors": bytes(range(256)) * 100, "config.json": b"{}", "tokenizer/vocab.txt": b"a"}
    try:
        for path, data in files.items():
            source.write_bytes(path, data)
        log_folder(handle, source, "model")
        artifacts = Path(_run(handle).info.artifact_uri.removeprefix("file://"))
        found = {str(path.relative_to(artifacts / "model")): path for path in artifacts.rglob("*") if path.is_file()}
        assert {name: hashlib.sha256(path.read_bytes()).digest() for name, path in found.items()} == {
            name: hashlib.sha256(data).digest() for name, data in files.items()
        }
    finally:
        source.delete_tree()


def test_a_file_text_or_bytes_are_logged_under_their_path(storage: Store, tmp_path: Path) -> None:
    handle = _open(storage)
    (tmp_path / "x").write_bytes(b"file")
    log_file(handle, "<html>", "report.html")
    log_file(handle, b"bytes", "evaluate/samples.txt")
    log_file(handle, tmp_path / "x", "evaluate/deep/x.bin")
    artifacts = Path(_run(handle).info.artifact_uri.removeprefix("file://"))
    assert (artifacts / "report.html").read_text() == "<html>"
    assert (artifacts / "evaluate" / "samples.txt").read_bytes() == b"bytes"
    assert (artifacts / "evaluate" / "deep" / "x.bin").read_bytes() == b"file"


def test_a_dataset_is_an_input_of_the_run_with_its_whole_digest_in_a_tag(storage: Store) -> None:
    handle = _open(storage)
    digest = hashlib.sha256(b"data").hexdigest()
    log_dataset(
        handle, name="train", url="s3://bucket/data", digest=digest, schema={"label": "int64"}, profile={"rows": 3}
    )
    run = _run(handle)
    [given] = run.inputs.dataset_inputs
    assert given.dataset.digest == digest[:36]
    assert json.loads(given.dataset.source) == {"uri": "s3://bucket/data"}
    assert run.data.tags["data.train"] == digest


def test_tags_lose_credentials(storage: Store) -> None:
    handle = _open(storage)
    set_tags(handle, {"published": "https://me:s3cret@host/x"})
    assert _run(handle).data.tags["published"] == "https://***@host/x"


def test_a_status_that_does_not_exist_is_the_callers_mistake(storage: Store) -> None:
    with pytest.raises(ValueError, match="DONE"):
        finish(_open(storage), "DONE")


def test_switched_off_nothing_is_recorded_and_nothing_fails(storage: Store) -> None:
    config = TrackingConfig(enabled=False)
    handle = open_run(config, storage, name="digits", pipeline_key=KEY, params={}, resume=True)
    assert handle is None
    log_metrics(handle, {"a": 1.0}, 1)
    log_folder(handle, storage, "model")
    log_file(handle, "", "x")
    log_dataset(handle, name="d", url="u", digest="x")
    set_tags(handle, {"a": "b"})
    finish(handle, "FINISHED")


def test_a_server_that_is_down_is_said_once_and_fails_nothing(
    storage: Store, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(_mlflow, "_silenced", set())
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://me:s3cret@127.0.0.1:9")
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    assert open_run(TrackingConfig(), storage, name="d", pipeline_key=KEY, params={}, resume=True) is None
    handle = RunHandle("r" * 32, "1", "http://me:s3cret@127.0.0.1:9", str(storage.local_path("spool")))
    log_metrics(handle, {"accuracy": 0.5}, 10)
    log_file(handle, "x", "report.html")
    finish(handle, "FINISHED")
    warnings = [record for record in caplog.records if record.name == "tasks.tracking"]
    assert [record.levelno for record in warnings] == [logging.WARNING]
    assert "s3cret" not in caplog.text + repr(handle)
    assert handle.ui_url() == f"http://***@127.0.0.1:9/#/experiments/1/runs/{'r' * 32}"
    [kept] = storage.local_path("spool").iterdir()  # the metrics wait for the server
    assert b'"accuracy":0.5' in (kept / "points.jsonl").read_bytes()


def test_metrics_kept_through_an_outage_are_sent_by_the_next_run(storage: Store) -> None:
    handle = _open(storage)
    database = storage.local_path("mlflow.db")
    aside = database.rename(database.with_suffix(".away"))
    database.mkdir()  # nothing can be opened there
    _mlflow._client.cache_clear()
    broken = RunHandle(handle.run_id, handle.experiment_id, handle.tracking_uri + "?x=1", handle.spool_dir)
    log_metrics(broken, {"accuracy": 0.5}, 10)
    assert len(list(Path(handle.spool_dir).iterdir())) == 1
    database.rmdir()
    aside.rename(database)
    for session in Path(handle.spool_dir).iterdir():
        text = (session / "session.json").read_text()
        (session / "session.json").write_text(text.replace("?x=1", ""))
    _open(storage)
    assert points(handle.tracking_uri, handle.run_id, "accuracy") == [(10, 0.5)]


def test_a_spec_with_credentials_is_refused_and_they_are_not_shown(storage: Store) -> None:
    config = TrackingConfig(uri="postgresql://me:s3cret@db/mlflow")
    with pytest.raises(ConfigError, match=r"tracking\.uri.*MLFLOW_TRACKING_URI") as caught:
        open_run(config, storage, name="d", pipeline_key=KEY, params={}, resume=True)
    assert "s3cret" not in str(caught.value)


def test_remote_storage_has_a_store_of_the_users_own(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path))
    one, two = (_mlflow.default_tracking_uri(Store.open(f"memory://{name}/x")) for name in ("a", "b"))
    assert one.startswith(f"sqlite:///{tmp_path}/trainflow/tracking/")
    assert one != two
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://tracking:5000")
    assert _mlflow.default_tracking_uri(Store.open("memory://a/x")) == "http://tracking:5000"


def test_a_handle_survives_json(storage: Store) -> None:
    handle = _open(storage)
    assert RunHandle.from_dict(json.loads(json.dumps(handle.to_dict()))) == handle
    assert handle.ui_url() is None
    assert handle.ui_path() == f"#/experiments/{handle.experiment_id}/runs/{handle.run_id}"


def test_a_whole_run_imports_no_torch(tmp_path: Path) -> None:
    """MLflow's flavours would import it when asked; nothing here asks."""
    fresh_store(tmp_path / "storage")
    (tmp_path / "storage" / "model").mkdir()
    (tmp_path / "storage" / "model" / "model.safetensors").write_bytes(b"x")
    code = """
        import sys
        from tasks import tracking
        from tasks.configs import TrackingConfig
        from trainer_lib.storage import Store
        assert "mlflow" not in sys.modules
        storage = Store.open(sys.argv[1])
        handle = tracking.open_run(TrackingConfig(), storage, name="d", pipeline_key="k", params={"a": 1}, resume=True)
        tracking.log_metrics(handle, {"a": 1.0}, 1)
        tracking.log_folder(handle, storage.child("model"), "model")
        tracking.log_dataset(handle, name="d", url="u", digest="d" * 64)
        tracking.finish(handle, "FINISHED")
        assert "mlflow" in sys.modules and "torch" not in sys.modules
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code), str(tmp_path / "storage")],
        capture_output=True,
        text=True,
        cwd=ROOT,
    )
    assert (done.returncode, done.stderr, done.stdout) == (0, "", "")
    [run] = runs(f"sqlite:///{tmp_path}/storage/mlflow.db")
    assert run.info.status == "FINISHED"
