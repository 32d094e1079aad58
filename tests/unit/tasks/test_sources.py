"""Declared sources: what changes their digests, and what is refused."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from tasks.stage.sources import check, fingerprints
from trainer_lib.errors import ConfigError, StorageError
from trainer_lib.storage import Store


def digest(source: str | Path, memory: Path | None = None, root: Path | None = None) -> str:
    [found] = fingerprints([str(source)], memory=memory, root=root)
    return found["digest"]


def test_a_file_counts_by_its_bytes(tmp_path: Path) -> None:
    path = tmp_path / "a.csv"
    path.write_text("1,2\n")
    before = digest(path)
    path.touch()
    assert digest(path) == before
    path.write_text("1,3\n")
    assert digest(path) != before


def test_a_folder_counts_by_names_and_bytes(tmp_path: Path) -> None:
    folder = tmp_path / "data"
    (folder / "sub").mkdir(parents=True)
    (folder / "a").write_text("x")
    (folder / "sub" / "b").write_text("y")
    before = digest(folder)
    (folder / "sub" / "b").rename(folder / "sub" / "c")
    renamed = digest(folder)
    (folder / "new").write_text("")
    assert len({before, renamed, digest(folder)}) == 3


def test_a_pattern_counts_by_the_files_that_match(tmp_path: Path) -> None:
    (tmp_path / "days" / "one").mkdir(parents=True)
    (tmp_path / "days" / "one" / "a.csv").write_text("x")
    (tmp_path / "days" / "notes.txt").write_text("1")
    pattern = tmp_path / "days" / "**" / "*.csv"
    before = digest(pattern)
    (tmp_path / "days" / "notes.txt").write_text("2")
    assert digest(pattern) == before
    (tmp_path / "days" / "b.csv").write_text("y")
    added = digest(pattern)
    (tmp_path / "days" / "one" / "a.csv").write_text("z")
    assert len({before, added, digest(pattern)}) == 3


def test_a_file_whose_name_looks_like_a_pattern_counts_as_itself(tmp_path: Path) -> None:
    (tmp_path / "a[1].csv").write_text("x")
    (tmp_path / "a1.csv").write_text("y")
    before = digest(tmp_path / "a[1].csv")
    (tmp_path / "a1.csv").write_text("z")
    assert digest(tmp_path / "a[1].csv") == before


def test_a_store_without_tags_counts_by_its_bytes() -> None:
    store = Store.open("memory://sources/folder")
    store.write_bytes("a.csv", b"one")
    file, folder = digest("memory://sources/folder/a.csv"), digest("memory://sources/folder")
    store.write_bytes("b.csv", b"two")
    assert digest("memory://sources/folder/a.csv") == file
    assert digest("memory://sources/folder") != folder
    assert digest("memory://sources/folder/*a.csv") != digest("memory://sources/folder/*.csv")
    store.write_bytes("a.csv", b"ONE")
    assert digest("memory://sources/folder/a.csv") != file
    store.delete_tree()


def test_labels_hold_no_absolute_path(tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "a.csv").write_text("x")
    inside = fingerprints([str(tmp_path / "data" / "a.csv")], root=tmp_path)
    outside = fingerprints([str(tmp_path / "data" / "a.csv")], root=tmp_path / "elsewhere")
    assert (inside[0]["source"], outside[0]["source"]) == ("data/a.csv", "a.csv")


def test_digests_are_remembered_until_the_file_changes(tmp_path: Path) -> None:
    path, memory = tmp_path / "a.csv", tmp_path / "memory.json"
    path.write_text("one")
    os.utime(path, (1, 1))
    before = digest(path, memory)
    entries = json.loads(memory.read_text())
    entries[str(path)][3] = "remembered"
    memory.write_text(json.dumps(entries))
    assert digest(path, memory) != before  # not read again: what is remembered is used
    path.write_text("two")
    os.utime(path, (2, 2))
    fresh = digest(path, memory)
    assert fresh == digest(path)
    memory.write_text("{torn")
    assert digest(path, memory) == fresh


def test_a_file_that_changed_just_now_is_not_remembered(tmp_path: Path) -> None:
    path, memory = tmp_path / "a.csv", tmp_path / "memory.json"
    path.write_text("one")
    digest(path, memory)
    assert not memory.exists()


def test_installed_packages_and_the_standard_library_count_by_their_files() -> None:
    found = fingerprints(["package:numpy", "package:numpy/numpy/version.py", "stdlib:json", "stdlib:json/decoder.py"])
    assert len({one["digest"] for one in found}) == 4
    assert found == fingerprints(
        ["package:numpy", "package:numpy/numpy/version.py", "stdlib:json", "stdlib:json/decoder.py"]
    )


@pytest.mark.parametrize(
    ("source", "words"),
    [
        ("package:nunpy", "numpy"),
        ("package:numpy/nowhere", "no such files"),
        ("stdlib:nowhere", "no such part"),
        ("hf://datasets/x", "names no repository"),
        ("s4://host/x", "Unknown URL scheme"),
        ("s3://", "names no bucket"),
        ("/nowhere/at/all", "does not exist"),
        ("/nowhere/at/*.csv", "No file matches"),
    ],
)
def test_what_cannot_be_tracked_is_refused(source: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words) as caught:
        fingerprints([source])
    assert caught.value.field == "prepare.sources"
    assert caught.value.remedy


def test_checking_reads_nothing(tmp_path: Path) -> None:
    check([str(tmp_path), "package:numpy", "stdlib:", "s3://nowhere/x", "https://nowhere.invalid/x"])


def test_a_server_that_is_away_is_a_storage_failure() -> None:
    with pytest.raises(StorageError, match="cannot be reached"):
        digest("http://127.0.0.1:9/x")
