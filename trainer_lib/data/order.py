"""The order of training samples: a pure function of (seed, epoch, position). Nothing is stored, nothing is replayed.

Glossary
    index         a sample's number in the dataset
    position      its place in an epoch's order, 0 … num_samples - 1
    global batch  the samples of one optimizer step over all ranks: positions [step * B, (step + 1) * B)
    micro-batch   what one rank feeds through the model at once; a step has several (gradient accumulation)

Within step s, micro-batch m and rank r take positions ``s*B + m*(world*micro) + r*micro + [0, micro)``, cut at the end
of the global batch and of the epoch. World size and micro-batch therefore never change *which* samples a step has, and
a resumed run may change both.

Small epochs (up to 2**16 samples) are sorted by a hash of (seed, epoch, index); larger ones go through a keyed Feistel
permutation with cycle walking (Black and Rogaway, "Ciphers with Arbitrary Finite Domains", 2002), which finds the
index at any position without computing the others. Both use only integer arithmetic, so an order never changes with a
library's version.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence, Sized
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch

from trainer_lib.data.generators import generators_seeded
from trainer_lib.errors import DataError

Indices = npt.NDArray[np.int64]
_Words = npt.NDArray[np.uint64]

_SORTED_LIMIT = 1 << 16  # below this a Feistel network has too few bits to shuffle well, and sorting is cheap
_BLOCK = 1024  # positions computed together: NumPy's cost per call is that of hundreds of positions
_ROUNDS = 8
_GOLDEN = np.uint64(0x9E3779B97F4A7C15)


class Order(Protocol):
    """Which sample stands where, in every epoch."""

    @property
    def num_samples(self) -> int:
        """Samples of an epoch."""

    def indices(self, epoch: int, start: int, stop: int) -> Indices:
        """Dataset indices at positions [start, stop) of `epoch`, int64."""

    def fingerprint(self) -> dict[str, Any]:
        """JSON that two orders share exactly when they give the same sequence; kept in checkpoints."""


def mix(words: _Words) -> _Words:
    """The finaliser of splitmix64 (Steele, Lea and Flood, 2014): every input bit reaches every output bit."""
    words = (words ^ (words >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    words = (words ^ (words >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return words ^ (words >> np.uint64(31))


def derive(seed: int, *parts: int | _Words) -> _Words:
    """64-bit keys from a seed and further numbers, order-sensitive: an array of one, or as many as a part has."""
    key = np.array([seed & 0xFFFFFFFFFFFFFFFF], dtype=np.uint64)
    for part in parts:
        number = part if isinstance(part, np.ndarray) else np.array([part & 0xFFFFFFFFFFFFFFFF], dtype=np.uint64)
        key = mix(key + _GOLDEN) ^ number
    return mix(key + _GOLDEN)


def sample_seeds(seed: int, epoch: int, indices: Indices) -> _Words:
    """One 64-bit seed per sample, from (seed, epoch, sample index) only."""
    return mix((mix(indices.astype(np.uint64) + _GOLDEN)) ^ derive(seed, epoch, 1))


@dataclass(frozen=True)
class SequentialOrder:
    """The dataset's own order, every epoch."""

    num_samples: int

    def indices(self, epoch: int, start: int, stop: int) -> Indices:
        """The positions themselves."""
        return np.arange(start, stop, dtype=np.int64)

    def fingerprint(self) -> dict[str, Any]:
        """Kind and number of samples."""
        return {"kind": "sequential", "num_samples": self.num_samples}


