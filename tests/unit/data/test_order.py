"""Data order: a pure function of (seed, epoch, position), the same for every world size; generators are put back."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from trainer_lib.data.loading.generators import keep_generators, watch_generators
from trainer_lib.data.loading.order import (
    BatchPlan,
    LengthGroupedOrder,
    OrderSampler,
    RandomOrder,
    SamplerOrder,
    SequentialOrder,
    sample_seeds,
)
from trainer_lib.errors import DataError


def cut(num_samples: int, batch: int, micro: int, world: int, rank: int = 0, *, drop_last: bool = False) -> BatchPlan:
    given: dict[str, Any] = {"data_parallel_size": world, "rank": rank, "drop_last": drop_last}
    return BatchPlan.cut(num_samples, global_batch=batch, micro_batch=micro, **given)


@pytest.mark.parametrize("count", [1, 2, 3, 10, 1000, 65_536, 65_537, 100_003])
def test_every_epoch_is_a_permutation(count: int) -> None:
    order = RandomOrder(count, seed=7)
    first, second = (order.indices(epoch, 0, count) for epoch in (0, 1))
    for found in (first, second):
        assert np.array_equal(np.sort(found), np.arange(count))
    if count > 10:
        assert not np.array_equal(first, second)
        assert not np.array_equal(first, RandomOrder(count, seed=8).indices(0, 0, count))


@pytest.mark.parametrize("count", [1000, 70_000])
def test_a_slice_does_not_depend_on_what_was_asked_before(count: int) -> None:
    whole = RandomOrder(count, seed=1).indices(3, 0, count)
    for start, stop in ((0, 5), (count - 7, count), (990, 1000), (500, 500)):
        assert np.array_equal(RandomOrder(count, seed=1).indices(3, start, stop), whole[start:stop])


def test_the_order_never_changes_with_a_library_version() -> None:
    """Written down once: a run that resumes under a newer NumPy or torch must see the same samples."""
    assert RandomOrder(10, seed=42).indices(0, 0, 10).tolist() == [0, 7, 1, 5, 9, 4, 2, 3, 8, 6]
    large = RandomOrder(10_000_000, seed=42).indices(1, 9_000_000, 9_000_006).tolist()
    assert large == [7192993, 5131132, 9945858, 4472010, 5416069, 8343685]


def test_large_orders_look_random() -> None:
    found = RandomOrder(100_000, seed=3).indices(0, 0, 100_000).astype(float)
    assert abs(np.corrcoef(np.arange(100_000), found)[0, 1]) < 0.01
    assert abs(np.mean(np.abs(np.diff(found))) / 100_000 - 1 / 3) < 0.01  # mean distance of two uniform draws


def test_the_first_place_goes_to_every_sample_equally_often() -> None:
    firsts = Counter(int(RandomOrder(8, seed=seed).indices(0, 0, 1)[0]) for seed in range(4000))
    assert set(firsts) == set(range(8)) and max(firsts.values()) / min(firsts.values()) < 1.35


@given(
    num_samples=st.integers(1, 200), global_batch=st.integers(1, 40), micro=st.integers(1, 12), world=st.integers(1, 5)
)
def test_every_step_has_the_same_samples_for_any_world_and_micro_batch(
    num_samples: int, global_batch: int, micro: int, world: int
) -> None:
    plans = [cut(num_samples, global_batch, micro, world, rank) for rank in range(world)]
    assert {plan.steps_per_epoch for plan in plans} == {-(-num_samples // global_batch)}
    for step in range(plans[0].steps_per_epoch):
        assert len({plan.micro_steps(step) for plan in plans}) == 1
        shares = [plan.share(step, m) for m in range(plans[0].micro_steps(step)) for plan in plans]
        assert all(stop - start <= micro for start, stop in shares)
        positions = [position for start, stop in shares for position in range(start, stop)]
        assert positions == list(range(step * global_batch, min((step + 1) * global_batch, num_samples)))


def test_a_last_batch_that_is_dropped_is_a_global_one() -> None:
    for world, micro in ((1, 4), (2, 2), (4, 1)):
        plan = cut(10, 4, micro, world, drop_last=True)
        assert (plan.num_samples, plan.steps_per_epoch) == (8, 2)
    with pytest.raises(DataError, match="dataloader_drop_last=False"):
        cut(3, 4, 4, 1, drop_last=True)
    with pytest.raises(DataError, match="no samples"):
        cut(0, 4, 4, 1)


def test_grouping_by_length_sorts_stretches_and_keeps_every_sample() -> None:
    lengths = [random.Random(5).randrange(1, 500) for _ in range(1)] + [(7 * i) % 301 + 1 for i in range(999)]
    order = LengthGroupedOrder(lengths, seed=1, stretch=100)
    epoch = order.indices(2, 0, 1000)
    assert sorted(epoch.tolist()) == list(range(1000)) and np.array_equal(order.indices(2, 250, 260), epoch[250:260])
    for start in range(0, 1000, 100):
        found = [lengths[index] for index in epoch[start : start + 100]]
        assert found == sorted(found, reverse=True)
    assert LengthGroupedOrder(lengths[::-1], 1, 100).fingerprint() != order.fingerprint()


def test_a_sampler_of_ones_own_gives_the_same_order_again_and_leaves_the_generators_alone() -> None:
    data = list(range(20))
    before = torch.get_rng_state()
    first = SamplerOrder(torch.utils.data.RandomSampler(data), seed=3)
    again = SamplerOrder(torch.utils.data.RandomSampler(data), 3)
    assert np.array_equal(first.indices(1, 0, 20), again.indices(1, 0, 20))
    assert not np.array_equal(first.indices(0, 0, 20), first.indices(1, 0, 20))
    assert torch.equal(before, torch.get_rng_state())


def test_an_order_as_a_sampler() -> None:
    sampler = OrderSampler(RandomOrder(10, seed=1))
    sampler.set_epoch(4)
    assert list(sampler) == RandomOrder(10, seed=1).indices(4, 0, 10).tolist() and len(sampler) == 10
    assert list(OrderSampler(SequentialOrder(3))) == [0, 1, 2]


def test_seeds_of_samples_differ_by_seed_epoch_and_sample() -> None:
    rows = np.arange(1000)
    assert len({int(s) for seed in (0, 1) for epoch in (0, 1) for s in sample_seeds(seed, epoch, rows)}) == 4000


DRAWS: dict[str, Callable[[], Any]] = {
    "python": random.random,
    "python gauss": lambda: random.gauss(0, 1),
    "python seed": lambda: random.seed(5),
    "numpy": np.random.rand,
    "numpy gauss": np.random.randn,
    "numpy seed": lambda: np.random.seed(5),
    "torch": lambda: torch.rand(1),
    "torch gauss": lambda: torch.randn(1),
    "torch seed": lambda: torch.manual_seed(5),
}


@pytest.fixture(autouse=True)
def _known_states() -> Iterator[None]:
    with keep_generators():
        random.seed(1), np.random.seed(2), torch.manual_seed(3)
        yield


def _draw_each() -> tuple[float, ...]:
    return (random.gauss(0, 1), random.random(), np.random.randn(), np.random.rand(), *torch.randn(2).tolist())


@pytest.mark.parametrize(("name", "half"), [*((name, False) for name in DRAWS), ("python gauss", True)])
def test_a_draw_is_noticed_and_put_back(name: str, half: bool) -> None:
    if half:
        random.gauss(0, 1)  # keeps the second of the pair beside the words
    with keep_generators():
        expected = _draw_each()
    watched = watch_generators()
    assert watched is not None and not watched.has_moved()
    DRAWS[name]()
    assert watched.has_moved()
    watched.restore()
    assert not watched.has_moved()
    assert _draw_each() == expected


def test_nothing_is_watched_while_numpy_holds_half_a_pair_of_gaussians() -> None:
    assert watch_generators() is not None
    np.random.randn()
    assert watch_generators() is None  # handing out the other half would change no word
    np.random.randn()
    assert watch_generators() is not None


def test_nothing_is_watched_with_another_generator_in_numpys_place() -> None:
    given: Any = np.random
    own = given.get_bit_generator()
    try:
        given.set_bit_generator(np.random.PCG64(1))
        assert watch_generators() is None
    finally:
        given.set_bit_generator(own)
    assert watch_generators() is not None
