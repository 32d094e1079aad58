"""Loaders whose state is a position: an epoch can start at any step at once, without replaying earlier ones.

Random numbers of a sample (augmentation in ``__getitem__``) and of a collator (masking) are seeded by (seed, epoch,
sample), in workers and in the training process. They do not depend on the number of workers, and do not change the
generators that dropout draws from. Data that draws no random numbers is read without seeding (`generators`).
"""

from __future__ import annotations

import functools
import itertools
import operator
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Sized
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias, TypeVar

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset, Subset, TensorDataset
from typing_extensions import override

from trainer_lib.data.loading.collators import PURE, default_data_collator, seeds_of_samples
from trainer_lib.data.loading.generators import keep_generators, seed_generators, watch_generators
from trainer_lib.data.loading.mixture_order import MixtureOrder
from trainer_lib.data.loading.order import BatchPlan, Indices, Order, sample_seeds
from trainer_lib.errors import ConfigError

if TYPE_CHECKING:
    from trainer_lib.data.loading.foreign import ForeignLoader
    from trainer_lib.data.loading.iterable import IterableLoader

T = TypeVar("T")
_AHEAD = 8  # quick batches that are read as one block
_QUICK_S = 250e-6  # a quick batch is read in less time


class Keys(NamedTuple):
    """The samples of one micro-batch: an epoch, and dataset indices, int64 ``[micro-batch]``."""

    epoch: int
    indices: Indices


def is_pure(dataset: Any) -> bool:
    """Whether reading a sample draws no random numbers for certain. A dataset can declare it as `is_pure = True`."""
    if isinstance(dataset, Subset):
        return is_pure(dataset.dataset)
    return isinstance(dataset, list | tuple | TensorDataset) or bool(getattr(dataset, "is_pure", False))


def is_pure_collator(collate: Any) -> bool:
    """Whether a collator draws no random numbers for certain. A collator can declare it as `is_pure = True`."""
    known = collate is default_data_collator or type(collate) in PURE
    return known or bool(getattr(collate, "is_pure", False))


class Fetch(Dataset[Any]):
    """Reads and collates whole micro-batches in the process that loads the data.

    The first batch is read under generators seeded per sample, which shows whether reading draws random numbers. When
    it does not, later batches are read without seeding, until one draws after all: it and all after it are seeded.
    """

    def __init__(self, dataset: Any, collate: Callable[[list[Any]], Any], seed: int) -> None:
        self.dataset = dataset
        self._seed = seed
        self._read_many = _find_batch_reader(dataset)
        self.use_collator(collate)

    def use_collator(self, collate: Callable[[list[Any]], Any]) -> None:
        """Collate with another function from the next batch on."""
        self.collate = collate
        self._draws: bool | None = None  # None until the first batch is read
        self._pure_collate = is_pure_collator(collate)
        self._pure = is_pure(self.dataset) and self._pure_collate

    def __getitems__(self, keys: Keys) -> Any:
        """The collated batch of these samples."""
        return self._read_block([keys])[0]

    def read_ahead(self, keys: Iterable[Keys]) -> Iterator[Any]:
        """The collated batches in order. Quick ones are read in blocks, since watching the generators takes as long."""
        waiting, size = iter(keys), 1
        while block := list(itertools.islice(waiting, size)):
            started = time.perf_counter()
            batches = self._read_block(block)
            size = _AHEAD if time.perf_counter() - started < _QUICK_S * len(block) else 1
            yield from batches

    def _read_block(self, block: list[Keys]) -> list[Any]:
        if self._pure:
            return [self.collate(self._read_rows(keys.indices.tolist())) for keys in block]
        watched = watch_generators() if self._draws is False else None
        if watched is None:
            return [self._read_seeded(keys) for keys in block]
        try:
            batches = [self._read_unseeded(keys) for keys in block]
        except BaseException as error:
            # An error under moved generators counts only if the seeded reading repeats it.
            if not watched.has_moved():
                raise
            watched.restore()
            if not isinstance(error, Exception):
                raise
        else:
            if not watched.has_moved():
                return batches
            watched.restore()
        self._draws = True
        return [self._read_seeded(keys) for keys in block]

    def _read_unseeded(self, keys: Keys) -> Any:
        rows = self._read_rows(keys.indices.tolist())
        return self.collate(rows) if self._pure_collate else self._collate_with_seeds(rows, _Seeds(self._seed, keys))

    def _read_seeded(self, keys: Keys) -> Any:
        with keep_generators():
            seeds = sample_seeds(self._seed, keys.epoch, keys.indices).tolist()
            rows = self._read_rows(keys.indices.tolist(), seeds)
            seed_generators(seeds[0] ^ 1)  # the collator draws other numbers than the first sample did
            batch = self._note_draws(lambda: self._collate_with_seeds(rows, seeds))
        self._draws = bool(self._draws)
        return batch

    def _note_draws(self, read: Callable[[], T]) -> T:
        """Return `read()`, called under freshly seeded generators; in the first batch, note whether it draws."""
        if self._draws is not None:
            return read()
        watched = watch_generators()
        result = read()
        if watched is None or watched.has_moved():
            self._draws = True
        return result

    def _collate_with_seeds(self, rows: list[Any], seeds: Sequence[int]) -> Any:
        token = seeds_of_samples.set(seeds)
        try:
            return self.collate(rows)
        finally:
            seeds_of_samples.reset(token)

    def _read_rows(self, indices: list[int], seeds: Sequence[int] | None = None) -> list[Any]:
        if (reader := self._read_many) is not None:
            if seeds is None:
                return list(reader(indices))
            seed_generators(seeds[0])
            return self._note_draws(lambda: list(reader(indices)))
        if seeds is None:
            return list(map(self.dataset.__getitem__, indices))
        rows: list[Any] = []
        for index, seed in zip(indices, seeds, strict=True):
            seed_generators(seed)
            rows.append(self._note_draws(functools.partial(operator.getitem, self.dataset, index)))
        return rows


