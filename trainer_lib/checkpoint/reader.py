"""Loading a checkpoint: only what was committed, and every byte is compared with the commit before it is used.

::

    open_checkpoint     read COMMIT.json; compare one listing with its entries (missing, cut short, links)
    Checkpoint          read the small JSON files; each must have its committed digest and its expected structure
    read_model, ...     read tensors when they are asked for; each file (of a sharded one, each block) is digested

No file is used that the commit does not list, and nothing is unpickled.
"""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

from torch import Tensor

from trainer_lib.base.json_text import parse_json
from trainer_lib.checkpoint import layout
from trainer_lib.checkpoint.catalogue import CheckpointInfo, read_checkpoint_info, recognise_folder
from trainer_lib.checkpoint.layout import damaged_file
from trainer_lib.checkpoint.optimizer import OptimizerSnapshot
from trainer_lib.checkpoint.sharded import ShardedTensors, index_file
from trainer_lib.checkpoint.tensors import read_safetensors, write_safetensors
from trainer_lib.checkpoint.values import from_json
from trainer_lib.distributed.communicator import Communicator, run_on_all_ranks
from trainer_lib.errors import ConfigError, DamagedError
from trainer_lib.storage import DigestingWriter, FileEntry, Store
from trainer_lib.storage.commit import COMMIT, verify_files

ShareTensors = Callable[[Callable[[], Mapping[str, Tensor]]], Mapping[str, Tensor]]
"""Takes a function that reads tensors and returns the tensors, for instance read on one rank for all."""

_JSON_LIMIT = 64 * 2**20  # the largest JSON file that is read, in bytes
_GROWING_LIMIT = 512 * 2**20
"""The limit for the trainer's state, which grows with every log, and for the index over the shards."""
_RANK_LIMIT = 1_000_000
_READ_AT_ONCE = frozenset((layout.SCHEDULER, layout.SCALER, layout.DATA, layout.TRAINER_STATE, layout.TRAINING_ARGS))
"""Files that opening a checkpoint reads already."""


