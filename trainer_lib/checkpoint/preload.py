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

from trainer_lib.checkpoint import writer as files
from trainer_lib.checkpoint.optimizer import OptimizerSnapshot
from trainer_lib.checkpoint.reader import Loaded
from trainer_lib.errors import DamagedError

Share = Callable[[Callable[[], Mapping[str, Tensor]]], Mapping[str, Tensor]]
_READ_AT_ONCE = {files.SCHEDULER, files.SCALER, files.DATA, files.TRAINER_STATE, files.TRAINING_ARGS}


class ReadAhead(Loaded):
    """A `Loaded` whose parts are here already. Each is handed out once, and read again when it is asked for again."""

    _model: Mapping[str, Tensor] | None = None
    _optimizer: OptimizerSnapshot | None = None
    _rng: tuple[int, dict[str, Any]] | None = None
    _extra: Mapping[int, Mapping[str, Tensor]] = MappingProxyType({})

    def read(self, *, rank: int, tensors: bool) -> None:
        """Read everything this rank needs; the first rank also what no rank does.

        Args:
            rank: of this process.
            tensors: whether this rank is the one (or one of those) that reads the tensors.

        Raises:
            DamagedError: a file is missing or has other bytes than were committed.
        """
        done = set(_READ_AT_ONCE)
        if tensors and files.MODEL in self._entries:
            self._model = super().model()
            done.add(files.MODEL)
        if tensors and files.OPTIMIZER_TENSORS in self._entries:
            self._optimizer = super().optimizer()
            done |= {files.OPTIMIZER, files.OPTIMIZER_TENSORS}
        own = files.rng_file(rank)
        if own in self._entries:
            self._rng = rank, super().rng(rank)
            done.add(own)
        self._extra = {each: super(ReadAhead, self).further_tensors(each) for each in {0, rank}}
        done |= {files.extra_file(each) for each in self._extra}
        for name in sorted(self._entries.keys() - done) if rank == 0 else ():
            self._compare(name)

    def model(self) -> Mapping[str, Tensor]:
        """See `Loaded.model`."""
        held, self._model = self._model, None
        return super().model() if held is None else held

    def optimizer(self, share: Share | None = None) -> OptimizerSnapshot | None:
        """See `Loaded.optimizer`; `share` is given what reads the tensors, to have it done on one rank for all."""
        held, self._optimizer = self._optimizer, None
        if held is None:
            return super().optimizer(share)
        tensors = held.tensors
        return held if share is None else dataclasses.replace(held, tensors=share(lambda: tensors))

    def rng(self, rank: int) -> dict[str, Any]:
        """See `Loaded.rng`."""
        held, self._rng = self._rng, None
        return held[1] if held is not None and held[0] == rank else super().rng(rank)

    def further_tensors(self, rank: int) -> Mapping[str, Tensor]:
        """See `Loaded.further_tensors`."""
        held = self._extra.get(rank)
        return super().further_tensors(rank) if held is None else held

    def _compare(self, name: str) -> None:
        entry = self._entries[name]
        found = self._store.digest(name)
        if found != entry.sha256:
            raise DamagedError(
                f"The file is damaged: its digest is {found[:12]}..., committed {entry.sha256[:12]}....",
                field=f"{self._store.url}/{name}",
                remedy="Use an earlier checkpoint (a resume does by itself), or restore the file.",
            )
