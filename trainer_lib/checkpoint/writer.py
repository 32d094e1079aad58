"""Saving a checkpoint: every rank writes its own files, then rank 0 makes them count by one more file.

The protocol. No phase begins on any rank before every rank has ended the phase before it::

    compare    every rank    equal digests of the tensors that all ranks hold alike
    prepare    rank 0        enough space?  claim the folder; delete its COMMIT.json, then whatever earlier saves left
    add        every rank    let the caller's own code add files, if it has any (`add_files`)
    write      every rank    write own files; their digests are computed on the way
    gather     rank 0        collect the entries (path, bytes, SHA-256) of all ranks; index the shards, if there are any
    commit     rank 0        sync; compare a listing with the entries; still our claim?; create COMMIT.json last,
                             read it back; release the claim                                    (`commit.write_commit`)
    announce   all ranks     every rank learns what was committed

    If a phase fails on any rank, every rank raises the error of the lowest rank that failed, and rank 0 deletes the
    files again unless another process has taken the folder over.

What holds at every moment, also when a process is killed or the store fails between two writes:

- The checkpoints of other steps stay as they are.
- The folder counts as a checkpoint only while COMMIT.json stands in it, and COMMIT.json lists every file with its
  digest. A save of a step that was saved before deletes the old COMMIT.json before anything else.
- Of two processes that write the same folder, at most one commits (`locks.claim`).

A file that is written last, in place of a rename, is what Orbax does on stores without an atomic rename
(``commit_success.txt``, https://orbax.readthedocs.io/en/latest/api_reference/checkpoint.path.atomicity.html). Here it
also carries the digests, so it proves the content and not only the completion.
"""

from __future__ import annotations

import contextlib
import hashlib
import shutil
import tempfile
import threading
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, wait
from dataclasses import asdict, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, TypeVar

from torch import Tensor

from trainer_lib.checkpoint import layout
from trainer_lib.checkpoint.catalogue import CheckpointInfo, list_checkpoints
from trainer_lib.checkpoint.sharded import build_index, compare_copies, write_shard
from trainer_lib.checkpoint.snapshot import HostCopy, Snapshot, estimate_bytes, freeze_snapshot
from trainer_lib.checkpoint.tensors import write_safetensors
from trainer_lib.checkpoint.values import render_json, to_json
from trainer_lib.distributed.communicator import Communicator, run_on_all_ranks
from trainer_lib.errors import ConfigError, LeaseLostError, StorageError, StorageFullError, TrainflowError
from trainer_lib.locks.claim import claim_folder, holds_claim, is_claim, release_claim
from trainer_lib.locks.lease import Holder
from trainer_lib.secrets import mask_value
from trainer_lib.storage import FileEntry, Store, relative_problem
from trainer_lib.storage.commit import COMMIT, Commit, write_commit

WriteFiles = Callable[[Path], None]  # writes files into a local folder; called on every rank


