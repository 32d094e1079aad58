"""An MLflow server that is away, slow or loses answers: it costs no time, and gets everything once, in order."""

from __future__ import annotations

import dataclasses
import json
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from tests.support.launched import wait_until
from tests.support.mlflow_proxy import Proxy, mlflow_server
from tests.support.mlflow_store import client, points, runs
from trainer_lib.storage import Store
from trainer_lib.trackers.mlflow import delivery, mlflow_client
from trainer_lib.trackers.mlflow.delivery import Delivery
from trainer_lib.trackers.mlflow.tracker import MLflowTracker
from trainflow.tasks.configs import TrackingConfig
from trainflow.tasks.tracking.mlflow_run import TrackedRun, deliver_waiting, find_waiting, open_run, spool_dir

PATIENCE_S = 5 + 3  # a second for each of five stages, and what a busy machine adds


class Scene:
    """A server behind a proxy, a storage, and what a pipeline does there. `database` is the server's."""

    def __init__(self, database: str, proxy: Proxy, folder: Path) -> None:
        self.database, self.proxy, self.storage = database, proxy, Store.open(folder / "storage")
        self.storage.write_bytes("model/model.safetensors", bytes(5000))
        self.storage.write_bytes("model/tokenizer/vocab.txt", b"a b c")

    def start(self, name: str, *, connected: bool = False, storage: Store | None = None, **more: Any) -> TrackedRun:
        """Open a run; `connected`: wait until the server has it."""
        given = {"name": name, "pipeline_key": "k" * 64, "params": {"lr": 0.1}, "resume": True, **more}
        run = open_run(TrackingConfig(), storage or self.storage, **given)
        assert run is not None
        while connected and run.handle.run_id is None:
            time.sleep(0.02)
        return run

    def log_whole(self, run: TrackedRun, steps: range = range(1, 91)) -> None:
        """Log what a pipeline logs: a curve from the worker, then its stages' results and files."""
        tracker = worker(run, steps[0] - 1)
        log(tracker, steps)
        tracker.close()
        run.log_metrics({"train/loss": 1 / steps[-1], "test_error": 0.25}, steps[-1], time_ms=1_700_000_000_000)
        for info in self.storage.list("model"):
            run.log_file(self.storage.read_bytes(info.path), info.path)
        run.set_tags({"trainflow.train": "abc"})
        run.log_file("<html>", "report.html")

    def run_while_away(self, name: str) -> TrackedRun:
        """Log a whole run that the server does not hear of, and let it be there again."""
        self.proxy.behave("refuse")
        run = self.start(name)
        self.log_whole(run)
        finish(run)
        self.proxy.behave("ok")
        return run

    def deliver(self) -> None:
        """Deliver what waits, as the next command does."""
        if (background := deliver_waiting(TrackingConfig(), self.storage)) is not None:
            assert background.complete()
        assert find_waiting(self.storage) is None

    def found(self, name: str) -> Any:
        """Return the only run of that name."""
        [run] = [run for run in runs(self.database) if run.info.run_name == name]
        return run

    def check_whole(self, name: str, status: str = "FINISHED") -> None:
        """Check that the run is there once, with every point, tag, parameter and file, and its end."""
        run = self.found(name)
        run_id = run.info.run_id
        assert run.info.status == status
        assert points(self.database, run_id, "train/loss") == curve(range(1, 91))
        assert points(self.database, run_id, "test_error") == [(90, 0.25)]
        times = [point.timestamp for point in client(self.database).get_metric_history(run_id, "train/loss")]
        assert times == sorted(times)
        assert run.data.params == {"lr": "0.1"}
        assert run.data.tags["trainflow.train"] == "abc"
        root = Path(self.database.removeprefix("sqlite:///")).parent / "artifacts" / run.info.experiment_id / run_id
        files = {str(path.relative_to(root / "artifacts")): path.read_bytes() for path in root.rglob("*.*")}
        model = {"model/model.safetensors": bytes(5000), "model/tokenizer/vocab.txt": b"a b c"}
        assert files == {**model, "report.html": b"<html>"}


def worker(run: TrackedRun, resume_step: int = 0, handle: Any = None) -> MLflowTracker:
    """A tracker as the worker of a run has it."""
    with mock.patch.dict(os.environ, (handle or run.handle).worker_env()):
        tracker = MLflowTracker(None)
        tracker.start(run_name=None, params={}, resume_step=resume_step)
    return tracker


