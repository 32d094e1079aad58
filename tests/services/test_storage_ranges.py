"""Parts of a file: read from anywhere, in any order, in few requests."""

from __future__ import annotations

import os
import random

import pytest

from trainer_lib.errors import ConfigError, StorageError
from trainer_lib.storage import Store
from trainer_lib.storage import ranges as ahead


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ahead, "PIECE", 1000)
    monkeypatch.setattr(ahead, "GAP", 50)


def test_a_range_is_read_from_any_store(any_store: Store) -> None:
    data = os.urandom(5000)
    any_store.write_bytes("x", data)
    for start, end in ((0, 8), (0, 5000), (999, 1001), (4999, 5000), (7, 7), (1500, 4500)):
        assert any_store.read_range("x", start, end) == data[start:end]


def test_many_parts_in_any_order_overlapping_too(any_store: Store) -> None:
    data, dice = os.urandom(20_000), random.Random(1)
    any_store.write_bytes("x", data)
    spans = [(start, dice.randrange(start, 20_001)) for start in (dice.randrange(20_000) for _ in range(40))]
    spans += [(100, 110), (100, 110), (0, 0), (20_000, 20_000)]
    buffers = [bytearray(end - start) for start, end in spans]
    any_store.read_into("x", [(start, memoryview(buffer)) for (start, _), buffer in zip(spans, buffers, strict=True)])
    assert buffers == [data[start:end] for start, end in spans]


def test_what_lies_beyond_the_end_is_an_error(any_store: Store) -> None:
    any_store.write_bytes("x", bytes(100))
    for start, end in ((90, 101), (100, 101), (500, 600)):
        with pytest.raises(StorageError) as caught:
            any_store.read_range("x", start, end)
        assert caught.value.field == f"{any_store.url}/x"
    with pytest.raises(StorageError):
        any_store.read_range("absent", 0, 1)
    with pytest.raises(ConfigError):
        any_store.read_range("../x", 0, 1)


def test_neighbours_are_read_together_and_large_ranges_in_pieces() -> None:
    asked: list[tuple[int, int]] = []

    def read(ranges: object) -> object:
        for start, end in ranges:  # type: ignore[attr-defined]
            asked.append((start, end))
            yield bytes(end - start)

    sizes = [(0, 10), (40, 10), (5000, 2500), (4960, 10), (9000, 1)]
    ahead.scatter(read, [(start, memoryview(bytearray(size))) for start, size in sizes])  # type: ignore[arg-type]
    assert asked == [(0, 50), (4960, 5960), (5960, 6960), (6960, 7500), (9000, 9001)]
