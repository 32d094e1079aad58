"""The removal of a recorded run or of a stage's result, beside processes that may take it up at that moment.

    <storage>/runs/<id>/removing.json               while it may be removed: the process that removes it
    <storage>/stages/<stage>/<key>/removing.json

A process that needs a run first leaves a mark in its folder (its sign of life, a tag) and then waits for that note to
go; one that needs a stage's result first names it in the record of its run. The remover first leaves the note and then
looks for marks and records, and touches nothing if it finds one. So while the note is there at least one of the two
sees the other, on any store. A removal that has looked before the mark was there may be over when the note is looked
for; it has then taken the mark, or the result, along. So the last look is for the mark itself, or for the commit.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable

from trainer_lib.errors import StorageError
from trainer_lib.locks.lease import Holder
from trainer_lib.storage import Store

REMOVING = "removing.json"
_NOTE_BYTES = 4096
_LOOK_S = 0.1
_TRIES = 5
_MARKS = 50
_REMOVAL_S = 120.0
"""Seconds that a process of another machine is given to remove a run, or some stages' results."""


def remove_run(folder: Store, record: str, is_needed: Callable[[], bool]) -> bool:
    """Remove a run's folder unless `is_needed`; False, and nothing is changed, if it is.

    Args:
        record: the file that makes the folder a run; it goes first.

    Raises:
        StorageError: not everything could be removed; the record is gone first, so no run is listed there.
    """
    note = Holder.this_process()
    if not folder.create(REMOVING, note.to_bytes()):
        other = Holder.from_bytes(folder.read_if_exists(REMOVING, limit=_NOTE_BYTES) or b"")
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

    Args:
        name: the mark's path in the folder.
        write: writes it; called again where a removal has taken it along. Where nothing can be written at all, the mark
            is given up after some seconds.
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
    """Wait until no process removes this folder, and return whether one did: it may have taken what was seen, too."""
    deadline = time.monotonic() + _REMOVAL_S
    has_waited = False
    while (data := folder.read_if_exists(REMOVING, limit=_NOTE_BYTES)) is not None:
        has_waited = True
        holder = Holder.from_bytes(data)
        if holder is None or holder.is_gone() or (not holder.is_alive() and time.monotonic() > deadline):
            folder.delete(REMOVING)  # its process died over it, or is on another machine and silent
            break
        time.sleep(_LOOK_S)
    return has_waited
