"""Time from the construction of a loader to its first batch, near the start of the data and far into it.

    python -m benchmarks.resume_position --size full --save

Ours: `TrainLoader` over rows that are generated on access, for each order: sequential, random, grouped by length. Each
measurement builds everything again, near and far in turn. The lengths that grouping needs are an array that exists
already (the cost of listing them is reported separately: it depends on the data's size, never on the position). The
goal: far within 1.1 times near plus 5 ms.

Peer: `accelerate.skip_first_batches` around a shuffled DataLoader, which is how the Trainer of transformers resumes, at
a position that it reaches in reasonable time, beside ours at the same one; and a stream without state, which every
library has to read, at 10,000 batches.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from accelerate import skip_first_batches
from torch.utils.data import DataLoader, Dataset, IterableDataset

from benchmarks._result import arguments, publish, spread
from trainer_lib import default_data_collator
from trainer_lib.data.loading.iterable import IterableLoader, Shares
from trainer_lib.data.loading.loader import TrainLoader
from trainer_lib.data.loading.order import BatchPlan, LengthGroupedOrder, Order, RandomOrder, SequentialOrder

BATCH = 10
NEAR = 10
SIZES = {"smallest": (200_000, 100_000, 50_000, 1_000, 5), "full": (20_000_000, 10_000_000, 1_000_000, 10_000, 15)}
"""Rows, far position, the peer's far position (samples), batches of the stream, runs."""


class Rows(Dataset[dict[str, Any]]):
    """`count` rows of eight numbers, generated on access."""

    def __init__(self, count: int) -> None:
        self._count = count

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {"x": torch.full((8,), float(index)), "labels": index % 3}


class Stream(IterableDataset[dict[str, Any]]):
    """An endless stream of equal rows."""

    def __iter__(self) -> Iterator[dict[str, Any]]:
        row: dict[str, Any] = {"x": torch.zeros(8), "labels": 0}
        while True:
            yield row


def first_batch(count: int, order: Callable[[], Order], position: int) -> float:
    """Return the seconds from nothing to the first batch at a position."""
    started = time.perf_counter()
    plan = BatchPlan.cut(count, global_batch=BATCH, micro_batch=BATCH, data_parallel_size=1, rank=0, drop_last=False)
    loader = TrainLoader(Rows(count), order=order(), plan=plan, collate=default_data_collator, seed=0, options={})
    micro = next(loader.micros(1, position // BATCH))
    seconds = time.perf_counter() - started
    assert micro.real
    return seconds


def peers_first_batch(count: int, position: int) -> float:
    """Return the seconds for a shuffled DataLoader whose first batches are skipped."""
    started = time.perf_counter()
    generator = torch.Generator().manual_seed(0)
    loader = DataLoader(Rows(count), BATCH, shuffle=True, generator=generator, collate_fn=default_data_collator)
    next(iter(skip_first_batches(loader, position // BATCH)))
    return time.perf_counter() - started


def stream_first_batch(batches: int) -> float:
    """Return our seconds for a stream without state, which is read up to the position."""
    started = time.perf_counter()
    shares = Shares(
        Stream(), default_data_collator, global_batch=BATCH, micro_batch=BATCH, data_parallel_size=1, rank=0, seed=0
    )
    loader = IterableLoader(shares, drop_last=False, options={})
    next(loader.micros(1, batches))
    return time.perf_counter() - started


def peers_stream_first_batch(batches: int) -> float:
    """Return the peer's seconds for that stream."""
    started = time.perf_counter()
    next(iter(skip_first_batches(DataLoader(Stream(), BATCH, collate_fn=default_data_collator), batches)))
    return time.perf_counter() - started


def in_turn(runs: int, **each: Callable[[], float]) -> dict[str, dict[str, float]]:
    """Measure each in turn, in milliseconds; the first round does not count."""
    taken: dict[str, list[float]] = {name: [] for name in each}
    for number in range(runs + 1):
        for name, measure in each.items():
            seconds = measure()
            if number:
                taken[name].append(1000 * seconds)
    return {name: spread(values) for name, values in taken.items()}


def main() -> None:
    """Measure, compare with the goals, print, and save on request."""
    chosen = arguments(__doc__, list(SIZES))
    count, far, peers_far, batches, runs = SIZES[chosen.size]
    torch.set_num_threads(1)
    lengths = np.random.default_rng(0).integers(1, 512, size=count)
    orders: dict[str, Callable[[], Order]] = {
        "sequential": lambda: SequentialOrder(count),
        "random": lambda: RandomOrder(count, seed=1),
        "group_by_length": lambda: LengthGroupedOrder(lengths, seed=1, stretch=50 * BATCH),  # type: ignore[arg-type]
    }
    found: dict[str, Any] = {}
    for name, order in orders.items():
        found[name] = in_turn(
            runs,
            near=lambda order=order: first_batch(count, order, NEAR),  # type: ignore[misc]
            far=lambda order=order: first_batch(count, order, far),  # type: ignore[misc]
        )
        allowed = 1.1 * found[name]["near"]["median"] + 5.0
        found[name]["within_bar"] = found[name]["far"]["median"] <= allowed
    started = time.perf_counter()
    list(map(int, lengths.tolist()))
    listing = 1000 * (time.perf_counter() - started)
    few = 2 * peers_far
    peer = in_turn(
        max(3, runs // 5),
        ours_near=lambda: first_batch(few, lambda: RandomOrder(few, seed=1), NEAR),
        ours_far=lambda: first_batch(few, lambda: RandomOrder(few, seed=1), peers_far),
        peer_near=lambda: peers_first_batch(few, NEAR),
        peer_far=lambda: peers_first_batch(few, peers_far),
    )
    streams = in_turn(3, ours=lambda: stream_first_batch(batches), peer=lambda: peers_stream_first_batch(batches))
    result = {
        "rows": count,
        "positions": {"near": NEAR, "far": far},
        "batch": BATCH,
        "runs": runs,
        "milliseconds": found,
        "listing_lengths_ms": listing,
        "beside_accelerate": {"rows": few, "far": peers_far, "milliseconds": peer},
        "stream_without_state": {"batches": batches, "milliseconds": streams},
    }
    publish("resume_position", chosen.size, result, chosen.save)


if __name__ == "__main__":
    main()