def add_files(store: Store, comm: Communicator, write: WriteFiles) -> dict[str, FileEntry]:
    """Let `write` add files to the folder. Collective. On rank 0, the entries of all added files by path; else empty.

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
        what = "A file or folder that save_model wrote into the checkpoint is a symbolic link."
        raise ConfigError(what, field="save_model", value=name, remedy="Copy what it leads to.")


def _merge(entries: list[FileEntry]) -> dict[str, FileEntry]:
    """The entries of all machines by path; where two machines uploaded one path, they uploaded the same bytes."""
    merged: dict[str, FileEntry] = {}
    for entry in entries:
        if merged.setdefault(entry.path, entry) != entry:
            what = "Two machines wrote different bytes under one name into the checkpoint."
            remedy = "Write the file on the main process only, or put the rank into its name."
            raise ConfigError(what, field="save_model", value=entry.path, remedy=remedy)
    return merged


def _checked(name: str) -> str:
    problem = "is the commit's own" if name == COMMIT else relative_problem(name)
    if problem:
        what = f"The name of a file that save_model wrote into the checkpoint {problem}."
        raise ConfigError(what, field="save_model", value=name, remedy="Choose another name.")
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


Result = TypeVar("Result")
Written = tuple[list[FileEntry], dict[str, Any]]
"""A rank's output: its files' entries, and what the index states of its shard (empty for whole tensors)."""

_saving: set[str] = set()
"""Ids of the claims that this process uses right now; any other claim of this process is left from a failed save."""


def save_checkpoint(
    root: Store, snapshot: Snapshot, comm: Communicator, *, keep: int | None = None, add: WriteFiles | None = None
) -> CheckpointInfo:
    """Write and commit ``checkpoint-<step>`` below `root`, in place of an earlier one. Collective; equal on every rank.

    Args:
        snapshot: what this rank contributes.
        comm: the ranks that write this folder.
        keep: how many checkpoints rotation will leave; only used to explain a disk that is too small for one more.
        add: writes further files into a local folder, on every rank. Where it writes a file that the snapshot has as
            well, its file stays; of the snapshot's model another file is then written.

    Raises (the same on every rank):
        StorageFullError: there is not enough space; states the bytes needed and free. Nothing was written.
        StorageError: a write failed, or another living process is writing this folder.
        NotReproducibleError: two ranks that should hold the same tensors do not.
        LeaseLostError: another process took the folder over while this one was writing.
        ConfigError: the state cannot be written without pickle.
    """
    claim = Holder.this_process()
    _saving.add(claim.id)
    try:
        return _Save(root, snapshot, comm, claim, keep).run_phases(add)
    finally:
        _saving.discard(claim.id)


class _Save:
    """One save. `run_phases` is the protocol; each phase is a method."""

    def __init__(self, root: Store, snapshot: Snapshot, comm: Communicator, claim: Holder, keep: int | None) -> None:
        self.name = layout.checkpoint_name(snapshot.step)
        self.root, self.store = root, root.child(self.name)
        self.snapshot, self.comm = snapshot, comm
        self.claim, self.keep = claim, keep

    def run_phases(self, add: WriteFiles | None = None) -> CheckpointInfo:
        try:
            if self.snapshot.parts is None:  # equal on every rank; copies of parts are compared with their files
                compare_copies(self.comm, self.snapshot.copies, self.snapshot.place)
            self._on_first_rank(self._prepare)
            added = {} if add is None else add_files(self.store, self.comm, add)
            self.snapshot = _leave_out(self.snapshot, added)
            written = run_on_all_ranks(self.comm, lambda: _write_rank(self.store, self.snapshot, self.comm.rank))
            files = self._gather_files(written)
            files += [entry for path, entry in added.items() if path not in {known.path for known in files}]
            # The ranks of an imported checkpoint count too: `more_rngs` holds their random states.
            ranks = self.comm.world_size + len(self.snapshot.more_rngs)
            meta = {**self.snapshot.meta, "step": self.snapshot.step, "world_size": ranks}
            commit = self._on_first_rank(lambda: _commit(self.store, files, meta, self.claim))
        except TrainflowError:
            if self.comm.rank == 0:
                _delete_failed_save(self.store, self.claim)
            raise
        record = self.comm.broadcast_json(None if commit is None else asdict(commit))
        committed = tuple(FileEntry(**entry) for entry in record["files"])
        return CheckpointInfo(self.snapshot.step, self.name, self.store.url, Commit(**{**record, "files": committed}))

    def _on_first_rank(self, work: Callable[[], Result]) -> Result | None:
        """Run `work` on rank 0; the other ranks wait for it, and raise what it raises. Collective."""
        return run_on_all_ranks(self.comm, lambda: work() if self.comm.rank == 0 else None)

    def _prepare(self) -> None:
        """Refuse what can be refused before a byte is written; claim the folder and empty it."""
        for name in self.snapshot.files:
            problem = "is one of the checkpoint's own names" if layout.is_own_file(name) else relative_problem(name)
            if problem:
                remedy = "Choose another name."
                raise ConfigError(f"The file name {problem}.", field="checkpoint", value=name, remedy=remedy)
        _check_space(self.root, self.store, estimate_bytes(self.snapshot, self.comm.world_size), self.keep)
        other = claim_folder(self.store, self.claim, self._is_in_use)
        if other is not None:
            remedy = "Wait for it, end it, or give each run its own output_dir."
            raise StorageError(f"The checkpoint is being written by {other}.", field=self.store.url, remedy=remedy)
        # A commit of the same step is withdrawn first: the folder counts as unfinished while it is rewritten.
        self.store.delete(COMMIT)
        _delete_files(self.store)

    def _is_in_use(self, other: Holder) -> bool:
        """Whether the writer of another claim is still writing; a claim of this process may be one that it forgot."""
        return other.is_alive() and (other.pid != self.claim.pid or other.id in _saving)

    def _gather_files(self, written: Written) -> list[FileEntry]:
        """Rank 0: the entries of every rank's files, after writing the index over the shards. Collective."""
        entries, shard = written
        gathered = self.comm.gather_json([[asdict(entry) for entry in entries], shard]) or []
        files = [FileEntry(**record) for records, _ in gathered for record in records]
        if self.snapshot.parts is not None:
            shards = [part for _, part in gathered]
            index = self._on_first_rank(
                lambda: _write_json(self.store, layout.SHARD_INDEX, build_index(shards), indent=None)
            )
            files += [index] if index is not None else []
        return files


