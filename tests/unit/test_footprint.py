"""The bytes of a rank under each strategy: arithmetic that can be checked by hand."""

from __future__ import annotations

from dataclasses import replace

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


def by_name(size: ModelSize, processes: int, **settings: int) -> dict[str, Footprint]:
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
    assert unknown.checkpoint_bytes is None
    assert SIZE.checkpoint_bytes == 1200
