"""New databases that are copied: the same tables, no rows of another database, never another version's."""

from __future__ import annotations

import os
import sqlite3
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from trainer_lib.base.ready_databases import Kind, create, keep, place
from trainflow.flows.server import membership

KIND = Kind("mlflow", "store/db_migrations/versions", ("alembic_version", "kinds"))


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def _run(database: Path, *statements: str) -> list[Any]:
    with closing(sqlite3.connect(database)) as connection, connection:
        return [connection.execute(each).fetchall() for each in statements][-1]


@pytest.fixture
def made(tmp_path: Path) -> Path:
    """A database as its program makes it, used already."""
    database = tmp_path / "made" / "made.db"
    database.parent.mkdir()
    _run(
        database,
        "PRAGMA journal_mode = WAL",
        "CREATE TABLE alembic_version (version_num TEXT)",
        "INSERT INTO alembic_version VALUES ('abc')",
        "CREATE TABLE kinds (name TEXT)",
        "INSERT INTO kinds VALUES ('slack')",
        'CREATE TABLE "runs of" (secret TEXT)',
        "INSERT INTO \"runs of\" VALUES ('mine-only')",
    )
    return database


def test_a_copy_has_the_tables_and_no_rows_but_those_of_a_new_database(tmp_path: Path, made: Path) -> None:
    keep(KIND, made)
    new = tmp_path / "new.db"
    assert place(KIND, new)
    assert _run(new, "SELECT * FROM alembic_version") == [("abc",)]
    assert _run(new, "SELECT * FROM kinds") == [("slack",)]
    assert _run(new, 'SELECT * FROM "runs of"') == []
    assert b"mine-only" not in KIND.template().read_bytes()
    assert KIND.template().stat().st_mode & 0o077 == 0
    assert {path.name for path in tmp_path.iterdir()} == {"made", "cache", "new.db"}  # no drafts


def test_nothing_is_placed_over_a_database_or_beside_the_journal_of_one(tmp_path: Path, made: Path) -> None:
    keep(KIND, made)
    there = tmp_path / "there.db"
    there.write_bytes(b"")
    assert not place(KIND, there)
    assert there.read_bytes() == b""
    (tmp_path / "gone.db-wal").write_bytes(b"changes")
    assert not place(KIND, tmp_path / "gone.db")
    assert not (tmp_path / "gone.db").exists()


def test_another_version_or_other_migrations_get_no_copy(
    tmp_path: Path, made: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    keep(KIND, made)
    older = KIND.template()
    with monkeypatch.context() as newer:
        newer.setattr("importlib.metadata.version", lambda name: "99.0")
        assert KIND.template() != older
        assert not place(KIND, tmp_path / "new.db")
    assert not place(Kind("mlflow", "store/db_migrations", KIND.filled), tmp_path / "new.db")
    # Prefect's tables are known by its migrations.
    assert membership._DATABASES.template().name.startswith("prefect-3.")


@pytest.mark.parametrize(
    "harm",
    [
        lambda path: path.write_bytes(path.read_bytes()[:5000]),
        lambda path: path.chmod(0o666),
        lambda path: path.write_bytes(b""),
    ],
    ids=["truncated", "others may write", "without tables"],
)
def test_tables_that_are_damaged_or_not_ours_alone_are_not_used(
    tmp_path: Path, made: Path, harm: Callable[[Path], object], monkeypatch: pytest.MonkeyPatch
) -> None:
    keep(KIND, made)
    harm(KIND.template())
    assert not place(KIND, tmp_path / "new.db")
    assert not (tmp_path / "new.db").exists()
    keep(KIND, made)
    assert place(KIND, tmp_path / "new.db")
    # A cache that cannot be used costs nothing.
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "new.db"))
    keep(KIND, made)
    assert not place(KIND, tmp_path / "other.db")


def test_threads_that_keep_and_place_at_once_get_whole_databases(tmp_path: Path, made: Path) -> None:
    def both(number: int) -> bool:
        keep(KIND, made)
        is_placed = place(KIND, tmp_path / f"own-{number}.db")
        place(KIND, tmp_path / "shared.db")
        return is_placed

    with ThreadPoolExecutor(6) as pool:
        assert list(pool.map(both, range(6))) == [True] * 6
    for database in [*tmp_path.glob("own-*.db"), tmp_path / "shared.db"]:
        assert _run(database, "SELECT * FROM kinds") == [("slack",)]


def _make(database: Path) -> None:
    _run(database, "CREATE TABLE IF NOT EXISTS alembic_version (version_num TEXT)")
    if not _run(database, "SELECT * FROM alembic_version"):
        _run(database, "INSERT INTO alembic_version VALUES ('abc')")
    _run(database, "CREATE TABLE IF NOT EXISTS kinds (name TEXT)")


def test_a_database_that_could_not_be_made_leaves_nothing_and_is_made_by_the_next(tmp_path: Path) -> None:
    database = tmp_path / "new" / "new.db"
    database.parent.mkdir()

    def fail(draft: Path) -> None:
        _run(draft, "CREATE TABLE alembic_version (version_num TEXT)")
        assert not database.exists()
        raise sqlite3.OperationalError("disk full")

    with pytest.raises(sqlite3.OperationalError), create(KIND, database, fail):
        pass
    assert [path.name for path in database.parent.iterdir()] == [".new.db.lock"]
    database.with_name("new.db-journal").write_bytes(b"the changes of a removed database")
    with create(KIND, database, _make):
        assert _run(database, "SELECT * FROM alembic_version") == [("abc",)]
    assert {path.name for path in database.parent.iterdir()} == {".new.db.lock", "new.db"}
    with create(KIND, database, fail):  # it is there, so nothing is made
        pass


def test_drafts_of_killed_processes_are_removed_after_an_hour(tmp_path: Path) -> None:
    killed, at_work = tmp_path / ".new.db-killed", tmp_path / ".new.db-at_work"
    for folder in (killed, at_work):
        folder.mkdir()
        (folder / "new.db").write_bytes(b"half")
    os.utime(killed, (time.time() - 4000, time.time() - 4000))
    with create(KIND, tmp_path / "new.db", _make):
        pass
    assert not killed.exists()
    assert at_work.exists()