# -- the folder --------------------------------------------------------------------------------------------------------


def _check_space(root: Store, store: Store, needed: int, keep: int | None) -> None:
    """Raise StorageFullError unless `needed` bytes fit; a store that cannot tell its free space passes."""
    # Object stores have no such limit.
    free = store.free_bytes()
    if free is None or free >= needed:
        return
    free += sum(info.size for info in store.list())  # files of an earlier save of this step are about to be deleted
    if free >= needed:
        return
    remedy = "Free space, lower save_total_limit, or choose another output_dir."
    if keep is not None and (excess := list_checkpoints(root)[keep - 1 :]):
        size = sum(entry.size for info in excess for entry in info.commit.files)
        # Rotation runs after the commit, so a disk that holds exactly `keep` checkpoints is full at every save.
        remedy += (
            f" save_total_limit={keep} frees {size:,} bytes, but only after the new checkpoint is committed: the disk"
            f" must hold {keep + 1} checkpoints for a moment."
        )
    what = f"A checkpoint needs {needed:,} bytes, {free:,} are free."
    raise StorageFullError(what, field=store.url, remedy=f"{remedy} Earlier checkpoints are intact.")


def _delete_files(store: Store) -> None:
    """Empty the folder; claims stay, because they are what protects the folder."""
    for path in store.links():
        store.delete(path)
    for info in store.list():
        if not is_claim(info.path):
            store.delete(info.path)


def _commit(store: Store, files: list[FileEntry], meta: dict[str, Any], claim: Holder) -> Commit:
    def ensure_ours() -> None:
        # Right before COMMIT.json is written: another process may have waited longer than we took.
        if not holds_claim(store, claim):
            what = "Another process has taken this checkpoint's folder over while this one was writing it."
            raise LeaseLostError(what, field=store.url, remedy="Give each run its own output_dir.")

    commit = write_commit(store, layout.KIND, files, meta, guard=ensure_ours)
    with contextlib.suppress(StorageError):  # the checkpoint is complete; a claim that stays does no harm
        release_claim(store)
    return commit


def _delete_failed_save(store: Store, claim: Holder) -> None:
    """Give the space of a failed save back, if the folder is still ours; the next save deletes what stays."""
    with contextlib.suppress(StorageError):
        if holds_claim(store, claim):
            store.delete(COMMIT)
            _delete_files(store)
            release_claim(store)
            if not store.list():
                store.delete_tree()  # a disk still has the empty folders


# -- the files ---------------------------------------------------------------------------------------------------------