class _Seeds(Sequence[int]):
    """The seeds of a batch's samples, computed when a collator first reads one."""

    def __init__(self, seed: int, keys: Keys) -> None:
        self._seed = seed
        self._keys = keys
        self._values: list[int] | None = None

    def __getitem__(self, place: Any) -> Any:
        if self._values is None:
            self._values = sample_seeds(self._seed, self._keys.epoch, self._keys.indices).tolist()
        return self._values[place]

    def __len__(self) -> int:
        return len(self._keys.indices)


def _find_batch_reader(dataset: Any) -> Callable[[list[int]], Any] | None:
    # Every Subset has __getitems__, which reads one by one when the dataset below has none.
    if isinstance(dataset, Subset) and _find_batch_reader(dataset.dataset) is None:
        return None
    reader = getattr(dataset, "__getitems__", None)
    return reader if callable(reader) else None


class Micro(NamedTuple):
    """A micro-batch for the model.

    A dummy batch is not real: other ranks have samples in this micro-step and this one has none, so it computes one
    sample at weight zero to take part in the collectives.
    """

    batch: Any
    real: bool
    samples: int | None = None  # what the collator was given; None when unknown


TrainSource: TypeAlias = "TrainLoader | IterableLoader | ForeignLoader"
"""The source of the training loop's micro-batches. `global_batch` is 0 when it is unknown, `steps_per_epoch`,
`epoch_samples` (over all ranks) and `micros_per_epoch` (on this rank, dummy batches included) are None. Its state is
what a checkpoint holds besides epoch and step, as JSON values."""


def _return_batch(batch: Any) -> Any:
    return batch


class _KeySampler:
    """Yields the samples of batches to torch's DataLoader, in the training process."""

    def __init__(self, order: Order, plan: BatchPlan) -> None:
        self.order = order
        self.plan = plan
        self.epoch = 0
        self.start_step = 0

    def shares(self, step: int) -> Iterator[tuple[int, int, bool]]:
        """(start, stop, real) of this rank's micro-batches of a step; a dummy batch is the step's first sample."""
        plan = self.plan
        first = step * plan.global_batch
        for micro_step in range(plan.micro_steps(step)):
            start, stop = plan.share(step, micro_step)
            yield (start, stop, True) if start < stop else (first, first + 1, False)

    def __iter__(self) -> Iterator[Keys]:
        for step in range(self.start_step, self.plan.steps_per_epoch):
            for start, stop, _ in self.shares(step):
                yield Keys(self.epoch, self.order.indices(self.epoch, start, stop))

    def __len__(self) -> int:
        full = self.plan.num_samples // self.plan.global_batch
        return full * self.plan.micro_steps(0) + self.plan.micro_steps(full)


def end_workers(loader: DataLoader[Any]) -> None:
    """End persistent workers. Left to the garbage collector, all of them would be waited for, up to 5 s each."""
    iterator: Any = getattr(loader, "_iterator", None)
    if iterator is not None:
        loader._iterator = None  # first: an interrupted shutdown must not be used again
        iterator._shutdown_workers()


