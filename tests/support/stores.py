"""Fixtures for the conformance suites: the same test over every kind of store.

`any_url` and `any_store` run a test on a local folder, ``memory://``, a real S3 server and ``faulty://``; the last has
no faults until `faults` is given a plan. Everything is empty at the start and removed at the end.
"""

from __future__ import annotations

import os
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.support.s3 import S3Server

if TYPE_CHECKING:
    from tests.support.faulty import Faults
    from trainer_lib.storage import Store

# fsspec reads its configuration from the environment when it is imported: only inside the fixtures, after the sandbox
# of tests/conftest.py is in place.


@pytest.fixture
def memory_url() -> Iterator[str]:
    """A folder in this process's memory store, emptied afterwards: fsspec keeps it for the whole process."""
    import fsspec

    name = f"test-{uuid.uuid4().hex[:12]}"
    yield f"memory://{name}"
    memory = fsspec.filesystem("memory")
    if memory.exists(f"/{name}"):
        memory.rm(f"/{name}", recursive=True)


@pytest.fixture
def faults() -> Iterator[Faults]:
    """The plan of ``faulty://``; no faults until it is given one."""
    from tests.support import faulty

    faulty.register()
    yield faulty.FAULTS
    faulty.forget()


@pytest.fixture
def faulty_url(faults: Faults) -> str:
    return "faulty://bucket/tests"


@pytest.fixture(params=["file", "memory", "s3", "faulty"])
def any_url(request: pytest.FixtureRequest, tmp_path: Path, s3_server: S3Server) -> str:
    """A folder that does not exist yet, on each kind of store in turn.

    Names the server although only one kind uses it: a session's fixture must start before the leak police looks.
    """
    if request.param == "file":
        return str(tmp_path / "store")
    return str(request.getfixturevalue(f"{request.param}_url"))


@pytest.fixture
def any_store(any_url: str) -> Store:
    from trainer_lib.storage import Store

    return Store.open(any_url)


def record_fsync(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Keep the path of everything that is fsynced from now on with bytes in it; it is fsynced all the same."""
    synced: list[str] = []
    real = os.fsync

    def record(descriptor: int) -> None:
        path = os.readlink(f"/proc/self/fd/{descriptor}")  # noqa: PTH115
        if Path(path).is_dir() or os.fstat(descriptor).st_size:
            synced.append(path)
        real(descriptor)

    monkeypatch.setattr(os, "fsync", record)
    return synced
