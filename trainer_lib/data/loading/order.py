"""The order of training samples: a pure function of (seed, epoch, position), which nothing has to store or replay.

Glossary
    index         a sample's number in the dataset
    position      a sample's place in an epoch's order, 0 … num_samples - 1
    global batch  the samples of one optimizer step over all ranks: positions [step * B, (step + 1) * B)
    micro-batch   the samples that one rank computes at once; a step has several (gradient accumulation)

In micro-batch m of step s, rank r computes the positions ``s*B + m*(size*micro) + r*micro + [0, micro)``, cut at the
end of the global batch and of the epoch. `size` is the number of data-parallel ranks. Neither it nor the micro-batch
changes *which* samples a step has, so a resumed run may change both.

Small epochs (up to 2**16 samples) are sorted by a hash of (seed, epoch, index). Larger ones use a keyed Feistel
permutation with cycle walking (Black and Rogaway, "Ciphers with Arbitrary Finite Domains", 2002), which computes the
index at any position without the others. Both use only integer arithmetic, so no version of a library changes an order.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence, Sized
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
import numpy.typing as npt
import torch

from trainer_lib.data.loading.generators import generators_seeded
from trainer_lib.errors import DataError

if TYPE_CHECKING:
    from trainer_lib.data.loading.mixture_order import MixtureOrder

Indices = npt.NDArray[np.int64]
_Words = npt.NDArray[np.uint64]

_SORTED_LIMIT = 1 << 16  # below this a Feistel network has too few bits to shuffle well, and sorting is cheap
_BLOCK = 1024  # positions computed together: a NumPy call costs as much as hundreds of positions
_ROUNDS = 8  # of the Feistel network: both halves are changed four times
_GOLDEN = np.uint64(0x9E3779B97F4A7C15)


def mix(words: _Words) -> _Words:
    """Hash 64-bit words ``[n]`` so that every input bit changes every output bit.

    Source: the finalizer of splitmix64 (Steele, Lea and Flood, "Fast Splittable Pseudorandom Number Generators", 2014).
    """
    words = (words ^ (words >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    words = (words ^ (words >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return words ^ (words >> np.uint64(31))


def derive(seed: int, *parts: int | _Words) -> _Words:
    """64-bit keys from a seed and further numbers, whose order matters: uint64 ``[1]``, or ``[n]`` like a part."""
    # Masked: NumPy refuses negative numbers, and those of more than 64 bits.
    key = np.array([seed & 0xFFFFFFFFFFFFFFFF], dtype=np.uint64)
    for part in parts:
        number = part if isinstance(part, np.ndarray) else np.array([part & 0xFFFFFFFFFFFFFFFF], dtype=np.uint64)
        key = mix(key + _GOLDEN) ^ number
    return mix(key + _GOLDEN)


def sample_seeds(seed: int, epoch: int, indices: Indices) -> _Words:
    """One 64-bit seed per sample, from (seed, epoch, sample index) only: uint64 ``[n]`` for indices ``[n]``."""
    return mix((mix(indices.astype(np.uint64) + _GOLDEN)) ^ derive(seed, epoch, 1))


@dataclass(frozen=True)
class SequentialOrder:
    """The dataset's own order in every epoch."""

    num_samples: int

    def indices(self, epoch: int, start: int, stop: int) -> Indices:
        """The positions [start, stop) themselves, int64 ``[stop - start]``."""
        return np.arange(start, stop, dtype=np.int64)

    def fingerprint(self) -> dict[str, Any]:
        """Kind and number of samples."""
        return {"kind": "sequential", "num_samples": self.num_samples}


