"""A checkpoint that was read before anything is taken from it: each byte once, compared with the commit on the way.

Finding the newest checkpoint looks at names, sizes and commit files only. What it found is read here, into host memory,
and handed out tensor by tensor; damage is thus known while the Trainer is still as it was, and an older checkpoint can
be taken instead, without a second look at the store.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

from torch import Tensor

from trainer_lib.checkpoint import layout
from trainer_lib.checkpoint.optimizer import OptimizerSnapshot
from trainer_lib.checkpoint.reader import Checkpoint
from trainer_lib.errors import DamagedError

Share = Callable[[Callable[[], Mapping[str, Tensor]]], Mapping[str, Tensor]]
_READ_AT_ONCE = {layout.SCHEDULER, layout.SCALER, layout.DATA, layout.TRAINER_STATE, layout.TRAINING_ARGS}


class PreloadedCheckpoint(Checkpoint):
    """A `Checkpoint` whose parts are in memory already. Each is handed out once; asked for again, it is read again."""

    _model: Mapping[str, Tensor] | None = None
    _optimizer: OptimizerSnapshot | None = None
    _rng: tuple[int, dict[str, Any]] | None = None
    _extra: Mapping[int, Mapping[str, Tensor]] = MappingProxyType({})

    def preload(self, *, rank: int, tensors: bool) -> None:
        """Read everything this rank needs; the first rank also what no rank does.

        Args:
            rank: of this process.
            tensors: whether this rank is the one (or one of those) that reads the tensors.

        Raises:
            DamagedError: a file is missing or has other bytes than were committed.
        """
        done = set(_READ_AT_ONCE)
        if tensors and layout.MODEL in self._entries:
            self._model = super().read_model()
            done.add(layout.MODEL)
        if tensors and layout.OPTIMIZER_TENSORS in self._entries:
            self._optimizer = super().read_optimizer()
            done |= {layout.OPTIMIZER, layout.OPTIMIZER_TENSORS}
        own = layout.rng_file(rank)
        if own in self._entries:
            self._rng = rank, super().read_rng(rank)
            done.add(own)
        self._extra = {each: super(PreloadedCheckpoint, self).read_extra(each) for each in {0, rank}}
        done |= {layout.extra_file(each) for each in self._extra}
        for name in sorted(self._entries.keys() - done) if rank == 0 else ():
            self._compare(name)

    def read_model(self) -> Mapping[str, Tensor]:
        """See `Checkpoint.read_model`."""
        held, self._model = self._model, None
        return super().read_model() if held is None else held

    def read_optimizer(self, share: Share | None = None) -> OptimizerSnapshot | None:
        """See `Checkpoint.read_optimizer`."""
        held, self._optimizer = self._optimizer, None
        if held is None:
            return super().read_optimizer(share)
        tensors = held.tensors
        return held if share is None else dataclasses.replace(held, tensors=share(lambda: tensors))

    def read_rng(self, rank: int) -> dict[str, Any]:
        """See `Checkpoint.read_rng`."""
        held, self._rng = self._rng, None
        return held[1] if held is not None and held[0] == rank else super().read_rng(rank)

    def read_extra(self, rank: int) -> Mapping[str, Tensor]:
        """See `Checkpoint.read_extra`."""
        held = self._extra.get(rank)
        return super().read_extra(rank) if held is None else held

    def _compare(self, name: str) -> None:
        entry = self._entries[name]
        found = self._store.digest(name)
        if found != entry.sha256:
            raise DamagedError(
                f"The file is damaged: its digest is {found[:12]}..., committed {entry.sha256[:12]}....",
                field=f"{self._store.url}/{name}",
                remedy="Use an earlier checkpoint (a resume does by itself), or restore the file.",
            )