class RandomOrder:
    """Another permutation every epoch, computed where it is asked for."""

    def __init__(self, num_samples: int, seed: int) -> None:
        self.num_samples = num_samples
        self._seed = seed
        self._sorted: tuple[int, Indices] | None = None  # (epoch, order) of a small epoch
        self._block: tuple[int, int, Indices] | None = None  # (epoch, number, order) of a stretch of a large one

    def indices(self, epoch: int, start: int, stop: int) -> Indices:
        """A slice of the epoch's permutation."""
        if self.num_samples <= _SORTED_LIMIT:
            if self._sorted is None or self._sorted[0] != epoch:
                every = np.arange(self.num_samples, dtype=np.uint64)
                keys = mix(mix(every + _GOLDEN) ^ derive(self._seed, epoch))
                self._sorted = (epoch, np.argsort(keys, kind="stable").astype(np.int64))
            return self._sorted[1][start:stop]
        first, last = start // _BLOCK, -(-max(stop, start + 1) // _BLOCK)
        blocks = np.concatenate([self._block_of(epoch, number) for number in range(first, last)])
        return blocks[start - first * _BLOCK : stop - first * _BLOCK]

    def _block_of(self, epoch: int, number: int) -> Indices:
        if self._block is None or self._block[:2] != (epoch, number):
            stop = min((number + 1) * _BLOCK, self.num_samples)
            positions = np.arange(number * _BLOCK, stop, dtype=np.uint64)
            self._block = (epoch, number, self._walk(positions, derive(self._seed, epoch)))
        return self._block[2]

    def _walk(self, positions: _Words, key: _Words) -> Indices:
        bits = (self.num_samples - 1).bit_length()
        found = _permute(positions, key, bits)
        outside = found >= np.uint64(self.num_samples)
        while outside.any():  # the domain is below twice the samples: one more round for less than half, each time
            found[outside] = _permute(found[outside], key, bits)
            outside = found >= np.uint64(self.num_samples)
        return found.astype(np.int64)

    def fingerprint(self) -> dict[str, Any]:
        """Kind, number of samples and seed."""
        return {"kind": "random", "num_samples": self.num_samples, "seed": self._seed}


