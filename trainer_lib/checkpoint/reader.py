"""Loading a checkpoint: only what was committed, every byte compared with the commit before it is used."""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, TypeVar

from torch import Tensor

from trainer_lib.agreement import run_on_all_ranks
from trainer_lib.checkpoint import layout
from trainer_lib.checkpoint.catalogue import CheckpointInfo, read_checkpoint_info
from trainer_lib.checkpoint.foreign.recognise import recognise_folder
from trainer_lib.checkpoint.optimizer import OptimizerSnapshot
from trainer_lib.checkpoint.parsing import parse_json
from trainer_lib.checkpoint.sharded import ShardedTensors
from trainer_lib.checkpoint.tensors import read_safetensors
from trainer_lib.checkpoint.values import from_json
from trainer_lib.commit import COMMIT, verify_files
from trainer_lib.errors import ConfigError, DamagedError
from trainer_lib.storage import FileEntry, Store

if TYPE_CHECKING:
    from trainer_lib.distributed import Communicator

_STATE_LIMIT = 512 * 2**20
_JSON_LIMIT = 64 * 2**20
"""Bytes that are read of a JSON file at most; of the trainer's state more: it grows with every log."""

_RANKS = 1_000_000
_NOT_COMMITTED = "There is no committed checkpoint there."
_HOW_TO_LIST = "A folder without COMMIT.json was not finished. `trainflow checkpoints list` shows those that were."


AnyCheckpoint = TypeVar("AnyCheckpoint", bound="Checkpoint")


class Checkpoint:
    """A checkpoint being resumed from. The small parts are read and verified; tensors are read when asked for.

    Attributes:
        step: optimizer steps done when it was saved.
        url: where it is.
        commit: its commit; `meta` has what the writer added.
        world_size: processes that wrote it; each has a random state in it.
        scheduler, scaler: None when there was none.
        data, trainer_state, training_args: as they were given to the writer, secrets removed.
    """

    def __init__(self, store: Store, info: CheckpointInfo) -> None:
        self.step = info.step
        self.url = info.url
        self.commit = info.commit
        self._store = store
        self._entries = {entry.path: entry for entry in info.commit.files}
        self.world_size = self._world_size()
        self.scheduler: dict[str, Any] | None = from_json(self._json(layout.SCHEDULER))
        self.scaler: dict[str, Any] | None = from_json(self._json(layout.SCALER))
        self.data: dict[str, Any] = self._json(layout.DATA) or {}
        if problem := _position_problem(self.data):
            raise _damaged(store, layout.DATA, problem)
        self.trainer_state: dict[str, Any] = self._json(layout.TRAINER_STATE) or {}
        self.training_args: dict[str, Any] = self._json(layout.TRAINING_ARGS) or {}

    @property
    def has_optimizer(self) -> bool:
        """Whether training can go on from it; False when only the model was saved."""
        return layout.OPTIMIZER in self._entries

    @property
    def is_sharded(self) -> bool:
        """Whether every rank wrote its own part of the tensors, and any rank may read the rows it needs."""
        return layout.SHARD_INDEX in self._entries

    def read_model(self) -> Mapping[str, Tensor]:
        """Name → tensor on the CPU, in the dtype it had; tied names share one tensor. Raises DamagedError.

        Of a sharded checkpoint each tensor is read, or some of its rows are, when it is asked for.
        """
        return self._tensors("model", layout.MODEL)

    def read_optimizer(
        self, share: Callable[[Callable[[], Mapping[str, Tensor]]], Mapping[str, Tensor]] | None = None
    ) -> OptimizerSnapshot | None:
        """The optimizer's state; None when only the model was saved. Read anew at each call. Raises DamagedError.

        `share` is given what reads the tensors, to have it done on one rank for all.
        """
        record = self._json(layout.OPTIMIZER)
        if record is None:
            return None
        problem = _optimizer_problem(record)
        if problem:
            raise _damaged(self._store, layout.OPTIMIZER, problem)

        def read() -> Mapping[str, Tensor]:
            return self._tensors("optimizer", layout.OPTIMIZER_TENSORS)

        return OptimizerSnapshot(read() if share is None else share(read), record["groups"], record["scalars"])

    def _tensors(self, group: str, file: str) -> Mapping[str, Tensor]:
        if self.is_sharded:
            return ShardedTensors(self._store, group, self._json(layout.SHARD_INDEX), self._entries)
        return read_safetensors(self._store, file, expect=self._entry(file))

    def has_rng(self, rank: int) -> bool:
        """Whether there is a random state of that rank."""
        return layout.rng_file(rank) in self._entries

    def read_extra(self, rank: int) -> Mapping[str, Tensor]:
        """A rank's further tensors, to which the JSON parts refer; empty when it had none. Raises DamagedError."""
        name = layout.extra_file(rank)
        return read_safetensors(self._store, name, expect=self._entry(name)) if name in self._entries else {}

    def read_rng(self, rank: int) -> dict[str, Any]:
        """The random state of a rank. Raises ConfigError when the saved run had no such rank."""
        state = self._json(layout.rng_file(rank))
        if state is None:
            raise ConfigError(
                f"The checkpoint has no random state of rank {rank}.",
                field="resume_from_checkpoint",
                value=self.url,
                remedy=f"It was saved by {self.world_size} ranks; seed the further ones anew.",
            )
        return state

    def read_file(self, name: str) -> bytes:
        """One of the further files (``config.json``). Raises DamagedError when absent or not as committed."""
        entry = self._entry(name)
        data = self._store.read_if_exists(name, limit=entry.size)
        if data is None:
            raise _damaged(self._store, name, "it is missing")
        if len(data) != entry.size or hashlib.sha256(data).hexdigest() != entry.sha256:
            raise _damaged(self._store, name, "it is not the file that was committed")
        return data

    @contextlib.contextmanager
    def treat_errors_as_damage(self, name: str) -> Iterator[None]:
        """A block that takes up what a file says: what it cannot use is damage of that file, not a failure of its own.

        The bytes are those that were committed, so the file was made by something else, or by another version.
        """
        try:
            yield
        except (AttributeError, IndexError, KeyError, TypeError, ValueError, OverflowError, RecursionError) as error:
            if isinstance(error, ConfigError):
                raise
            raise _damaged(self._store, name, f"it cannot be used ({type(error).__name__}: {error})") from error

    def _world_size(self) -> int:
        count = self.commit.meta.get("world_size", 1)
        if type(count) is not int or not 0 < count <= _RANKS:
            raise _damaged(self._store, COMMIT, f"it speaks of {str(count)[:40]} processes")
        return count

    def _entry(self, name: str) -> FileEntry:
        entry = self._entries.get(name)
        if entry is None:
            raise _damaged(self._store, name, "the commit does not list it")
        return entry

    def _json(self, name: str) -> dict[str, Any] | None:
        if name not in self._entries:
            return None
        limit = _STATE_LIMIT if name in (layout.TRAINER_STATE, layout.SHARD_INDEX) else _JSON_LIMIT
        if self._entries[name].size > limit:
            raise _damaged(self._store, name, f"it has more than {limit:,} bytes")
        try:
            record = parse_json(self.read_file(name))
        except ValueError as error:
            raise _damaged(self._store, name, f"it is not JSON that trainflow writes ({str(error)[:80]})") from error
        if not isinstance(record, dict):
            raise _damaged(self._store, name, "it is not an object")
        return record


