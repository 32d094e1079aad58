"""Iterable datasets, whose samples are divided among ranks by position.

Every rank reads the same stream and keeps its share (positions as in `order`), so no sample is lost or used twice. A
stream has no random access. To resume, a dataset with `state_dict` and `load_state_dict` is restored; any other is read
and discarded up to the position, which is logged before it starts. So is one whose state is incomplete: the state of
datasets' shuffled streams leaves out the samples in the shuffle buffer.
"""

from __future__ import annotations

import itertools
import logging
import sys
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.utils.data import DataLoader, IterableDataset

from trainer_lib.data.loading.collators import seeds_of_samples
from trainer_lib.data.loading.generators import keep_generators, seed_generators
from trainer_lib.data.loading.loader import Micro, end_workers, has_length, refuse_change
from trainer_lib.data.loading.order import derive, sample_seeds
from trainer_lib.errors import ConfigError

_DATASET = "The iterable dataset has no state to restore"
_BUFFERED = "The iterable dataset's own state leaves out what its shuffle buffer holds"
_BLOCK = 4096  # rounds whose seeds are computed at once
_log = logging.getLogger(__name__)


class _Part(NamedTuple):
    """A collated share from a worker; the numbers of samples in its whole round and in the share."""

    batch: Any
    real: bool
    samples: int
    share: int


