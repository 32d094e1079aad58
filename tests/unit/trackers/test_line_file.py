"""A file of lines that grows: appended where the store can, written whole elsewhere."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from trainer_lib.storage import Store
from trainer_lib.trackers.line_file import LineFile


@pytest.fixture(params=["local", "memory"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Any:
    store = Store.open(tmp_path / "out" if request.param == "local" else "memory://test-lines/out")
    yield store
    store.delete_tree()


def test_lines_are_kept_in_order_and_replaced_at_once(store: Store) -> None:
    file = LineFile(store, "some.txt")
    assert file.read() == []
    file.replace([b"a\n"])
    file.append(b"b\n")
    file.close()
    assert store.read_bytes("some.txt") == b"a\nb\n"
    again = LineFile(store, "some.txt")
    again.replace(again.read()[:1])
    again.append(b"c\n")
    again.close()
    assert file.read() == [b"a\n", b"c\n"]


def test_a_line_that_a_crash_has_torn_is_left_out(store: Store) -> None:
    store.write_bytes("some.txt", b"a\nb")
    assert LineFile(store, "some.txt").read() == [b"a\n"]
