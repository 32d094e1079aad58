"""The order of a mixture of sources: which source, and which of its rows, a pure function of (seed, epoch, position).

In a segment of constant weights a source of weight w gives its row j at the time (j + 1/2) / w. A block is what comes
within `BLOCK` units of time, shuffled: a source has w * BLOCK rows of it, give or take one, and so many are before any
block that no earlier one is needed to know it. A segment ends where the schedule or a change has other weights, and
where the rows that a source may give in an epoch are used up: the others then continue by their weights.

Sources are passed from the first row to the last, every time in another order, over the ends of segments and epochs.
"""

from __future__ import annotations

import heapq
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from itertools import accumulate, pairwise
from typing import Any

import numpy as np

from trainer_lib.data.loading.order import Indices, RandomOrder, SequentialOrder, derive
from trainer_lib.data.rows.mixture import FIELD, Mixture, Piece, merge_weights
from trainer_lib.errors import ConfigError

BLOCK = 256  # positions of a block, about
_WHOLE = 1 << 30  # what the weights of a segment add up to, about: whole numbers, so no rounding changes an order
_Counts = tuple[int, ...]


@dataclass(frozen=True)
class _Segment:
    """Positions of an epoch with the same weights."""

    start: int
    stop: int
    weights: _Counts  # of the sources, whole numbers
    base: _Counts  # rows of the sources that the epoch has before it
    counts: _Counts  # rows of the sources in it, had it no end by other weights: such an end changes nothing before it

    def before(self, block: int) -> _Counts:
        """Rows of the sources in front of a block."""
        total, time = sum(self.weights), 2 * block * BLOCK
        at_time = ((weight * time + total) // (2 * total) for weight in self.weights)
        return tuple(map(min, at_time, self.counts))

    def block_at(self, place: int) -> int:
        """The block that has a place of the segment."""
        block = place // BLOCK  # off by few: a block has one row more or fewer of a source
        while sum(self.before(block)) > place:
            block -= 1
        while sum(self.before(block + 1)) <= place:
            block += 1
        return block


def _first_events(weights: _Counts, count: int) -> _Counts:
    """Rows of the sources among the first `count` positions of a segment."""
    endless = _Segment(0, count, weights, (), tuple(count + 1 if weight else 0 for weight in weights))
    # A block that begins before them is known without those in front of it; from there on, row by row.
    block = max(0, count // BLOCK - 1 - len(weights) // BLOCK)
    counts = list(endless.before(block))
    waiting = [(Fraction(2 * counts[place] + 1, weight), place) for place, weight in enumerate(weights) if weight]
    heapq.heapify(waiting)
    for _ in range(count - sum(counts)):
        _, place = waiting[0]
        counts[place] += 1
        heapq.heapreplace(waiting, (Fraction(2 * counts[place] + 1, weights[place]), place))
    return tuple(counts)


@dataclass
class MixtureOrder:
    """The order of a mixture, with the interface of the other orders."""

    mixture: Mixture
    seed: int
    batch: int  # samples of an optimizer step, by which steps are positions
    drop_last: bool = False  # an incomplete last batch of an epoch is not trained
    shuffled: bool = True  # rows of a source come in another order in every pass; else in their own
    # Weights that were changed while training, as JSON, with `step`, `weights` and `id`.
    changes: list[dict[str, Any]] = field(default_factory=list)

    def __post_init__(self) -> None:
        sizes = tuple(self.mixture.rows.values())
        self.names = tuple(self.mixture.rows)
        self.num_samples = self.mixture.epoch_rows
        self._first = list(accumulate(sizes, initial=0))
        seeds = [int(derive(self.seed, place, 4)[0]) for place in range(len(sizes))]
        self._orders = [
            RandomOrder(size, seed) if self.shuffled else SequentialOrder(size)
            for size, seed in zip(sizes, seeds, strict=True)
        ]
        whole = self.num_samples // self.batch
        self._steps = max(1, whole if self.drop_last or whole * self.batch == self.num_samples else whole + 1)
        self.use_changes(self.changes)

    def _forget(self) -> None:
        changed = [Piece(int(change["step"]), change["weights"]) for change in self.changes]
        # Sorted stably: of two for one step the change counts, and of two changes the newer one.
        first, *later = sorted([*self.mixture.pieces, *changed], key=lambda piece: piece.step)
        self._pieces = [first]
        for step, weights in later:
            self._pieces.append(Piece(step, merge_weights(self._pieces[-1].weights, weights, field=FIELD)))
        self._plans: dict[int, list[_Segment]] = {}
        self._used: dict[int, _Counts] = {}
        self._block: tuple[tuple[int, int, int], Indices] | None = None

    # -- changes while training ----------------------------------------------------------------------------------------

    def weights_at(self, step: int) -> dict[str, float]:
        """The weights of an optimizer step."""
        return dict([piece for piece in self._pieces if piece.step <= step][-1].weights)

    def change(self, step: int, weights: Mapping[str, float], *, name: str) -> dict[str, float]:
        """Change weights from an optimizer step on, until the schedule names the sources. Raises ConfigError."""
        merged = merge_weights(self.weights_at(step), weights, field="weights")
        self.use_changes([*self.changes, {"step": step, "weights": merged, "id": name}])
        return merged

    def use_changes(self, changes: Sequence[Mapping[str, Any]]) -> None:
        """Take these changes in place of those that were made."""
        before, self.changes = self.changes, [dict(change) for change in changes]
        try:
            self._forget()
            for piece in self._pieces:
                self._segments(piece.step // self._steps)
        except ConfigError:
            self.changes = before
            self._forget()
            raise

    # -- positions -----------------------------------------------------------------------------------------------------

    def indices(self, epoch: int, start: int, stop: int) -> Indices:
        """Indices at positions [start, stop), int64 ``[stop - start]``; computes only the blocks that hold them."""
        parts: list[Indices] = [np.empty(0, np.int64)]
        for number, segment in enumerate(self._segments(epoch)):
            at, end = max(start, segment.start), min(stop, segment.stop)
            while at < end:
                block = segment.block_at(at - segment.start)
                first = segment.start + sum(segment.before(block))
                whole = self._block_of(epoch, number, block)
                parts.append(whole[at - first : end - first])
                at = first + len(whole)
        return np.concatenate(parts)

    def _block_of(self, epoch: int, number: int, block: int) -> Indices:
        key = (epoch, number, block)
        if self._block is not None and self._block[0] == key:
            return self._block[1]
        segment, used = self._segments(epoch)[number], self._used_before(epoch)
        sources, before = self._shuffle(epoch, segment, block), segment.before(block)
        indices = np.empty(len(sources), np.int64)
        for place in np.unique(sources).tolist():
            own, start = sources == place, used[place] + segment.base[place] + before[place]
            indices[own] = self._rows(place, start, int(own.sum()))
        self._block = (key, indices)
        return indices

    def _shuffle(self, epoch: int, segment: _Segment, block: int) -> Indices:
        """The numbers of the sources at the positions of a block, int64 ``[positions]``."""
        counts = np.subtract(segment.before(block + 1), segment.before(block))
        keys = derive(self.seed, epoch, segment.start, block, 3, np.arange(counts.sum(), dtype=np.uint64))
        shuffled: Indices = np.repeat(np.arange(len(counts)), counts)[np.argsort(keys, kind="stable")]
        return shuffled

    def _rows(self, place: int, start: int, count: int) -> Indices:
        """So many rows of a source from one on, counted over all of its passes, as indices of the dataset."""
        order, parts, stop = self._orders[place], list[Indices](), start + count
        while start < stop:
            number, at = divmod(start, order.num_samples)
            end = min(at + stop - start, order.num_samples)
            parts.append(order.indices(number, at, end))
            start += end - at
        return np.concatenate(parts) + self._first[place]

    def _segments(self, epoch: int) -> list[_Segment]:
        if epoch not in self._plans:
            self._plans[epoch] = self._plan(epoch)
        return self._plans[epoch]

    def _plan(self, epoch: int) -> list[_Segment]:
        steps = range(epoch * self._steps, (epoch + 1) * self._steps)
        weights = self.weights_at(steps.start)
        inner = [piece for piece in self._pieces if steps.start < piece.step < steps.stop]
        ends = [((piece.step - steps.start) * self.batch, piece.weights) for piece in inner]
        left = [self.mixture.budgets.get(name) for name in self.names]
        base, segments, at = tuple([0] * len(left)), list[_Segment](), 0
        for end, following in [*ends, (self.num_samples, weights)]:
            while at < end:
                scaled = self._scale(weights, left, epoch)
                counts = _until_used_up(scaled, left)
                if counts is None or sum(counts) > self.num_samples - at:
                    counts = _first_events(scaled, self.num_samples - at)
                segments.append(_Segment(at, min(end, at + sum(counts)), scaled, base, counts))
                counts, at = self._given(epoch, segments[-1]), segments[-1].stop
                base = tuple(map(sum, zip(base, counts, strict=True)))
                left = [rest if rest is None else rest - count for rest, count in zip(left, counts, strict=True)]
            weights = dict(following)
        return segments

    def _given(self, epoch: int, segment: _Segment) -> _Counts:
        """The rows of the sources between the ends of a segment."""
        length = segment.stop - segment.start
        if length == sum(segment.counts):
            return segment.counts
        block = segment.block_at(length)
        before = segment.before(block)
        part = self._shuffle(epoch, segment, block)[: length - sum(before)]
        return tuple(map(sum, zip(before, np.bincount(part, minlength=len(before)).tolist(), strict=True)))

    def _scale(self, weights: Mapping[str, float], left: Sequence[int | None], epoch: int) -> _Counts:
        """The weights of sources that have rows left, as whole numbers."""
        scaled = tuple(
            0 if rest == 0 or not weights[name] else max(1, round(weights[name] * _WHOLE))
            for name, rest in zip(self.names, left, strict=True)
        )
        if any(scaled):
            return scaled
        idle = [name for name, rest in zip(self.names, left, strict=True) if rest != 0]
        what = f"In epoch {epoch} the sources with a weight are used up, and {', '.join(idle)} has rows left."
        remedy = "Give it a weight above 0, fewer epochs or tokens; or remove those of another source."
        raise ConfigError(what, field=FIELD, value=dict(weights), remedy=remedy)

    def _used_before(self, epoch: int) -> _Counts:
        """Rows of the sources that all epochs before this one have."""
        if epoch not in self._used:
            total = [0] * len(self.names)
            # Epochs without another piece in them have as many rows of the sources as the first of them.
            marks = {0, epoch, *(piece.step // self._steps + more for piece in self._pieces for more in (0, 1))}
            for first, following in pairwise(sorted(mark for mark in marks if mark <= epoch)):
                last = self._segments(first)[-1]
                for place, (base, count) in enumerate(zip(last.base, last.counts, strict=True)):
                    total[place] += (following - first) * (base + count)
            self._used[epoch] = tuple(total)
        return self._used[epoch]

    def fingerprint(self) -> dict[str, Any]:
        """Kind, sources, budgets, weights by step, batch and seed; not what was changed while training."""
        return {
            "kind": "mixture",
            "num_samples": self.num_samples,
            "sources": [[name, rows, self.mixture.budgets.get(name)] for name, rows in self.mixture.rows.items()],
            "weights": [[piece.step, dict(piece.weights)] for piece in self.mixture.pieces],
            "batch": [self.batch, self.drop_last],
            "shuffled": self.shuffled,
            "seed": self.seed,
        }


def _until_used_up(weights: _Counts, left: Sequence[int | None]) -> _Counts | None:
    """Rows of the sources when the first of those with a budget has given all; None: none has one."""
    ends = [
        (Fraction(2 * rest - 1, weight), weight, rest)
        for rest, weight in zip(left, weights, strict=True)
        if rest and weight
    ]
    if not ends:
        return None
    _, weight, rest = min(ends)
    return tuple((other * (2 * rest - 1) + weight) // (2 * weight) for other in weights)