def log(tracker: MLflowTracker, steps: range) -> None:
    for step in steps:
        tracker.log({"loss": 1 / step}, step)


def curve(steps: range) -> list[tuple[int, float]]:
    return [(step, 1 / step) for step in steps]


def finish(run: TrackedRun, status: str = "FINISHED") -> None:
    """End the run of a pipeline of five stages, which takes little time."""
    began = time.monotonic()
    run.finish(status, stages=5)
    assert time.monotonic() - began < PATIENCE_S


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[int, str]]:
    """The port of a real server, and the address of its database."""
    folder = tmp_path_factory.mktemp("mlflow")
    with mlflow_server(folder) as port:
        yield port, f"sqlite:///{folder / 'mlflow.db'}"


@pytest.fixture
def scene(server: tuple[int, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Scene]:
    monkeypatch.setattr(delivery, "POLL_S", 0.05)
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_TIMEOUT", "3")
    mlflow_client.load()  # what is measured below is the server's time
    with Proxy(server[0]) as proxy:
        monkeypatch.setenv("MLFLOW_TRACKING_URI", proxy.uri)
        yield Scene(server[1], proxy, tmp_path)


@pytest.mark.parametrize(
    ("mode", "status", "waits"),
    [
        ("ok", "FINISHED", "None"),
        ("refuse", "FAILED", "1 run (92 points, 3 files)"),
        ("delay", "FINISHED", "1 run (92 points, 3 files)"),
    ],
)
def test_a_server_out_of_reach_costs_nothing_and_gets_everything_later_and_one_in_reach_at_the_end(
    scene: Scene, mode: str, status: str, waits: str
) -> None:
    scene.proxy.behave(mode)
    began = time.monotonic()
    run = scene.start(mode)
    scene.log_whole(run)
    assert time.monotonic() - began < 3  # on a busy machine; nothing is waited for
    finish(run, status)
    assert str(find_waiting(scene.storage)) == waits
    if mode == "ok":
        assert (run.handle.ui_url() or "").startswith(f"{scene.proxy.uri}/#/experiments/")
    scene.proxy.behave("ok")
    time.sleep(3 if mode == "delay" else 0.1)  # requests of before are answered
    scene.deliver()
    scene.check_whole(mode, status)


@pytest.mark.parametrize("only", ["runs/create", "runs/log-batch", "runs/update", "artifacts/", "experiments/create"])
def test_an_answer_that_is_lost_doubles_nothing(scene: Scene, only: str) -> None:
    name = f"lost-{only.replace('/', '-')}"
    scene.proxy.behave("cut", only=only)
    run = scene.start(name)
    scene.log_whole(run)
    run.finish("FINISHED", stages=5)
    assert [line for line in scene.proxy.requests if only in line]
    # The next look finds what arrived, so only this may be left: nothing.
    assert find_waiting(scene.storage) is None or only != "runs/create"
    scene.proxy.behave("ok")
    scene.deliver()
    scene.check_whole(name)


def test_points_that_arrived_without_an_answer_are_not_sent_again(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not every server drops a point that it has already."""
    sent: list[int] = []
    real = mlflow_client.send_points

    def send(client: Any, run_id: str, points: list[mlflow_client.Point]) -> None:
        sent.append(len(points))
        real(client, run_id, points)

    monkeypatch.setattr(mlflow_client, "send_points", send)
    run = scene.start("asked", connected=True)
    scene.proxy.behave("cut", only="runs/log-batch")
    tracker = worker(run)
    log(tracker, range(1, 6))
    wait_until(lambda: sent)
    scene.proxy.behave("ok")
    tracker.close()
    run.finish("FINISHED", stages=5)
    assert sum(sent) == 5


def test_a_request_that_arrives_after_it_was_repeated_doubles_nothing(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The server accepts it when the client has long given up, and has already sent the points again."""
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_TIMEOUT", "1")
    scene.proxy.delay_s = 4.0
    run = scene.start("late-request", connected=True)
    run_id = str(run.handle.run_id)
    scene.proxy.requests.clear()
    scene.proxy.behave("delay", only="runs/log-batch")
    tracker = worker(run)
    log(tracker, range(1, 4))
    for value in (0.25, 0.25, 0.5):
        time.sleep(0.005)  # another time of the same result
        run.log_metrics({"test_error": value}, 3)
    wait_until(lambda: [line for line in scene.proxy.requests if "runs/log-batch" in line])
    scene.proxy.behave("ok")
    wait_until(lambda: points(scene.database, run_id, "test_error"))
    tracker.close()
    run.finish("FINISHED", stages=5)
    scene.deliver()
    time.sleep(scene.proxy.delay_s + 1)  # now the first request has arrived, too
    assert points(scene.database, run_id, "train/loss") == curve(range(1, 4))
    assert points(scene.database, run_id, "test_error") == [(3, 0.25), (3, 0.5)]


def test_a_password_is_in_no_file_and_in_no_log_and_comes_from_the_environment(
    scene: Scene, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_URI", scene.proxy.uri.replace("http://", "http://me:s3cret@"))
    scene.run_while_away("masked")
    files = [path.read_bytes() for path in spool_dir(scene.storage).rglob("*") if path.is_file()]
    assert b"s3cret" not in b"".join(files)
    with monkeypatch.context() as patch:
        patch.delenv("MLFLOW_TRACKING_URI")
        delivery = Delivery(spool_dir(scene.storage))
        assert not delivery.deliver()
        assert "set MLFLOW_TRACKING_URI" in (delivery.obstacle or "")
    scene.deliver()
    assert "s3cret" not in caplog.text
    scene.check_whole("masked")


def test_what_a_full_disk_or_a_crash_left_in_a_spool_stops_no_delivery_and_goes(scene: Scene) -> None:
    run = scene.run_while_away("torn")
    spool = spool_dir(scene.storage)
    for session in spool.glob("*-*"):
        with (session / "points.jsonl").open("ab") as file:
            file.write(b'{"t": 17000000')  # half a line
        (session / "state.json").write_bytes(b"")  # emptied by a power failure
        (session / "session.json.123-456").write_bytes(b'{"tracki')
    unreadable = spool / "00000000000000000002-1-abcd"
    # Half made; unreadable; set aside longer than a month ago.
    for folder in (spool / "00000000000000000001-1-abcd", unreadable, spool / "00000000000000000003-1-abcd.damaged"):
        folder.mkdir()
    (unreadable / "session.json").write_bytes(b"")
    scene.deliver()
    scene.check_whole("torn")
    assert [path.name for path in spool.iterdir() if path.is_dir()] in ([], [f"{unreadable.name}.damaged"])
    assert json.loads((spool / f"{run.handle.token}.run").read_text())["run_id"] == run.handle.run_id


def test_a_file_that_is_gone_when_it_is_delivered_is_named_and_stops_nothing(
    scene: Scene, caplog: pytest.LogCaptureFixture
) -> None:
    scene.run_while_away("gone")
    for kept in spool_dir(scene.storage).glob("*/files/*"):
        kept.unlink()
    scene.deliver()
    assert "model/model.safetensors is not logged to MLflow" in caplog.text
    assert scene.found("gone").info.status == "FINISHED"


def test_a_worker_on_another_machine_delivers_its_points_by_itself(scene: Scene, tmp_path: Path) -> None:
    run = scene.start("far", connected=True)
    run_id = str(run.handle.run_id)
    tracker = worker(run, handle=dataclasses.replace(run.handle, host="another", spool_dir=str(tmp_path / "far")))
    log(tracker, range(1, 2))
    wait_until(lambda: points(scene.database, run_id, "train/loss"))
    tracker.close()
    finish(run)
    assert points(scene.database, run_id, "train/loss") == [(1, 1.0)]


def test_a_run_taken_up_on_another_machine_keeps_its_end(scene: Scene, tmp_path: Path) -> None:
    """The first machine could not deliver its failure; the second one has finished the run meanwhile."""
    scene.proxy.behave("refuse")
    first = scene.start("moved")
    first.log_metrics({"loss": 1.0}, 1)
    finish(first, "FAILED")
    scene.proxy.behave("ok")
    second = scene.start("moved", storage=Store.open(tmp_path / "second"), token=first.handle.token)
    second.log_metrics({"loss": 0.5}, 2)
    finish(second)
    scene.deliver()
    run = scene.found("moved")
    assert run.info.status == "FINISHED"
    assert points(scene.database, run.info.run_id, "loss") == [(1, 1.0), (2, 0.5)]
