"""One process at a time sets up a sqlite database: two that find no tables would both create them."""

from __future__ import annotations

import contextlib
import fcntl
from collections.abc import Iterator
from pathlib import Path


@contextlib.contextmanager
def lock_database(tracking_uri: str) -> Iterator[None]:
    """Hold a lock beside the database file that a tracking URI names; any other URI needs none."""
    scheme, _, path = tracking_uri.partition(":///")
    if scheme != "sqlite" or not path:
        yield
        return
    database = Path(path)
    database.parent.mkdir(parents=True, exist_ok=True)
    with (database.parent / f".{database.name}.lock").open("a") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield
