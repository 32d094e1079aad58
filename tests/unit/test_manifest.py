"""Complete or absent: the commit protocol on every kind of store, and on one that fails at each write in turn."""

from __future__ import annotations

import contextlib
import json
import threading
from concurrent.futures import ThreadPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.faulty import Died, Faults, Kind
from trainer_lib import commit as manifest
from trainer_lib.commit import (
    COMMIT,
    Commit,
    FileEntry,
    content_digest,
    read_commit,
    verify,
    withdraw,
    write_commit,
)
from trainer_lib.errors import DamagedError, LeaseLostError, StorageError, TrainflowError
from trainer_lib.storage import Store


def write_files(store: Store) -> list[FileEntry]:
    return [store.write_bytes("b.bin", b"bbbb"), store.write_bytes("a/x.bin", bytes(1000)), store.write_bytes("z", b"")]


def committed(store: Store) -> Commit:
    return write_commit(store, "stage", write_files(store), {"metrics": {"loss": 0.1}, "note": "é"})


# ---------------------------------------------------------------------------------------------- every kind of store


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
    assert verify(any_store, commit) == []


def test_other_files_in_the_folder_are_nobodys_business(any_store: Store) -> None:
    commit = committed(any_store)
    any_store.write_bytes("lease/1.json", b"1")
    assert verify(any_store, commit) == []


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

    missing, digest, size = verify(any_store, commit)
    assert missing == "a/x.bin: missing"
    assert digest.startswith("b.bin: digest ")
    assert size == "z: 1 bytes, committed 0"
    assert verify(any_store, commit, digests=False) == [missing, size]


def test_withdrawing_leaves_nothing_and_is_repeatable(any_store: Store) -> None:
    committed(any_store)
    withdraw(any_store)
    withdraw(any_store)
    assert any_store.list() == []
    assert read_commit(any_store) is None


def test_the_wrong_kind_is_refused(any_store: Store) -> None:
    committed(any_store)
    with pytest.raises(DamagedError, match="of a stage, not of a checkpoint"):
        read_commit(any_store, kind="checkpoint")


# --------------------------------------------------------------------------------------------- stores that fail


def _number_of_writes(url: str, faults: Faults) -> int:
    faults.plan(None)
    committed(Store.open(url))
    return faults.count


@pytest.mark.parametrize("kind", ["error", "full", "short", "silent", "after", "die"])
def test_a_store_that_fails_at_each_write_in_turn_leaves_nothing_that_looks_complete(
    kind: Kind, faulty_url: str, faults: Faults
) -> None:
    writes = _number_of_writes(faulty_url, faults)
    assert writes == 9  # open, write and close two files; open and close an empty one; put the commit
    for at in range(1, writes + 1):
        store = Store.open(f"{faulty_url}/{kind}-{at}")
        faults.plan(at, kind)
        try:
            told: Commit | None = committed(store)
        except (TrainflowError, Died):
            told = None
        faults.plan(None)
        try:
            found = read_commit(store)
        except DamagedError:
            found = None
        if told is not None:
            assert found == told
        if found is not None:
            assert verify(store, found) == []
        # The next run of the same work finds nothing in its way.
        if found is None:
            withdraw(store)
            committed(store)
            assert verify(store, committed_again := read_commit(store) or pytest.fail()) == []
            assert committed_again.files


@pytest.mark.parametrize("kind", ["error", "die"])
def test_a_deletion_that_stops_half_way_never_leaves_a_complete_looking_folder(
    kind: Kind, faulty_url: str, faults: Faults
) -> None:
    store = Store.open(faulty_url)
    for at in range(1, 5):
        withdraw(store)
        commit = committed(store)
        faults.plan(at, kind)
        with pytest.raises((StorageError, Died)):
            withdraw(store)
        faults.plan(None)
        found = read_commit(store)
        assert found is None or verify(store, commit) == []


def test_a_commit_whose_answer_got_lost_counts(faulty_url: str, faults: Faults) -> None:
    writes = _number_of_writes(faulty_url, faults)
    store = Store.open(f"{faulty_url}/again")
    faults.plan(writes, "after")
    commit = committed(store)
    faults.plan(None)
    assert read_commit(store) == commit


def _commit_many(args: tuple[str, int]) -> list[int]:
    folder, number = args
    won = []
    for round_number in range(20):
        store = Store.open(folder).child(str(round_number))
        with contextlib.suppress(LeaseLostError):
            write_commit(store, "stage", [], {"by": number})
            won.append(round_number)
    return won


def test_of_processes_that_commit_at_once_exactly_one_wins(tmp_path: Path) -> None:
    with get_context("spawn").Pool(2) as pool:
        won = pool.map(_commit_many, [(str(tmp_path), number) for number in range(2)])
        pool.close()
        pool.join()
    assert sorted(won[0] + won[1]) == list(range(20))
    for number in range(2):
        for round_number in won[number]:
            commit = read_commit(Store.open(tmp_path / str(round_number)))
            assert commit is not None
            assert commit.meta == {"by": number}


# ------------------------------------------------------------------------------------------------- the file itself


def test_equal_content_has_an_equal_digest_whatever_the_time_and_the_meta(tmp_path: Path) -> None:
    one, two = Store.open(tmp_path / "1"), Store.open(tmp_path / "2")
    first = write_commit(one, "stage", write_files(one), {"run": 1})
    second = write_commit(two, "stage", list(reversed(write_files(two))), {"run": 2})
    assert first.content_digest == second.content_digest
    assert first.id != second.id
    changed = [*first.files[:-1], FileEntry("y", 0, first.files[-1].sha256)]
    assert content_digest(changed) != first.content_digest