class Checkpoint:
    """A committed checkpoint, opened for reading: small parts are read and verified, tensors when they are asked for.

    What `preload` has read of model, optimizer and random state is handed out once, so that its memory is free
    afterwards; asked for again, it is read again.

    Raises DamagedError when a small file is not as it was committed, or cannot be what the writer wrote; StorageError.
    """

    def __init__(self, store: Store, info: CheckpointInfo) -> None:
        # Whether whole tensors are read one by one when they are asked for, too, so that they never are in memory all
        # together; their file is then read twice.
        self.reads_singly = False
        self._model: Mapping[str, Tensor] | None = None
        self._optimizer: OptimizerSnapshot | None = None
        self._rng: tuple[int, dict[str, Any]] | None = None
        self._extra: dict[int, Mapping[str, Tensor]] = {}
        self.step = info.step
        self.url = info.url
        self.commit = info.commit
        self._store = store
        self._entries = {entry.path: entry for entry in info.commit.files}
        # Ranks that wrote it; each has a random state in it.
        self.world_size = count = info.commit.meta.get("world_size", 1)
        if type(count) is not int or not 0 < count <= _RANK_LIMIT:
            raise self._damaged(COMMIT, f"it states a world size of {str(count)[:40]}")
        # `state_dict()`s, None when there was none; then the JSON that the writer was given, secrets removed.
        self.scheduler: dict[str, Any] | None = from_json(self._read_json(layout.SCHEDULER))
        self.scaler: dict[str, Any] | None = from_json(self._read_json(layout.SCALER))
        self.data: dict[str, Any] = self._read_json(layout.DATA) or {}
        if problem := _find_position_problem(self.data):
            raise damaged_file(f"{self.url}/{layout.DATA}", problem)
        self.trainer_state: dict[str, Any] = self._read_json(layout.TRAINER_STATE) or {}
        self.training_args: dict[str, Any] = self._read_json(layout.TRAINING_ARGS) or {}

    @property
    def earlier_runs(self) -> tuple[str, ...]:
        """Folders next to it, with checkpoints of an earlier run: a run that continues it spares them."""
        names = self.commit.meta.get("earlier_runs", [])
        if not isinstance(names, list):
            raise self._damaged(COMMIT, f"it states the earlier runs {str(names)[:40]}")
        return tuple(map(str, names))

    @property
    def has_optimizer(self) -> bool:
        """Whether training can resume from it; False when only the model was saved."""
        return layout.OPTIMIZER in self._entries

    @property
    def _model_file(self) -> str:
        return layout.OWN_MODEL if layout.OWN_MODEL in self._entries else layout.MODEL

    @property
    def is_sharded(self) -> bool:
        """Whether every rank wrote its own blocks of the tensors; any rank can read just the blocks that it needs."""
        return layout.SHARD_INDEX in self._entries

    def has_rng(self, rank: int) -> bool:
        """Whether the checkpoint has a random state of a rank."""
        return layout.rng_file(rank) in self._entries

    def read_model(self) -> Mapping[str, Tensor]:
        """Read the model: name → tensor `[...]` on the CPU, in its saved shape and dtype; tied names share one tensor.

        Those of a sharded checkpoint are read, and checked, when they are asked for. Raises DamagedError.
        """
        held, self._model = self._model, None
        return self._read_tensors("model", self._model_file) if held is None else held

    def write_model(self, writer: DigestingWriter) -> None:
        """Write the model into one safetensors file; one in blocks some rows at a time, so in little memory."""
        tensors = self.read_model()
        if isinstance(tensors, ShardedTensors):
            tensors.write_file(writer)
        else:
            write_safetensors(writer, tensors)

    def read_optimizer(self, share: ShareTensors | None = None) -> OptimizerSnapshot | None:
        """Read the optimizer's state; None when only the model was saved. Raises DamagedError.

        `share` is called with the function that reads the tensors, so that one rank can read them for all.
        """
        held, self._optimizer = self._optimizer, None
        if held is not None:
            tensors = held.tensors
            return held if share is None else replace(held, tensors=share(lambda: tensors))
        record = self._read_json(layout.OPTIMIZER)
        if record is None:
            return None
        if problem := _find_optimizer_problem(record):
            raise self._damaged(layout.OPTIMIZER, problem)
        read = partial(self._read_tensors, "optimizer", layout.OPTIMIZER_TENSORS)
        # `read` is passed on without being called: for a sharded model one rank may read whole tensors for all.
        return OptimizerSnapshot(read() if share is None else share(read), record["groups"], record["scalars"])

    def read_extra(self, rank: int) -> Mapping[str, Tensor]:
        """A rank's extra tensors (of callbacks, of `past_index`): name → `[...]` on the CPU. Raises DamagedError."""
        if rank in self._extra:
            return self._extra[rank]
        name = layout.extra_file(rank)
        return read_safetensors(self._store, name, expect=self._require_entry(name)) if name in self._entries else {}

    def read_rng(self, rank: int) -> dict[str, Any]:
        """Read the random states of a rank. Raises ConfigError if there was no such rank, and DamagedError."""
        held, self._rng = self._rng, None
        state = held[1] if held is not None and held[0] == rank else self._read_json(layout.rng_file(rank))
        if state is None:
            what = f"The checkpoint has no random state of rank {rank}."
            remedy = f"It was saved by {self.world_size} ranks; give further ranks a new seed."
            raise ConfigError(what, field="resume_from_checkpoint", value=self.url, remedy=remedy)
        return state

    def preload(self, *, rank: int, tensors: bool, weights: bool = False) -> None:
        """Read everything that this rank needs; rank 0 also compares the files that no rank needs. Raises DamagedError.

        `tensors`: this rank reads those of model and optimizer; `weights`: the files of the optimizer are left out.
        """
        done = {*_READ_AT_ONCE, *((layout.OPTIMIZER, layout.OPTIMIZER_TENSORS) if weights else ())}
        if tensors and self._model_file in self._entries:
            self._model = self.read_model()
            done.add(self._model_file)
        if tensors and layout.OPTIMIZER_TENSORS in self._entries.keys() - done:
            self._optimizer = self.read_optimizer()
            done |= {layout.OPTIMIZER, layout.OPTIMIZER_TENSORS}
        own = layout.rng_file(rank)
        if own in self._entries:
            self._rng = rank, self.read_rng(rank)
            done.add(own)
        # Rank 0's extra tensors belong to callbacks, which every rank restores.
        self._extra = {holder: self.read_extra(holder) for holder in {0, rank}}
        done |= {layout.extra_file(holder) for holder in self._extra}
        # One rank is enough for files that no rank needs.
        for name in sorted(self._entries.keys() - done) if rank == 0 else ():
            committed, found = self._entries[name].sha256, self._store.digest(name)
            if found != committed:
                raise self._damaged(name, f"its digest is {found[:12]}..., committed {committed[:12]}...")

    def read_file(self, name: str) -> bytes:
        """Read any committed file, for instance ``config.json``. Raises DamagedError if it is not as committed."""
        entry = self._require_entry(name)
        data = self._store.read_if_exists(name, limit=entry.size)
        if data is None:
            raise self._damaged(name, "it is missing")
        if len(data) != entry.size or hashlib.sha256(data).hexdigest() != entry.sha256:
            raise self._damaged(name, "it is not the file that was committed")
        return data

    @contextlib.contextmanager
    def treat_errors_as_damage(self, name: str) -> Iterator[None]:
        """Raise DamagedError for errors of a ``with`` block that the content of a file causes.

        The bytes are those that were committed, so another program or another version wrote them.
        """
        try:
            yield
        except (AttributeError, IndexError, KeyError, TypeError, ValueError, OverflowError) as error:
            if isinstance(error, ConfigError):  # a ValueError as well, but about the user's input
                raise
            raise self._damaged(name, f"it cannot be used ({type(error).__name__}: {error})") from error

    def _read_tensors(self, group: str, file: str) -> Mapping[str, Tensor]:
        if self.is_sharded:
            return ShardedTensors(self._store, group, self._read_json(layout.SHARD_INDEX), self._entries)
        if self.reads_singly:
            index = index_file(self._store, file, group, self._require_entry(file))
            return ShardedTensors(self._store, group, index, self._entries)
        return read_safetensors(self._store, file, expect=self._require_entry(file))

    def _require_entry(self, name: str) -> FileEntry:
        if name not in self._entries:
            raise self._damaged(name, "the commit does not list it")
        return self._entries[name]

    def _read_json(self, name: str) -> dict[str, Any] | None:
        if name not in self._entries:
            return None
        limit = _GROWING_LIMIT if name in (layout.TRAINER_STATE, layout.SHARD_INDEX) else _JSON_LIMIT
        if self._entries[name].size > limit:  # before a byte is read; `read_file` reads no more than the committed size
            raise self._damaged(name, f"it has more than {limit:,} bytes")
        try:
            record = parse_json(self.read_file(name))
        except ValueError as error:
            raise self._damaged(name, f"it is not JSON that trainflow writes ({str(error)[:80]})") from error
        if not isinstance(record, dict):
            raise self._damaged(name, "it is not an object")
        return record

    def _damaged(self, name: str, reason: str) -> DamagedError:
        return damaged_file(f"{self.url}/{name}", reason)


