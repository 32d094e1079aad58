"""Saving a checkpoint: every rank writes its part, all agree that nothing failed, rank 0 commits.

::

    rank 0: is there space? clear what an interrupted save left, claim the folder     -> agree
    every rank: write own files, digests computed on the way                          -> agree
    gather the file lists; rank 0: is the claim still ours? COMMIT.json               -> agree

A failure on one rank is raised on all, as the same typed error. Whatever happens, older checkpoints stay as they are,
and the new folder does not count until ``COMMIT.json`` is there.
"""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import TYPE_CHECKING, Any

from torch import Tensor

from trainer_lib.agreement import run_on_all_ranks
from trainer_lib.checkpoint import layout
from trainer_lib.checkpoint.catalogue import CheckpointInfo, list_checkpoints
from trainer_lib.checkpoint.optimizer import OptimizerSnapshot
from trainer_lib.checkpoint.sharded import LocalShard, build_index, collect_local_rows, is_any_sharded, write_shard
from trainer_lib.checkpoint.tensors import write_safetensors
from trainer_lib.checkpoint.values import to_json
from trainer_lib.commit import COMMIT, Commit, FileEntry, write_commit
from trainer_lib.errors import (
    ConfigError,
    LeaseLostError,
    StorageError,
    StorageFullError,
    TrainflowError,
)
from trainer_lib.locks.claim import claim_folder, holds_claim, is_claim, release_claim
from trainer_lib.locks.lease import Holder
from trainer_lib.storage import Store, relative_problem

if TYPE_CHECKING:
    from trainer_lib.distributed import Communicator

_SECRET = re.compile(r"(token|secret|password|api_key|access_key)$", re.IGNORECASE)
_OVERHEAD = 2**20
"""Bytes per rank beyond the tensors that the space check allows for headers, random states and JSON."""

_saving: set[str] = set()
"""Claims that this process is using right now: others of its own are leftovers of a save that failed."""


@dataclass
class Snapshot:
    """What one rank contributes. Shared state is taken from rank 0; only `rng` and `extra` are every rank's own.

    Attributes:
        step: optimizer steps done.
        model: name → tensor, tied names included.
        optimizer, scheduler, scaler: None when there is none, or only the model is to be saved.
        rng: `capture_rng`; empty when only the model is to be saved.
        data: position in the data; JSON.
        trainer_state, training_args: JSON, with the fields of the reference Trainer's files.
        files: further files, name → bytes (``config.json``, a tokenizer's).
        parts: this rank's rows of a model's and an optimizer's divided tensors, instead of `model` and the optimizer's
            tensors; None when they are whole.
        meta: what the commit should say besides step, world size and parameter count; JSON.
        extra: name → tensor of what is neither the model's nor the optimizer's; the JSON parts refer to them by name.
        more_rngs: of an imported checkpoint, the random states of further ranks, which are not here to write them.
    """

    step: int
    model: Mapping[str, Tensor]
    optimizer: OptimizerSnapshot | None = None
    scheduler: dict[str, Any] | None = None
    scaler: dict[str, Any] | None = None
    rng: dict[str, Any] = field(default_factory=dict)
    data: dict[str, Any] = field(default_factory=dict)
    trainer_state: dict[str, Any] = field(default_factory=dict)
    training_args: dict[str, Any] = field(default_factory=dict)
    files: Mapping[str, bytes] = field(default_factory=dict)
    meta: dict[str, Any] = field(default_factory=dict)
    parts: LocalShard | None = None
    extra: Mapping[str, Tensor] = field(default_factory=dict)
    more_rngs: list[dict[str, Any]] = field(default_factory=list)


def save_checkpoint(root: Store, snapshot: Snapshot, comm: Communicator, *, keep: int | None = None) -> CheckpointInfo:
    """Write and commit ``checkpoint-<step>`` below `root`. Collective: every rank calls it with its snapshot.

    A checkpoint of the same step that is there already is replaced: its commit is removed first. `keep` is what older
    ones will be rotated to (`catalogue.rotate_checkpoints`), for the word to someone whose disk is too small for it.

    Raises (the same on every rank):
        StorageFullError: there is no room; says the bytes needed and free. Nothing was written.
        StorageError: a write failed, or another living process is writing this folder.
        LeaseLostError: another process took the folder over while we were writing.
        ConfigError: the state cannot be written without pickle.
    """
    name = layout.checkpoint_name(snapshot.step)
    store = root.child(name)
    is_first = comm.rank == 0
    with _claim() as claim:
        try:
            run_on_all_ranks(comm, lambda: _prepare(root, snapshot, claim, comm.world_size, keep) if is_first else None)
            entries, shard = run_on_all_ranks(comm, lambda: _write_rank(store, snapshot, comm.rank))
            gathered = comm.gather_json([[asdict(entry) for entry in entries], shard]) or []
            files = [FileEntry(**record) for part, _ in gathered for record in part]
            if snapshot.parts is not None:
                files += run_on_all_ranks(comm, lambda: _write_index(store, [each for _, each in gathered], is_first))
            ranks = comm.world_size + len(snapshot.more_rngs)
            meta = {**snapshot.meta, "step": snapshot.step, "world_size": ranks}
            commit = run_on_all_ranks(comm, lambda: _commit(store, files, meta, claim) if is_first else None)
        except TrainflowError:
            if is_first:
                _clear_failed(store, claim)
            raise
    record = comm.broadcast_json(None if commit is None else asdict(commit))
    committed = tuple(FileEntry(**entry) for entry in record["files"])
    return CheckpointInfo(snapshot.step, name, store.url, Commit(**{**record, "files": committed}))