class Shares(IterableDataset[_Part]):
    """Cuts a stream into rounds of ranks x micro-batch samples and collates this rank's part of a round.

    The random generators are seeded by (seed, epoch, round) for every round and restored after it, so a resumed stream
    draws the same numbers, and dropout is not affected. `dummy_batches`: give a rank without samples a dummy batch.
    """

    def __init__(
        self,
        dataset: Any,
        collate: Callable[[list[Any]], Any],
        *,
        global_batch: int,
        micro_batch: int,
        data_parallel_size: int,
        rank: int,
        seed: int,
        dummy_batches: bool = True,
    ) -> None:
        self.dataset = dataset
        self.stream = with_own_position(dataset)
        self.collate = collate
        self.epoch = 0
        self.first_round = 0
        self.reads_all = False  # whether the rounds before `first_round` must be read first
        self.outside: torch.Tensor | None = None  # epoch and first round in shared memory, for persistent workers
        self.global_batch = global_batch
        # A global batch that is smaller than a round of full micro-batches is divided evenly.
        self._micro = min(micro_batch, -(-global_batch // data_parallel_size))
        self.unit = data_parallel_size * self._micro  # samples of a round
        self.rank = rank
        self._seed = seed
        self._dummy_batches = dummy_batches

    def __iter__(self) -> Iterator[_Part]:
        worker = torch.utils.data.get_worker_info()
        if worker is not None and self.outside is not None:  # this worker's copy may be of an earlier epoch
            epoch, self.first_round = self.outside.tolist()
            self.begin_epoch(epoch)
        number, room = self.first_round, self.global_batch
        samples = self._read_to_first_round() if self.reads_all else None
        while True:
            with keep_generators():
                seed = int(derive(self._seed, self.epoch, number, 0 if worker is None else worker.id)[0])
                seed_generators(seed)
                samples = iter(self.stream) if samples is None else samples
                unit = list(itertools.islice(samples, min(room, self.unit)))
                part = self._collate_part(unit, seed) if unit else None
            if part is None:
                return
            yield part
            number += 1
            room = room - len(unit) or self.global_batch  # a round never crosses the end of a global batch

    def _read_to_first_round(self) -> Iterator[Any]:
        """Read the stream up to the first round. Rounds are read under their own seeds, as in the interrupted run."""
        samples: Iterator[Any] | None = None
        room = self.global_batch
        with keep_generators():
            for start in range(0, self.first_round, _BLOCK):
                numbers = np.arange(start, min(start + _BLOCK, self.first_round), dtype=np.uint64)
                for seed in derive(self._seed, self.epoch, numbers, 0).tolist():
                    seed_generators(seed)
                    samples = iter(self.stream) if samples is None else samples
                    unit = itertools.islice(samples, min(room, self.unit))
                    room = room - sum(1 for _ in unit) or self.global_batch
        return iter(self.stream) if samples is None else samples

    def begin_epoch(self, epoch: int) -> None:
        """Pass the epoch to the stream: call its `set_epoch`, or seed its `generator`."""
        self.epoch = epoch
        if callable(set_epoch := getattr(self.stream, "set_epoch", None)):
            set_epoch(epoch)
        elif isinstance(generator := getattr(self.stream, "generator", None), torch.Generator):
            generator.manual_seed(self._seed + epoch)

    def _collate_part(self, unit: list[Any], seed: int) -> _Part:
        first = self.rank * self._micro
        share = unit[first : first + self._micro]
        if not share and not self._dummy_batches:
            return _Part(None, False, len(unit), 0)
        # By the place in the round: otherwise every rank would mask the same tokens.
        places = np.arange(first, first + max(1, len(share)), dtype=np.int64)
        token = seeds_of_samples.set(sample_seeds(seed, self.epoch, places).tolist())
        try:
            return _Part(self.collate(share or unit[:1]), bool(share), len(unit), len(share))
        finally:
            seeds_of_samples.reset(token)


class IterableLoader(DataLoader[Any]):
    """This rank's micro-batches of an iterable dataset. Iteration yields the plain batches.

    `in_dummy_batch`: whether the one that it gave last is a dummy.
    """

    in_dummy_batch = False

    def __init__(self, shares: Shares, *, drop_last: bool, options: Mapping[str, Any]) -> None:
        dataset, global_batch = shares.dataset, shares.global_batch
        self.shares = shares
        self.global_batch = global_batch
        self._accumulation = -(-global_batch // shares.unit)
        self._drop_last = drop_last
        self.epoch_samples: int | None = len(dataset) if has_length(dataset) else None
        self.steps_per_epoch: int | None = None
        self.micros_per_epoch: int | None = None
        if (count := self.epoch_samples) is not None:
            self.steps_per_epoch = count // global_batch if drop_last else -(-count // global_batch)
            self.micros_per_epoch = self.steps_per_epoch * self._accumulation if drop_last else len(self)
        self._restored: dict[str, Any] | None = None
        # Persistent workers keep their copy of `shares`: they read the position from shared memory.
        if options.get("num_workers") and options.get("persistent_workers"):
            self.shares.outside = torch.zeros(2, dtype=torch.int64).share_memory_()  # type: ignore[no-untyped-call]
        # A generator of its own: torch's loader would draw from the global one.
        settings = {"batch_size": None, "generator": torch.Generator().manual_seed(0), **options}
        self._reader: DataLoader[_Part] = DataLoader(self.shares, **settings)
        # To its users it is a loader of their own stream with their own collator.
        super().__init__(dataset, collate_fn=shares.collate, **settings)

    @property
    def collate_fn(self) -> Any:
        """The collator; overrides of `get_train_dataloader` may set another one."""
        return self.shares.collate

    @collate_fn.setter
    def collate_fn(self, collate: Any) -> None:
        self.shares.collate = collate

    def __len__(self) -> int:
        if self.epoch_samples is None:
            raise TypeError("The iterable dataset has no length.")
        return -(-self.epoch_samples // self.shares.unit)

    def __iter__(self) -> Any:
        """The batches, without the parts that have none."""
        try:
            for part in self._reader:
                if part.batch is not None:
                    self.in_dummy_batch = not part.real
                    yield part.batch
        finally:
            self.in_dummy_batch = False

    def micro_steps(self, step: int) -> int:
        """Micro-batches per full step."""
        return self._accumulation

    def step_samples(self, step: int) -> int:
        """Samples of a step; those of a full step while the length is unknown."""
        left = self.global_batch if self.epoch_samples is None else self.epoch_samples - step * self.global_batch
        return max(0, min(self.global_batch, left))

    def set_epoch(self, epoch: int) -> None:
        """Pass the epoch to the dataset, also in persistent workers."""
        self.shares.begin_epoch(epoch)
        self._share_position()

    def _share_position(self) -> None:
        if self.shares.outside is not None:
            self.shares.outside[0], self.shares.outside[1] = self.shares.epoch, self.shares.first_round

    def micros(self, epoch: int, start_step: int) -> Iterator[Micro]:
        """This rank's micro-batches of an epoch, from a step on."""
        self.set_epoch(epoch)
        parts = self._iterate_parts(start_step)
        while step := list(itertools.islice(parts, self._accumulation)):
            if self._drop_last and sum(part.samples for part in step) < self.global_batch:
                return
            for part in step:
                yield Micro(part.batch, part.real, part.share)

    def rounds(self) -> Iterator[Micro]:
        """One pass for evaluation; a round in which this rank has no samples yields None or a dummy batch."""
        self.shares.first_round, self.shares.reads_all = 0, False
        self.set_epoch(0)
        for part in self._reader:
            yield Micro(part.batch, part.real, part.share)

    def _iterate_parts(self, start_step: int) -> Iterator[_Part]:
        rounds = start_step * self._accumulation
        self.shares.first_round, self.shares.reads_all = rounds, False
        if self._restored is not None:
            self.shares.stream.load_state_dict(self._restored)
            self._restored = None
        elif self.num_workers > 0:
            # Every worker reads a stream of its own: rounds are counted where the workers' outputs meet.
            self.shares.first_round = 0
            self._share_position()
            parts = iter(self._reader)
            discard(parts, rounds)
            return parts
        else:
            self.shares.reads_all = rounds > 0
        self._share_position()
        return iter(self._reader)

    def close(self) -> None:
        """End the workers."""
        end_workers(self._reader)

    def state(self) -> dict[str, Any]:
        """The global batch and, without workers, the dataset's own state if it has a complete one."""
        # Workers determine the order: they read their own streams or parts.
        order = {"kind": "iterable", "workers": self.num_workers}
        state: dict[str, Any] = {"order": order, "global_batch": self.global_batch}
        stream, read = self.shares.stream, getattr(self.shares.stream, "state_dict", None)
        if self.num_workers == 0 and callable(read) and has_complete_state(stream):
            state["dataset"] = read() if self._restored is None else self._restored
        return state

    def load_state(self, state: dict[str, Any], *, epoch: int, step: int) -> None:
        """Restore the dataset, or log that it will be read up to the position."""
        refuse_change("global_batch_size", state.get("global_batch"), self.global_batch)
        before = state.get("order", {}).get("workers")
        if max(1, before if isinstance(before, int) else self.num_workers) != max(1, self.num_workers):
            raise ConfigError(
                f"The value was {before} when the checkpoint was written. Every worker of an iterable dataset reads a "
                "stream of its own, so the order of the samples would change.",
                field="dataloader_num_workers",
                value=self.num_workers,
                remedy="Restore it, or set ignore_data_skip=True to read the epoch's data from the start.",
            )
        stream = self.shares.stream
        if state.get("dataset") is not None and callable(getattr(stream, "load_state_dict", None)):
            self._restored = state["dataset"]
        elif step and self.shares.rank == 0:
            what = _DATASET if has_complete_state(stream) else _BUFFERED
            batches = f"{step * self.global_batch:,} samples ({step * self._accumulation:,} batches)"
            _log.warning("%s: reading and discarding %s up to the position.", what, batches)


def discard(items: Iterator[Any], count: int) -> None:
    """Read and discard so many items."""
    for _ in itertools.islice(items, count):
        pass


def has_complete_state(stream: Any) -> bool:
    """Whether a stream's `state_dict` restores it exactly; False for one with a shuffle buffer."""
    # datasets wraps its sources in each other: any of them may hold a buffer.
    waiting, seen = [stream], set()
    while waiting:
        source = waiting.pop()
        if id(source) in seen or source is None:
            continue
        seen.add(id(source))
        if "BufferShuffled" in type(source).__name__:
            return False
        waiting += [getattr(source, name, None) for name in ("_ex_iterable", "ex_iterable", "dataset")]
        waiting += getattr(source, "ex_iterables", None) or []
    return True


def with_own_position(stream: Any) -> Any:
    """A stream of datasets over the same data with a position of its own; any other stream as it is.

    Such a stream keeps its position in the sources that it wraps. Otherwise an evaluation of the stream that is trained
    on would move the position that the next checkpoint saves, and a resume would leave the user's stream positioned.
    """
    kind = getattr(sys.modules.get("datasets"), "IterableDataset", None)
    return _copy_sources(stream) if kind is not None and isinstance(stream, kind) else stream


def _copy_sources(stream: Any) -> Any:
    copied = object.__new__(type(stream))  # `copy.copy` makes an IterableDataset that shares its attributes
    copied.__dict__.update(vars(stream))
    for name, value in vars(stream).items():
        if callable(getattr(value, "_init_state_dict", None)):
            setattr(copied, name, _copy_sources(value))
        elif isinstance(value, list) and any(callable(getattr(source, "_init_state_dict", None)) for source in value):
            setattr(copied, name, [_copy_sources(source) for source in value])
    return copied
