"""What earlier runs left in the spool, what a person deleted, and pipelines whose MLflow is out of reach."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import socket
import stat
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from mlflow.store.tracking import sqlalchemy_store

from tests.support.command import Cli
from tests.support.mlflow_store import client, fresh_store, points, runs
from tests.support.runs import ALL, ran, run, succeeded
from trainer_lib.errors import StorageError
from trainer_lib.storage import Store
from trainer_lib.trackers import spool
from trainer_lib.trackers.mlflow import mlflow_client
from trainer_lib.trackers.mlflow.delivery import Delivery, Shipper
from trainer_lib.trackers.spool import Session
from trainflow.flows.cli.signals import stoppable
from trainflow.flows.reports.run_record import RunRecord
from trainflow.tasks.configs import TrackingConfig
from trainflow.tasks.tracking.mlflow_run import (
    RunHandle,
    TrackedRun,
    deliver_waiting,
    find_waiting,
    open_run,
    spool_dir,
    tracking_uri,
)

KEY = "k" * 64


@pytest.fixture
def storage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Store:
    fresh_store(tmp_path / "storage")
    # The threads of the runs stay out of the way: the tests deliver.
    monkeypatch.setattr("trainflow.tasks.tracking.mlflow_run.Shipper", _NoShipper)
    return Store.open(tmp_path / "storage")


class _NoShipper:
    def __init__(self, _: Delivery) -> None: ...

    def start(self) -> None: ...

    def close(self, *_: Any, **__: Any) -> bool:
        return True


def start(storage: Store, name: str = "digits", token: str | None = None) -> TrackedRun:
    run = open_run(
        TrackingConfig(), storage, name=name, pipeline_key=KEY, params={"lr": 0.1}, resume=token is None, token=token
    )
    assert run is not None
    return run


def delivery(handle: RunHandle) -> Delivery:
    return Delivery(Path(handle.spool_dir), handle.tracking_uri)


def delivered(storage: Store, step: int, ending: str, token: str | None = None) -> RunHandle:
    """A run that logged the loss of one step, ended, and was delivered."""
    run = start(storage, token=token)
    run.log_metrics({"loss": 1 / step}, step)
    run.finish(ending)
    assert delivery(run.handle).deliver()
    return run.handle


def statuses(handle: RunHandle) -> dict[str, str]:
    return {run.info.run_name: run.info.status for run in runs(handle.tracking_uri)}


# -- one run is stuck -------------------------------------------------------------------------------------------------
def leave_two(storage: Store) -> RunHandle:
    """Leave two finished runs in the spool; the first has a file."""
    first, second = start(storage, "first"), start(storage, "second")
    first.log_metrics({"loss": 1.0}, 1)
    first.log_file("<html>", "report.html")
    second.log_metrics({"loss": 2.0}, 1)
    first.finish("FINISHED")
    second.finish("FINISHED")
    return second.handle


@pytest.mark.parametrize(
    ("stuck", "first", "waits"),
    [("send_file", "FINISHED", "1 run (1 file)"), ("send_points", "RUNNING", "1 run (1 point, 1 file)")],
)
def test_a_run_that_the_server_or_a_storage_does_not_take_holds_back_no_other_and_is_sent_later(
    storage: Store, monkeypatch: pytest.MonkeyPatch, stuck: str, first: str, waits: str
) -> None:
    handle = leave_two(storage)
    real: Callable[..., None] = getattr(mlflow_client, stuck)

    def refuse(server: Any, run_id: str, *rest: Any) -> None:
        if server.get_run(run_id).info.run_name == "first":
            raise StorageError("No module named 'boto3'", field="s3://b/model", remedy="Give credentials.")
        real(server, run_id, *rest)

    with monkeypatch.context() as patch:
        patch.setattr(mlflow_client, stuck, refuse)
        with pytest.raises(Exception, match="boto3"):
            delivery(handle).deliver()
    assert statuses(handle) == {"first": first, "second": "FINISHED"}, "a storage that is away leaves no run open"
    assert str(find_waiting(storage)) == waits
    assert delivery(handle).deliver()
    assert statuses(handle) == {"first": "FINISHED", "second": "FINISHED"}
    assert find_waiting(storage) is None
    assert [path.read_bytes() for path in storage.local_path("mlartifacts").rglob("*.html")] == [b"<html>"]


def test_a_server_that_does_not_answer_is_asked_once_in_a_pass(storage: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    handle = leave_two(storage)
    asked: list[str] = []

    def hang(_: Any, head: Any) -> None:
        asked.append(head["run_name"])
        raise TimeoutError

    monkeypatch.setattr(mlflow_client, "find_run", hang)
    with pytest.raises(TimeoutError):
        delivery(handle).deliver()
    assert asked == ["first"]


# -- a run that a person deleted --------------------------------------------------------------------------------------
def purge(uri: str, run_id: str) -> None:
    """Remove a deleted run from the database, as `mlflow gc` does."""
    module: Any = sqlalchemy_store
    module.SqlAlchemyStore(uri, str(Path(uri.removeprefix("sqlite:///")).parent))._hard_delete_run(run_id)


@pytest.mark.parametrize("is_purged", [False, True])
def test_a_failed_run_that_was_deleted_gets_a_new_one_under_its_token(storage: Store, *, is_purged: bool) -> None:
    first = delivered(storage, 1, "FAILED")
    deleted = first.run_id or ""
    client(first.tracking_uri).delete_run(deleted)
    if is_purged:
        purge(first.tracking_uri, deleted)
    for ending in ("FAILED", "FINISHED"):
        again = delivered(storage, 2, ending, first.token)
    assert again.run_id != deleted
    assert statuses(again) == {"digits": "FINISHED"}
    assert points(again.tracking_uri, again.run_id or "", "loss") == [(2, 0.5)]
    assert find_waiting(storage) is None


def test_an_experiment_that_was_deleted_is_restored_and_its_run_goes_on(
    storage: Store, caplog: pytest.LogCaptureFixture
) -> None:
    first = delivered(storage, 1, "FAILED")
    client(first.tracking_uri).delete_experiment(first.experiment_id)
    again = delivered(storage, 2, "FINISHED", first.token)
    [run] = runs(again.tracking_uri)
    assert (run.info.run_id, run.info.status) == (first.run_id, "FINISHED")
    assert points(again.tracking_uri, run.info.run_id, "loss") == [(1, 1.0), (2, 0.5)]
    assert "The MLflow experiment digits was deleted. It is restored with its runs" in caplog.text


@pytest.mark.parametrize("metrics", [{}, {"loss": 2.0, "accuracy": 1.0}])
def test_what_is_left_of_a_run_that_was_deleted_is_set_aside(
    storage: Store, metrics: dict[str, float], caplog: pytest.LogCaptureFixture
) -> None:
    run = start(storage)
    delivery(run.handle).deliver()
    client(run.handle.tracking_uri).delete_run(run.handle.run_id)
    run.log_metrics(metrics, 2)
    run.finish("KILLED")
    assert delivery(run.handle).deliver()
    assert find_waiting(storage) is None
    assert [path.suffix for path in Path(run.handle.spool_dir).glob("*-*")] == [".orphan"]
    assert "is deleted there" in caplog.text


# -- two machines train one run, the first one's points arrive last ---------------------------------------------------
def log(session: Session, steps: range) -> None:
    for step in steps:
        session.write({"t": spool.now_ms(), "s": step, "m": {"loss": 1 / step}})
    time.sleep(0.01)  # what another machine logs next is later


@pytest.mark.parametrize("sent", [0, 50])
def test_points_that_arrive_after_those_of_the_machine_that_went_on_are_there_once(tmp_path: Path, sent: int) -> None:
    """The first machine is preempted at step 100 with a checkpoint at 90; the second one trains from there to 200."""
    uri = fresh_store(tmp_path)
    run_id = client(uri).create_run("0").info.run_id
    head = {"tracking_uri": uri, "run_id": run_id, "dedupe": True}
    first, second = (Session.create(tmp_path / name, head) for name in ("first", "second"))
    log(first, range(1, sent + 1))
    if sent:
        assert Delivery(first.path.parent, uri).deliver()
    log(first, range(sent + 1, 101))
    first.close()
    log(second, range(91, 201))
    second.close()
    assert Delivery(second.path.parent, uri).deliver()
    assert Delivery(first.path.parent, uri).deliver()
    assert points(uri, run_id, "loss") == [(step, 1 / step) for step in range(1, 201)]
    assert not list(tmp_path.glob("*/*-*"))


# -- what cannot be delivered from here -------------------------------------------------------------------------------
def test_a_session_that_cannot_be_read_is_named_once_and_holds_back_no_other(
    storage: Store, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    handle = leave_two(storage)
    blocked = sorted(Path(handle.spool_dir).glob("*-*"))[0]
    real: Callable[[Path, Any], Any] = vars(spool)["read_json"]

    def refuse(path: Path, kind: Any) -> Any:  # the tests may run as root, to whom no folder is closed
        if path.parent == blocked:
            raise PermissionError(13, "Permission denied", str(path))
        return real(path, kind)

    monkeypatch.setattr(spool, "read_json", refuse)
    assert delivery(handle).deliver()
    assert find_waiting(storage) is None
    assert statuses(handle) == {"second": "FINISHED"}
    assert [record.getMessage() for record in caplog.records].count(
        f"What {blocked} holds for MLflow is left there; it cannot be read: Permission denied"
    ) == 1
    assert blocked.is_dir()


def _planted(storage: Store, head: dict[str, Any], *records: dict[str, Any]) -> Path:
    """A session that a stranger put into a storage which the user unpacked: it is the user's own file."""
    made: dict[str, Any] = {"token": "t", "experiment": "planted", "run_name": "planted", "start_ms": 1, "tags": {}}
    made |= {"tracking_uri": tracking_uri(TrackingConfig(), storage), "artifact_location": "file:///elsewhere"}
    session = Session.create(spool_dir(storage), {**made, **head})
    (session.path / "files").mkdir()
    for record in records:
        session.write(record)
    session.write_last({"end": "FINISHED", "t": 2})
    session.close()
    return session.path


