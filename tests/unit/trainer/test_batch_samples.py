"""`get_batch_samples` may change the list of batches that its parent drew: each keeps its weight."""

from __future__ import annotations

from typing import Any

import pytest

from tests.support.gradients import assert_close, gradients
from tests.support.toys import TokenModel, token_rows
from trainer_lib import Trainer
from trainer_lib.data.loader import Micro
from trainer_lib.trainer.weighting import MicroBatches


class Drops(Trainer):
    """Leaves out the first batch that its parent drew, and counts the others by itself."""

    def get_batch_samples(self, *args: Any) -> Any:
        batches, _ = super().get_batch_samples(*args)
        return batches[1:], self._get_num_items_in_batch(batches[1:])


class Splits(Trainer):
    """Computes every batch that its parent drew in pieces of two samples."""

    def get_batch_samples(self, *args: Any) -> Any:
        batches, items = super().get_batch_samples(*args)
        pieces = (zip(*(value.split(2) for value in batch.values()), strict=True) for batch in batches)
        return [dict(zip(batches[0], each, strict=True)) for batch in pieces for each in batch], items


class DrawsOnce(Trainer):
    """Draws one batch more than it computes, with counts of its own."""

    def get_batch_samples(self, epoch_iterator: Any, num_batches: int, *_: Any) -> Any:
        batches = [next(epoch_iterator) for _ in range(num_batches)][:-1]
        return batches, sum(self._trainflow.forward.target_items(batch) for batch in batches)


@pytest.mark.parametrize(("cls", "first", "last"), [(Drops, 4, 16), (Splits, 0, 16), (DrawsOnce, 0, 12)])
def test_an_override_may_drop_or_split_the_batches_of_a_step(cls: type[Trainer], first: int, last: int) -> None:
    rows = token_rows(16)
    whole = gradients(rows[first:last], micro=last - first, batch=last - first, model=TokenModel)
    assert_close(gradients(rows, micro=4, batch=16, model=TokenModel, cls=cls), whole)


def test_the_samples_of_batches_are_known_after_some_were_dropped_or_split() -> None:
    class Source:
        def micros(self, epoch: int, start_step: int) -> Any:
            return iter([Micro("a", True, 3), Micro("b", True, 2), Micro("c", False, 0)])

    source: Any = Source()
    batches = MicroBatches(source, 0, 0)
    drawn = list(batches)
    assert batches.samples_of(drawn) == [3, 2, 0]
    assert batches.samples_of([drawn[0], "piece"]) == [3, None]
    assert batches.samples_of(["copy of b", "copy of c"]) == [2, 0]
    batches.drawn = batches.drawn[2:]
    assert batches.samples_of(["half a dummy", "the other half"]) == [0, 0]