class _SeededLoader(DataLoader[Any]):
    """A DataLoader that does not draw from torch's global generator.

    To its users it is a loader of their own dataset with their own collator; a loader inside reads through `fetch`.
    `options`: further settings of torch's DataLoader.
    """

    def __init__(self, fetch: Fetch, batch_sampler: Any, options: Mapping[str, Any]) -> None:
        self._fetch = fetch
        self._keys = batch_sampler
        settings = {
            "batch_sampler": batch_sampler,
            "generator": torch.Generator().manual_seed(0),  # any seed: every sample is seeded anyway
            **options,
        }
        self._reader: DataLoader[Any] = DataLoader(fetch, collate_fn=_return_batch, **settings)
        super().__init__(fetch.dataset, collate_fn=fetch.collate, **settings)

    @property
    def collate_fn(self) -> Any:
        """The collator; overrides of `get_train_dataloader` may set another one."""
        return self._fetch.collate

    @collate_fn.setter
    def collate_fn(self, collate: Any) -> None:
        if collate is not self._fetch.collate:
            self._fetch.use_collator(collate)

    def __iter__(self) -> Any:
        """The batches. Without workers and pinned memory they are read directly, past torch's iterator."""
        return iter(self._reader) if self.num_workers or self.pin_memory else self._read_directly()

    def close(self) -> None:
        """End the workers."""
        end_workers(self._reader)

    def _read_directly(self) -> Iterator[Any]:
        # One by one: a callback's change of the data must apply from the next step on.
        return map(self._fetch.__getitems__, self._keys)


class TrainLoader(_SeededLoader):
    """This rank's micro-batches of a map-style dataset. Iteration yields the batches of the epoch in `set_epoch`."""

    def __init__(
        self,
        dataset: Any,
        *,
        order: Order,
        plan: BatchPlan,
        collate: Callable[[list[Any]], Any],
        seed: int,
        options: Mapping[str, Any],
    ) -> None:
        self.plan = plan
        self.order = order
        self.keys = _KeySampler(order, plan)
        self.global_batch = plan.global_batch
        self.steps_per_epoch: int | None = plan.steps_per_epoch
        self.epoch_samples: int | None = plan.num_samples
        self.micros_per_epoch: int | None = len(self.keys)
        super().__init__(Fetch(dataset, collate, seed), self.keys, options)

    def set_epoch(self, epoch: int, start_step: int = 0) -> None:
        """Iterate over that epoch from now on, from `start_step`."""
        self.keys.epoch, self.keys.start_step = epoch, start_step

    def micro_steps(self, step: int) -> int:
        """Micro-batches of a step of the epoch."""
        return self.plan.micro_steps(step)

    def step_samples(self, step: int) -> int:
        """Samples of a step over all ranks."""
        return self.plan.step_samples(step)

    def micros(self, epoch: int, start_step: int) -> Iterator[Micro]:
        """This rank's micro-batches of an epoch, from a step on."""
        if isinstance(self.order, MixtureOrder):
            return self._micros_between_changes(self.order, epoch, start_step)
        return self._micros(epoch, start_step)

    def _micros_between_changes(self, order: MixtureOrder, epoch: int, step: int) -> Iterator[Micro]:
        """As `micros`; read again from a step on whose weights were changed: workers may be ahead of it."""
        while step < self.plan.steps_per_epoch:
            changes, micros = order.changes, self._micros(epoch, step)
            while step < self.plan.steps_per_epoch and order.changes is changes:
                yield from itertools.islice(micros, self.plan.micro_steps(step))
                step += 1

    def _micros(self, epoch: int, start_step: int) -> Iterator[Micro]:
        self.set_epoch(epoch, start_step)
        # With one rank every micro-batch has samples, and all full steps are divided alike.
        if self.plan.data_parallel_size == 1:
            return map(Micro, self, itertools.repeat(True), self._sizes(start_step))
        steps = range(start_step, self.plan.steps_per_epoch)
        shares = (share for step in steps for share in self.keys.shares(step))
        return (Micro(batch, real, stop - start) for batch, (start, stop, real) in zip(self, shares, strict=True))

    def _sizes(self, start_step: int) -> Iterator[int]:
        """Samples of the micro-batches from a step on, with one rank."""
        full, last = self.plan.num_samples // self.global_batch, self.plan.steps_per_epoch - 1
        sizes = [[stop - start for start, stop, _ in self.keys.shares(step)] for step in (0, last)]
        every = itertools.chain.from_iterable(itertools.repeat(sizes[0], max(0, full - start_step)))
        return itertools.chain(every, sizes[1] if last >= max(full, start_step) else ())

    def state(self) -> dict[str, Any]:
        """The order's fingerprint and the global batch; the position itself is (epoch, step)."""
        state = {"order": self.order.fingerprint(), "global_batch": self.global_batch}
        return {**state, "mixture": self.order.changes} if isinstance(self.order, MixtureOrder) else state

    def load_state(self, state: dict[str, Any], *, epoch: int, step: int) -> None:
        """Restore changes of a mixture. Raise ConfigError for another order or global batch: the position differs."""
        refuse_change("global_batch_size", state.get("global_batch"), self.global_batch)
        refuse_change("train_dataset", state.get("order"), self.order.fingerprint())
        if isinstance(self.order, MixtureOrder):
            self.order.use_changes(state.get("mixture") or [])


