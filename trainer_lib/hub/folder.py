"""A folder on any store as an offline hub, and the hub at an address (`open_hub`).

    <target>/README.md  NEWEST    for people: the newest card, which they may edit, and the path of its revision
    <target>/revisions/<00001>-<content digest[:16]>/{README.md, model.safetensors, …, COMMIT.json}

By the protocol of `trainer_lib.storage.commit`, a revision is either committed or absent. The newest revision has the
highest number. History stays: no revision is renamed or overwritten, and no program depends on the two files for
people. A lease on the target keeps two publishers apart. The next publisher removes what a killed one left without a
COMMIT.json.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias

from trainer_lib.errors import DamagedError, StorageError
from trainer_lib.hub.base import Content, Published, parse_target
from trainer_lib.hub.card import choose_card, insert_section, move_pictures
from trainer_lib.locks.lease import acquire_lease
from trainer_lib.storage import FileEntry, Store
from trainer_lib.storage.commit import COMMIT, Commit, read_commit, verify_files, withdraw_folder, write_commit

if TYPE_CHECKING:
    from trainer_lib.hub.huggingface import HuggingFaceHub

REVISIONS = "revisions"
CARD = "README.md"
POINTER = "NEWEST"
MAIN = "main"
CHUNK_BYTES = 8 << 20
_CARD_BYTES = 16 << 20


@dataclass(frozen=True)
class Revision:
    """One committed revision."""

    number: int
    name: str
    branch: str
    store: Store
    commit: Commit


class FolderHub:
    """Publishes to a folder. Every `branch` (default: main) has its own line of revisions."""

    def __init__(self, target: str, *, branch: str | None = None, field: str = "publish.to") -> None:
        self.target = target
        self.branch = branch or MAIN
        self._root = Store.open(target, field=field)

    def revisions(self) -> list[Revision]:
        """Committed revisions of this branch, newest first. Their files are not verified."""
        found = [revision for name in self._list_names() if (revision := self._read_revision(name)) is not None]
        ours = [revision for revision in found if revision.branch == self.branch]
        return sorted(ours, key=lambda revision: -revision.number)

    def newest(self) -> Revision | None:
        """The newest revision whose files are all intact; None without one."""
        intact = (revision for revision in self.revisions() if not verify_files(revision.store, revision.commit))
        return next(intact, None)

    def find_newest(self) -> Published | None:
        """The newest intact publication; None where nothing is published."""
        newest = self.newest()
        return None if newest is None else self._describe_result(newest, created=False)

    def newest_name(self) -> str | None:
        """The name of the newest revision, also where its commit file or its files are damaged; None without one."""
        for name in sorted(self._list_names(), key=_parse_number, reverse=True):
            if not self._root.child(REVISIONS, name).exists(COMMIT):
                continue  # a publisher was killed, or is still writing
            found = self._read_revision(name)
            if found is None or found.branch == self.branch:
                return name
        return None

    def holds(self, revision: str, digest: str) -> bool:
        """Whether the revision exists, is intact and has this content digest."""
        known = self._read_revision(revision) if revision in self._list_names() else None
        return known is not None and _is_intact(known, digest)

    def read_card(self) -> str | None:
        """The README.md next to the revisions; None without one, and for another branch than main."""
        present = self._root.read_if_exists(CARD, limit=_CARD_BYTES) if self.branch == MAIN else None
        return None if present is None else present.decode(errors="replace")

    def publish(self, content: Content, *, message: str) -> Published:
        """Copy the files into a new revision and commit it, unless the newest one is intact and holds this content."""
        lease = acquire_lease(self._root)
        if lease is None:  # only with a `wait` that gives up
            raise StorageError("Another process is publishing to this folder.", field=self.target, remedy="Try again.")
        with lease:
            # Only under the lease: another publisher's unfinished revision looks the same.
            for child in [self._root.child(REVISIONS, name) for name in self._list_names()]:
                if not child.exists(COMMIT):
                    withdraw_folder(child)
            revisions = self.revisions()
            # Only the newest: to publish an older content again is a new revision.
            if revisions and _is_intact(revisions[0], content.digest):
                self._point_to(revisions[0])
                return self._describe_result(revisions[0], created=False)
            # Damaged revisions count as well: their numbers are never used again.
            number = 1 + max((_parse_number(name) for name in self._list_names()), default=0)
            name = f"{number:05d}-{content.digest[:16]}"
            store = self._root.child(REVISIONS, name)
            entries = [_copy(content, path, store) for path in sorted([*content.files, *content.texts])]
            _verify_copies(content, entries, store)
            meta: dict[str, Any] = {
                "number": number,
                "branch": self.branch,
                "parent": revisions[0].name if revisions else None,
                "message": message,
                "lineage": dict(content.lineage),
            }
            commit = write_commit(store, "published", entries, meta, guard=lease.ensure_held)
            made = Revision(number, name, self.branch, store, commit)
            self._point_to(made)
            return self._describe_result(made, created=True)

    def _point_to(self, revision: Revision) -> None:
        """Write the files for people, where they do not say it already: the card, and where the newest revision is."""
        if self.branch != MAIN:
            return
        where = f"{REVISIONS}/{revision.name}"
        published = (revision.store.read_if_exists(CARD, limit=_CARD_BYTES) or b"").decode(errors="replace")
        card = choose_card(self.read_card(), move_pictures(published, where), field=self.target)
        shown = insert_section(card, "revision", f"Newest revision: [{where}]({where})")
        for name, text in ((CARD, shown.encode()), (POINTER, f"{where}\n".encode())):
            if self._root.read_if_exists(name, limit=_CARD_BYTES) != text:
                self._root.write_bytes(name, text)

    def _describe_result(self, revision: Revision, *, created: bool) -> Published:
        url, commit = revision.store.url, revision.commit
        return Published(self.target, url, revision.name, commit.content_digest, created, commit.files)

    def _list_names(self) -> list[str]:
        return [name for name in self._root.children(REVISIONS) if _parse_number(name) > 0]

    def _read_revision(self, name: str) -> Revision | None:
        store = self._root.child(REVISIONS, name)
        try:
            commit = read_commit(store, kind="published")
        except DamagedError:  # not written by this library, or changed since: ignored, and never removed
            return None
        if commit is None:
            return None
        return Revision(_parse_number(name), name, str(commit.meta.get("branch", MAIN)), store, commit)


def _is_intact(revision: Revision, digest: str) -> bool:
    return revision.commit.content_digest == digest and not verify_files(revision.store, revision.commit)


def _parse_number(name: str) -> int:
    digits = name.partition("-")[0]
    # isascii, because other scripts' digits are digits as well.
    return int(digits) if digits.isascii() and digits.isdigit() else 0


def _copy(content: Content, path: str, store: Store) -> FileEntry:
    with content.open(path) as source, store.open_write(path) as target:
        while chunk := source.read(CHUNK_BYTES):
            target.write(chunk)
    return target.entry


def _verify_copies(content: Content, entries: list[FileEntry], store: Store) -> None:
    """Withdraw the revision and raise DamagedError when a source changed while it was copied."""
    wanted = {entry.path: entry for entry in content.entries()}
    for entry in entries:
        if entry != wanted[entry.path]:
            withdraw_folder(store)
            sizes = f"{entry.size:,} bytes, committed {wanted[entry.path].size:,}"
            what = f"{entry.path} differs from what its stage committed ({sizes})."
            field = content.files[entry.path].store.url
            raise DamagedError(what, field=field, remedy="Run the stage that it comes from again.")


Hub: TypeAlias = "FolderHub | HuggingFaceHub"


def open_hub(to: str, *, revision: str | None = None, private: bool | None = None) -> Hub:
    """Open the hub at an address, without contacting it. `private` applies to a repository that has to be created."""
    target = parse_target(to, revision=revision)
    if target.repo is None:
        return FolderHub(target.url, branch=target.revision)
    from trainer_lib.hub.huggingface import HuggingFaceHub  # loads the Hub's client

    return HuggingFaceHub(target.repo, branch=target.revision, private=private)
