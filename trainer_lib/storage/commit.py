"""The commit protocol: a folder is complete if and only if it holds a valid ``COMMIT.json``.

::

    write every file under its final name      digests are computed while writing; a local disk is fsynced
    write_commit
        sync, list once, compare sizes         finds a file that the store swallowed now, not when it is needed
        guard()                                raises unless the folder is still ours (a lease's epoch, a claim)
        create COMMIT.json                     last; all or nothing; exclusive where the store can
        read it back                           no commit is reported that was not seen
    read_commit, verify_files                  trust nothing that COMMIT.json does not list with its digest
    withdraw_folder                            COMMIT.json first, then the rest

COMMIT.json proves itself: it has one canonical form and a seal (the SHA-256 of everything else in it), so any changed
byte is noticed. It is small, typed and parsed strictly, because a folder may come from anywhere.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import re
import uuid
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any

from trainer_lib.base.json_text import parse_json, seal_of
from trainer_lib.errors import DamagedError, LeaseLostError, NewerVersionError, StorageError
from trainer_lib.storage import FileEntry, Store, relative_problem

COMMIT = "COMMIT.json"  # name of the commit file in its folder

FORMAT = 1
LIMIT = 64 * 2**20  # the largest commit file that is read or written, in bytes
MOST_FILES = 300_000
"""Files that fit into it, with paths of up to 120 characters: a job that would write more is refused before it."""

_KINDS = ("stage", "checkpoint", "published")
_SHA256 = re.compile(r"[0-9a-f]{64}")
_FIELDS = {"format", "kind", "id", "created", "content_digest", "files", "meta", "seal"}


@dataclass(frozen=True)
class Commit:
    """The contents of a complete folder."""

    kind: str  # ``stage``, ``checkpoint`` or ``published``
    files: tuple[FileEntry, ...]  # the committed files, sorted by path
    meta: dict[str, Any]  # facts that the kind defines; JSON
    created: str  # when it was committed, ISO-8601, UTC
    content_digest: str  # SHA-256 over the sorted paths, sizes and digests; it covers neither times nor `meta`
    # Unique to this commit, so that a writer whose answer was lost recognises its own.
    id: str = field(default_factory=lambda: uuid.uuid4().hex)

    def entry(self, path: str) -> FileEntry | None:
        """The committed file at `path`; None when the commit does not list it."""
        return next((entry for entry in self.files if entry.path == path), None)


def content_digest(files: Iterable[FileEntry]) -> str:
    """SHA-256 (hexadecimal) over one line ``path NUL size NUL sha256`` per file, sorted by path; no time counts."""
    digest = hashlib.sha256()
    for entry in sorted(files, key=lambda entry: entry.path):
        digest.update(f"{entry.path}\0{entry.size}\0{entry.sha256}\n".encode())
    return digest.hexdigest()


def write_commit(
    store: Store,
    kind: str,
    files: Iterable[FileEntry],
    meta: dict[str, Any],
    *,
    guard: Callable[[], None] | None = None,
) -> Commit:
    """Declare a folder complete, after every file in `files` was written; it may hold others, which are not covered.

    `guard` is called right before the commit, and raises (`LeaseLostError`) to prevent it.

    Raises:
        StorageError: a file is absent or has another size than was written; nothing is committed.
        LeaseLostError: another process has committed the folder already.
        ValueError: the kind, a path or the meta is invalid: a mistake of the caller.
    """
    entries = tuple(sorted(files, key=lambda entry: entry.path))
    created = datetime.now(UTC).isoformat(timespec="microseconds")
    # Through JSON: the commit that is returned equals the one that will be read.
    commit = Commit(kind, entries, parse_json(json.dumps(meta)), created, content_digest(entries))
    data = _render(commit)
    _check_own(commit, data)
    # Before the commit: after a power cut COMMIT.json must not list files that were only cached.
    store.sync()
    if problems := verify_files(store, commit, digests=False):
        what = f"Files that were written are missing or cut short: {'; '.join(problems[:5])}."
        remedy = "Nothing was committed. If several machines take part, they must share the storage."
        raise StorageError(what, field=store.url, remedy=remedy)
    if guard is not None:
        guard()
    _put(store, data)
    return commit


def read_commit(store: Store, *, kind: str | None = None) -> Commit | None:
    """Read the commit of a folder; None when the folder is not complete.

    Raises:
        DamagedError: the commit file is too large, malformed, altered, or not of `kind`.
        NewerVersionError: a newer trainflow wrote it. The folder is not damaged, and nothing in it may be changed.
        StorageError: the store cannot be read.
    """
    try:
        data = store.read_if_exists(COMMIT, limit=LIMIT)
    except DamagedError as error:
        raise _damaged(store, f"has more than {LIMIT:,} bytes") from error
    if data is None:
        return None
    commit = _parse(store, data)
    if kind is not None and commit.kind != kind:
        raise _damaged(store, f"is of a {commit.kind}, not of a {kind}")
    return commit


def verify_files(
    store: Store, commit: Commit, *, digests: bool = True, on_read: Callable[[int], object] = lambda size: None
) -> list[str]:
    """Compare a folder's files with its commit; one line per problem, none when the folder is intact.

    Without `digests` presence and sizes alone count (one listing). `on_read` takes the numbers of bytes that were read.
    Raises StorageError, which says nothing about the files: another try may help.
    """
    sizes = {info.path: info.size for info in store.list()}
    problems = []
    for entry in commit.files:
        size = sizes.get(entry.path)
        if size is None:
            # A listing leaves links out, because a link may lead out of the folder.
            problems.append(f"{entry.path}: {'a link, not a file' if store.exists(entry.path) else 'missing'}")
        elif size != entry.size:
            problems.append(f"{entry.path}: {size:,} bytes, committed {entry.size:,}")
        elif digests and (found := store.digest(entry.path, on_read)) != entry.sha256:
            problems.append(f"{entry.path}: digest {found[:12]}..., committed {entry.sha256[:12]}...")
    return problems


def withdraw_folder(store: Store) -> None:
    """Delete a folder, its commit first, so that a half-deleted folder never looks complete."""
    store.delete(COMMIT)
    store.delete_tree()


def _put(store: Store, data: bytes) -> None:
    """Create the commit file, and return only once it was read back."""
    failure: StorageError | None = None
    created = False
    try:
        created = store.create(COMMIT, data)
    except StorageError as error:  # the file may be there all the same, and only the answer was lost
        failure = error
    seen = store.read_if_exists(COMMIT, limit=LIMIT)
    if seen == data:
        return
    # A put that failed is reported as such (below), whatever the store shows now.
    if not created and failure is None and seen is not None:
        remedy = "Run the command again: the other process's result is used if it is intact."
        raise LeaseLostError("Another process has committed this folder.", field=f"{store.url}/{COMMIT}", remedy=remedy)
    if seen is not None and data.startswith(seen):  # torn: ours, but not whole
        with contextlib.suppress(StorageError):
            store.delete(COMMIT)
    raise failure or StorageError(
        "The store did not keep the commit file as it was written.",
        field=f"{store.url}/{COMMIT}",
        remedy="Nothing was committed. Run the command again; if this repeats, the store cannot be trusted.",
    )


def _check_own(commit: Commit, data: bytes) -> None:
    """Refuse to write a commit that `read_commit` would refuse to read."""
    problem = f"a commit of {len(data):,} bytes is larger than {LIMIT:,}" if len(data) > LIMIT else None
    problem = problem or _entries_problem([entry.__dict__ for entry in commit.files])
    if commit.kind not in _KINDS or problem:
        raise ValueError(problem or f"kind {commit.kind!r} is not one of {_KINDS}")


# -- the file ----------------------------------------------------------------------------------------------------------


def _render(commit: Commit) -> bytes:
    record: dict[str, Any] = {
        "format": FORMAT,
        "kind": commit.kind,
        "id": commit.id,
        "created": commit.created,
        "content_digest": commit.content_digest,
        "files": [{"path": entry.path, "size": entry.size, "sha256": entry.sha256} for entry in commit.files],
        "meta": commit.meta,
    }
    return (json.dumps(record | {"seal": seal_of(record)}, indent=1) + "\n").encode()


def _parse(store: Store, data: bytes) -> Commit:
    try:
        record = parse_json(data)
        problem = _record_problem(record)
        if problem is not None and _is_sealed(record) and record["format"] > FORMAT:
            remedy = "Update trainflow on this machine, or choose another storage. Nothing was changed there."
            raise NewerVersionError(f"The commit file {problem}.", field=f"{store.url}/{COMMIT}", remedy=remedy)
        if problem is None:
            entries = tuple(FileEntry(**entry) for entry in record["files"])
            texts = (record[name] for name in ("created", "content_digest", "id"))
            commit = Commit(record["kind"], entries, record["meta"], *texts)
            # Rendering the parsed commit again covers the seal, the canonical form and every byte at once.
            if commit.content_digest == content_digest(entries) and _render(commit) == data:
                return commit
            problem = "was altered after it was written"
    except ValueError:  # malformed UTF-8, JSON or numbers
        problem = "is not JSON that trainflow writes"
    raise _damaged(store, problem)


def _is_sealed(record: object) -> bool:
    """Whether a record of any format states it and carries its seal, so that no damage made the format."""
    if not isinstance(record, dict) or type(record.get("format")) is not int:
        return False
    return bool(record.get("seal") == seal_of({name: value for name, value in record.items() if name != "seal"}))


def _record_problem(record: object) -> str | None:
    if not isinstance(record, dict):
        return "is not an object"
    version = record.get("format")
    # Not isinstance: True is an int.
    if type(version) is not int or version < 1:
        return "does not state its format"
    if version > FORMAT:
        return f"has format {version}, which a newer trainflow wrote; this one reads up to {FORMAT}"
    if set(record) != _FIELDS:
        return f"has unexpected or missing fields: {sorted(set(record) ^ _FIELDS)[:5]}"
    texts = [record[name] for name in ("kind", "id", "created", "content_digest", "seal")]
    if not all(isinstance(text, str) for text in texts) or not isinstance(record["meta"], dict):
        return "has a field of the wrong type"
    if record["kind"] not in _KINDS:
        return f"has the unknown kind {record['kind'][:40]!r}"
    return _entries_problem(record["files"])


def _entries_problem(entries: object) -> str | None:
    if not isinstance(entries, list):
        return "has no list of files"
    previous = ""
    for entry in entries:
        if not isinstance(entry, dict) or set(entry) != {"path", "size", "sha256"}:
            return "has a malformed file entry"
        path, size, sha256 = entry["path"], entry["size"], entry["sha256"]
        problem = relative_problem(path)
        if problem:
            return f"lists a file whose path {problem}: {str(path)[:80]!r}"
        # Strictly sorted, which also excludes a path listed twice.
        if path == COMMIT or path <= previous:
            return f"lists {path[:80]!r} out of order, twice, or lists itself"
        if type(size) is not int or size < 0 or not isinstance(sha256, str) or not _SHA256.fullmatch(sha256):
            return f"has a malformed size or digest for {path[:80]!r}"
        previous = path
    return None


def _damaged(store: Store, reason: str) -> DamagedError:
    remedy = "The folder cannot be trusted: restore it from a copy, or remove it and run the command again."
    return DamagedError(f"The commit file {reason}.", field=f"{store.url}/{COMMIT}", remedy=remedy)
