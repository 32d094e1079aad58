"""Loading a checkpoint: only what was committed, every byte compared with the commit before it is used."""

from __future__ import annotations

import hashlib
import json
from typing import TYPE_CHECKING, Any

from torch import Tensor

from trainer_lib.checkpoint import writer as files
from trainer_lib.checkpoint.catalogue import CheckpointInfo, read_info
from trainer_lib.checkpoint.collective import together
from trainer_lib.checkpoint.optimizer import OptimizerSnapshot
from trainer_lib.checkpoint.tensors import read_safetensors
from trainer_lib.checkpoint.values import from_json
from trainer_lib.errors import ConfigError, DamagedError
from trainer_lib.storage import FileEntry, Store

if TYPE_CHECKING:
    from trainer_lib.distributed import Communicator


class Loaded:
    """A checkpoint being resumed from. The small parts are read and verified; tensors are read when asked for.

    Attributes:
        step: optimizer steps done when it was saved.
        url: where it is.
        commit: its commit; `meta` has the world size and what the writer added.
        scheduler, scaler: None when there was none.
        data, trainer_state, training_args: as they were given to the writer, secrets removed.
    """

    def __init__(self, store: Store, info: CheckpointInfo) -> None:
        self.step = info.step
        self.url = info.url
        self.commit = info.commit
        self._store = store
        self._entries = {entry.path: entry for entry in info.commit.files}
        self.scheduler: dict[str, Any] | None = from_json(self._json(files.SCHEDULER))
        self.scaler: dict[str, Any] | None = from_json(self._json(files.SCALER))
        self.data: dict[str, Any] = self._json(files.DATA) or {}
        self.trainer_state: dict[str, Any] = self._json(files.TRAINER_STATE) or {}
        self.training_args: dict[str, Any] = self._json(files.TRAINING_ARGS) or {}

    @property
    def has_optimizer(self) -> bool:
        """Whether training can go on from it; False when only the model was saved."""
        return files.OPTIMIZER in self._entries

    def model(self) -> dict[str, Tensor]:
        """Name → tensor on the CPU, in the dtype it had; tied names share one tensor. Raises DamagedError."""
        return read_safetensors(self._store, files.MODEL, expect=self._entry(files.MODEL))

    def optimizer(self) -> OptimizerSnapshot | None:
        """The optimizer's state; None when only the model was saved. Read anew at each call. Raises DamagedError."""
        record = self._json(files.OPTIMIZER)
        if record is None:
            return None
        entry = self._entry(files.OPTIMIZER_TENSORS)
        groups, scalars = record.get("groups"), record.get("scalars")
        if not isinstance(groups, list) or not isinstance(scalars, dict):
            raise _damaged(self._store, files.OPTIMIZER, "it has no groups")
        return OptimizerSnapshot(read_safetensors(self._store, entry.path, expect=entry), groups, scalars)

    def rng(self, rank: int) -> dict[str, Any]:
        """The random state of a rank. Raises ConfigError when the saved run had no such rank."""
        state = self._json(files.rng_file(rank))
        if state is None:
            raise ConfigError(
                f"The checkpoint has no random state of rank {rank}.",
                field="resume_from_checkpoint",
                value=self.url,
                remedy=f"It was saved by {self.commit.meta.get('world_size')} ranks; seed the further ones anew.",
            )
        return state

    def file(self, name: str) -> bytes:
        """One of the further files (``config.json``). Raises DamagedError when absent or not as committed."""
        entry = self._entry(name)
        data = self._store.read_if_exists(name, limit=entry.size)
        if data is None:
            raise _damaged(self._store, name, "it is missing")
        if len(data) != entry.size or hashlib.sha256(data).hexdigest() != entry.sha256:
            raise _damaged(self._store, name, "it is not the file that was committed")
        return data

    def _entry(self, name: str) -> FileEntry:
        entry = self._entries.get(name)
        if entry is None:
            raise _damaged(self._store, name, "the commit does not list it")
        return entry

    def _json(self, name: str) -> dict[str, Any] | None:
        if name not in self._entries:
            return None
        try:
            record = json.loads(self.file(name))
        except (ValueError, RecursionError) as error:
            raise _damaged(self._store, name, "it is not JSON") from error
        if not isinstance(record, dict):
            raise _damaged(self._store, name, "it is not an object")
        return record


def load_checkpoint(root: Store, name: str, comm: Communicator) -> Loaded:
    """Open a committed checkpoint. Collective; every rank reads for itself.

    Raises (the same on every rank):
        ConfigError: there is no committed checkpoint of that name.
        DamagedError: the commit or a small file is damaged; `Loaded.model` and `Loaded.optimizer` check theirs.
        StorageError: the store cannot be read.
    """
    return together(comm, lambda: _open(root, name))


def _open(root: Store, name: str) -> Loaded:
    info = read_info(root, name)
    if info is None:
        raise ConfigError(
            "There is no committed checkpoint there.",
            field="resume_from_checkpoint",
            value=root.child(name).url,
            remedy="A folder without COMMIT.json was not finished. `trainflow checkpoints list` shows those that were.",
        )
    return Loaded(root.child(name), info)


def _damaged(store: Store, name: str, reason: str) -> DamagedError:
    return DamagedError(
        f"The file is damaged: {reason}.",
        field=f"{store.url}/{name}",
        remedy="Use an earlier checkpoint (a resume does by itself), or restore the file.",
    )
