"""The spool of a tracker: what a full disk, kill -9 and a power failure leave, and who holds what."""

from __future__ import annotations

import errno
import json
import os
import resource
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import pytest

from tests.support.repository import ROOT
from trainer_lib.storage import Store
from trainer_lib.trackers.jsonl import LineFile
from trainer_lib.trackers.mlflow.delivery import Delivery
from trainer_lib.trackers.spool import Session, count_waiting, known_run, note_run, sole_delivery

FULL = r"No space left|File too large"
HEAD = {"tracking_uri": "http://127.0.0.1:9", "token": "t"}


@contextmanager
def full_at(size: int) -> Iterator[None]:
    """No file of this process grows beyond `size` bytes inside the block."""
    before, handler = resource.getrlimit(resource.RLIMIT_FSIZE), signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, handler)


def point(step: int) -> dict[str, Any]:
    return {"t": 1_700_000_000_000, "s": step, "m": {"loss": 1.0}}


def steps(session: Session) -> list[int]:
    return [record["s"] for record, _ in session.read(0, 1 << 30)]


def test_what_a_full_disk_refuses_is_written_when_there_is_room(tmp_path: Path) -> None:
    session = Session.create(tmp_path, HEAD)
    session.write(point(1))
    size = (session.path / "points.jsonl").stat().st_size
    with full_at(size + 10):  # less than a line
        for step in (2, 3):
            with pytest.raises(OSError, match=FULL):
                session.write(point(step))
        assert steps(session) == [1]
        assert (session.path / "points.jsonl").stat().st_size == size
    session.write(point(4))
    assert steps(session) == [1, 2, 3, 4]
    session.close()


@pytest.mark.parametrize(("room", "kept"), [(1000, [2, 3, "FINISHED"]), (60, ["FINISHED"])])
def test_on_a_full_disk_the_last_record_has_room(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, room: int, kept: list[object]
) -> None:
    session = Session.create(tmp_path, HEAD)
    write = os.write

    def full(handle: int, data: bytes) -> int:
        if (session.path / "reserve").exists() or len(data) > room:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return write(handle, data)

    monkeypatch.setattr("trainer_lib.trackers.spool.os.write", full)
    for step in (2, 3):
        with pytest.raises(OSError, match=FULL):
            session.write(point(step))
    with nullcontext() if len(kept) == 3 else pytest.raises(OSError, match=FULL):
        session.write_last({"end": "FINISHED", "t": 1})
    session.close()
    assert [record.get("s") or record["end"] for record, _ in session.read(0, 1 << 30)] == kept


def test_a_session_that_cannot_be_made_leaves_nothing(tmp_path: Path) -> None:
    with full_at(10), pytest.raises(OSError, match=FULL):
        Session.create(tmp_path, HEAD)
    assert list(tmp_path.iterdir()) == []


def test_a_line_that_does_not_fit_leaves_no_half_line_in_a_file_of_lines(tmp_path: Path) -> None:
    file = LineFile(Store.open(tmp_path), "some.txt")
    file.append(b"first\n")
    with full_at(10):
        with pytest.raises(OSError, match=FULL):
            file.append(b"second\n")
        with pytest.raises(OSError, match=FULL):
            file.replace([b"first\n", b"second\n"])
    file.append(b"third\n")
    assert file.read() == [b"first\n", b"third\n"]
    assert [path.name for path in tmp_path.iterdir()] == ["some.txt"]


def test_a_torn_line_is_skipped_and_a_lost_state_begins_again(tmp_path: Path) -> None:
    session = Session.create(tmp_path, HEAD)
    session.write(point(1))
    with (session.path / "points.jsonl").open("ab") as file:
        file.write(b'{"t": 1, "s"\n{"t": 1, "s": 2, "m": {}}\n{"t": 1')
    (session.path / "state.json").write_bytes(b"")
    session.close()
    [stored] = Session.stored(tmp_path)
    assert [record.get("s") for record, _ in stored.read(0)] == [1, None, 2]
    assert stored.over


def test_a_session_is_over_once_its_process_has_closed_it_or_is_gone(tmp_path: Path) -> None:
    session = Session.create(tmp_path, HEAD)
    assert [each.over for each in Session.stored(tmp_path)] == [False]
    program = """
        import os, signal, sys
        from pathlib import Path
        from trainer_lib.trackers.spool import Session
        session = Session.create(Path(sys.argv[1]), {"tracking_uri": "x", "token": "other"})
        session.write({"t": 1, "s": 1, "m": {"loss": 1.0}})
        print([each.over for each in Session.stored(Path(sys.argv[1]))], flush=True)
        os.kill(os.getpid(), signal.SIGKILL)
    """
    command = [sys.executable, "-c", textwrap.dedent(program), str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (-signal.SIGKILL, "[False, False]\n")
    assert [each.over for each in Session.stored(tmp_path)] == [False, True]
    assert str(waiting := count_waiting(tmp_path)) == "1 run (1 point)"
    assert waiting is not None
    assert len(waiting.servers) == 1, "those of the sessions, whatever a spec says by now"
    session.close()
    assert [each.over for each in Session.stored(tmp_path)] == [True, True]
    with sole_delivery(tmp_path):
        Delivery(tmp_path, "http://127.0.0.1:1").drop_foreign()
    Delivery(tmp_path, "x").drop_foreign()
    assert count_waiting(tmp_path) is not None, "another process delivers it, or it is this server's"
    Delivery(tmp_path, "http://127.0.0.1:1").drop_foreign()
    assert count_waiting(tmp_path) is None


def test_one_thread_or_process_delivers_at_a_time(tmp_path: Path) -> None:
    with sole_delivery(tmp_path) as first, sole_delivery(tmp_path) as second:
        assert (first, second) == (True, False)
    with sole_delivery(tmp_path) as again:
        assert again
    with sole_delivery(tmp_path / "absent") as absent:
        assert not absent


def test_a_token_stands_for_a_run_for_a_month(tmp_path: Path) -> None:
    note_run(tmp_path, "old", "1", "2")
    os.utime(tmp_path / "old.run", (0, 0))
    assert known_run(tmp_path, "old") == {"run_id": "1", "experiment_id": "2"}
    note_run(tmp_path, "new", "3", "4")
    assert known_run(tmp_path, "old") == {}
    assert json.loads((tmp_path / "new.run").read_text())["run_id"] == "3"


def test_sessions_keep_their_order_when_the_clock_is_put_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = Session.create(tmp_path, {"number": 1})
    now = time.time_ns()
    monkeypatch.setattr(time, "time_ns", lambda: now - 3600 * 10**9)
    second = Session.create(tmp_path, {"number": 2})
    assert [each.head["number"] for each in Session.stored(tmp_path)] == [1, 2]
    first.close()
    second.close()
