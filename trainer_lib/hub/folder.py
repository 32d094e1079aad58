"""A hub that is a folder on any store: the offline hub.

    <target>/revisions/<00001>-<content digest[:16]>/{README.md, model.safetensors, …, COMMIT.json}

The commit protocol of `trainer_lib.commit` makes a revision committed or absent. The newest is the one with the
highest number: history stays, nothing is renamed or overwritten, and there is no pointer file a reader would have to
trust. A lease on the target keeps two publishers apart; what a killed one left without COMMIT.json is removed by the
next.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from trainer_lib.commit import Commit, read_commit, verify_files, withdraw_folder, write_commit
from trainer_lib.errors import DamagedError, StorageError
from trainer_lib.hub.base import Content, Published
from trainer_lib.locks.lease import acquire_lease
from trainer_lib.storage import FileEntry, Store

REVISIONS = "revisions"
MAIN = "main"
CHUNK = 8 << 20


@dataclass(frozen=True)
class Revision:
    """One committed revision."""

    number: int
    name: str
    branch: str
    store: Store
    commit: Commit


class FolderHub:
    """Publishes to a folder. `branch` labels a line of revisions of its own (default: main)."""

    def __init__(self, target: str, *, branch: str | None = None, field: str = "publish.to") -> None:
        self.target = target
        self.branch = branch or MAIN
        self._root = Store.open(target, field=field)

    def revisions(self) -> list[Revision]:
        """Committed revisions of this branch, newest first. Files are not verified."""
        found = [revision for name in self._names() if (revision := self._read(name)) is not None]
        return sorted((one for one in found if one.branch == self.branch), key=lambda one: -one.number)

    def newest(self) -> Revision | None:
        """The newest committed revision whose files are all as committed; None when there is none."""
        return next((one for one in self.revisions() if not verify_files(one.store, one.commit)), None)

    def holds(self, revision: str, digest: str) -> bool:
        """Whether the revision is there, intact, with this content digest."""
        found = self._read(revision) if revision in self._names() else None
        if found is None or found.commit.content_digest != digest:
            return False
        return not verify_files(found.store, found.commit)

    def publish(self, content: Content, *, message: str) -> Published:
        """Copy the files into a new revision and commit it, unless the newest one holds the same content, intact."""
        lease = acquire_lease(self._root)
        if lease is None:  # only a `wait` that says so gives up
            raise StorageError("Another process is publishing there.", field=self.target, remedy="Try again.")
        with lease:
            self._remove_leftovers()
            revisions = self.revisions()
            if revisions and self._same(revisions[0], content):
                return self._published(revisions[0], created=False)
            number = 1 + max((_number(name) for name in self._names()), default=0)
            name = f"{number:05d}-{content.digest[:16]}"
            store = self._root.child(REVISIONS, name)
            entries = [_copy(content, path, store) for path in sorted([*content.files, *content.texts])]
            _check(content, entries, store)
            meta: dict[str, Any] = {
                "number": number,
                "branch": self.branch,
                "parent": revisions[0].name if revisions else None,
                "message": message,
                "lineage": dict(content.lineage),
            }
            commit = write_commit(store, "published", entries, meta, guard=lease.ensure_held)
            return self._published(Revision(number, name, self.branch, store, commit), created=True)

    def _same(self, revision: Revision, content: Content) -> bool:
        return revision.commit.content_digest == content.digest and not verify_files(revision.store, revision.commit)

    def _published(self, revision: Revision, *, created: bool) -> Published:
        commit = revision.commit
        return Published(
            self.target, revision.store.url, revision.name, commit.content_digest, created, tuple(commit.files)
        )

    def _names(self) -> list[str]:
        return [name for name in self._root.children(REVISIONS) if _number(name) > 0]

    def _read(self, name: str) -> Revision | None:
        store = self._root.child(REVISIONS, name)
        try:
            commit = read_commit(store, kind="published")
        except DamagedError:  # not ours, or its commit file was changed: never the newest, and never removed
            return None
        if commit is None:
            return None
        return Revision(_number(name), name, str(commit.meta.get("branch", MAIN)), store, commit)

    def _remove_leftovers(self) -> None:
        for name in self._names():
            store = self._root.child(REVISIONS, name)
            if not store.exists("COMMIT.json"):
                withdraw_folder(store)


def _number(name: str) -> int:
    digits = name.partition("-")[0]
    return int(digits) if digits.isascii() and digits.isdigit() else 0


def _copy(content: Content, path: str, store: Store) -> FileEntry:
    with content.open(path) as source, store.open_write(path) as target:
        while chunk := source.read(CHUNK):
            target.write(chunk)
    return target.entry


def _check(content: Content, entries: list[FileEntry], store: Store) -> None:
    """What was copied is what was promised: a source that changed in the meantime is not published."""
    wanted = {entry.path: entry for entry in content.entries()}
    for entry in entries:
        if entry != wanted[entry.path]:
            withdraw_folder(store)
            raise DamagedError(
                f"{entry.path} is not what its stage committed ({entry.size:,} bytes, committed "
                f"{wanted[entry.path].size:,}).",
                field=content.files[entry.path].store.url,
                remedy="Run the stage it comes from again.",
            )
