"""Complete or absent: the commit protocol, on a store that fails at each write in turn, and against damage."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.support.commits import committed, write_files
from tests.support.faulty import Died, Faults, Kind
from tests.support.hostile import bounded
from trainer_lib.errors import DamagedError, StorageError, TrainflowError
from trainer_lib.storage import FileEntry, Store
from trainer_lib.storage.commit import (
    COMMIT,
    LIMIT,
    Commit,
    content_digest,
    read_commit,
    verify_files,
    withdraw_folder,
    write_commit,
)


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
        assert told is not None or (kind, at) != ("after", writes), "a commit whose answer got lost counts"
        try:
            found = read_commit(store)
        except DamagedError:
            found = None
        if told is not None:
            assert found == told
        if found is not None:
            assert verify_files(store, found) == []
        # The next run of the same work finds nothing in its way.
        if found is None:
            withdraw_folder(store)
            committed(store)
            assert verify_files(store, committed_again := read_commit(store) or pytest.fail()) == []
            assert committed_again.files


@pytest.mark.parametrize("kind", ["error", "die"])
def test_a_deletion_that_stops_half_way_never_leaves_a_complete_looking_folder(
    kind: Kind, faulty_url: str, faults: Faults
) -> None:
    store = Store.open(faulty_url)
    for at in range(1, 5):
        withdraw_folder(store)
        commit = committed(store)
        faults.plan(at, kind)
        with pytest.raises((StorageError, Died)):
            withdraw_folder(store)
        faults.plan(None)
        assert read_commit(store) is None or verify_files(store, commit) == []


# ------------------------------------------------------------------------------------------------- the file itself
def test_equal_content_has_an_equal_digest_whatever_the_time_and_the_meta(tmp_path: Path) -> None:
    one, two = Store.open(tmp_path / "1"), Store.open(tmp_path / "2")
    first = write_commit(one, "stage", write_files(one), {"run": 1})
    second = write_commit(two, "stage", list(reversed(write_files(two))), {"run": 2})
    assert first.content_digest == second.content_digest
    assert first.id != second.id
    assert content_digest([*first.files[:-1], FileEntry("y", 0, first.files[-1].sha256)]) != first.content_digest


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
        ({"format": 2}, "a newer trainflow"),
        ({"format": 0}, "not state its format"),
        ({"format": 1e9}, "not state its format"),
        ({"format": True}, "not state its format"),
        ({"format": "1"}, "not state its format"),
        ({"kind": "trap"}, "unknown kind"),
        ({"kind": 1}, "wrong type"),
        ({"meta": []}, "wrong type"),
        ({"id": 5}, "wrong type"),
        ({"files": [{"path": "a"}]}, "malformed file entry"),
        ({"extra": 1}, "unexpected or missing fields"),
        ({"files": {}}, "no list of files"),
        ({"files": [1]}, "malformed file entry"),
        (entry(path="../../etc/passwd"), "'..'"),
        (entry(path="a/../../outside"), "'..'"),
        (entry(path="/etc/passwd"), "absolute"),
        (entry(path="a\x1b[2Jb"), "control character"),
        (entry(path="x" * 300), "longer"),
        (entry(path="/".join(["x" * 100] * 20)), "longer"),
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
    "data",
    [
        *(b"\xff\xfe", b"[" * 100_000, b'{"a":' * 100_000, b"1" * 10_000, b"null", b"[]", b"{}", b"NaN", b"nul"),
        *(b'"', b"", b"\0", b'"\\ud800"', b'{"format": 1, "format": 1}'),
        json.dumps({**GOOD, "meta": {"x": "HERE"}})
        .replace('"HERE"', "[" * 900 + "]" * 900)
        .encode(),  # cannot be written
    ],
)
def test_what_is_no_commit_is_refused_and_nothing_crashes(data: bytes, tmp_path: Path) -> None:
    (tmp_path / COMMIT).write_bytes(data)
    with bounded(50), pytest.raises(DamagedError):
        read_commit(Store.open(tmp_path))


def test_a_huge_commit_file_is_not_read(tmp_path: Path) -> None:
    with (tmp_path / COMMIT).open("wb") as file:
        file.truncate(LIMIT + 1)
    with pytest.raises(DamagedError, match="more than 67,108,864 bytes"):
        read_commit(Store.open(tmp_path))


@pytest.mark.parametrize(
    ("kind", "files"),
    [("trap", []), ("stage", [FileEntry("../x", 0, "0" * 64)]), ("stage", [FileEntry(COMMIT, 0, "0" * 64)])],
)
def test_what_could_not_be_read_is_not_written(kind: str, files: list[FileEntry], tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"kind|\.\.|itself"):
        write_commit(Store.open(tmp_path), kind, files, {})
    assert list(tmp_path.iterdir()) == []
