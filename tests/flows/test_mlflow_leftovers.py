"""What earlier runs left in the spool, and what a person deleted: neither keeps other runs from their server."""

from __future__ import annotations

import socket
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tasks.configs import TrackingConfig
from tasks.tracking import RunHandle, TrackedRun, deliver_waiting, find_waiting, open_run
from tests.support.mlflow_store import client, fresh_store, points, runs
from trainer_lib.errors import StorageError, StoreUnreachableError
from trainer_lib.storage import Store
from trainer_lib.trackers import mlflow_client
from trainer_lib.trackers.delivery import Delivery
from trainer_lib.trackers.shipper import Shipper
from trainer_lib.trackers.spool import Session

KEY = "k" * 64


@pytest.fixture
def storage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Store:
    fresh_store(tmp_path / "storage")
    # The threads of the runs stay out of the way: the tests deliver.
    monkeypatch.setattr("tasks.tracking.Shipper", _NoShipper)
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


@pytest.mark.parametrize("stuck", ["send_file", "send_points"])
def test_a_run_that_the_server_does_not_take_holds_back_no_other(
    storage: Store, monkeypatch: pytest.MonkeyPatch, stuck: str
) -> None:
    handle = leave_two(storage)
    real: Callable[..., None] = getattr(mlflow_client, stuck)

    def refuse(server: Any, run_id: str, *rest: Any) -> None:
        if server.get_run(run_id).info.run_name == "first":
            raise ImportError("No module named 'boto3'")
        real(server, run_id, *rest)

    with monkeypatch.context() as patch:
        patch.setattr(mlflow_client, stuck, refuse)
        with pytest.raises(Exception, match="boto3"):
            delivery(handle).deliver()
    assert statuses(handle)["second"] == "FINISHED"
    assert str(find_waiting(storage)).startswith("1 run (")
    assert delivery(handle).deliver()
    assert statuses(handle) == {"first": "FINISHED", "second": "FINISHED"}
    assert find_waiting(storage) is None


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


# -- files ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("error", [StoreUnreachableError, StorageError])
def test_a_model_whose_storage_is_away_is_sent_later(
    storage: Store, monkeypatch: pytest.MonkeyPatch, error: type[StorageError]
) -> None:
    storage.write_bytes("model/model.safetensors", b"weights")
    run = start(storage)
    run.log_folder(storage.child("model"), "model")
    run.finish("FINISHED")

    def away(_: Store, rel: str = "") -> Any:
        raise error("Could not list it: no credentials.", field="s3://b/model", remedy="Give credentials.")

    with monkeypatch.context() as patch:
        patch.setattr(Store, "list", away)
        with pytest.raises(Exception, match="Could not list it"):
            delivery(run.handle).deliver()
    assert statuses(run.handle) == {"digits": "FINISHED"}  # a storage that is away leaves no run open
    assert str(find_waiting(storage)) == "1 run (1 file)"
    assert delivery(run.handle).deliver()
    assert [path.read_bytes() for path in storage.local_path("mlartifacts").rglob("*.safetensors")] == [b"weights"]


# -- a run that a person deleted --------------------------------------------------------------------------------------


def purge(uri: str, run_id: str) -> None:
    """Remove a deleted run from the database, as `mlflow gc` does."""
    from mlflow.store.tracking import sqlalchemy_store

    module: Any = sqlalchemy_store
    module.SqlAlchemyStore(uri, str(Path(uri.removeprefix("sqlite:///")).parent))._hard_delete_run(run_id)


@pytest.mark.parametrize("is_purged", [False, True])
def test_a_failed_run_that_was_deleted_gets_a_new_one_under_its_token(storage: Store, *, is_purged: bool) -> None:
    first = start(storage)
    first.log_metrics({"loss": 1.0}, 1)
    first.finish("FAILED")
    assert delivery(first.handle).deliver()
    deleted = first.handle.run_id or ""
    client(first.handle.tracking_uri).delete_run(deleted)
    if is_purged:
        purge(first.handle.tracking_uri, deleted)

    for ending in ("FAILED", "FINISHED"):
        again = start(storage, token=first.handle.token)
        again.log_metrics({"loss": 0.5}, 2)
        again.finish(ending)
        assert delivery(again.handle).deliver()
    assert again.handle.run_id != deleted
    assert statuses(again.handle) == {"digits": "FINISHED"}
    assert points(again.handle.tracking_uri, again.handle.run_id or "", "loss") == [(2, 0.5)]
    assert find_waiting(storage) is None