def test_any_flipped_bit_of_the_commit_file_is_noticed(memory_url: str) -> None:
    store = Store.open(memory_url)
    write_commit(store, "stage", [store.write_bytes("x", b"1")], {"loss": 1.5e-07, "step": 3})
    data = store.read_bytes(COMMIT)
    for position in range(len(data)):
        for bit in range(8):
            flipped = bytearray(data)
            flipped[position] ^= 1 << bit
            store.write_bytes(COMMIT, bytes(flipped))
            with pytest.raises(DamagedError):
                read_commit(store)


def test_any_truncation_or_addition_is_noticed(memory_url: str) -> None:
    store = Store.open(memory_url)
    committed(store)
    data = store.read_bytes(COMMIT)
    for changed in [data[:length] for length in range(len(data))] + [data + b"\n", b"\n" + data, b""]:
        store.write_bytes(COMMIT, changed)
        with pytest.raises(DamagedError):
            read_commit(store)


GOOD: dict[str, Any] = {
    "format": 1,
    "kind": "stage",
    "id": "1",
    "created": "now",
    "content_digest": "",
    "files": [{"path": "a", "size": 1, "sha256": "0" * 64}],
    "meta": {},
    "seal": "",
}


def entry(**changes: Any) -> dict[str, Any]:
    return {"files": [{**GOOD["files"][0], **changes}]}


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"format": 2}, "newer one"),
        ({"format": True}, "no format"),
        ({"format": "1"}, "no format"),
        ({"kind": "trap"}, "unknown kind"),
        ({"kind": 1}, "wrong type"),
        ({"meta": []}, "wrong type"),
        ({"extra": 1}, "other fields"),
        ({"files": {}}, "no files"),
        ({"files": [1]}, "malformed file entry"),
        (entry(path="../../etc/passwd"), "'..'"),
        (entry(path="/etc/passwd"), "absolute"),
        (entry(path="a\\b"), "backslash"),
        (entry(path="a\0"), "control character"),
        (entry(path="\ud800"), "surrogate"),
        (entry(path=""), "empty"),
        (entry(path=None), "empty"),
        (entry(path=COMMIT), "itself"),
        (entry(size=-1), "malformed size"),
        (entry(size=1.0), "malformed size"),
        (entry(size=True), "malformed size"),
        (entry(sha256="0" * 63), "malformed size or digest"),
        (entry(sha256="A" * 64), "malformed size or digest"),
        (entry(more=1), "malformed file entry"),
        ({"files": GOOD["files"] * 2}, "twice"),
        ({}, "altered"),
    ],
)
def test_a_malformed_commit_is_refused_with_its_reason(change: dict[str, Any], reason: str, tmp_path: Path) -> None:
    store = Store.open(tmp_path)
    (tmp_path / COMMIT).write_text(json.dumps({**GOOD, **change}))
    with pytest.raises(DamagedError, match=reason) as caught:
        read_commit(store)
    assert caught.value.field == f"{tmp_path}/{COMMIT}"
    assert caught.value.remedy


@pytest.mark.parametrize(
    "data", [b"\xff\xfe", b"[" * 100_000, b'{"a":' * 50_000, b"1" * 5000, b'"', b"null", b"[]", b"{}", b"NaN"]
)
def test_what_is_no_commit_is_refused_and_nothing_crashes(data: bytes, tmp_path: Path) -> None:
    (tmp_path / COMMIT).write_bytes(data)
    with pytest.raises(DamagedError):
        read_commit(Store.open(tmp_path))


def test_a_deep_meta_that_parses_but_cannot_be_written_is_refused(tmp_path: Path) -> None:
    text = json.dumps({**GOOD, "meta": {"x": "HERE"}}).replace('"HERE"', "[" * 900 + "]" * 900)
    (tmp_path / COMMIT).write_text(text)
    with pytest.raises(DamagedError):
        read_commit(Store.open(tmp_path))


def test_a_huge_commit_file_is_not_read(tmp_path: Path) -> None:
    with (tmp_path / COMMIT).open("wb") as file:
        file.truncate(manifest.LIMIT + 1)
    with pytest.raises(DamagedError, match="more than 67,108,864 bytes"):
        read_commit(Store.open(tmp_path))


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from([*GOOD, "path"]), inner, max_size=8),
    max_leaves=12,
)


@settings(max_examples=40)
@given(JSON, st.sampled_from(sorted(GOOD)))
def test_no_json_at_all_passes_or_crashes(value: Any, name: str) -> None:
    store = Store.open("memory://test-manifest-fuzz")
    store.write_bytes(COMMIT, json.dumps({**GOOD, name: value}).encode())
    try:
        with pytest.raises(DamagedError):
            read_commit(store)
    finally:
        store.delete_tree()


@pytest.mark.parametrize(
    ("kind", "files"),
    [("trap", []), ("stage", [FileEntry("../x", 0, "0" * 64)]), ("stage", [FileEntry(COMMIT, 0, "0" * 64)])],
)
def test_what_could_not_be_read_is_not_written(kind: str, files: list[FileEntry], tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"kind|\.\.|itself"):
        write_commit(Store.open(tmp_path), kind, files, {})
    assert list(tmp_path.iterdir()) == []
