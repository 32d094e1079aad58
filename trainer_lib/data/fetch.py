"""Reading and collating one micro-batch, as if every sample were read under generators seeded for it alone."""

from __future__ import annotations

import functools
import itertools
import operator
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple, TypeVar

from torch.utils.data import Dataset, Subset, TensorDataset

from trainer_lib.data.collators import (
    DataCollatorForSeq2Seq,
    DataCollatorWithPadding,
    default_data_collator,
    seeds_of_samples,
)
from trainer_lib.data.generators import keep_generators, seed_generators, watch
from trainer_lib.data.order import Indices, sample_seeds

T = TypeVar("T")
_AHEAD = 8  # batches that are read at once when they are quick
_QUICK = 250e-6  # seconds that reading a quick batch takes at most


class Keys(NamedTuple):
    """The samples of one micro-batch."""

    epoch: int
    indices: Indices


def is_pure(dataset: Any) -> bool:
    """Whether reading a sample certainly draws no random number; a dataset may say so with an attribute `is_pure`."""
    if isinstance(dataset, Subset):
        return is_pure(dataset.dataset)
    return isinstance(dataset, list | tuple | TensorDataset) or bool(getattr(dataset, "is_pure", False))


def is_pure_collator(collate: Any) -> bool:
    """Whether a collator certainly draws no random number; others may say so with an attribute `is_pure`."""
    known = collate is default_data_collator or type(collate) in (DataCollatorWithPadding, DataCollatorForSeq2Seq)
    return known or bool(getattr(collate, "is_pure", False))


class Fetch(Dataset[Any]):
    """Reads and collates a whole micro-batch, as if under generators seeded per sample; runs where the data is loaded.

    The first batch is, and shows whether reading draws random numbers. When it did not, the next ones are read as they
    are; should one draw after all, it is read a second time, seeded, and all after it are seeded again.
    """

    def __init__(self, dataset: Any, collate: Callable[[list[Any]], Any], seed: int) -> None:
        self.dataset = dataset
        self.collate = collate
        self._seed = seed
        self._pure_collate = is_pure_collator(collate)
        self._pure = is_pure(dataset) and self._pure_collate
        self._draws: bool | None = None  # None until the first batch is read
        self._read_many = _batched_reader(dataset)

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, index: int) -> Any:
        return self.dataset[index]

    def __getitems__(self, keys: Keys) -> Any:
        """The collated batch of `keys`."""
        return self._block([keys])[0]

    def ahead(self, keys: Iterable[Keys]) -> Iterator[Any]:
        """The collated batches. Those that are read in no time are read a few at once, for watching takes as long."""
        waiting, size = iter(keys), 1
        while block := list(itertools.islice(waiting, size)):
            started = time.perf_counter()
            batches = self._block(block)
            size = _AHEAD if time.perf_counter() - started < _QUICK * len(block) else 1
            yield from batches

    def _block(self, block: list[Keys]) -> list[Any]:
        if self._pure:
            return [self.collate(self._read(keys.indices.tolist())) for keys in block]
        watched = watch() if self._draws is False else None
        if watched is None:
            return [self._seeded(keys) for keys in block]
        try:
            batches = [self._as_it_is(keys) for keys in block]
        except BaseException as error:
            if not watched.moved():
                raise
            watched.put_back()
            if not isinstance(error, Exception):
                raise
        else:
            if not watched.moved():
                return batches
            watched.put_back()
        self._draws = True
        return [self._seeded(keys) for keys in block]

    def _as_it_is(self, keys: Keys) -> Any:
        rows = self._read(keys.indices.tolist())
        return self.collate(rows) if self._pure_collate else self._collated(rows, _Seeds(self._seed, keys))

    def _seeded(self, keys: Keys) -> Any:
        with keep_generators():
            seeds = sample_seeds(self._seed, keys.epoch, keys.indices).tolist()
            rows = self._read(keys.indices.tolist(), seeds)
            seed_generators(seeds[0] ^ 1)  # a collator's own draws: by the first sample, apart from that sample's
            batch = self._noting_draws(lambda: self._collated(rows, seeds))
        self._draws = bool(self._draws)
        return batch

    def _noting_draws(self, read: Callable[[], T]) -> T:
        """`read()`, under generators just seeded; in the first batch it is noted when it draws from them."""
        if self._draws is not None:
            return read()
        watched = watch()
        result = read()
        if watched is None or watched.moved():
            self._draws = True
        return result

    def _collated(self, rows: list[Any], seeds: Sequence[int]) -> Any:
        token = seeds_of_samples.set(seeds)
        try:
            return self.collate(rows)
        finally:
            seeds_of_samples.reset(token)

    def _read(self, indices: list[int], seeds: Sequence[int] | None = None) -> list[Any]:
        if (reader := self._read_many) is not None:
            if seeds is None:
                return list(reader(indices))
            seed_generators(seeds[0])
            return self._noting_draws(lambda: list(reader(indices)))
        if seeds is None:
            return list(map(self.dataset.__getitem__, indices))
        rows: list[Any] = []
        for index, seed in zip(indices, seeds, strict=True):
            seed_generators(seed)
            rows.append(self._noting_draws(functools.partial(operator.getitem, self.dataset, index)))
        return rows


class _Seeds(Sequence[int]):
    """Seeds of a batch's samples, computed when a collator asks for one."""

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


def _batched_reader(dataset: Any) -> Callable[[list[int]], Any] | None:
    # A Subset always has __getitems__, but only reads one by one when what it wraps does.
    if isinstance(dataset, Subset) and _batched_reader(dataset.dataset) is None:
        return None
    reader = getattr(dataset, "__getitems__", None)
    return reader if callable(reader) else None