def test_an_experiment_that_was_deleted_is_restored_and_its_run_goes_on(
    storage: Store, caplog: pytest.LogCaptureFixture
) -> None:
    first = start(storage)
    first.log_metrics({"loss": 1.0}, 1)
    first.finish("FAILED")
    assert delivery(first.handle).deliver()
    client(first.handle.tracking_uri).delete_experiment(first.handle.experiment_id)

    again = start(storage, token=first.handle.token)
    again.log_metrics({"loss": 0.5}, 2)
    again.finish("FINISHED")
    assert delivery(again.handle).deliver()
    [run] = runs(again.handle.tracking_uri)
    assert (run.info.run_id, run.info.status) == (first.handle.run_id, "FINISHED")
    assert points(again.handle.tracking_uri, run.info.run_id, "loss") == [(1, 1.0), (2, 0.5)]
    assert "The MLflow experiment digits was deleted. It is restored with its runs" in caplog.text


@pytest.mark.parametrize("metrics", [{}, {"loss": 2.0}, {"loss": 2.0, "accuracy": 1.0}])
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
        session.append({"loss": 1 / step}, step)
    time.sleep(0.01)  # what another machine logs next is later


@pytest.mark.parametrize("delivered", [0, 50])
def test_points_that_arrive_after_those_of_the_machine_that_went_on_are_there_once(
    tmp_path: Path, delivered: int
) -> None:
    """The first machine is preempted at step 100 with a checkpoint at 90; the second one trains from there to 200."""
    uri = fresh_store(tmp_path)
    run_id = client(uri).create_run("0").info.run_id
    head = {"tracking_uri": uri, "run_id": run_id, "dedupe": True}
    first, second = (Session.create(tmp_path / name, head) for name in ("first", "second"))
    log(first, range(1, delivered + 1))
    if delivered:
        assert Delivery(first.path.parent).deliver()
    log(first, range(delivered + 1, 101))
    first.close()
    log(second, range(91, 201))
    second.close()
    assert Delivery(second.path.parent).deliver()
    assert Delivery(first.path.parent).deliver()
    assert points(uri, run_id, "loss") == [(step, 1 / step) for step in range(1, 201)]
    assert not list(tmp_path.glob("*/*-*"))


# -- what cannot be delivered from here -------------------------------------------------------------------------------


def test_a_session_that_cannot_be_read_is_named_once_and_holds_back_no_other(
    storage: Store, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    handle = leave_two(storage)
    blocked = sorted(Path(handle.spool_dir).glob("*-*"))[0]
    real = Path.read_bytes

    def refuse(path: Path) -> bytes:  # the tests may run as root, to whom no folder is closed
        if path.parent == blocked:
            raise PermissionError(13, "Permission denied", str(path))
        return real(path)

    monkeypatch.setattr(Path, "read_bytes", refuse)
    assert delivery(handle).deliver()
    assert find_waiting(storage) is None
    assert statuses(handle) == {"second": "FINISHED"}
    assert [record.getMessage() for record in caplog.records].count(
        f"What {blocked} holds for MLflow is left there; it cannot be read: Permission denied"
    ) == 1
    assert blocked.is_dir()


@pytest.fixture
def silent_server() -> Iterator[str]:
    """A server that takes connections and never answers."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        yield f"http://me:s3cret@127.0.0.1:{listener.getsockname()[1]}"


@pytest.mark.parametrize("has_password", [True, False])
def test_what_another_server_never_took_costs_a_later_command_a_few_seconds(
    storage: Store, monkeypatch: pytest.MonkeyPatch, silent_server: str, *, has_password: bool
) -> None:
    with monkeypatch.context() as patch:
        patch.setenv("MLFLOW_TRACKING_URI", silent_server if has_password else silent_server.replace("me:s3cret@", ""))
        start(storage, "old").finish("FINISHED")
    monkeypatch.setattr("tasks.tracking.Shipper", Shipper)
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
