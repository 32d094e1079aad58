"""Publishing to a folder: committed or absent, history kept, nothing new for the same content."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

from tests.support.publishing import digits_content, publish
from trainer_lib.errors import ConfigError, DamagedError
from trainer_lib.hub.base import Published
from trainer_lib.hub.folder import FolderHub, open_hub
from trainer_lib.storage import Store
from trainer_lib.storage.commit import read_commit, verify_files


@pytest.fixture
def target(tmp_path: Path) -> str:
    return str(tmp_path / "hub")


def test_a_revision_is_a_committed_folder_with_every_file(tmp_path: Path, target: str) -> None:
    content = digits_content(tmp_path)
    done = publish(target, content, message="first")
    assert done.created
    assert done.revision == f"00001-{content.digest[:16]}"
    store = Store.open(done.url)
    commit = read_commit(store, kind="published")
    assert commit is not None
    assert verify_files(store, commit) == []
    assert commit.content_digest == content.digest == done.content_digest
    assert (Path(done.url) / "README.md").read_bytes() == b"# Digits\n"
    assert commit.meta["lineage"] == dict(content.lineage)


@pytest.mark.parametrize("store", ["", "memory://test-hub-folder"])
def test_the_same_content_publishes_nothing_new(tmp_path: Path, store: str, target: str) -> None:
    to = store or target
    try:
        first = publish(to, digits_content(tmp_path / "a"), message="first")
        again = publish(to, digits_content(tmp_path / "b"), message="again")
        assert (first.created, again.created, again.url) == (True, False, first.url)
        assert len(FolderHub(to).revisions()) == 1
    finally:
        Store.open(to).delete_tree()


def test_history_is_kept_and_going_back_is_a_revision_too(tmp_path: Path, target: str) -> None:
    old, new = digits_content(tmp_path / "a", b"old"), digits_content(tmp_path / "b", b"new")
    for content in (old, new, old):
        publish(target, content, message="next")
    revisions = FolderHub(target).revisions()
    assert [revision.commit.content_digest for revision in revisions] == [old.digest, new.digest, old.digest]
    assert [revision.commit.meta["parent"] for revision in revisions] == [revisions[1].name, revisions[2].name, None]


def test_a_damaged_newest_revision_is_passed_over_and_published_anew(tmp_path: Path, target: str) -> None:
    old, new = digits_content(tmp_path / "a", b"old"), digits_content(tmp_path / "b", b"new")
    publish(target, old, message="old")
    done = publish(target, new, message="new")
    (Path(done.url) / "model.safetensors").write_bytes(b"n3w")
    hub = FolderHub(target)
    newest = hub.newest()
    assert newest is not None
    assert newest.commit.content_digest == old.digest
    assert hub.newest_name() == done.revision  # `trainflow verify` must see the damage
    assert not hub.holds(done.revision, new.digest)
    again = publish(target, new, message="new")
    assert again.created
    assert again.revision.startswith("00003-")


def test_branches_have_their_own_newest(tmp_path: Path, target: str) -> None:
    content = digits_content(tmp_path)
    publish(target, content, message="on main")
    assert publish(target, content, message="on next", revision="next").created
    assert not publish(target, content, message="on next", revision="next").created
    assert [one.branch for one in FolderHub(target, branch="next").revisions()] == ["next"]
    # The newest of main, although the other branch's has a higher number; what a killed publisher left does not count.
    (Path(target) / "revisions" / "00009-0123456789abcdef").mkdir()
    assert str(FolderHub(target).newest_name()).startswith("00001-")


def test_two_publishers_at_once_make_two_whole_revisions(tmp_path: Path, target: str) -> None:
    contents = [digits_content(tmp_path / name, name.encode()) for name in ("a", "b")]
    done: list[Published] = []
    threads = [threading.Thread(target=lambda it=it: done.append(publish(target, it, message="m"))) for it in contents]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(one.revision[:5] for one in done) == ["00001", "00002"]
    assert all(not verify_files(revision.store, revision.commit) for revision in FolderHub(target).revisions())


def test_a_source_that_changed_is_not_published_and_an_unknown_kind_of_store_is_refused(
    tmp_path: Path, target: str
) -> None:
    content = digits_content(tmp_path / "a")
    (tmp_path / "a" / "model" / "model.safetensors").write_bytes(b"w3ights")
    with pytest.raises(DamagedError, match=r"model\.safetensors differs from what its stage committed"):
        publish(target, content, message="first")
    assert FolderHub(target).revisions() == []
    with pytest.raises(ConfigError, match=r"publish\.to"):
        open_hub("nosuch://bucket/hub")


def test_foreign_files_in_the_target_are_left_alone(tmp_path: Path, target: str) -> None:
    hub = Store.open(target)
    hub.write_bytes("revisions/notes.txt", b"mine")
    hub.write_bytes("revisions/00007-theirs/COMMIT.json", b"{}")
    assert publish(target, digits_content(tmp_path / "a"), message="first").revision.startswith("00008-")
    assert hub.read_bytes("revisions/notes.txt") == b"mine"
    assert hub.exists("revisions/00007-theirs/COMMIT.json")
