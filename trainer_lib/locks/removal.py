"""The removal of a run, a stage's result or a checkpoint, alongside processes that may take it up at that moment.

A run, or a result of a stage::

    <storage>/runs/<id>/removing.json               while it may be removed: the process that removes it
    <storage>/stages/<stage>/<key>/removing.json

A process that needs a run first leaves a mark in its folder (its sign of life, a tag) and then waits for that note to
go; one that needs a stage's result first names it in the record of its run. The remover first leaves the note and then
looks for marks and records, and touches nothing if it finds one. So while the note is there at least one of the two
sees the other, on any store. A removal that has looked before the mark was there may be over when the note is looked
for; it has then taken the mark, or the result, along. So the last look is for the mark itself, or for the commit.

A checkpoint: a reader leaves a mark in its folder, ``READING-<id>.json`` (a `lease.Holder`), and looks for the commit
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
import time
import uuid
from collections.abc import Callable, Iterable, Iterator
from datetime import UTC, datetime

from typing_extensions import override

from trainer_lib.errors import StorageError
from trainer_lib.locks.lease import Heartbeat, Holder, read_small
from trainer_lib.storage import Store
from trainer_lib.storage.commit import COMMIT, LIMIT

REMOVING = "removing.json"
_LOOK_S = 0.1
_TRIES = 5
_MARKS = 50
_REMOVAL_S = 120.0  # seconds that a process of another machine is given to remove a run, or some stages' results
_LIVING_S = 600.0  # seconds that a process is given that runs on this machine; its note is not removed afterwards
KEEP = "KEEP.json"
TTL_S = 3600.0  # seconds that a mark of another machine counts after it was last renewed
RENEW_S = 600.0  # seconds between two renewals
_PREFIX, _SUFFIX = "READING-", ".json"
_LOG = logging.getLogger(__name__)


def remove_run(folder: Store, record: str, is_needed: Callable[[], bool]) -> bool:
    """Remove a run's folder, the file `record` first, unless `is_needed`; False, and nothing is changed, if it is.

    Raises StorageError for what remains; without its record no run is listed there.
    """
    note = Holder.this_process()
    if not folder.create(REMOVING, note.to_bytes()):
        other = Holder.from_bytes(read_small(folder, REMOVING) or b"")
        if other is None or not other.is_gone():
            return False  # another process removes it
        folder.delete(REMOVING)
        if not folder.create(REMOVING, note.to_bytes()):
            return False
    try:
        needed = is_needed()
    except BaseException:
        folder.delete(REMOVING)
        raise
    if needed:
        folder.delete(REMOVING)
        return False
    folder.delete(record)
    for name in folder.children():
        if name != REMOVING:
            _delete(folder, name)
    # Last, and nothing after it: a process that waits for it fills the folder again at once.
    folder.delete(REMOVING)
    if folder.is_local:
        with contextlib.suppress(OSError):
            folder.local_path().rmdir()
    return True


def leave_mark(folder: Store, name: str, write: Callable[[], object]) -> None:
    """Write a mark, a file of a run's folder, until it is there and no removal is under way that may not have seen it.

    `write` is called again where a removal has taken the mark along. Where nothing can be written at all, it is given
    up after some seconds.
    """
    for _ in range(_MARKS):
        write()
        if not await_removal(folder) and folder.exists(name):
            return
        time.sleep(_LOOK_S)


def announce_removal(folder: Store) -> None:
    """Leave the note in a folder that this process holds the lease of, in place of one that a dead process left."""
    folder.replace(REMOVING, Holder.this_process().to_bytes())


def withdraw_removal(folder: Store) -> None:
    """Take the note of `announce_removal` away: nothing was removed, or everything else was."""
    folder.delete(REMOVING)


def _delete(folder: Store, name: str) -> None:
    """Remove a file or a folder, into which a process that waits may just be writing its sign of life."""
    for _ in range(_TRIES - 1):
        with contextlib.suppress(StorageError):
            folder.delete_tree(name)
            return
        time.sleep(_LOOK_S)
    folder.delete_tree(name)


def await_removal(folder: Store) -> bool:
    """Wait until no process removes this folder, and return whether one did: it may have taken what was seen, too.

    Raises StorageError when a process of this machine is still at it after ten minutes.
    """
    began = time.monotonic()
    has_waited = False
    while (data := read_small(folder, REMOVING)) is not None:
        has_waited = True
        holder = Holder.from_bytes(data)
        waited_s = time.monotonic() - began
        if holder is None or holder.is_gone() or (waited_s > _REMOVAL_S and not holder.is_alive()):
            folder.delete(REMOVING)  # its process died over it, or is on another machine and silent
            break
        if waited_s > _LIVING_S:
            what = f"The folder has been under removal for more than {_LIVING_S:.0f} s ({holder})."
            remedy = "Wait for that process, or end it. If it removes nothing, delete this file."
            raise StorageError(what, field=f"{folder.url}/{REMOVING}", remedy=remedy)
        time.sleep(_LOOK_S)
    return has_waited


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


@contextlib.contextmanager
def protect_from_removal(store: Store) -> Iterator[None]:
    """Protect a checkpoint from removal for the length of a ``with`` block; look for its commit inside the block.

    Without a commit, or where no mark can be written (a read-only store), the block runs without protection.
    """
    with contextlib.ExitStack() as stack:
        with contextlib.suppress(StorageError):  # reading itself will raise it
            if store.exists(COMMIT):
                stack.enter_context(_Mark(store))
        yield


def list_readers(store: Store, names: Iterable[str] | None = None) -> list[Holder]:
    """List the processes that read a checkpoint now, as far as this machine can know, from `names` in its folder."""
    marks = [name for name in names or store.children() if name.startswith(_PREFIX) and name.endswith(_SUFFIX)]
    holders = [Holder.from_bytes(read_small(store, name) or b"") for name in marks]
    return [holder for holder in holders if holder is not None and _counts(holder)]


def is_protected(store: Store, *, even_kept: bool = False) -> bool:
    """Whether a checkpoint must not be removed now: a process is reading it or, unless `even_kept`, it is kept."""
    names = store.children()
    return (KEEP in names and not even_kept) or bool(list_readers(store, names))


def withdraw_if_unread(store: Store, *, even_kept: bool = False) -> bool:
    """Delete a checkpoint unless a process is reading it or it is kept; False, and nothing is changed, then.

    `even_kept`: delete it although it is kept: its training has gone back to before it. Raises StorageError.
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


class _Mark(Heartbeat):
    """A mark that is replaced by a newer one from time to time; one that cannot be removed expires by itself."""

    def __init__(self, store: Store) -> None:
        super().__init__(RENEW_S, "a reader")
        self._store = store
        self._name: str | None = None

    @override
    def _beat(self) -> None:
        name = f"{_PREFIX}{uuid.uuid4().hex}{_SUFFIX}"
        try:
            self._store.create(name, Holder.this_process(TTL_S).to_bytes())
        except StorageError as error:
            what = "%s is read without protection from removal, its mark could not be written: %s"
            _LOG.info(what, self._store.url, error)
            return
        # The new mark before the old one is removed, so that there is a whole mark at every moment.
        with contextlib.suppress(StorageError):
            self._end()
        self._name = name

    @override
    def _end(self) -> None:
        if self._name is not None:
            self._store.delete(self._name)


def _counts(holder: Holder) -> bool:
    if holder.is_alive() or holder.is_gone():  # on this machine there is no need for clocks
        return holder.is_alive()
    try:
        renewed = datetime.fromisoformat(holder.since)
        return abs((datetime.now(UTC) - renewed).total_seconds()) < holder.ttl_s
    except (ValueError, TypeError):  # not a date, or one without a time zone
        return False