MODEL: dict[str, Any] = {"name": "m", "digest": "d", "step": 1, "columns": {}}
FILE: dict[str, Any] = {"path": "x", "folder": "/", "name": "x", "size": 1, "sha256": ""}
FLAVOR: dict[str, Any] = {"name": "f", "config": {}, "files": [FILE]}
ASKED: dict[str, Any] = {"name": "n", "digest": "d", "alias": None, "description": "", "tags": {}, "score": None}


@pytest.mark.parametrize(
    "record",
    [
        {"file": "../../../../outside/secret", "path": "x"},
        {"file": "{outside}/secret", "path": "x"},
        {"file": "000001", "path": "x"},  # a link to it
        {"file": "000002", "path": "../../../x"},
        {"model": MODEL, "files": {"x": "../../../../outside/secret"}},
        {"model": MODEL, "files": {"../../x": "000002"}},
        {"folder": "{outside}", "path": "x"},
        {"registration": {**ASKED, "flavor": FLAVOR}, "kept_in": None},
        {"registration": {**ASKED, "flavor": None}, "kept_in": "{outside}"},
    ],
)
def test_a_planted_session_sends_no_file_of_the_user_and_writes_nothing_elsewhere(
    storage: Store, tmp_path: Path, record: dict[str, Any]
) -> None:
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "secret").write_text("s3cret")
    planted = _planted(storage, {}, json.loads(json.dumps(record).replace("{outside}", str(outside))))
    (planted / "files" / "000001").symlink_to(outside / "secret")
    (planted / "files" / "000002").write_text("planted")
    uri = tracking_uri(TrackingConfig(), storage)
    assert Delivery(spool_dir(storage), uri).deliver()
    assert [run.info.run_name for run in runs(uri)] == ["planted"]
    kept = [path for path in tmp_path.rglob("*") if path.is_file() and outside not in path.parents]
    assert not [path for path in kept if b"s3cret" in path.read_bytes()]
    assert [path.name for path in outside.iterdir()] == ["secret"]
    assert client(uri).get_experiment_by_name("planted").artifact_location.startswith(storage.local_path().as_uri())