def _permute(values: _Words, key: _Words, bits: int) -> _Words:
    """A bijection on [0, 2**bits): halves of the word are hashed into each other in turn."""
    low_bits = np.uint64(bits // 2)
    low_mask = np.uint64((1 << (bits // 2)) - 1)
    high_mask = np.uint64((1 << (bits - bits // 2)) - 1)
    low, high = values & low_mask, values >> low_bits
    for number in range(_ROUNDS):
        round_key = derive(number, int(key[0]))
        if number % 2 == 0:
            low = low ^ (mix(high ^ round_key) & low_mask)
        else:
            high = high ^ (mix(low ^ round_key) & high_mask)
    return (high << low_bits) | low


class LengthGroupedOrder:
    """Samples of similar length stand together: every stretch of `stretch` random samples is sorted, longest first.

    The longest sample of the epoch's first stretch comes first, so memory runs out early if it will at all. With
    `shuffled_batch` (samples; `stretch` is a multiple of it) the batches inside a stretch are shuffled, save the first
    one of the epoch and an incomplete one at its end: lengths then vary from step to step instead of falling in saws.
    """

    def __init__(self, lengths: Sequence[int], seed: int, stretch: int, *, shuffled_batch: int | None = None) -> None:
        self.num_samples = len(lengths)
        self._lengths = np.asarray(lengths, dtype=np.int64)
        self._seed = seed
        self._stretch = stretch
        self._batch = shuffled_batch
        self._random = RandomOrder(self.num_samples, seed)
        self._digest: str | None = None

    def indices(self, epoch: int, start: int, stop: int) -> Indices:
        """A slice; only the stretches it touches are computed."""
        first = start // self._stretch * self._stretch
        pieces = [self._sorted(epoch, at) for at in range(first, max(stop, first + 1), self._stretch)]
        return np.concatenate(pieces)[start - first : stop - first]

    def _sorted(self, epoch: int, start: int) -> Indices:
        piece = self._random.indices(epoch, start, min(start + self._stretch, self.num_samples))
        piece = piece[np.argsort(-self._lengths[piece], kind="stable")]
        return piece if self._batch is None else self._with_batches_shuffled(piece, epoch, start, self._batch)

    def _with_batches_shuffled(self, piece: Indices, epoch: int, start: int, batch: int) -> Indices:
        fixed = 1 if start == 0 else 0
        whole = len(piece) // batch
        numbers: _Words = np.arange(fixed, whole, dtype=np.uint64)
        keys = mix(mix(numbers + _GOLDEN) ^ derive(self._seed, epoch, start, 2))
        batches = piece[fixed * batch : whole * batch].reshape(-1, batch)[np.argsort(keys, kind="stable")]
        return np.concatenate([piece[: fixed * batch], batches.reshape(-1), piece[max(whole, fixed) * batch :]])

    def fingerprint(self) -> dict[str, Any]:
        """Kind, stretch, a digest of the lengths, and the random order underneath."""
        if self._digest is None:  # every save asks
            positions: _Words = np.arange(self.num_samples, dtype=np.uint64)
            lengths: _Words = self._lengths.astype(np.uint64)
            self._digest = str(int(mix(mix(lengths) ^ positions).sum()))
        found = {**self._random.fingerprint(), "kind": "length", "stretch": self._stretch, "lengths": self._digest}
        return found if self._batch is None else {**found, "kind": "sortish", "batch": self._batch}


class SamplerOrder:
    """The order a user's own sampler gives, listed once per epoch under generators seeded by (seed, epoch).

    A sampler with `set_epoch` is told the epoch, one with an empty `generator` is given a seeded one for the pass.
    """

    def __init__(self, sampler: Iterable[Any], seed: int) -> None:
        self._sampler = sampler
        self._seed = seed
        self._listed: tuple[int, Indices] | None = None
        self.num_samples = len(sampler) if isinstance(sampler, Sized) else len(self._list(0))

    def indices(self, epoch: int, start: int, stop: int) -> Indices:
        """A slice of the epoch's list."""
        return self._list(epoch)[start:stop]

    def _list(self, epoch: int) -> Indices:
        if self._listed is None or self._listed[0] != epoch:
            if callable(set_epoch := getattr(self._sampler, "set_epoch", None)):
                set_epoch(epoch)
            with generators_seeded(int(derive(self._seed, epoch)[0])):
                listed = np.fromiter((int(index) for index in self._sampler), dtype=np.int64)
            self._listed = (epoch, listed)
        return self._listed[1]

    def fingerprint(self) -> dict[str, Any]:
        """Kind, sampler class, length and seed."""
        kind = f"sampler:{type(self._sampler).__qualname__}"
        return {"kind": kind, "num_samples": self.num_samples, "seed": self._seed}


class OrderSampler(torch.utils.data.Sampler[int]):
    """An `Order` as torch knows samplers: one epoch's indices."""

    def __init__(self, order: Order) -> None:
        self.order = order
        self.epoch = 0

    def set_epoch(self, epoch: int) -> None:
        """Iterate that epoch from now on."""
        self.epoch = epoch

    def __iter__(self) -> Iterator[int]:
        for start in range(0, len(self), 4096):
            yield from self.order.indices(self.epoch, start, min(start + 4096, len(self))).tolist()

    def __len__(self) -> int:
        return self.order.num_samples


@dataclass(frozen=True)
class BatchPlan:
    """How an epoch is cut into steps, micro-batches and shares of ranks.

    Attributes:
        num_samples: samples of an epoch that are trained on (without a dropped last global batch).
        global_batch: samples of a step; the last step of an epoch may have fewer.
        micro_batch: samples one rank takes at once, at most.
        data_parallel_size, rank: the number of ranks that share the samples, and this rank among them.
    """

    num_samples: int
    global_batch: int
    micro_batch: int
    data_parallel_size: int
    rank: int

    @classmethod
    def cut(
        cls,
        num_samples: int,
        *,
        global_batch: int,
        micro_batch: int,
        data_parallel_size: int,
        rank: int,
        drop_last: bool,
    ) -> BatchPlan:
        """The plan for an epoch. Raises DataError when it has no step at all.

        `drop_last` drops an incomplete *global* batch, so that the steps do not depend on the number of processes.
        """
        used = num_samples // global_batch * global_batch if drop_last else num_samples
        if used == 0:
            what = "has no samples." if num_samples == 0 else f"has fewer samples ({num_samples}) than a global batch."
            remedy = "Give a dataset that is not empty." if num_samples == 0 else "Set dataloader_drop_last=False."
            raise DataError(f"The training data {what}", field="train_dataset", remedy=remedy)
        # A global batch smaller than one round of full micro-batches is shared out evenly instead.
        return cls(
            used, global_batch, min(micro_batch, -(-global_batch // data_parallel_size)), data_parallel_size, rank
        )

    @property
    def steps_per_epoch(self) -> int:
        """Optimizer steps of one epoch."""
        return -(-self.num_samples // self.global_batch)

    @property
    def max_micro_steps(self) -> int:
        """Micro-batches per rank of a full step."""
        return -(-self.global_batch // (self.data_parallel_size * self.micro_batch))

    def step_samples(self, step: int) -> int:
        """Samples of one step over all ranks; `step` counts within the epoch."""
        return min(self.global_batch, self.num_samples - step * self.global_batch)

    def micro_steps(self, step: int) -> int:
        """Micro-batches of one step: the same on every rank."""
        return -(-self.step_samples(step) // (self.data_parallel_size * self.micro_batch))

    def share(self, step: int, micro_step: int) -> tuple[int, int]:
        """Positions [start, stop) of this rank's micro-batch; empty (start == stop) when it has none."""
        first = step * self.global_batch
        end = first + self.step_samples(step)
        start = first + (micro_step * self.data_parallel_size + self.rank) * self.micro_batch
        return min(start, end), min(start + self.micro_batch, end)
