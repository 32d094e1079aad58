"""DataLoaders that the user built: every rank reads them, and the batches go to the ranks in turn."""

from __future__ import annotations

import copy
import itertools
import logging
from collections.abc import Iterator
from typing import Any

import torch
from torch.utils.data import RandomSampler

from trainer_lib.data.loading.generators import (
    LoaderGenerators,
    generators_seeded,
    keep_generators,
    parts_of_loader,
    seed_generators,
)
from trainer_lib.data.loading.items import count_samples
from trainer_lib.data.loading.iterable import discard
from trainer_lib.data.loading.loader import Micro, has_length, refuse_change

_log = logging.getLogger(__name__)
_LOADER = "The DataLoader has no state to restore"


def count_samples_of(loader: Any, batch: Any) -> int | None:
    """Samples in a batch of a user's loader: by the batch, else the loader's `batch_size`; None when neither tells."""
    size = getattr(loader, "batch_size", None)
    samples = count_samples(batch, size if isinstance(size, int) and not hasattr(batch, "__len__") else None)
    return size if samples is None and isinstance(size, int) else samples


class ForeignLoader:
    """A DataLoader of the user's own, whose batches go to the ranks in turn.

    A loader with `state_dict` and `load_state_dict` (torchdata's StatefulDataLoader) is restored when training resumes.
    Any other is read and discarded up to the position. `keeps_start`: note the state that it starts with, for `rewind`.
    """

    def __init__(
        self,
        loader: Any,
        *,
        accumulation: int,
        data_parallel_size: int,
        rank: int,
        seed: int,
        drop_last: bool,
        keeps_start: bool = False,
    ) -> None:
        self.loader = loader
        self._accumulation = accumulation
        self._world = data_parallel_size
        self._rank = rank
        self._seed = seed
        self._drop_last = drop_last
        self._generator = torch.Generator()
        self._generators = LoaderGenerators(loader)
        self._restored: dict[str, Any] | None = None
        self._keeps_start = keeps_start and callable(getattr(loader, "state_dict", None))
        self._start: dict[str, Any] | None = None
        batches = len(loader) if has_length(loader) else None
        self.steps_per_epoch = None if batches is None else self._steps(batches)
        self.micros_per_epoch = None if batches is None else -(-batches // data_parallel_size)
        # With a batch sampler the loader has no size of its own.
        batch_sampler = getattr(loader, "batch_sampler", None)
        size = getattr(loader, "batch_size", None) or getattr(batch_sampler, "batch_size", None)
        self.global_batch = size * accumulation * data_parallel_size if isinstance(size, int) else 0
        dataset = getattr(loader, "dataset", None)
        self.epoch_samples = len(dataset) if dataset is not None and has_length(dataset) else None

    def _steps(self, batches: int) -> int:
        per_step = self._accumulation * self._world
        return batches // per_step if self._drop_last else -(-batches // per_step)

    def micro_steps(self, step: int) -> int:
        """Micro-batches per full step."""
        return self._accumulation

    def step_samples(self, step: int) -> int:
        """Samples per full step over all ranks; 0 when unknown."""
        return self.global_batch

    def micros(self, epoch: int, start_step: int) -> Iterator[Micro]:
        """This rank's batches of an epoch, from a step on; in an incomplete last round some are dummy batches."""
        if self._restored is not None:
            self.loader.load_state_dict(self._restored)
            self._restored = None
            start_step = 0
        self._set_epoch(epoch)
        with keep_generators():  # discarding batches must not change the restored generators
            seed_generators(self._seed + epoch)
            self._keep_start()
            batches = iter(self.loader)
            discard(batches, self._batches_before(start_step))
            self._generators.reach_position()
        # Batches go to the ranks in turn, so every rank has to read all of them.
        while turn := list(itertools.islice(batches, self._world)):
            real = self._rank < len(turn)
            batch = turn[self._rank] if real else turn[0]
            yield Micro(batch, real, count_samples_of(self.loader, batch))

    def close(self) -> None:
        """Put back the user's generators, and take away ours; the user owns the loader's workers."""
        self._generators.put_back()
        for part in parts_of_loader(self.loader):
            # The next training would take it for the user's own.
            if isinstance(part, RandomSampler) and part.generator is self._generator:
                part.generator = None

    def rewind(self) -> None:
        """Put a loader with a state back to where training found it."""
        if self._start is not None and callable(getattr(self.loader, "load_state_dict", None)):
            self.loader.load_state_dict(copy.deepcopy(self._start))

    def _keep_start(self) -> None:
        if self._keeps_start and self._start is None:
            self._start = copy.deepcopy(self.loader.state_dict())

    def _set_epoch(self, epoch: int) -> None:
        self._generators.begin_epoch(epoch)
        for part in parts_of_loader(self.loader):
            if callable(set_epoch := getattr(part, "set_epoch", None)):
                set_epoch(epoch)
            if isinstance(part, RandomSampler) and (part.generator is None or part.generator is self._generator):
                # Otherwise it would draw its seed from the global generator, which differs between ranks.
                part.generator = self._generator.manual_seed(self._seed + epoch)

    def state(self) -> dict[str, Any]:
        """The global batch, and the loader's own state if it has one."""
        state: dict[str, Any] = {"order": {"kind": "loader"}, "global_batch": self.global_batch}
        state |= self._generators.state()
        if callable(read := getattr(self.loader, "state_dict", None)):
            state["loader"] = read()
        return state

    def load_state(self, state: dict[str, Any], *, epoch: int, step: int) -> None:
        """Restore the loader, or log that it will be read up to the position."""
        refuse_change("global_batch_size", state.get("global_batch"), self.global_batch)
        if generators := state.get("generators"):
            self._generators.load_state(generators, epoch)
        if state.get("loader") is not None and callable(getattr(self.loader, "load_state_dict", None)):
            with generators_seeded(self._seed):  # a loader may begin to read in order to have a state
                self._keep_start()
            self._restored = state["loader"]
        elif step and self._rank == 0:
            _log.warning(
                "%s: reading and discarding %d batches up to the position.", _LOADER, self._batches_before(step)
            )

    def _batches_before(self, step: int) -> int:
        return step * self._accumulation * self._world