def _leave_out(snapshot: Snapshot, added: Mapping[str, FileEntry]) -> Snapshot:
    """The snapshot without the files that were added in their final form."""
    files = {name: data for name, data in snapshot.files.items() if name not in added}
    if snapshot.parts is not None or (present := added.get(layout.MODEL)) is None:
        return replace(snapshot, files=files)
    # The added file may hold other weights, or the same under other names.
    digest = hashlib.sha256()
    unwritten: Any = SimpleNamespace(write=digest.update)
    write_safetensors(unwritten, snapshot.model)
    is_same = present.sha256 == digest.hexdigest()
    return replace(snapshot, files=files, model_file=None if is_same else layout.OWN_MODEL)


def _write_rank(store: Store, snapshot: Snapshot, rank: int) -> Written:
    entries = [_write_json(store, layout.rng_file(rank), snapshot.rng, indent=None)] if snapshot.rng else []
    if snapshot.extra:
        entries.append(_write_tensors(store, layout.extra_file(rank), snapshot.extra))
    shard: dict[str, Any] = {}
    if snapshot.parts is not None:
        entry, shard = write_shard(store, snapshot.parts, rank)
        entries.append(entry)
    return entries + (_write_shared(store, snapshot) if rank == 0 else []), shard


def _write_shared(store: Store, snapshot: Snapshot) -> list[FileEntry]:
    """Write what rank 0 contributes for all ranks."""
    is_whole, optimizer = snapshot.parts is None, snapshot.optimizer
    name = snapshot.model_file if is_whole else None
    entries = [] if name is None else [_write_tensors(store, name, snapshot.model)]
    if optimizer is not None:
        if is_whole:
            entries.append(_write_tensors(store, layout.OPTIMIZER_TENSORS, optimizer.tensors))
        entries.append(_write_json(store, layout.OPTIMIZER, {"groups": optimizer.groups, "scalars": optimizer.scalars}))
    for name, state in ((layout.SCHEDULER, snapshot.scheduler), (layout.SCALER, snapshot.scaler)):
        if state is not None:
            entries.append(_write_json(store, name, to_json(state, name)))
    for name, state in ((layout.DATA, snapshot.data), (layout.TRAINER_STATE, snapshot.trainer_state)):
        entries.append(_write_json(store, name, state))
    # Masked again: a subclass's arguments may hold a token under any name.
    entries.append(_write_json(store, layout.TRAINING_ARGS, mask_value("training_args", snapshot.training_args)))
    entries.extend(store.write_bytes(name, data) for name, data in snapshot.files.items())
    entries.extend(_write_json(store, layout.rng_file(rank), rng) for rank, rng in enumerate(snapshot.more_rngs, 1))
    return entries


def _write_tensors(store: Store, name: str, tensors: Mapping[str, Tensor]) -> FileEntry:
    with store.open_write(name) as writer:
        write_safetensors(writer, tensors)
    return writer.entry


def _write_json(store: Store, name: str, value: object, *, indent: int | None = 1) -> FileEntry:
    return store.write_bytes(name, (render_json(name, value, indent=indent) + "\n").encode())