def select_part(snapshot: Snapshot, rank: int) -> Snapshot:
    """What of a snapshot a rank writes: shared state is rank 0's, random states are each rank's own."""
    if rank == 0:
        return snapshot
    return Snapshot(snapshot.step, {}, rng=snapshot.rng, parts=snapshot.parts, extra=snapshot.extra)


def shard_snapshot(snapshot: Snapshot, rank: int) -> Snapshot:
    """The snapshot with this rank's rows in place of tensors that are divided over ranks; itself when none is."""
    if not is_any_sharded(snapshot.model):
        return snapshot
    optimizer = snapshot.optimizer
    groups = {"model": snapshot.model, "optimizer": optimizer.tensors if optimizer is not None else {}}
    parts = collect_local_rows(groups, rank)
    return replace(
        snapshot, model={}, optimizer=None if optimizer is None else replace(optimizer, tensors={}), parts=parts
    )


def estimate_bytes(snapshot: Snapshot, world_size: int) -> int:
    """An upper estimate of a checkpoint's size in bytes."""
    tensors = [*snapshot.model.values(), *(snapshot.optimizer.tensors.values() if snapshot.optimizer else ())]
    payload: int = sum(tensor.numel() * tensor.element_size() for tensor in tensors)
    payload += world_size * sum(tensor.numel() * tensor.element_size() for tensor in snapshot.extra.values())
    if snapshot.parts is not None:
        rows = [each.values for each in snapshot.parts.rows.values()]
        payload += world_size * sum(each.numel() * each.element_size() for each in rows)
    return payload + sum(map(len, snapshot.files.values())) + 512 * len(tensors) + _OVERHEAD * (world_size + 1)


# -- the folder --------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def _claim() -> Iterator[Holder]:
    claim = Holder.this_process()
    _saving.add(claim.id)
    try:
        yield claim
    finally:
        _saving.discard(claim.id)


def _prepare(root: Store, snapshot: Snapshot, claim: Holder, world_size: int, keep: int | None) -> None:
    """Check what can be checked, claim the folder, remove what is left of earlier saves."""
    store = root.child(layout.checkpoint_name(snapshot.step))
    for file in snapshot.files:
        problem = "is one of the checkpoint's own names" if layout.is_own_file(file) else relative_problem(file)
        if problem:
            raise ConfigError(
                f"The file name {problem}.", field="checkpoint", value=file, remedy="Choose another name."
            )
    _check_space(root, store, estimate_bytes(snapshot, world_size), keep)
    other = claim_folder(
        store, claim, lambda other: other.is_alive() and (other.pid != claim.pid or other.id in _saving)
    )
    if other is not None:
        raise _being_written(store, str(other))
    store.delete(COMMIT)
    _remove_files(store)


def _check_space(root: Store, store: Store, needed: int, keep: int | None) -> None:
    free = store.free_bytes()
    if free is None or free >= needed:
        return
    left = sum(info.size for info in store.list())  # of an earlier save of this step: about to be removed
    if free + left >= needed:
        return
    remedy = "Free space, lower save_total_limit, or choose another output_dir."
    if keep is not None and (excess := list_checkpoints(root)[keep - 1 :]):
        size = sum(entry.size for info in excess for entry in info.commit.files)
        remedy += (
            f" save_total_limit={keep} will give {size:,} bytes back, but only once the new one is committed: the disk"
            f" must hold {keep + 1} for a moment."
        )
    raise StorageFullError(
        f"A checkpoint needs {needed:,} bytes, {free + left:,} are free.",
        field=store.url,
        remedy=f"{remedy} Earlier checkpoints are intact.",
    )