def load_checkpoint(root: Store, name: str, comm: Communicator) -> Checkpoint:
    """Open a committed checkpoint. Collective; every rank reads for itself.

    Raises (the same on every rank):
        ConfigError: there is no committed checkpoint of that name.
        DamagedError: the commit or a small file is damaged; tensors are checked when they are read.
        StorageError: the store cannot be read.
    """
    return run_on_all_ranks(comm, lambda: open_checkpoint(root, name, Checkpoint))


def open_checkpoint(root: Store, name: str, kind: type[AnyCheckpoint]) -> AnyCheckpoint:
    """`load_checkpoint` for one process alone, as `Checkpoint` or a class derived from it."""
    store = root.child(name)
    info = read_checkpoint_info(root, name)
    if info is None:
        known = recognise_folder(store)
        raise ConfigError(
            f"There is no committed checkpoint there, but {known.what}." if known else _NOT_COMMITTED,
            field="resume_from_checkpoint",
            value=store.url,
            remedy=known.remedy if known else _HOW_TO_LIST,
        )
    problems = verify_files(store, info.commit, digests=False)  # links and special files are among them
    if problems:
        file, _, reason = problems[0].rpartition(": ")
        raise _damaged(store, file, f"{reason} (and {len(problems) - 1} more)" if len(problems) > 1 else reason)
    return kind(store, info)


def _position_problem(data: dict[str, Any]) -> str | None:
    for name in ("epoch", "step_in_epoch", "position", "samples_seen"):
        value = data.get(name, 0)
        if type(value) is not int or not 0 <= value < 2**62:
            return f"its {name} is no count"
    for name in ("source", "history"):
        if not isinstance(data.get(name, {}), dict):
            return f"its {name} is no object"
    return None


def _optimizer_problem(record: dict[str, Any]) -> str | None:
    groups, scalars = record.get("groups"), record.get("scalars")
    if not isinstance(groups, list) or not isinstance(scalars, dict):
        return "it has no groups"
    for group in groups:
        names = group.get("params") if isinstance(group, dict) else None
        if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
            return "a group of it names no parameters"
    state = scalars.get("state", {})
    if not isinstance(state, dict) or not all(isinstance(values, dict) for values in state.values()):
        return "its state is not by parameter"
    return None


def _damaged(store: Store, name: str, reason: str) -> DamagedError:
    return DamagedError(
        f"The file is damaged: {reason}.",
        field=f"{store.url}/{name}",
        remedy="Use an earlier checkpoint (a resume does by itself), or restore the file.",
    )
