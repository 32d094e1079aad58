"""A real MLflow database for each test, without paying for its migrations each time."""

from __future__ import annotations

import contextlib
import functools
import sqlite3
import tempfile
from pathlib import Path
from typing import Any

from trainer_lib.trackers.mlflow.mlflow_client import connect


@functools.cache
def _migrated() -> bytes:
    with tempfile.TemporaryDirectory() as folder:
        database = Path(folder) / "mlflow.db"
        connect(f"sqlite:///{database}")
        return database.read_bytes()


def fresh_store(folder: Path) -> str:
    """The tracking URI of a new, empty database in `folder`, with the experiment "Default" and artifacts beside it."""
    folder.mkdir(parents=True, exist_ok=True)
    database = folder / "mlflow.db"
    database.write_bytes(_migrated())
    # The first database had its artifacts where its test was at work.
    with contextlib.closing(sqlite3.connect(database)) as changing, changing:
        changing.execute("UPDATE experiments SET artifact_location = ?", (str(folder / "mlruns" / "0"),))
    return f"sqlite:///{database}"


def client(uri: str) -> Any:
    return connect(uri)


def runs(uri: str) -> list[Any]:
    one = connect(uri)
    experiments = [experiment.experiment_id for experiment in one.search_experiments()]
    return list(one.search_runs(experiments, order_by=["attributes.start_time ASC"]))


def points(uri: str, run_id: str, key: str) -> list[tuple[int, float]]:
    """(step, value) of every point of a metric, in order of step."""
    return sorted((point.step, point.value) for point in connect(uri).get_metric_history(run_id, key))
