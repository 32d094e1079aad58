"""Reads and collates micro-batches; every sample is read as if the random generators were seeded for it alone."""

from __future__ import annotations

import functools
import itertools
import operator
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple, TypeVar

from torch.utils.data import Dataset, Subset, TensorDataset

from trainer_lib.data.loading.collators import PURE, default_data_collator, seeds_of_samples
from trainer_lib.data.loading.generators import keep_generators, seed_generators, watch_generators
from trainer_lib.data.loading.order import Indices, sample_seeds

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
