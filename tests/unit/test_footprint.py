"""The bytes of a rank under each strategy: arithmetic that can be checked by hand."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from trainer_lib.footprint import STRATEGIES, Footprint, ModelSize, footprints

SIZE = ModelSize(
    parameters=100,
    trainable=100,
    parameter_bytes=400,
    gradient_bytes=400,
    optimizer_bytes=800,
    activation_bytes=50,
    evaluation_bytes=None,
    gathered_bytes=100,
    stored_bytes=400,
)


def by_name(size: ModelSize, processes: int, **settings: Any) -> dict[str, Footprint]:
    return {each.strategy: each for each in footprints(size, processes, **settings)}


@pytest.mark.parametrize(
    ("strategy", "parameters", "gradients", "optimizer", "exchange"),
    [
        ("single", 400, 400, 800, 0),
        ("ddp", 400, 400, 800, 400),
        ("fsdp", 100, 100, 200, 200),
        ("zero-1", 500, 400, 200, 800),
        ("zero-2", 500, 100, 200, 800),
        ("zero-3", 200, 100, 200, 900),
    ],
)
def test_what_each_strategy_shares_out_over_four_ranks(
    strategy: str, parameters: int, gradients: int, optimizer: int, exchange: int
) -> None:
    rank = by_name(SIZE, 4)[strategy]
    assert (rank.parameters, rank.gradients, rank.optimizer, rank.exchange) == (
        *(parameters, gradients, optimizer),
        exchange,
    )
    assert rank.total == parameters + gradients + optimizer + exchange + 50
    assert rank.processes == (1 if strategy == "single" else 4)


def test_a_small_bucket_is_taken_as_it_is_set_and_a_large_evaluation_is_the_peak() -> None:
    assert by_name(SIZE, 2, bucket_elements=10)["zero-2"].exchange == 80
    large = by_name(replace(SIZE, evaluation_bytes=10_000), 1)["single"]
    assert large.total == 400 + 800 + 10_000


def test_one_process_alone_may_have_a_larger_micro_batch() -> None:
    ranks = {each.strategy: each for each in footprints(replace(SIZE, micro_batch=4), 2, alone=8)}
    assert (ranks["single"].activations, ranks["ddp"].activations) == (100, 50)


def test_what_is_not_known_stays_unknown() -> None:
    unknown = replace(SIZE, optimizer_bytes=None)
    assert [each.total for each in footprints(unknown, 2)] == [None] * len(STRATEGIES)
    assert [each.checkpoint for each in footprints(unknown, 2)] == [None] * len(STRATEGIES)
    assert unknown.checkpoint_bytes() is None
    assert SIZE.checkpoint_bytes() == 1200


@pytest.mark.parametrize(
    ("strategy", "each", "writers"),
    [
        ("single", 1200, 1),
        ("ddp", 1200, 1),  # the other ranks hold the same, and write none of it
        ("fsdp", 300, 4),
        ("zero-1", 1200, 1),  # what ZeRO shards is gathered to the first rank
        ("zero-2", 1200, 1),
        ("zero-3", 1200, 1),
    ],
)
def test_what_a_rank_writes_into_a_checkpoint(strategy: str, each: int, writers: int) -> None:
    rank = by_name(SIZE, 4)[strategy]
    assert (rank.checkpoint, rank.writers) == (each, writers)


@pytest.mark.parametrize(("writers", "each"), [(None, 200), (1, 600), (3, 200), (4, 150)])
def test_fsdp_is_written_by_as_many_ranks_as_its_settings_say(writers: int | None, each: int) -> None:
    rank = {one.strategy: one for one in footprints(replace(SIZE, optimizer_bytes=200), 3, writers=writers)}["fsdp"]
    assert (rank.checkpoint, rank.writers) == (each, writers or 3)


def test_a_part_that_does_not_come_out_even_counts_as_the_largest() -> None:
    assert by_name(replace(SIZE, stored_bytes=401), 4)["fsdp"].checkpoint == 301


def test_a_checkpoint_of_the_model_alone_has_no_optimizer_state() -> None:
    unknown = replace(SIZE, optimizer_bytes=None)
    ranks = {each.strategy: each.checkpoint for each in footprints(unknown, 2, only_model=True)}
    assert ranks == {"single": 400, "ddp": 400, "fsdp": 200, "zero-1": 400, "zero-2": 400, "zero-3": 400}
