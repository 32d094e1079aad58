"""Files that the caller's own code writes into a checkpoint's folder, committed with the rest.

The code gets a local folder: the checkpoint's own on a disk, and a temporary one of the same name, whose files are then
uploaded, where the store is remote.
"""

from __future__ import annotations

import contextlib
import hashlib
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import Tensor

from trainer_lib.checkpoint.tensors import write_safetensors
from trainer_lib.distributed.agreement import run_on_all_ranks
from trainer_lib.errors import ConfigError
from trainer_lib.locks.claim import is_claim
from trainer_lib.storage import Store, relative_problem
from trainer_lib.storage.commit import COMMIT, FileEntry

if TYPE_CHECKING:
    from trainer_lib.distributed.communicator import Communicator

WriteFiles = Callable[[Path], None]
"""Writes files into a local folder; called on every rank."""


def add_files(store: Store, comm: Communicator, write: WriteFiles) -> dict[str, FileEntry]:
    """Let `write` add files to the folder. Collective.

    Returns:
        On rank 0, the entries of all added files by path; empty on the other ranks.

    Raises (the same on every rank):
        ConfigError: a file is a link, has a name that a checkpoint cannot hold, or other bytes on another machine.
        TrainflowError: what `write` raised on the lowest rank where it failed.
    """
    if store.is_local:
        run_on_all_ranks(comm, lambda: write(store.local_path()))
        return run_on_all_ranks(comm, lambda: _entries(store) if comm.rank == 0 else {})
    with _staging_folder(store, comm) as folder:
        run_on_all_ranks(comm, lambda: write(folder))
        # One rank of each machine: those of a machine share the folder.
        own = run_on_all_ranks(comm, lambda: _upload(store, folder) if comm.local_rank == 0 else [])
        gathered = comm.gather_json([asdict(entry) for entry in own]) or []
    entries = [FileEntry(**record) for records in gathered for record in records]
    return run_on_all_ranks(comm, lambda: _merge(entries))


def digest_of_tensors(tensors: Mapping[str, Tensor]) -> str:
    """The SHA-256 of the safetensors file of these tensors ``[...]``, which is not written."""
    sink: Any = _DigestSink()
    write_safetensors(sink, tensors)
    return str(sink.digest.hexdigest())


class _DigestSink:
    def __init__(self) -> None:
        self.digest = hashlib.sha256()

    def write(self, data: bytes | bytearray | memoryview) -> int:
        view = memoryview(data).cast("B")
        self.digest.update(view)
        return len(view)


def _entries(store: Store) -> dict[str, FileEntry]:
    _refuse_links(store)
    found = [info for info in store.list() if not is_claim(info.path)]
    for info in found:
        store.sync_file(info.path)  # the caller's code only closed it
    return {info.path: FileEntry(_checked(info.path), info.size, store.digest(info.path)) for info in found}


def _upload(store: Store, folder: Path) -> list[FileEntry]:
    _refuse_links(Store.open(folder))
    paths = sorted(path for path in folder.rglob("*") if path.is_file())
    return [store.upload(path, _checked(path.relative_to(folder).as_posix())) for path in paths]


def _refuse_links(store: Store) -> None:
    """Before the save's own files: one of them, written under a link's name, would replace what the link leads to."""
    for name in store.links():
        raise ConfigError(
            "A file or folder that save_model wrote into the checkpoint is a symbolic link.",
            field="save_model",
            value=name,
            remedy="Copy what it leads to.",
        )


def _merge(entries: list[FileEntry]) -> dict[str, FileEntry]:
    """The entries of all machines by path; where two machines uploaded one path, they uploaded the same bytes."""
    merged: dict[str, FileEntry] = {}
    for entry in entries:
        if merged.setdefault(entry.path, entry) != entry:
            raise ConfigError(
                "Two machines wrote different bytes under one name into the checkpoint.",
                field="save_model",
                value=entry.path,
                remedy="Write the file on the main process only, or put the rank into its name.",
            )
    return merged


def _checked(name: str) -> str:
    problem = "is the commit's own" if name == COMMIT else relative_problem(name)
    if problem:
        raise ConfigError(
            f"The name of a file that save_model wrote into the checkpoint {problem}.",
            field="save_model",
            value=name,
            remedy="Choose another name.",
        )
    return name


@contextlib.contextmanager
def _staging_folder(store: Store, comm: Communicator) -> Iterator[Path]:
    """A temporary folder at one path on every machine, with the name of the checkpoint's."""
    made = run_on_all_ranks(comm, lambda: tempfile.mkdtemp(prefix="trainflow-save-") if comm.rank == 0 else None)
    above = comm.broadcast_json(made)
    folder = Path(above) / store.url.rstrip("/").rpartition("/")[2]
    try:
        run_on_all_ranks(comm, lambda: folder.mkdir(parents=True, exist_ok=True))
        yield folder
    finally:
        if comm.local_rank == 0:
            shutil.rmtree(above, ignore_errors=True)
