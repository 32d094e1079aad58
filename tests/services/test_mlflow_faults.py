"""An MLflow server that is away, slow, hangs or loses answers: it costs no time, and gets everything once, in order."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tasks.configs import TrackingConfig
from tasks.tracking import TrackedRun, deliver_waiting, find_waiting, open_run, spool_dir
from tests.support.mlflow_proxy import Proxy, mlflow_server
from tests.support.mlflow_store import client, points, runs
from trainer_lib.storage import Store
from trainer_lib.trackers import mlflow_client, shipper
from trainer_lib.trackers.delivery import Delivery
from trainer_lib.trackers.mlflow import MLflowTracker

KEY = "k" * 64
PATIENCE_S = 5 + 3  # a second for each of five stages, and what a busy machine adds


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[int, str]]:
    """The port of a real server, and the address of its database."""
    folder = tmp_path_factory.mktemp("mlflow")
    with mlflow_server(folder) as port:
        yield port, f"sqlite:///{folder / 'mlflow.db'}"


@pytest.fixture
def proxy(server: tuple[int, str], monkeypatch: pytest.MonkeyPatch) -> Iterator[Proxy]:
    monkeypatch.setattr(shipper, "POLL_S", 0.05)
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_TIMEOUT", "3")
    mlflow_client.load()  # what is measured below is the server's time
    with Proxy(server[0]) as proxy:
        monkeypatch.setenv("MLFLOW_TRACKING_URI", proxy.uri)
        yield proxy


@pytest.fixture
def storage(tmp_path: Path) -> Store:
    store = Store.open(tmp_path / "storage")
    store.write_bytes("model/model.safetensors", bytes(5000))
    store.write_bytes("model/tokenizer/vocab.txt", b"a b c")
    return store


def start(storage: Store, name: str, **more: object) -> TrackedRun:
    run = open_run(
        TrackingConfig(),
        storage,
        name=name,
        pipeline_key=KEY,
        params={"lr": 0.1},
        resume=True,
        **more,  # type: ignore[arg-type]
    )
    assert run is not None
    return run


def log_whole(run: TrackedRun, storage: Store, monkeypatch: pytest.MonkeyPatch, steps: range = range(1, 91)) -> None:
    """Log what a pipeline logs: a curve from the worker, then its stages' results and files."""
    with monkeypatch.context() as patch:
        for name, value in run.handle.worker_env().items():
            patch.setenv(name, value)
        tracker = MLflowTracker(None)
        tracker.start(run_name=None, params={}, resume_step=steps[0] - 1)
        for step in steps:
            tracker.log({"loss": 1 / step}, step)
        tracker.close()
    run.log_metrics({"train/loss": 1 / steps[-1], "test_error": 0.25}, steps[-1], time_ms=1_700_000_000_000)
    for info in storage.list("model"):
        run.log_file(storage.read_bytes(info.path), info.path)
    run.set_tags({"trainflow.train": "abc"})
    run.log_file("<html>", "report.html")


def finish(run: TrackedRun, status: str = "FINISHED") -> float:
    """End the run of a pipeline of five stages; return the seconds that this took."""
    began = time.monotonic()
    run.finish(status, stages=5)
    return time.monotonic() - began


def deliver(storage: Store) -> None:
    """Deliver what waits, as the next command does."""
    if (background := deliver_waiting(TrackingConfig(), storage)) is not None:
        assert background.complete()
    assert find_waiting(storage) is None