class BackgroundSaver:
    """Writes checkpoints, one at a time, in a separate thread, while training continues.

    ::

        main thread    start: copy the snapshot to the host -> agree     train, train, ...     has_ended?     finish
        saving thread                     `-> save_checkpoint: prepare, write, gather, commit, after_commit -^

    While a save is under way (`is_busy`, equal on every rank) the following is true:

    1. Training may change everything that the snapshot was taken from: the thread reads a copy (`HostCopy`).
    2. No second save is started, because there is one copy; the caller finishes the first save before.
    3. The folder has no COMMIT.json yet, so every reader takes an older checkpoint for the newest.
    4. Rotation has deleted nothing for this save: it runs as `after_commit`, in the thread, after the commit.
    5. The thread's collectives travel over a process group of its own (`Communicator.twin`), so they cannot meet those
       of training, whose order they do not know.
    6. No rank has used the outcome. All ranks learn it between the same two optimizer steps, from `has_ended` or
       `finish`.

    If the process dies meanwhile, the folder has no commit and does not count; the next save of the step, or the next
    training in this output_dir, deletes what is left of it.

    Args:
        comm: all ranks.
        disk: the ranks that write one folder together: all of them, or those of this machine.
        timeout_s: seconds that one rank waits for another rank's writing.
        keep: how many checkpoints rotation leaves; see `save_checkpoint`.
    """

    def __init__(self, comm: Communicator, disk: Communicator, *, timeout_s: float, keep: int | None = None) -> None:
        self.memory = HostCopy()  # the copy that a save writes from
        self._comm = comm
        self._disk = disk
        # Connections of its own: the thread's messages must not meet those of the step.
        self._channel = disk.twin(timeout_s)
        self._keep = keep
        self._job: Future[CheckpointInfo] | None = None
        self._unfinished: Callable[[], bool] | None = None
        """The question, on its way since the last `has_ended`, whether any rank is still writing."""

    @property
    def is_busy(self) -> bool:
        """Whether a save was started whose outcome was not collected yet; equal on every rank."""
        return self._job is not None

    def start(self, root: Store, snapshot: Snapshot, *, after_commit: Callable[[], None]) -> None:
        """Copy the snapshot and begin to write it. Collective. On return its tensors may change.

        `after_commit` is called in the thread. All ranks raise alike: ConfigError, OutOfMemoryError, and RuntimeError
        while an earlier save runs.
        """
        if self._job is not None:
            raise RuntimeError("One save at a time: finish the one before.")
        frozen = run_on_all_ranks(self._disk, lambda: freeze_snapshot(snapshot, self._disk.rank, self.memory))

        def save() -> CheckpointInfo:
            # `keep` only serves the remedy when space runs out: rotation is the caller's `after_commit`.
            info = save_checkpoint(root, frozen, self._channel, keep=self._keep)
            after_commit()
            return info

        self._job = start_daemon(save, f"trainflow-save-{snapshot.step}")

    def has_ended(self) -> bool:
        """Whether the save under way has ended, well or not, on every rank. Collective while there is one.

        With several ranks the answer is one call old: the question travels while the step between two calls computes,
        so no rank waits for it.
        """
        if self._job is None:
            return False
        if self._comm.world_size == 1:
            return self._job.done()
        # The answer to the question of the step before: nothing waits for a message here.
        has_ended = self._unfinished is not None and not self._unfinished()
        self._unfinished = None if has_ended else self._comm.any_later(not self._job.done())
        return has_ended

    def finish(self) -> CheckpointInfo:
        """Wait for the save under way and return what it committed. Collective. Raises as `save_checkpoint`."""
        pending, self._unfinished = self._unfinished, None
        if pending is not None:  # every rank asked at the last step boundary, so every rank has to take the answer
            pending()
        return self.finish_without_agreement()

    def finish_without_agreement(self) -> CheckpointInfo:
        """`finish` without a message to other ranks' main threads, which may have failed elsewhere."""
        if self._job is None:
            raise RuntimeError("No save is under way.")
        wait([self._job])  # an interrupt leaves the job as it is
        # Cleared before the result is raised, so that the next save can start after a failed one.
        job, self._job, self._unfinished = self._job, None, None
        return job.result()

    def close(self) -> None:
        """Give the copy's memory back; call it when nothing is under way."""
        self.memory.close()


def start_daemon(work: Callable[[], Result], name: str) -> Future[Result]:
    """Work in a thread; a daemon, because a user may press Ctrl-C once more to leave without waiting for it."""
    outcome: Future[Result] = Future()
    outcome.set_running_or_notify_cancel()  # nobody can cancel it any more

    def run() -> None:
        try:
            outcome.set_result(work())
        except BaseException as error:  # raised again where the result is asked for
            outcome.set_exception(error)

    threading.Thread(target=run, name=name, daemon=True).start()
    return outcome
