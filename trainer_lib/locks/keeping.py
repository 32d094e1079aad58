"""A mark that keeps a checkpoint: every rotation leaves the checkpoint alone until the mark is taken away.

An evaluation beside a training marks the best one so. Unlike the mark of a reader, ``KEEP.json`` outlives
its process. Marking and removing are safe in every order, by the rule of `locks.readers`: the mark is written before
the commit is looked for, and a remover deletes the commit before it looks for marks.
"""

from __future__ import annotations

import json

from trainer_lib.storage import Store
from trainer_lib.storage.commit import COMMIT

KEEP = "KEEP.json"


def keep_checkpoint(store: Store, why: str) -> bool:
    """Mark a checkpoint as one to keep; False when it is not there any more.

    Args:
        store: the checkpoint's folder.
        why: a sentence for a person who looks into the folder.

    Raises:
        StorageError: the store cannot be read or written.
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
    """Take the mark of a checkpoint away; nothing happens where there is none.

    Raises:
        StorageError: the store cannot be written.
    """
    store.delete(KEEP)


def is_kept(store: Store) -> bool:
    """Whether a checkpoint is marked as one to keep.

    Raises:
        StorageError: the store cannot be read.
    """
    return KEEP in store.children()