def _being_written(store: Store, who: str) -> StorageError:
    remedy = "Wait for it, end it, or give each run its own output_dir."
    return StorageError(f"The checkpoint is being written by {who}.", field=store.url, remedy=remedy)


def _remove_files(store: Store) -> None:
    for info in store.list():
        if not is_claim(info.path):
            store.delete(info.path)


def _commit(store: Store, files: list[FileEntry], meta: dict[str, Any], claim: Holder) -> Commit:
    def guard() -> None:
        if not holds_claim(store, claim):
            raise LeaseLostError(
                "Another process has taken this checkpoint's folder over while we were writing it.",
                field=store.url,
                remedy="Give each run its own output_dir.",
            )

    commit = write_commit(store, layout.KIND, files, meta, guard=guard)
    with contextlib.suppress(StorageError):  # the checkpoint is complete; a claim that stays does no harm
        release_claim(store)
    return commit


def _clear_failed(store: Store, claim: Holder) -> None:
    """Give the space back, if the folder is still ours; what cannot be removed is a leftover for the next save."""
    with contextlib.suppress(StorageError):
        if holds_claim(store, claim):
            store.delete(COMMIT)
            _remove_files(store)
            release_claim(store)
            if not store.list():
                store.delete_tree()  # what is left of it on a disk: empty folders


# -- the files ---------------------------------------------------------------------------------------------------------


def _write_rank(store: Store, snapshot: Snapshot, rank: int) -> tuple[list[FileEntry], dict[str, Any]]:
    """This rank's files, and what the index says of its shard."""
    entries = [_write_json(store, layout.rng_file(rank), snapshot.rng, indent=None)] if snapshot.rng else []
    if snapshot.extra:
        entries.append(_write_tensors(store, layout.extra_file(rank), snapshot.extra))
    shard: dict[str, Any] = {}
    if snapshot.parts is not None:
        entry, shard = write_shard(store, snapshot.parts, rank)
        entries.append(entry)
    return entries + (_write_shared(store, snapshot) if rank == 0 else []), shard


def _write_index(store: Store, shards: list[dict[str, Any]], is_first: bool) -> list[FileEntry]:
    return [_write_json(store, layout.SHARD_INDEX, build_index(shards), indent=None)] if is_first else []


def _write_shared(store: Store, snapshot: Snapshot) -> list[FileEntry]:
    whole, optimizer = snapshot.parts is None, snapshot.optimizer
    entries = [_write_tensors(store, layout.MODEL, snapshot.model)] if whole else []
    if optimizer is not None:
        if whole:
            entries.append(_write_tensors(store, layout.OPTIMIZER_TENSORS, optimizer.tensors))
        entries.append(_write_json(store, layout.OPTIMIZER, {"groups": optimizer.groups, "scalars": optimizer.scalars}))
    for name, state in ((layout.SCHEDULER, snapshot.scheduler), (layout.SCALER, snapshot.scaler)):
        if state is not None:
            entries.append(_write_json(store, name, to_json(state, name)))
    for name, state in ((layout.DATA, snapshot.data), (layout.TRAINER_STATE, snapshot.trainer_state)):
        entries.append(_write_json(store, name, state))
    entries.append(_write_json(store, layout.TRAINING_ARGS, _without_secrets(snapshot.training_args)))
    entries.extend(store.write_bytes(name, data) for name, data in snapshot.files.items())
    entries.extend(_write_json(store, layout.rng_file(rank), rng) for rank, rng in enumerate(snapshot.more_rngs, 1))
    return entries


def _write_tensors(store: Store, name: str, tensors: Mapping[str, Tensor]) -> FileEntry:
    with store.open_write(name) as writer:
        write_safetensors(writer, tensors)
    return writer.entry


def _write_json(store: Store, name: str, value: object, *, indent: int | None = 1) -> FileEntry:
    return store.write_bytes(name, (render_json(name, value, indent=indent) + "\n").encode())


def render_json(name: str, value: object, *, indent: int | None = None) -> str:
    """A part of the state as JSON. Raises ConfigError when it holds anything else."""
    try:
        return json.dumps(value, indent=indent)
    except (TypeError, ValueError, RecursionError) as error:
        raise ConfigError(
            f"It cannot be written as JSON: {error}",
            field=name,
            remedy="Keep plain numbers, texts, lists and dicts in the state (of a callback, a dataset, the arguments).",
        ) from error


def _without_secrets(value: Any, name: str = "") -> Any:
    if isinstance(value, dict):
        return {key: _without_secrets(item, str(key)) for key, item in value.items()}
    is_secret = isinstance(value, str) and _SECRET.search(name) and not re.fullmatch(r"<\w+>", value)
    return f"<{name.upper()}>" if is_secret else value
