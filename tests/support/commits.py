"""A small committed folder: what the tests of the commit protocol have in common."""

from __future__ import annotations

from trainer_lib.storage import FileEntry, Store
from trainer_lib.storage.commit import Commit, write_commit


def write_files(store: Store) -> list[FileEntry]:
    """Write three small files, one of them empty."""
    return [store.write_bytes("b.bin", b"bbbb"), store.write_bytes("a/x.bin", bytes(1000)), store.write_bytes("z", b"")]


def committed(store: Store) -> Commit:
    return write_commit(store, "stage", write_files(store), {"metrics": {"loss": 0.1}, "note": "é"})