def refuse_change(field: str, saved: Any, now: Any) -> None:
    """Raise ConfigError when a setting changed on which the position in the data depends."""
    if saved is not None and saved != now:
        raise ConfigError(
            f"The value was {saved} when the checkpoint was written, so its position in the data does not apply.",
            field=field,
            value=now,
            remedy="Restore it, or set ignore_data_skip=True to read the epoch's data from the start. "
            "After a change of processes, keep global_batch_size as it was.",
        )


class EvalLoader(_SeededLoader):
    """This rank's share of a map-style dataset in the dataset's order, without padding or repetition.

    Round b covers rows [b*size*batch, (b+1)*size*batch), where `size` is the number of data-parallel ranks. Each rank
    reads its slice; in the last round it may have none.
    """

    # A rank without rows in the last round gets a dummy batch there, for a loop that communicates.
    equal_rounds = False
    in_dummy_batch = False  # whether the batch that iteration gave last is one

    def __init__(
        self,
        dataset: Any,
        *,
        batch_size: int,
        data_parallel_size: int,
        rank: int,
        collate: Callable[[list[Any]], Any],
        seed: int,
        options: Mapping[str, Any],
        rows: tuple[int, int] | None = None,
    ) -> None:
        start, stop = rows or (0, len(dataset))
        self.rows = (start, stop)  # of the dataset, which all ranks read together
        # Equal on every rank; this one may have one batch fewer.
        self.rounds = -(-(stop - start) // (batch_size * data_parallel_size))
        # Rounds of all ranks: only in the last round may some ranks have fewer rows.
        ends = [(start + (number * data_parallel_size + rank) * batch_size) for number in range(self.rounds)]
        # The rows [start, stop) of this rank's batches.
        self.slices = [(at, min(at + batch_size, stop)) for at in ends if at < stop]
        super().__init__(Fetch(dataset, collate, seed), _RowSampler(self.slices), options)

    def dummy_batch(self) -> Any:
        """A dummy batch of the first row, for a rank without rows that takes part in the others' collectives."""
        start, _ = self.rows
        return self._fetch.__getitems__(Keys(0, np.arange(start, start + 1, dtype=np.int64)))

    def own_batches(self) -> Iterator[Any]:
        """This rank's batches, without a dummy batch."""
        return iter(super().__iter__())

    @override
    def __iter__(self) -> Any:
        """This rank's batches and, with `equal_rounds`, a dummy batch for the round that it has no rows in."""
        yield from self.own_batches()
        if self.equal_rounds and len(self.slices) < self.rounds:
            self.in_dummy_batch = True
            try:
                yield self.dummy_batch()
            finally:
                self.in_dummy_batch = False

    @override
    def _read_directly(self) -> Iterator[Any]:
        return self._fetch.read_ahead(self._keys)


class _RowSampler:
    def __init__(self, slices: Sequence[tuple[int, int]]) -> None:
        self._slices = slices

    def __iter__(self) -> Iterator[Keys]:
        for start, stop in self._slices:
            yield Keys(0, np.arange(start, stop, dtype=np.int64))

    def __len__(self) -> int:
        return len(self._slices)


def has_length(dataset: Any) -> bool:
    """Whether `len(dataset)` works. An iterable dataset may have a length, too."""
    if not isinstance(dataset, Sized):
        return False
    # A class may define a length and refuse it for an instance.
    try:
        len(dataset)
    except (TypeError, NotImplementedError):
        return False
    return True
