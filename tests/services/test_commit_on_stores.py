"""Complete or absent: the commit protocol on every kind of store."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.support.commits import committed, write_files
from trainer_lib.commit import COMMIT, FileEntry, read_commit, verify_files, withdraw_folder, write_commit
from trainer_lib.errors import DamagedError, LeaseLostError, StorageError
from trainer_lib.storage import Store


def test_a_commit_is_read_as_it_was_written(any_store: Store) -> None:
    assert read_commit(any_store) is None
    files = write_files(any_store)
    assert read_commit(any_store) is None

    commit = write_commit(any_store, "stage", files, {"step": 3, "nested": {"list": [1, 2.5, None]}})

    found = read_commit(any_store, kind="stage")
    assert found == commit
    assert [entry.path for entry in commit.files] == ["a/x.bin", "b.bin", "z"]
    assert commit.entry("b.bin") == files[0]
    assert commit.entry("c") is None
    assert verify_files(any_store, commit) == []


def test_other_files_in_the_folder_are_nobodys_business(any_store: Store) -> None:
    commit = committed(any_store)
    any_store.write_bytes("lease/1.json", b"1")
    assert verify_files(any_store, commit) == []


def test_the_second_commit_is_refused_and_the_first_stays(any_store: Store) -> None:
    first = committed(any_store)
    with pytest.raises(LeaseLostError, match="Another process has committed"):
        write_commit(any_store, "stage", [], {})
    assert read_commit(any_store) == first


def test_of_writers_that_commit_at_once_exactly_one_wins(any_store: Store) -> None:
    barrier = threading.Barrier(4)

    def attempt(number: int) -> bool:
        barrier.wait()
        try:
            write_commit(any_store, "stage", [], {"number": number})
        except LeaseLostError:
            return False
        return True

    with ThreadPoolExecutor(4) as pool:
        won = list(pool.map(attempt, range(4)))
    commit = read_commit(any_store)
    assert commit is not None
    assert won[commit.meta["number"]]
    assert sum(won) == 1 or not any_store.exclusive


def test_a_missing_or_short_file_prevents_the_commit(any_store: Store) -> None:
    files = write_files(any_store)
    absent = FileEntry("never/written", 3, "0" * 64)
    with pytest.raises(StorageError, match="never/written: missing"):
        write_commit(any_store, "stage", [*files, absent], {})
    any_store.write_bytes("b.bin", b"bb")
    with pytest.raises(StorageError, match=r"b\.bin: 2 bytes, committed 4"):
        write_commit(any_store, "stage", files, {})
    assert read_commit(any_store) is None


def test_the_guard_has_the_last_word(any_store: Store) -> None:
    def lost() -> None:
        raise LeaseLostError("taken over")

    with pytest.raises(LeaseLostError):
        write_commit(any_store, "stage", write_files(any_store), {}, guard=lost)
    assert not any_store.exists(COMMIT)


def test_damage_is_named_file_by_file(any_store: Store) -> None:
    commit = committed(any_store)
    any_store.write_bytes("b.bin", b"bbbB")
    any_store.write_bytes("z", b"1")
    any_store.delete("a/x.bin")

    missing, digest, size = verify_files(any_store, commit)
    assert missing == "a/x.bin: missing"
    assert digest.startswith("b.bin: digest ")
    assert size == "z: 1 bytes, committed 0"
    assert verify_files(any_store, commit, digests=False) == [missing, size]


def test_withdrawing_leaves_nothing_and_is_repeatable(any_store: Store) -> None:
    committed(any_store)
    withdraw_folder(any_store)
    withdraw_folder(any_store)
    assert any_store.list() == []
    assert read_commit(any_store) is None


def test_the_wrong_kind_is_refused(any_store: Store) -> None:
    committed(any_store)
    with pytest.raises(DamagedError, match="of a stage, not of a checkpoint"):
        read_commit(any_store, kind="checkpoint")
