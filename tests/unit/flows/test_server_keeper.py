"""When a command takes its embedded server for hung: not after one look, however long ago the last answer came."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any, cast

import pytest

from flows.server import membership
from flows.server.membership import Membership, _Keeper


class Described:
    """A membership whose server has this process's number."""

    def description(self) -> dict[str, Any]:
        return {"pid": os.getpid(), "url": "http://127.0.0.1:1"}


def test_a_machine_that_slept_does_not_cost_the_server(monkeypatch: pytest.MonkeyPatch) -> None:
    answers = iter([True, False, False, True, False, False, False])
    killed: list[int] = []
    monkeypatch.setattr(membership, "is_healthy", lambda url: next(answers))
    monkeypatch.setattr(os, "kill", lambda pid, number: killed.append(pid))
    keeper = _Keeper(cast(Membership, Described()))
    keeper._look()
    keeper._answered_s = time.monotonic() - 1000
    keeper._look()
    keeper._look()
    assert not killed, "two looks without an answer"
    keeper._look()  # answers again
    keeper._answered_s = time.monotonic() - 1000
    keeper._look()
    keeper._look()
    assert not killed, "looks are counted since the last answer"
    keeper._look()
    assert killed == [os.getpid()]


@pytest.mark.parametrize("words", ["file is not a database", "database disk image is malformed"])
def test_a_damaged_database_of_prefect_is_named(tmp_path: Path, words: str) -> None:
    member = Membership.__new__(Membership)
    member.log, member._database = tmp_path / "server.log", tmp_path / "prefect.db"
    member.log.write_text(f"sqlalchemy.exc.DatabaseError: (sqlite3.DatabaseError) {words}\nApplication startup failed.")
    failure = member._failure("It ended with exit code 3.")
    assert failure.value == str(tmp_path / "prefect.db")
    assert "damaged" in failure.message
    assert "Move it away" in str(failure.remedy)
