"""One process at a time sets up a sqlite database: two that find no tables would both create them."""

from __future__ import annotations

import contextlib
import fcntl
from collections.abc import Iterator
from pathlib import Path

from trainer_lib.ready_databases import Kind, keep, place

DATABASES = Kind("mlflow", "store/db_migrations/versions", ("alembic_version", "workspaces"))


@contextlib.contextmanager
def lock_database(tracking_uri: str) -> Iterator[None]:
    """Hold a lock beside the database file that a tracking URI names; any other URI needs none.

    A new one is copied from an earlier one's tables, because MLflow's migrations take seconds.
    """
    scheme, _, path = tracking_uri.partition(":///")
    if scheme != "sqlite" or not path:
        yield
        return
    database = Path(path)
    database.parent.mkdir(parents=True, exist_ok=True)
    with (database.parent / f".{database.name}.lock").open("a") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        is_new = not database.exists()
        is_copy = is_new and place(DATABASES, database)
        yield
        if is_new and not is_copy:
            keep(DATABASES, database)
