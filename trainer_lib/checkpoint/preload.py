"""A checkpoint that is read whole before anything of it is used: each byte once, compared with the commit on the way.

Finding the newest checkpoint looks at names, sizes and commit files only. Here its bytes are read into host memory and
handed out tensor by tensor afterwards. Damage is thus known while the Trainer is still as it was, so an older
checkpoint can be used instead, and an intact one is not read a second time.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from torch import Tensor
from typing_extensions import override

from trainer_lib.checkpoint import layout
from trainer_lib.checkpoint.optimizer import OptimizerSnapshot
from trainer_lib.checkpoint.parsing import damaged_file
from trainer_lib.checkpoint.reader import Checkpoint, ShareTensors

_READ_AT_ONCE = frozenset((layout.SCHEDULER, layout.SCALER, layout.DATA, layout.TRAINER_STATE, layout.TRAINING_ARGS))
"""Files that opening a checkpoint reads already."""


class PreloadedCheckpoint(Checkpoint):
    """A `Checkpoint` whose parts are in memory already.

    Model, optimizer and random state are handed out once, so that their memory is free afterwards; asked for again,
    they are read again.
    """

    _model: Mapping[str, Tensor] | None = None
    _optimizer: OptimizerSnapshot | None = None
    _rng: tuple[int, dict[str, Any]] | None = None
    _extra: Mapping[int, Mapping[str, Tensor]] = MappingProxyType({})

    def preload(self, *, rank: int, tensors: bool, weights: bool = False) -> None:
        """Read everything that this rank needs; rank 0 also compares the files that no rank needs.

        Args:
            rank: of this process.
            tensors: whether this rank reads the tensors of model and optimizer.
            weights: leave the files of the optimizer out.

        Raises:
            DamagedError: a file is missing or has other bytes than were committed.
            StorageError: the store cannot be read.
        """
        done = {*_READ_AT_ONCE, *((layout.OPTIMIZER, layout.OPTIMIZER_TENSORS) if weights else ())}
        if tensors and self._model_file in self._entries:
            self._model = super().read_model()
            done.add(self._model_file)
        if tensors and layout.OPTIMIZER_TENSORS in self._entries.keys() - done:
            self._optimizer = super().read_optimizer()
            done |= {layout.OPTIMIZER, layout.OPTIMIZER_TENSORS}
        own = layout.rng_file(rank)
        if own in self._entries:
            self._rng = rank, super().read_rng(rank)
            done.add(own)
        # Rank 0's extra tensors belong to callbacks, which every rank restores.
        self._extra = {each: super(PreloadedCheckpoint, self).read_extra(each) for each in {0, rank}}
        done |= {layout.extra_file(each) for each in self._extra}
        # One rank is enough for files that no rank needs.
        for name in sorted(self._entries.keys() - done) if rank == 0 else ():
            self._compare_digest(name)

    @override
    def read_model(self) -> Mapping[str, Tensor]:
        # Handed out once, so that the memory is free as soon as the model has taken it over.
        held, self._model = self._model, None
        return super().read_model() if held is None else held

    @override
    def read_optimizer(self, share: ShareTensors | None = None) -> OptimizerSnapshot | None:
        held, self._optimizer = self._optimizer, None
        if held is None:
            return super().read_optimizer(share)
        tensors = held.tensors
        return held if share is None else dataclasses.replace(held, tensors=share(lambda: tensors))

    @override
    def read_rng(self, rank: int) -> dict[str, Any]:
        held, self._rng = self._rng, None
        return held[1] if held is not None and held[0] == rank else super().read_rng(rank)

    @override
    def read_extra(self, rank: int) -> Mapping[str, Tensor]:
        held = self._extra.get(rank)
        return super().read_extra(rank) if held is None else held

    def _compare_digest(self, name: str) -> None:
        committed, found = self._entries[name].sha256, self._store.digest(name)
        if found != committed:
            raise damaged_file(
                f"{self._store.url}/{name}", f"its digest is {found[:12]}..., committed {committed[:12]}..."
            )