def test_a_session_is_for_the_server_of_the_command_alone(
    storage: Store, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Credentials of the environment go to no address that a file names."""
    monkeypatch.setenv("MLFLOW_TRACKING_TOKEN", "s3cret")
    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.settimeout(0.2)
        _planted(storage, {"tracking_uri": f"http://127.0.0.1:{listener.getsockname()[1]}"})
        deliverer = Delivery(spool_dir(storage), tracking_uri(TrackingConfig(), storage))
        assert not deliverer.deliver()
        with pytest.raises(TimeoutError):
            listener.accept()
    assert "not for the server of this command" in str(deliverer.obstacle)
    assert str(deliverer.obstacle) in caplog.text
    assert str(find_waiting(storage)) == "the end of 1 run"


def test_what_waited_in_a_storage_that_was_moved_goes_to_its_database(storage: Store) -> None:
    handle = leave_two(storage)
    moved = storage.local_path().rename(storage.local_path().with_name("moved"))
    assert Delivery(spool_dir(Store.open(moved)), f"sqlite:///{moved}/mlflow.db").deliver()
    assert sorted(run.info.run_name for run in runs(f"sqlite:///{moved}/mlflow.db")) == ["first", "second"]
    assert not Path(handle.spool_dir).exists()


@pytest.mark.parametrize("fault", ["owner", "mode", "link", "token", "root"])
def test_a_session_that_others_own_or_may_write_is_named_and_left(
    storage: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, fault: str
) -> None:
    planted = _planted(storage, {"token": "../../out"} if fault == "token" else {})
    if fault == "link":
        planted.rename(tmp_path / "elsewhere")
        planted.symlink_to(tmp_path / "elsewhere")
    elif fault in ("mode", "root"):
        (planted if fault == "mode" else planted.parent).chmod(0o770)
    elif fault == "owner":
        lstat = Path.lstat
        changed = {planted: os.stat_result((0o40700, 1, 1, 1, os.geteuid() + 1, 0, 0, 0, 0, 0))}
        monkeypatch.setattr(Path, "lstat", lambda path: changed.get(path) or lstat(path))
    uri = tracking_uri(TrackingConfig(), storage)
    assert Delivery(spool_dir(storage), uri).deliver()
    assert runs(uri) == []
    assert fault == "token" or "it is another user's, or others can write it" in caplog.text
    assert not (storage.local_path() / "out.run").exists()
    if fault == "root":
        with pytest.raises(PermissionError):
            Session.create(planted.parent, {})


def test_every_user_of_a_storage_has_a_private_spool_in_a_folder_that_is_as_open_as_the_storage(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("trainflow.tasks.tracking.mlflow_run.Shipper", _NoShipper)
    storage = Store.open(tmp_path / "shared")
    (tmp_path / "shared").mkdir()
    (tmp_path / "shared").chmod(0o2770)
    start(storage, "mine")
    folder = tmp_path / "shared" / "spool"
    assert stat.S_IMODE(folder.stat().st_mode) == 0o3770, "sticky: nobody takes away what is another's"
    assert [path.stat().st_mode & 0o777 for path in folder.iterdir()] == [0o700]
    with monkeypatch.context() as patch:
        patch.setattr(os, "geteuid", lambda: 4242)
        assert spool_dir(storage).name == "4242"
        assert find_waiting(storage) is None, "what waits is said to its owner"


def test_what_another_server_never_took_costs_a_later_command_a_few_seconds(
    storage: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:  # it takes connections and never answers
        with monkeypatch.context() as patch:
            patch.setenv("MLFLOW_TRACKING_URI", f"http://me:s3cret@127.0.0.1:{listener.getsockname()[1]}")
            start(storage, "old").finish("FINISHED")
        monkeypatch.setattr("trainflow.tasks.tracking.mlflow_run.Shipper", Shipper)
        mlflow_client.load()  # what is measured below is the server's time
        monkeypatch.setenv("MLFLOW_HTTP_REQUEST_TIMEOUT", "8")
        background = deliver_waiting(TrackingConfig(), storage)
        assert background is not None
        began = time.monotonic()
        assert not background.complete()
        assert time.monotonic() - began < 3 + 3  # one answer is waited for, and a busy machine
    run = start(storage, "new")
    run.log_metrics({"loss": 1.0}, 1)
    run.finish("FINISHED")
    assert statuses(run.handle) == {"new": "FINISHED"}
    assert str(find_waiting(storage)) == "the end of 1 run"


# -- whole pipelines --------------------------------------------------------------------------------------------------
@pytest.fixture
def away(folder: Path) -> Iterator[Any]:
    """A function that takes MLflow's database away, or gives it back."""
    database = folder / "store" / "mlflow.db"

    def switch(gone: bool) -> None:
        if gone:
            database.rename(database.with_suffix(".away"))
            database.mkdir()  # nothing can be opened there
        else:
            database.rmdir()
            database.with_suffix(".away").rename(database)

    yield switch
    with contextlib.suppress(OSError):
        switch(False)


def uri(folder: Path) -> str:
    return f"sqlite:///{folder / 'store' / 'mlflow.db'}"


def test_a_run_without_mlflow_is_delivered_whole_by_the_next_one_which_finds_everything_cached(
    folder: Path, away: Any, caplog: pytest.LogCaptureFixture
) -> None:
    settings = ("tracking.enabled=true", "train.args.learning_rate=1e-2")
    away(True)
    first = run(folder, *settings)
    assert ran(first) == ALL - {"prepare-data"}
    assert first.mlflow_run_id is None
    assert "1 run (" in (first.mlflow_waiting or "")
    assert len([record for record in caplog.records if "MLflow" in record.getMessage()]) == 1
    away(False)
    again = run(folder, *settings)
    assert ran(again) == set()
    assert again.mlflow_waiting is None
    whole, late = runs(uri(folder))
    assert again.mlflow_run_id == late.info.run_id
    assert late.info.status == "FINISHED"
    for key in (name for name in whole.data.metrics if not name.startswith("system/")):  # the machine's load is sampled
        late_steps, steps = ([step for step, _ in points(uri(folder), each.info.run_id, key)] for each in (late, whole))
        assert late_steps == steps, key
    assert "report.html" in {path.name for path in Path(late.info.artifact_uri.removeprefix("file://")).iterdir()}
    connected = client(uri(folder))
    # Models of both runs have the same names.
    models = connected.search_logged_models([late.info.experiment_id])
    late_ones = [each for each in models if each.source_run_id == late.info.run_id]
    assert sorted(each.name for each in late_ones) == ["checkpoint-4", "checkpoint-8", "toy"]
    mine = {each.name: each for each in late_ones}
    assert all(str(each.status) == "READY" for each in mine.values())
    linked = {(each.key, each.step) for each in connected.get_logged_model(mine["toy"].model_id).metrics}
    assert ("test/error", 8) in linked
    assert late.data.tags["trainflow.published_url"]
    assert len(run(folder, *settings).to_dict()["stages"]) == 5
    assert len(runs(uri(folder))) == 2


def test_sync_delivers_by_itself(folder: Path, away: Any, cli: Cli) -> None:
    settings = ("tracking.enabled=true", "predict.rows_per_file=7")
    away(True)
    assert run(folder, *settings).mlflow_waiting
    refused = cli("sync", "pipeline.yaml", cwd=folder)
    assert refused.code == 14
    assert "still waits for MLflow" in refused.err
    assert "Traceback" not in refused.err
    away(False)
    done = cli("sync", "pipeline.yaml", "--json", cwd=folder)
    assert (done.code, json.loads(done.out)["ok"]) == (0, True), done.err
    assert [each.info.status for each in runs(uri(folder))] == ["FINISHED", "FINISHED"]
    assert run(folder, *settings).mlflow_waiting is None


# -- signals while a run closes ---------------------------------------------------------------------------------------
def test_signals_while_the_run_closes_neither_stop_it_nor_make_another_run(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.rmtree(folder / "store" / "stages" / "predict")
    left = {RunRecord._write_report: signal.SIGINT, TrackedRun.finish: signal.SIGTERM}

    def signalled(method: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **options: Any) -> Any:
            if number := left.pop(method, None):
                os.kill(os.getpid(), number)
            return method(*args, **options)

        return call

    with monkeypatch.context() as patch, stoppable(lambda _: None, remedy="") as stop:
        patch.setattr(RunRecord, "_write_report", signalled(RunRecord._write_report))
        patch.setattr(TrackedRun, "finish", signalled(TrackedRun.finish))
        result = succeeded(folder, "tracking.enabled=true", on_closing=stop.come_too_late)
    assert (ran(result), left) == ({"predict"}, {})
    [record] = [json.loads(path.read_text()) for path in folder.glob("store/runs/*/run.json")]
    assert record["status"] == "FINISHED"
    run(folder, "tracking.enabled=true").raise_for_error()
    assert [each.info.status for each in runs(uri(folder))] == ["FINISHED", "FINISHED"]
