"""The rank that keeps the others waiting is named; none is when all are alike."""

from __future__ import annotations

import os
import time
from typing import Any

import pytest

from tests.support.distributed import run_distributed
from tests.support.toys import classification_rows
from tests.support.training import trainer
from trainer_lib.callbacks.stragglers import StragglerCallback

ROWS = classification_rows(64)


class Slow:
    """Rows that one rank takes long to load."""

    def __init__(self, rank: int, seconds: float) -> None:
        self._seconds = seconds if int(os.environ["RANK"]) == rank else 0.0

    def __len__(self) -> int:
        return len(ROWS)

    def __getitem__(self, index: int) -> Any:
        time.sleep(self._seconds)
        return ROWS[index]


def _trained(folder: str, where: str, rank: int) -> list[str]:
    told: list[str] = []
    callback = StragglerCallback(every_s=0.1, windows=2, report=told.append)
    rows = Slow(rank, 0.01 if where == "data" else 0.0)
    one = trainer(folder, rows, callbacks=[callback], max_steps=60, per_device_train_batch_size=2, logging_steps=7)
    if where == "forward" and int(os.environ["RANK"]) == rank:
        [*one.model.modules()][-1].register_forward_pre_hook(lambda *_: time.sleep(0.02))
    one.train()
    return told


@pytest.mark.parametrize(("where", "rank"), [("data", 0), ("data", 1), ("forward", 1)])
def test_the_rank_that_is_slow_is_named_on_the_first(where: str, rank: int, tmp_path: Any) -> None:
    first, second = run_distributed(_trained, 2, str(tmp_path), where, rank)
    assert second == []
    # A second time only after a window in which a busy machine held the other rank up as well.
    assert {line.split(" is slow: ")[0] for line in first} == {f"Rank {rank}"}
    own = float(first[0].split("it needs ")[1].split(" ms")[0])
    assert own >= 20.0


def _judged(said: list[tuple[float, ...]]) -> list[str]:
    import json

    told: list[str] = []
    callback = StragglerCallback(windows=2, report=told.append)
    for number, times in enumerate(said):
        callback._compare([json.dumps([number, own]) for own in times])
    return told


def test_a_single_slow_window_or_a_slow_step_of_a_millisecond_is_none() -> None:
    assert _judged([(0.1, 0.9), (0.1, 0.1), (0.1, 0.9), (0.1, 0.1)]) == []
    assert _judged([(0.0001, 0.0009)] * 5) == []
    assert _judged([(0.1, 0.14)] * 5) == []
    [told] = _judged([(0.1, 0.1, 0.9)] * 5)
    slow, rest = told.split("; ")
    assert slow == "Rank 2 is slow: it needs 900.0 ms of its own per step, and the median is 100.0 ms"
    assert rest == "the other ranks wait for it."


def test_a_world_of_one_is_not_measured(tmp_path: Any) -> None:
    callback = StragglerCallback(every_s=0.0)
    one = trainer(tmp_path, ROWS, callbacks=[callback], max_steps=2)
    one.train()
    assert callback._clock is None
