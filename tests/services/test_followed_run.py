"""The metrics of followed checkpoints in a real MLflow database: in the training's run, each point once."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tasks.configs import TrackingConfig
from tasks.follow.evaluations import Evaluation
from tasks.follow.points import RunPoints
from tasks.tracking import TrackedRun, find_waiting, open_run
from tests.support.mlflow_store import fresh_store, points, runs
from trainer_lib.storage import Store
from trainer_lib.trackers import shipper
from trainer_lib.trackers.mlflow import MLflowTracker


@pytest.fixture
def uri(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setattr(shipper, "POLL_S", 0.05)
    uri = fresh_store(tmp_path / "mlflow")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", uri)
    return uri


@pytest.fixture
def storage(tmp_path: Path) -> Store:
    return Store.open(tmp_path / "storage")


@pytest.fixture
def run(uri: str, storage: Store) -> Iterator[TrackedRun]:
    run = open_run(TrackingConfig(), storage, name="toy", pipeline_key="k" * 64, params={}, resume=True)
    assert run is not None
    yield run
    run.finish("FINISHED")


def evaluation(step: int, loss: float) -> Evaluation:
    metrics = {"eval_loss": loss, "eval_runtime": 0.1, "epoch": step / 4}
    return Evaluation(f"checkpoint-{step}", step, "c" * 64, metrics, 1_700_000_000_000 + step, 0.1)


def log(run: TrackedRun, *evaluations: Evaluation) -> None:
    followed = RunPoints(run.handle)
    for each in evaluations:
        assert followed.log(each)
    followed.close()


def test_points_join_the_run_once_also_out_of_order_and_after_its_end(
    run: TrackedRun, uri: str, storage: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        for name, value in run.handle.worker_env().items():
            patch.setenv(name, value)
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


def test_a_tracker_that_is_away_costs_nothing_and_gets_everything_later(
    run: TrackedRun, uri: str, storage: Store, monkeypatch: pytest.MonkeyPatch
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
