"""The losses of the steps that no log covers: which they are, and how many of them are kept."""

from __future__ import annotations

import json
import math

import pytest
import torch

from trainer_lib.communicator import SingleProcess
from trainer_lib.strategies.single import SingleStrategy
from trainer_lib.trainer.history import StepHistory
from trainer_lib.worker.train import thin_losses

NAN, INF = math.nan, math.inf


@pytest.mark.parametrize(
    ("losses", "most", "kept"),
    [
        ([], 3, []),
        ([(1, 0.5)], 3, [(1, 0.5)]),
        ([(1, 3.0), (2, 2.0), (3, 1.0)], 3, [(1, 3.0), (2, 2.0), (3, 1.0)]),
        ([(1, 3.0), (2, 2.0), (3, 1.0), (4, 0.0)], 3, [(2, 2.5), (4, 0.5)]),
        ([(7, 3.0), (8, NAN), (9, 1.0), (10, INF)], 2, [(8, 3.0), (10, 1.0)]),
        ([(1, NAN), (2, -INF), (3, 1.0)], 2, [(2, "NaN"), (3, 1.0)]),
        ([(1, NAN), (2, INF)], 5, [(1, "NaN"), (2, "NaN")]),
    ],
)
def test_at_most_so_many_means_are_kept(
    losses: list[tuple[int, float]], most: int, kept: list[tuple[int, float | str]]
) -> None:
    assert [(each["step"], each["loss"]) for each in thin_losses(losses, most)] == kept


def test_a_long_training_keeps_its_first_and_its_last_part() -> None:
    losses = [(step, float(step)) for step in range(1, 12_346)]
    kept = thin_losses(losses)
    assert len(kept) <= 500
    assert (kept[0]["step"], kept[0]["loss"]) == (25, 13.0)
    assert kept[-1]["step"] == 12_345
    json.dumps(kept, allow_nan=False)
    json.dumps(thin_losses([(1, NAN)]), allow_nan=False)


def test_unlogged_are_the_steps_since_the_last_log() -> None:
    history = StepHistory(SingleStrategy(torch.device("cpu"), SingleProcess()), nonfinite_limit=5)

    def add(*losses: float) -> None:
        for loss in losses:
            history.append(torch.tensor(loss), torch.tensor(1.0))

    assert history.unlogged(0) == []
    add(4.0, 3.0)
    history.collect(2)
    assert history.unlogged(2) == [(1, 4.0), (2, 3.0)]
    history.take(hide_nonfinite=True)
    assert history.unlogged(2) == []
    add(2.0, NAN)
    history.collect(4)
    add(1.0)
    history.collect(5)
    [third, fourth, fifth] = history.unlogged(5)
    assert (third, fifth) == ((3, 2.0), (5, 1.0))
    assert fourth[0] == 4
    assert math.isnan(fourth[1])
    resumed = StepHistory(SingleStrategy(torch.device("cpu"), SingleProcess()), nonfinite_limit=5)
    resumed.load_state(json.loads(json.dumps(history.state())))
    assert [step for step, _ in resumed.unlogged(5)] == [3, 4, 5]
