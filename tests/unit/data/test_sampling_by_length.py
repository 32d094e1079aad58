"""Sorting by length: less padding, every sample once an epoch, results in the rows' own order."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import IterableDataset

from tests.support.seq2seq import Copier, Tokens, seq2seq_trainer
from tests.support.toys import TokenModel
from tests.support.training import trainer
from trainer_lib import DataCollatorForLanguageModeling
from trainer_lib.data.loading.order import LengthGroupedOrder, RandomOrder
from trainer_lib.data.rows.given_rows import in_order, longest_first, require_column
from trainer_lib.errors import ConfigError, DataError

LENGTHS = np.random.default_rng(0).lognormal(3.0, 0.8, 4000).astype(int).clip(1, 400).tolist()


def _share_of_padding(order: Any, batch: int = 16, epoch: int = 0) -> float:
    indices = order.indices(epoch, 0, len(LENGTHS))
    padded = real = 0
    for start in range(0, len(indices), batch):
        lengths = [LENGTHS[index] for index in indices[start : start + batch]]
        padded, real = padded + max(lengths) * len(lengths), real + sum(lengths)
    return 1 - real / padded


@pytest.mark.parametrize("shuffled", [None, 16])
def test_the_share_of_padding_falls_to_a_fraction(shuffled: int | None) -> None:
    random = _share_of_padding(RandomOrder(len(LENGTHS), 1))
    grouped = _share_of_padding(LengthGroupedOrder(LENGTHS, 1, 800, shuffled_batch=shuffled))
    assert random > 0.5
    assert grouped < random / 5


@pytest.mark.parametrize("count", [1, 15, 16, 17, 799, 800, 801, 1607])
def test_shuffled_batches_hold_every_sample_once_and_a_slice_stands_alone(count: int) -> None:
    order = LengthGroupedOrder(LENGTHS[:count], 3, 800, shuffled_batch=16)
    whole = order.indices(2, 0, count)
    assert sorted(whole.tolist()) == list(range(count))
    start = count // 2
    assert np.array_equal(order.indices(2, start, count), whole[start:])
    assert np.array_equal(LengthGroupedOrder(LENGTHS[:count], 3, 800, shuffled_batch=16).indices(2, 0, count), whole)
    if count > 800:
        assert not np.array_equal(order.indices(3, 0, count), whole)


def test_shuffled_batches_vary_from_step_to_step() -> None:
    """Sorted stretches fall from long to short; shuffled batches do not, save that the longest comes first."""

    def means(order: Any) -> Any:
        return np.array([LENGTHS[index] for index in order.indices(0, 0, 800)]).reshape(-1, 16).mean(1)

    sawtooth, shuffled = (means(LengthGroupedOrder(LENGTHS, 1, 800, shuffled_batch=each)) for each in (None, 16))
    assert (np.diff(sawtooth) <= 0).all()
    assert 0.3 < (np.diff(shuffled[1:]) <= 0).mean() < 0.7
    assert shuffled[0] == sawtooth[0] == shuffled.max()


# ------------------------------------------------------------------------------------------------ through the Trainer
class Padding(Tokens):
    """Pads, and knows of no attention mask."""

    def pad(self, encoded_inputs: list[Any], **options: Any) -> dict[str, torch.Tensor]:
        return {"input_ids": super().pad(encoded_inputs)["input_ids"]}


def _rows(count: int = 120) -> list[dict[str, list[int]]]:
    return [{"input_ids": [2 + number % 9] * min(LENGTHS[number], 40)} for number in range(count)]


def _trainer(folder: Path, rows: Any, **given: Any) -> Any:
    collate = DataCollatorForLanguageModeling(Padding(), mlm=False)
    return trainer(folder, rows, model=TokenModel(), **{"data_collator": collate, **given})


def _widths(one: Any, epoch: int = 0) -> list[tuple[int, int]]:
    """(longest, shortest) of every micro-batch of an epoch."""
    loader = one.get_train_dataloader()
    loader.set_epoch(epoch)
    lengths = [(batch["labels"] != -100).sum(1) for batch in loader]
    return [(int(each.max()), int(each.min())) for each in lengths]


def _padding(one: Any) -> float:
    loader = one.get_train_dataloader()
    real = padded = 0
    for batch in loader:
        real, padded = real + int((batch["labels"] != -100).sum()), padded + batch["labels"].numel()
    return 1 - real / padded


@pytest.mark.parametrize("how", ["input_ids", "length", "size"])
def test_group_by_length_finds_the_lengths(tmp_path: Path, how: str) -> None:
    rows: list[dict[str, Any]] = _rows()
    name = "length" if how == "input_ids" else how
    if how != "input_ids":
        rows = [{**row, how: len(row["input_ids"])} for row in rows]
    grouped = _trainer(tmp_path, rows, train_sampling_strategy="group_by_length", length_column_name=name)
    assert _padding(grouped) < 0.5 * _padding(_trainer(tmp_path, rows))
    assert max(_widths(grouped)) == _widths(grouped)[0]  # the longest first: memory runs out early if it will
    grouped.args.max_steps = 2
    grouped.train()  # the column is not an input of the model


def test_lengths_given_in_a_column_are_believed(tmp_path: Path) -> None:
    """Short sequences said to be long come first."""
    rows = [{**row, "length": 100 - len(row["input_ids"])} for row in _rows()]
    widths = _widths(_trainer(tmp_path, rows, train_sampling_strategy="group_by_length"))
    assert widths[0][0] == min(longest for longest, _ in widths)


def test_a_dataset_of_datasets_is_sorted_by_its_column(tmp_path: Path) -> None:
    import datasets

    rows = [{**row, "length": len(row["input_ids"]), "text": "x"} for row in _rows(60)]
    data = datasets.Dataset.from_list(rows)
    one = _trainer(tmp_path, data, train_sampling_strategy="group_by_length", max_steps=3)
    assert _padding(one) < 0.5 * _padding(_trainer(tmp_path, data))
    one.train()
    without = data.remove_columns("length")
    assert _widths(_trainer(tmp_path, without, train_sampling_strategy="group_by_length")) == _widths(one)


def test_every_sample_comes_once_an_epoch_in_an_order_of_seed_and_epoch(tmp_path: Path) -> None:
    rows = [{"input_ids": [2] * (1 + number % 7), "label": number} for number in range(30)]

    def order(epoch: int, **given: Any) -> list[int]:
        sampler = _trainer(tmp_path, rows, train_sampling_strategy="group_by_length", **given)._get_train_sampler()
        sampler.set_epoch(epoch)
        return list(sampler)

    assert sorted(order(0)) == list(range(30)) and order(0) == order(0) != order(1)
    assert order(0, data_seed=5) == order(0, data_seed=5, seed=9) != order(0)


def test_sortish_sampling_pads_less_and_shuffles_batches(tmp_path: Path) -> None:
    rows = [{"input_ids": row["input_ids"], "labels": row["input_ids"]} for row in _rows()]

    def widths(**given: Any) -> list[int]:
        loader = seq2seq_trainer(tmp_path, Copier(), train_dataset=rows, **given).get_train_dataloader()
        return [batch["input_ids"].shape[1] for batch in loader]

    sortish, random = widths(sortish_sampler=True), widths()
    assert sum(sortish) < 0.7 * sum(random) and sorted(sortish, reverse=True) != sortish
    assert sortish[0] == max(sortish)
    one = seq2seq_trainer(tmp_path, Copier(), train_dataset=rows, sortish_sampler=True, max_steps=2)
    assert one.train().global_step == 2


class _Stream(IterableDataset[Any]):
    def __iter__(self) -> Any:
        return iter(_rows(4))


def test_what_cannot_be_sorted_is_refused_before_the_first_step(tmp_path: Path) -> None:
    grouped: dict[str, Any] = {"train_sampling_strategy": "group_by_length", "max_steps": 2}
    with pytest.raises(ConfigError, match=r"train_sampling_strategy = .*: A stream cannot be sorted"):
        _trainer(tmp_path, _Stream(), **grouped)
    with pytest.raises(ConfigError, match=r"sortish_sampler = True: A stream cannot be sorted"):
        seq2seq_trainer(tmp_path, Copier(), train_dataset=_Stream(), sortish_sampler=True, max_steps=2)
    with pytest.raises(ConfigError, match=r"length_column_name = length: Sorting by length: the samples have neither"):
        _trainer(tmp_path, [{"x": 1}], **grouped).train()


# ----------------------------------------------------------------------------- masks follow samples, not micro-batches
class Masking(Padding):
    mask_token_id = 10
    all_special_ids = (0,)

    def __len__(self) -> int:
        return 10


@pytest.mark.parametrize("workers", [0, 2])
def test_a_sample_is_masked_alike_in_every_micro_batch_and_anew_every_epoch(tmp_path: Path, workers: int) -> None:
    rows = [{"input_ids": [number + 1] * (3 + number)} for number in range(8)]

    def masks(micro: int, epoch: int = 0, seed: int = 1) -> dict[int, list[bool]]:
        collate = DataCollatorForLanguageModeling(Masking(), mlm_probability=0.5, random_replace_prob=0.2)
        given = {"global_batch_size": 4, "per_device_train_batch_size": micro, "dataloader_num_workers": workers}
        one = _trainer(tmp_path, rows, data_collator=collate, seed=seed, data_seed=1, **given)
        loader = one.get_train_dataloader()
        loader.set_epoch(epoch)
        found = {}
        for batch in loader:
            for labels in batch["labels"]:
                if (labels != -100).any():
                    number = int(labels.max()) - 1
                    found[number] = (labels[: 3 + number] != -100).tolist()
        return found

    alone, pairs, fours = masks(1), masks(2), masks(4)
    assert alone == pairs == fours and len(alone) >= 6
    assert masks(4, epoch=1) != fours and masks(4, seed=2) != fours


def test_results_of_sorted_rows_come_back_in_order() -> None:
    draw = random.Random(0)
    rows = [[draw.random()] * draw.randrange(9) for _ in range(50)]
    order = longest_first(rows)
    lengths = [len(rows[place]) for place in order]
    assert lengths == sorted(lengths, reverse=True)
    results = np.array([[sum(rows[place]), place] for place in order])
    assert in_order(results, order).tolist() == [[sum(row), place] for place, row in enumerate(rows)]


def test_a_number_is_a_length_and_equal_lengths_keep_their_order() -> None:
    assert longest_first([2, 5, 2.5, 5]) == [1, 3, 2, 0]
    assert longest_first(["", "ab", np.zeros(3), "cd", None]) == [2, 1, 3, 0, 4]


def test_what_has_no_result_for_each_row_is_refused() -> None:
    with pytest.raises(DataError, match="returned 2 values for 3 rows"):
        in_order(np.zeros(2), [2, 0, 1])
    with pytest.raises(DataError, match="no column 'text'; the nearest is 'texts'"):
        require_column(["texts"], "text", field="predict.sort_by")