def load_checkpoint(root: Store, name: str, comm: Communicator) -> Checkpoint:
    """Open a committed checkpoint on every rank. Collective; raises as `open_checkpoint`, the same on every rank."""
    return run_on_all_ranks(comm, lambda: open_checkpoint(root, name))


def open_checkpoint(root: Store, name: str) -> Checkpoint:
    """Open a committed checkpoint on this process alone. Raises ConfigError, DamagedError and StorageError."""
    store = root.child(name)
    info = read_checkpoint_info(root, name)
    if info is None:
        known = recognise_folder(store)
        instead = f", but {known.what}" if known else "" if store.children() else ": it is empty or does not exist"
        how = "A folder without COMMIT.json is unfinished, or a model alone: see `trainflow checkpoints list`."
        what, remedy = f"The folder holds no committed checkpoint{instead}.", known.remedy if known else how
        raise ConfigError(what, field="resume_from_checkpoint", value=store.url, remedy=remedy)
    problems = verify_files(store, info.commit, digests=False)  # also finds links and special files
    if problems:
        file, _, reason = problems[0].rpartition(": ")
        more = f" (and {len(problems) - 1} more)" if len(problems) > 1 else ""
        raise damaged_file(f"{store.url}/{file}", f"{reason}{more}")
    return Checkpoint(store, info)


def _find_position_problem(data: dict[str, Any]) -> str | None:
    for name in ("epoch", "step_in_epoch", "position", "samples_seen"):
        value = data.get(name, 0)
        if type(value) is not int or not 0 <= value < 2**62:  # type(): a bool is an int as well
            return f"its {name} is not a count"
    for name in ("source", "history"):
        if not isinstance(data.get(name, {}), dict):
            return f"its {name} is not an object"
    return None


def _find_optimizer_problem(record: dict[str, Any]) -> str | None:
    groups, scalars = record.get("groups"), record.get("scalars")
    if not isinstance(groups, list) or not isinstance(scalars, dict):
        return "it has no groups"
    for group in groups:
        names = group.get("params") if isinstance(group, dict) else None
        if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
            return "a group in it lists no parameters"
    state = scalars.get("state", {})
    if not isinstance(state, dict) or not all(isinstance(values, dict) for values in state.values()):
        return "its state is not by parameter"
    return None