class RandomOrder:
    """Another permutation in every epoch, computed only at the positions that are read."""

    def __init__(self, num_samples: int, seed: int) -> None:
        self.num_samples = num_samples
        self._seed = seed
        self._sorted: tuple[int, Indices] | None = None  # (epoch, order) of a small epoch
        self._block: tuple[int, int, Indices] | None = None  # (epoch, number, order) of a block of a large one

    def indices(self, epoch: int, start: int, stop: int) -> Indices:
        """Positions [start, stop) of the epoch's permutation, int64 ``[stop - start]``."""
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
        """Permute positions ``[n]``; results outside the epoch are permuted again until they are inside."""
        bits = (self.num_samples - 1).bit_length()
        found = _permute(positions, key, bits)
        outside = found >= np.uint64(self.num_samples)
        # The domain has less than twice the samples: a round leaves less than half of them outside.
        while outside.any():
            found[outside] = _permute(found[outside], key, bits)
            outside = found >= np.uint64(self.num_samples)
        return found.astype(np.int64)

    def fingerprint(self) -> dict[str, Any]:
        """Kind, number of samples and seed."""
        return {"kind": "random", "num_samples": self.num_samples, "seed": self._seed}


def _permute(values: _Words, key: _Words, bits: int) -> _Words:
    """A bijection on [0, 2**bits) for values ``[n]``: the halves of a word are hashed into each other in turn."""
    low_bits = np.uint64(bits // 2)
    low_mask = np.uint64((1 << (bits // 2)) - 1)
    high_mask = np.uint64((1 << (bits - bits // 2)) - 1)
    low, high = values & low_mask, values >> low_bits
    for number in range(_ROUNDS):
        # Even rounds change the low half, odd rounds the high one; all can be undone, so no two values collide.
        round_key = derive(number, int(key[0]))
        if number % 2 == 0:
            low = low ^ (mix(high ^ round_key) & low_mask)
        else:
            high = high ^ (mix(low ^ round_key) & high_mask)
    return (high << low_bits) | low


class LengthGroupedOrder:
    """Groups samples of similar length: every `stretch` of random samples is sorted by length, longest first.

    The first stretch of an epoch begins with its longest sample, so memory that does not suffice runs out early.
    Batches of `shuffled_batch` samples (a divisor) are shuffled in their stretch, except the first and an incomplete
    last one of the epoch, so that lengths do not fall steadily from step to step.
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
        """Indices at positions [start, stop), int64 ``[stop - start]``; computes only the stretches that hold them."""
        first = start // self._stretch * self._stretch
        pieces = [self._sort_stretch(epoch, at) for at in range(first, max(stop, first + 1), self._stretch)]
        return np.concatenate(pieces)[start - first : stop - first]

    def _sort_stretch(self, epoch: int, start: int) -> Indices:
        piece = self._random.indices(epoch, start, min(start + self._stretch, self.num_samples))
        piece = piece[np.argsort(-self._lengths[piece], kind="stable")]
        return piece if self._batch is None else self._shuffle_batches(piece, epoch, start, self._batch)

    def _shuffle_batches(self, piece: Indices, epoch: int, start: int, batch: int) -> Indices:
        fixed = 1 if start == 0 else 0  # the longest batch of the epoch stays first
        whole = len(piece) // batch
        numbers: _Words = np.arange(fixed, whole, dtype=np.uint64)
        keys = mix(mix(numbers + _GOLDEN) ^ derive(self._seed, epoch, start, 2))
        batches = piece[fixed * batch : whole * batch].reshape(-1, batch)[np.argsort(keys, kind="stable")]
        return np.concatenate([piece[: fixed * batch], batches.reshape(-1), piece[max(whole, fixed) * batch :]])

    def fingerprint(self) -> dict[str, Any]:
        """Kind, stretch, a digest of the lengths, and the fingerprint of the random order below."""
        if self._digest is None:  # computed once: every save reads it
            positions: _Words = np.arange(self.num_samples, dtype=np.uint64)
            # Position and length together: lengths in another order are another order.
            lengths: _Words = self._lengths.astype(np.uint64)
            self._digest = str(int(mix(mix(lengths) ^ positions).sum()))
        found = {**self._random.fingerprint(), "kind": "length", "stretch": self._stretch, "lengths": self._digest}
        return found if self._batch is None else {**found, "kind": "sortish", "batch": self._batch}


class SamplerOrder:
    """The order of a user's own sampler, read once per epoch (`set_epoch`) under generators seeded by (seed, epoch)."""

    def __init__(self, sampler: Iterable[Any], seed: int) -> None:
        self._sampler = sampler
        self._seed = seed
        self._listed: tuple[int, Indices] | None = None
        self.num_samples = len(sampler) if isinstance(sampler, Sized) else len(self._list_indices(0))

    def indices(self, epoch: int, start: int, stop: int) -> Indices:
        """The sampler's indices at positions [start, stop), int64 ``[stop - start]``."""
        return self._list_indices(epoch)[start:stop]

    def _list_indices(self, epoch: int) -> Indices:
        if self._listed is None or self._listed[0] != epoch:
            if callable(set_epoch := getattr(self._sampler, "set_epoch", None)):
                set_epoch(epoch)
            with generators_seeded(int(derive(self._seed, epoch)[0])):
                listed = np.fromiter((int(index) for index in self._sampler), dtype=np.int64)
            self._listed = (epoch, listed)
        return self._listed[1]

    def fingerprint(self) -> dict[str, Any]:
        """Kind, class of the sampler, number of samples and seed."""
        kind = f"sampler:{type(self._sampler).__qualname__}"
        return {"kind": kind, "num_samples": self.num_samples, "seed": self._seed}


Order: TypeAlias = "SequentialOrder | RandomOrder | LengthGroupedOrder | SamplerOrder | MixtureOrder"
"""The sample at every position of every epoch. Fingerprints are equal for two orders exactly when their sequences are;
checkpoints store them."""


class OrderSampler(torch.utils.data.Sampler[int]):
    """A torch sampler of an `Order`: the indices of one epoch."""

    def __init__(self, order: Order) -> None:
        self.order = order
        self.epoch = 0

    def set_epoch(self, epoch: int) -> None:
        """Iterate over that epoch from now on."""
        self.epoch = epoch

    def __iter__(self) -> Iterator[int]:
        for start in range(0, len(self), 4096):
            yield from self.order.indices(self.epoch, start, min(start + 4096, len(self))).tolist()

    def __len__(self) -> int:
        return self.order.num_samples


@dataclass(frozen=True)
class BatchPlan:
    """The division of an epoch into steps, micro-batches and the shares of ranks."""

    num_samples: int  # of an epoch that are trained on, without a dropped last global batch
    global_batch: int  # samples per step; the last step of an epoch may have fewer
    micro_batch: int  # samples that a rank computes at once, at most
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
        """The plan of an epoch. Raises DataError when it has no step.

        `drop_last` drops an incomplete *global* batch, so that the steps do not depend on the number of processes.
        """
        used = num_samples // global_batch * global_batch if drop_last else num_samples
        if used == 0:
            what = "has no samples." if num_samples == 0 else f"has fewer samples ({num_samples}) than a global batch."
            remedy = "Give a dataset that is not empty." if num_samples == 0 else "Set dataloader_drop_last=False."
            raise DataError(f"The training data {what}", field="train_dataset", remedy=remedy)
        # A global batch that is smaller than one round of full micro-batches is divided evenly among the ranks.
        return cls(
            used, global_batch, min(micro_batch, -(-global_batch // data_parallel_size)), data_parallel_size, rank
        )

    @property
    def steps_per_epoch(self) -> int:
        """Optimizer steps per epoch."""
        return -(-self.num_samples // self.global_batch)

    def step_samples(self, step: int) -> int:
        """Samples of one step over all ranks; `step` is counted within the epoch."""
        return min(self.global_batch, self.num_samples - step * self.global_batch)

    def micro_steps(self, step: int) -> int:
        """Micro-batches of one step; every rank has equally many."""
        return -(-self.step_samples(step) // (self.data_parallel_size * self.micro_batch))

    def share(self, step: int, micro_step: int) -> tuple[int, int]:
        """Positions [start, stop) of this rank's micro-batch; start == stop when the rank has none."""
        first = step * self.global_batch
        end = first + self.step_samples(step)
        start = first + (micro_step * self.data_parallel_size + self.rank) * self.micro_batch
        return min(start, end), min(start + self.micro_batch, end)
