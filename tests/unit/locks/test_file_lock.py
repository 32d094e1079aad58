"""Locks on files: which exclude each other, and what is said of files that are not there."""

from __future__ import annotations

from pathlib import Path

from trainer_lib.locks.file_lock import is_locked, try_lock


def test_an_exclusive_lock_excludes_every_other_until_its_file_is_closed(tmp_path: Path) -> None:
    path = tmp_path / "lock"
    with path.open("ab") as first:
        assert not is_locked(path)
        assert try_lock(first.fileno())
        assert is_locked(path)
        with path.open("ab") as second:
            assert not try_lock(second.fileno())
            assert not try_lock(second.fileno(), shared=True)
            assert try_lock(first.fileno(), shared=True), "its own lock becomes the other kind"
            assert try_lock(second.fileno(), shared=True)
            assert not try_lock(first.fileno())
            assert not is_locked(path), "others may still share it"
    with path.open("ab") as third:
        assert try_lock(third.fileno())


def test_a_file_that_is_not_there_is_not_locked_and_not_made(tmp_path: Path) -> None:
    assert not is_locked(tmp_path / "absent")
    assert list(tmp_path.iterdir()) == []
