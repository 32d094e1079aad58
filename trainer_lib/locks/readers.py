"""Marks of processes that read a checkpoint, so that no rotation removes it meanwhile. No torch here.

A reader leaves a mark in the checkpoint's folder, ``READING-<id>.json`` (a `lease.Holder`), and looks for the commit
*after* it. A remover deletes the commit first and looks for marks *after* that::

    reader:   write the mark,    then: is there a commit?   no  -> the checkpoint is gone; use another
    remover:  delete the commit, then: are there marks?     yes -> put the commit back

In every order of these four steps at least one of the two sees the other, on any store (as in Dekker's algorithm).

A mark does not outlive its process for long. On the same machine a reader that was killed is seen to be gone. From
another machine its mark counts for `TTL_S` seconds after it was last renewed, which happens every `RENEW_S` seconds by
the reader's clock: clocks that differ by less than `TTL_S` do no harm.
"""

from __future__ import annotations

import contextlib
import json
import logging
import threading
import uuid
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime

from trainer_lib.errors import DamagedError, StorageError
from trainer_lib.locks.lease import Holder
from trainer_lib.storage import Store
from trainer_lib.storage.commit import COMMIT, LIMIT

KEEP = "KEEP.json"


def keep_checkpoint(store: Store, why: str) -> bool:
    """Mark a checkpoint as one that every rotation leaves alone; False when it is not there any more.

    Unlike the mark of a reader, ``KEEP.json`` outlives its process; `why` is for a person who looks into the folder.
    Raises StorageError.
    """
    # First a look, so that the mark does not make the folder of a removed checkpoint again.
    if not store.exists(COMMIT):
        return False
    store.create(KEEP, (json.dumps({"why": why}) + "\n").encode())
    if store.exists(COMMIT):
        return True
    store.delete(KEEP)
    return False


def end_keeping(store: Store) -> None:
    """Take the mark of a checkpoint away; nothing happens where there is none. Raises StorageError."""
    store.delete(KEEP)


def is_kept(store: Store) -> bool:
    """Whether a checkpoint is marked as one to keep. Raises StorageError."""
    return KEEP in store.children()


TTL_S = 3600.0
"""Seconds that a mark of another machine counts after it was last renewed."""
RENEW_S = 600.0
"""Seconds between two renewals."""
_PREFIX, _SUFFIX = "READING-", ".json"
_MARK_LIMIT = 4096
_LOG = logging.getLogger(__name__)


@contextlib.contextmanager
def protect_from_removal(store: Store) -> Iterator[None]:
    """Protect a checkpoint from removal for the length of a ``with`` block; look for its commit inside the block.

    Without a commit, or where no mark can be written (a read-only store), the block runs without protection.
    """
    mark = _Mark(store)
    try:
        yield
    finally:
        mark.remove()


def list_readers(store: Store) -> list[Holder]:
    """List the processes that are reading a checkpoint now, as far as this machine can know."""
    return _readers(store, store.children())


def is_protected(store: Store, *, even_kept: bool = False) -> bool:
    """Whether a checkpoint must not be removed now: a process is reading it or, unless `even_kept`, it is kept."""
    names = store.children()
    return (KEEP in names and not even_kept) or bool(_readers(store, names))


def withdraw_if_unread(store: Store, *, even_kept: bool = False) -> bool:
    """Delete a checkpoint unless a process is reading it or it is kept; False, and nothing is changed, then.

    Args:
        store: the checkpoint's folder.
        even_kept: delete it although it is kept: its training has gone back to before it.

    Raises:
        StorageError: the checkpoint, or all of it but its commit, could not be deleted.
    """
    if is_protected(store, even_kept=even_kept):
        return False
    commit = store.read_if_exists(COMMIT, limit=LIMIT)
    # The commit goes first: a process that looks from now on finds no checkpoint.
    store.delete(COMMIT)
    # A reader, or a mark, came between the first look and the deletion.
    if commit is not None and is_protected(store, even_kept=even_kept):
        store.create(COMMIT, commit)
        return False
    store.delete_tree()
    return True


class _Mark:
    """A mark that is renewed by a thread until it is removed."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._name: str | None = self._put() if _has_commit(store) else None
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._keep, name="trainflow-reading", daemon=True)
        if self._name is not None:
            self._thread.start()

    def remove(self) -> None:
        """Remove the mark; one that cannot be removed expires by itself."""
        self._done.set()
        if self._name is not None:
            self._thread.join()
            self._drop(self._name)

    def _keep(self) -> None:
        while not self._done.wait(RENEW_S):
            # The new mark before the old one is removed, so that there is a whole mark at every moment.
            name = self._put()
            if name is not None and self._name is not None:
                self._drop(self._name)
                self._name = name

    def _put(self) -> str | None:
        name = f"{_PREFIX}{uuid.uuid4().hex}{_SUFFIX}"
        try:
            return name if self._store.create(name, Holder.this_process(TTL_S).to_bytes()) else None
        except StorageError as error:
            _LOG.info(
                "%s is read without protection from removal, its mark could not be written: %s", self._store.url, error
            )
            return None

    def _drop(self, name: str) -> None:
        with contextlib.suppress(StorageError):
            self._store.delete(name)


def _readers(store: Store, names: Sequence[str]) -> list[Holder]:
    marks = [name for name in names if name.startswith(_PREFIX) and name.endswith(_SUFFIX)]
    return [holder for name in marks if (holder := _holder(store, name)) is not None and _counts(holder)]


def _has_commit(store: Store) -> bool:
    try:
        return store.exists(COMMIT)
    except StorageError:  # reading itself will raise it
        return False


def _holder(store: Store, name: str) -> Holder | None:
    try:
        return Holder.from_bytes(store.read_if_exists(name, limit=_MARK_LIMIT) or b"")
    except DamagedError:
        return None


def _counts(holder: Holder) -> bool:
    if holder.is_alive() or holder.is_gone():  # on this machine there is no need for clocks
        return holder.is_alive()
    try:
        renewed = datetime.fromisoformat(holder.since)
        return abs((datetime.now(UTC) - renewed).total_seconds()) < holder.ttl_s
    except (ValueError, TypeError):  # not a date, or one without a time zone
        return False
