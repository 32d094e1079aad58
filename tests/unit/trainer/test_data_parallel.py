"""World is not data-parallel size: batches, data order and loss weights follow the latter.

The two are equal today. Here two processes of a pretended world of four work on the same share of the data.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest

from tests.support.toys import classification_rows
from tests.support.training import trainer
from trainer_lib import Trainer
from trainer_lib.data.iterable import IterableLoader
from trainer_lib.data.loader import EvalLoader, TrainLoader
from trainer_lib.distributed import DataParallel, SingleProcess
from trainer_lib.evaluation.evaluation_loop import iterate_rounds
from trainer_lib.trainer.weighting import LossScale, StepWeights

ROWS = classification_rows(24)


class Half(SingleProcess):
    """The last of four processes, which takes the second of two shares."""

    rank = local_rank = 3
    world_size = local_world_size = 4
    data_parallel = DataParallel(1, 2)


def build(folder: Path, **given: Any) -> Trainer:
    built = trainer(folder, ROWS, eval_dataset=ROWS, train_sampling_strategy="sequential", **given)
    built._trainflow.world = dataclasses.replace(built._trainflow.world, comm=Half())
    return built


@pytest.mark.parametrize(
    ("given", "total", "micro"),
    [
        ({"per_device_train_batch_size": 3, "gradient_accumulation_steps": 2}, 12, 3),
        ({"per_device_train_batch_size": 6, "accelerator_config": {"split_batches": True}}, 6, 3),
        ({"per_device_train_batch_size": 3, "global_batch_size": 12}, 12, 3),
    ],
)
def test_the_batch_follows_the_data_parallel_size(
    given: dict[str, Any], total: int, micro: int, tmp_path: Path
) -> None:
    built = build(tmp_path, **given)
    assert built.get_total_train_batch_size(built.args) == total
    loader = built.get_train_dataloader()
    assert isinstance(loader, TrainLoader)
    assert (loader.plan.global_batch, loader.plan.micro_batch) == (total, micro)
    # Each round of two shares, of which this process takes the second.
    assert [loader.plan.share(0, step) for step in range(total // (2 * micro))] == [
        (first + micro, first + 2 * micro) for first in range(0, total, 2 * micro)
    ]


def test_evaluation_takes_this_share_of_any_loader(tmp_path: Path) -> None:
    built = build(tmp_path, per_device_eval_batch_size=4)
    loader = built.get_eval_dataloader()
    assert isinstance(loader, EvalLoader)
    assert loader.slices == [(4, 8), (12, 16), (20, 24)]
    dealt = list(iterate_rounds(["a", "b", "c"], built._trainflow.comm))
    assert [(micro.batch, micro.real) for micro in dealt] == [("b", True), ("c", False)]


def test_a_stream_is_cut_into_shares(tmp_path: Path) -> None:
    from torch.utils.data import IterableDataset

    class Stream(IterableDataset[Any]):
        def __iter__(self) -> Any:
            return iter(ROWS)

    built = build(tmp_path, per_device_train_batch_size=2, max_steps=2)
    built.train_dataset = Stream()
    loader = built.get_train_dataloader()
    assert isinstance(loader, IterableLoader)
    assert loader.global_batch == 4
    assert [len(batch["labels"]) for batch in loader] == [2] * 6  # 12 of the 24 rows


def test_a_loss_is_weighted_by_the_data_parallel_size() -> None:
    weights = StepWeights(data_parallel_size=2, over_ranks=True)
    weights.items, weights.num_items = [3], 12
    assert weights.weight(LossScale.MEAN) == pytest.approx(2 * 3 / 12)
    assert weights.weight(LossScale.SHARE) == 2.0