def check_whole(server: tuple[int, str], name: str, status: str = "FINISHED") -> None:
    """Check that the run is there once, with every point, tag, parameter and file, and its end."""
    database = server[1]
    [run] = [each for each in runs(database) if each.info.run_name == name]
    assert run.info.status == status
    assert points(database, run.info.run_id, "train/loss") == [(step, 1 / step) for step in range(1, 91)]
    assert points(database, run.info.run_id, "test_error") == [(90, 0.25)]
    times = [each.timestamp for each in client(database).get_metric_history(run.info.run_id, "train/loss")]
    assert times == sorted(times)
    assert run.data.params == {"lr": "0.1"}
    assert run.data.tags["trainflow.train"] == "abc"
    artifacts = (
        Path(database.removeprefix("sqlite:///")).parent / "artifacts" / run.info.experiment_id / run.info.run_id
    )
    found = {str(path.relative_to(artifacts / "artifacts")): path.read_bytes() for path in artifacts.rglob("*.*")}
    assert found == {
        "model/model.safetensors": bytes(5000),
        "model/tokenizer/vocab.txt": b"a b c",
        "report.html": b"<html>",
    }


def test_a_server_that_answers_has_everything_when_the_run_ends(
    server: tuple[int, str], proxy: Proxy, storage: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = start(storage, "well")
    log_whole(run, storage, monkeypatch)
    assert finish(run) < PATIENCE_S
    assert find_waiting(storage) is None
    check_whole(server, "well")
    assert (run.handle.ui_url() or "").startswith(f"{proxy.uri}/#/experiments/")


@pytest.mark.parametrize("mode", ["refuse", "hang", "delay"])
def test_a_server_out_of_reach_from_the_beginning_costs_nothing_and_gets_everything_later(
    server: tuple[int, str], proxy: Proxy, storage: Store, monkeypatch: pytest.MonkeyPatch, mode: str
) -> None:
    proxy.behave(mode)
    began = time.monotonic()
    run = start(storage, f"late-{mode}")
    log_whole(run, storage, monkeypatch)
    assert time.monotonic() - began < 3  # on a busy machine; nothing is waited for
    assert finish(run) < PATIENCE_S
    assert str(find_waiting(storage)) == "1 run (92 points, 3 files)"
    proxy.behave("ok")
    time.sleep(0.1 if mode == "refuse" else 3)  # requests of before are answered, or end
    deliver(storage)
    check_whole(server, f"late-{mode}")


def test_a_server_that_dies_in_the_middle_gets_the_rest_and_no_run_stays_open(
    server: tuple[int, str], proxy: Proxy, storage: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = start(storage, "dies")
    while run.handle.run_id is None:
        time.sleep(0.02)
    proxy.behave("refuse")
    log_whole(run, storage, monkeypatch)
    assert finish(run, "FAILED") < PATIENCE_S
    proxy.behave("ok")
    deliver(storage)
    check_whole(server, "dies", "FAILED")


@pytest.mark.parametrize("only", ["runs/create", "runs/log-batch", "runs/update", "artifacts/", "experiments/create"])
def test_an_answer_that_is_lost_doubles_nothing(
    server: tuple[int, str], proxy: Proxy, storage: Store, monkeypatch: pytest.MonkeyPatch, only: str
) -> None:
    name = f"lost-{only.replace('/', '-')}"
    proxy.behave("cut", only=only)
    run = start(storage, name)
    log_whole(run, storage, monkeypatch)
    run.finish("FINISHED", stages=5)
    assert [line for line in proxy.requests if only in line]
    # The next look finds what arrived, so only this may be left: nothing.
    assert find_waiting(storage) is None or only != "runs/create"
    proxy.behave("ok")
    deliver(storage)
    check_whole(server, name)


def test_points_that_arrived_without_an_answer_are_not_sent_again(
    proxy: Proxy, storage: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not every server drops a point that it has already."""
    sent: list[int] = []
    real = mlflow_client.send_points

    def send(client: object, run_id: str, points: list[mlflow_client.Point]) -> None:
        sent.append(len(points))
        real(client, run_id, points)  # type: ignore[arg-type]

    monkeypatch.setattr(mlflow_client, "send_points", send)
    run = start(storage, "asked")
    while run.handle.run_id is None:
        time.sleep(0.02)
    proxy.behave("cut", only="runs/log-batch")
    with contextlib.closing(_Worker(run, monkeypatch)) as worker:
        worker.log(range(1, 6))
        while not sent:
            time.sleep(0.02)
        proxy.behave("ok")
    run.finish("FINISHED", stages=5)
    assert sum(sent) == 5


def test_a_request_that_arrives_after_it_was_repeated_doubles_nothing(
    server: tuple[int, str], proxy: Proxy, storage: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The server accepts it when the client has long given up, and has already sent the points again."""
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_TIMEOUT", "1")
    proxy.delay_s = 4.0
    run = start(storage, "late-request")
    while run.handle.run_id is None:
        time.sleep(0.02)
    database, run_id = server[1], run.handle.run_id
    proxy.requests.clear()
    proxy.behave("delay", only="runs/log-batch")
    with contextlib.closing(_Worker(run, monkeypatch)) as worker:
        worker.log(range(1, 4))
        for value in (0.25, 0.25, 0.5):
            time.sleep(0.005)  # another time of the same result
            run.log_metrics({"test_error": value}, 3)
        while not [line for line in proxy.requests if "runs/log-batch" in line]:
            time.sleep(0.02)
        proxy.behave("ok")
        while not points(database, run_id, "test_error"):
            time.sleep(0.05)
    run.finish("FINISHED", stages=5)
    deliver(storage)
    time.sleep(proxy.delay_s + 1)  # now the first request has arrived, too
    assert points(database, run_id, "train/loss") == [(step, 1 / step) for step in range(1, 4)]
    assert points(database, run_id, "test_error") == [(3, 0.25), (3, 0.5)]


class _Worker:
    def __init__(self, run: TrackedRun, monkeypatch: pytest.MonkeyPatch) -> None:
        with monkeypatch.context() as patch:
            for name, value in run.handle.worker_env().items():
                patch.setenv(name, value)
            self._tracker = MLflowTracker(None)
            self._tracker.start(run_name=None, params={}, resume_step=0)

    def log(self, steps: range) -> None:
        for step in steps:
            self._tracker.log({"loss": 1 / step}, step)

    def close(self) -> None:
        self._tracker.close()


def test_an_outage_in_the_middle_of_a_run_leaves_no_double_and_no_gap(
    server: tuple[int, str], proxy: Proxy, storage: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = start(storage, "outage")
    worker = _Worker(run, monkeypatch)
    worker.log(range(1, 31))
    while run.handle.run_id is None:
        time.sleep(0.02)
    proxy.behave("refuse")
    worker.log(range(31, 61))
    time.sleep(0.3)
    proxy.behave("ok")
    worker.close()
    log_whole(run, storage, monkeypatch, range(51, 91))  # the training was resumed at step 50
    finish(run)
    deliver(storage)
    check_whole(server, "outage")


def test_two_processes_deliver_one_spool_once(
    server: tuple[int, str], proxy: Proxy, storage: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    proxy.behave("refuse")
    run = start(storage, "two")
    log_whole(run, storage, monkeypatch)
    finish(run)
    proxy.behave("ok")
    root = Path(run.handle.spool_dir)
    first, second = shipper.Shipper(Delivery(root)), shipper.Shipper(Delivery(root))
    first.start()
    second.start()
    assert first.close(60, 60)
    assert second.close(60, 60)
    check_whole(server, "two")


def test_a_password_is_in_no_file_and_in_no_log_and_comes_from_the_environment(
    server: tuple[int, str],
    proxy: Proxy,
    storage: Store,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_URI", proxy.uri.replace("http://", "http://me:s3cret@"))
    proxy.behave("refuse")
    run = start(storage, "masked")
    log_whole(run, storage, monkeypatch)
    finish(run)
    files = [path.read_bytes() for path in spool_dir(storage).rglob("*") if path.is_file()]
    assert b"s3cret" not in b"".join(files)
    proxy.behave("ok")
    with monkeypatch.context() as patch:
        patch.delenv("MLFLOW_TRACKING_URI")
        delivery = Delivery(spool_dir(storage))
        assert not delivery.deliver()
        assert "set MLFLOW_TRACKING_URI" in (delivery.obstacle or "")
    deliver(storage)
    assert "s3cret" not in caplog.text
    check_whole(server, "masked")


def test_what_a_full_disk_or_a_crash_left_in_a_spool_stops_no_delivery_and_goes(
    server: tuple[int, str], proxy: Proxy, storage: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    proxy.behave("refuse")
    run = start(storage, "torn")
    log_whole(run, storage, monkeypatch)
    finish(run)
    spool = spool_dir(storage)
    for session in spool.glob("*-*"):
        with (session / "points.jsonl").open("ab") as file:
            file.write(b'{"t": 17000000')  # half a line
        (session / "state.json").write_bytes(b"")  # emptied by a power failure
        (session / "session.json.123-456").write_bytes(b'{"tracki')
    half_made = spool / "00000000000000000001-1-abcd.new"
    half_made.mkdir()
    unreadable = spool / "00000000000000000002-1-abcd"
    unreadable.mkdir()
    (unreadable / "session.json").write_bytes(b"")
    (spool / "00000000000000000003-1-abcd.damaged").mkdir()  # set aside longer than a month ago
    proxy.behave("ok")
    deliver(storage)
    check_whole(server, "torn")
    assert [path.name for path in spool.iterdir() if path.is_dir()] in ([], [f"{unreadable.name}.damaged"])
    assert json.loads((spool / f"{run.handle.token}.run").read_text())["run_id"] == run.handle.run_id


def test_a_file_that_is_gone_when_it_is_delivered_is_named_and_stops_nothing(
    server: tuple[int, str],
    proxy: Proxy,
    storage: Store,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    proxy.behave("refuse")
    run = start(storage, "gone")
    log_whole(run, storage, monkeypatch)
    finish(run)
    for kept in spool_dir(storage).glob("*/files/*"):
        kept.unlink()
    proxy.behave("ok")
    deliver(storage)
    assert "model/model.safetensors is not logged to MLflow" in caplog.text
    [found] = [each for each in runs(server[1]) if each.info.run_name == "gone"]
    assert found.info.status == "FINISHED"


def test_a_worker_on_another_machine_delivers_its_points_by_itself(
    server: tuple[int, str], proxy: Proxy, storage: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = start(storage, "far")
    while run.handle.run_id is None:
        time.sleep(0.02)
    far = dataclasses.replace(run.handle, host="another machine", spool_dir=str(tmp_path / "far"))
    with monkeypatch.context() as patch:
        for name, value in far.worker_env().items():
            patch.setenv(name, value)
        tracker = MLflowTracker(None)
        tracker.start(run_name=None, params={}, resume_step=0)
        tracker.log({"loss": 1.0}, 1)
        deadline = time.monotonic() + 20
        while not points(server[1], run.handle.run_id, "train/loss") and time.monotonic() < deadline:
            time.sleep(0.1)
        tracker.close()
    finish(run)
    assert points(server[1], run.handle.run_id, "train/loss") == [(1, 1.0)]


def test_a_run_taken_up_on_another_machine_keeps_its_end(
    server: tuple[int, str], proxy: Proxy, storage: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first machine could not deliver its failure; the second one has finished the run meanwhile."""
    proxy.behave("refuse")
    first = start(storage, "moved")
    first.log_metrics({"loss": 1.0}, 1)
    finish(first, "FAILED")
    proxy.behave("ok")
    second = start(Store.open(tmp_path / "second"), "moved", token=first.handle.token)
    second.log_metrics({"loss": 0.5}, 2)
    finish(second)
    deliver(storage)
    [run] = [each for each in runs(server[1]) if each.info.run_name == "moved"]
    assert run.info.status == "FINISHED"
    assert points(server[1], run.info.run_id, "loss") == [(1, 1.0), (2, 0.5)]
