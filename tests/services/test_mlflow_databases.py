"""Databases that MLflow makes and those that are copied for it."""

from __future__ import annotations

import os
import signal
import sqlite3
import sys
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy.event

from tests.support import mlflow_store
from trainer_lib.trackers import mlflow_client


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
    assert mlflow_client.DATABASES.template().exists()
    schema = "SELECT type, name, sql FROM sqlite_master ORDER BY type, name"
    assert _run(first, schema) == _run(second, schema)
    filled = "SELECT * FROM alembic_version UNION SELECT name FROM workspaces UNION SELECT name FROM experiments"
    assert _run(first, filled) == _run(second, filled)
    assert client.create_run(client.create_experiment("one")).info.run_id


def _connect_killed_before(number: int, kind: str, database: Path) -> None:
    """Connect in a process that kills itself before its nth SQL statement, or its nth step on the disk."""
    child = os.fork()
    if child == 0:
        left = [number]

        def count(*_: object) -> None:
            left[0] -= 1
            if left[0] == 0:
                os.kill(os.getpid(), signal.SIGKILL)

        if kind == "statement":
            sqlalchemy.event.listen(sqlalchemy.Engine, "before_cursor_execute", count)
        else:
            sys.addaudithook(lambda event, _: count() if event == kind else None)
        try:
            mlflow_client.connect(f"sqlite:///{database}")
        finally:
            os._exit(0)
    assert os.WIFSIGNALED(os.waitpid(child, 0)[1]), "it was not killed: choose a smaller number"


def test_a_database_whose_birth_was_killed_at_any_step_is_used_by_the_next_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    mlflow_client.load()
    database = tmp_path / "storage" / "mlflow.db"
    # Left as they were, the third and the fourth could never be used again. The rename is of the tables that are kept.
    steps = [("statement", number) for number in (1, 60, 400, 800, 1600)] + [("os.rename", 1)]
    for kind, number in steps:
        _connect_killed_before(number, kind, database)
        assert not database.exists(), (kind, number)
    assert mlflow_store.client(f"sqlite:///{database}").create_experiment("first")
    for kind in ("os.link", "os.rename"):  # now as a copy
        copied = tmp_path / kind / "mlflow.db"
        _connect_killed_before(1, kind, copied)
        assert not copied.exists()
        assert mlflow_store.client(f"sqlite:///{copied}").create_experiment("first")


def test_tables_that_were_kept_half_made_are_made_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    template = mlflow_client.DATABASES.template()
    with closing(sqlite3.connect(template)) as half, half:
        half.execute("CREATE TABLE alembic_version (version_num TEXT)")
        half.execute("INSERT INTO alembic_version VALUES ('451aebb31d03')")
    template.chmod(0o600)
    client = mlflow_store.client(f"sqlite:///{tmp_path / 'a' / 'mlflow.db'}")
    assert client.create_experiment("first")
    assert len(_run(template, "SELECT name FROM sqlite_master")) > 50
