"""Databases that MLflow makes and those that are copied for it."""

from __future__ import annotations

import sqlite3
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from tests.support import mlflow_store
from trainer_lib.trackers import database_lock, mlflow_client


def _run(database: Path, *statements: str) -> list[Any]:
    with closing(sqlite3.connect(database)) as connection, connection:
        return [connection.execute(each).fetchall() for each in statements][-1]


def test_the_second_database_of_mlflow_is_a_copy_that_differs_in_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    first, second = tmp_path / "a" / "mlflow.db", tmp_path / "b" / "mlflow.db"
    mlflow_client.connect(f"sqlite:///{first}")
    client = mlflow_store.client(f"sqlite:///{second}")
    assert database_lock.DATABASES.template().exists()
    schema = "SELECT type, name, sql FROM sqlite_master ORDER BY type, name"
    assert _run(first, schema) == _run(second, schema)
    filled = "SELECT * FROM alembic_version UNION SELECT name FROM workspaces UNION SELECT name FROM experiments"
    assert _run(first, filled) == _run(second, filled)
    assert client.create_run(client.create_experiment("one")).info.run_id
