"""Collators make the batches that models of the reference's kind expect."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch

from trainer_lib import (
    DataCollatorForLanguageModeling,
    DataCollatorForSeq2Seq,
    DataCollatorWithPadding,
    default_data_collator,
)
from trainer_lib.data.fetch import is_pure_collator
from trainer_lib.errors import ConfigError, DataError


class Tokenizer:
    """As little of a tokenizer as a collator needs."""

    pad_token_id = 0
    mask_token_id = 99
    all_special_ids: Any = (0, 1)
    model_input_names = ("input_ids", "attention_mask")

    def __init__(self, padding_side: str = "right") -> None:
        self.padding_side = padding_side

    def __len__(self) -> int:
        return 50

    def pad(self, encoded_inputs: Any, **options: Any) -> dict[str, torch.Tensor]:
        rows = [list(row["input_ids"]) for row in encoded_inputs]
        width = options.get("max_length") or max(map(len, rows))
        multiple = options.get("pad_to_multiple_of") or 1
        width = -(-width // multiple) * multiple
        left = self.padding_side == "left"
        fill = [[0] * (width - len(row)) for row in rows]
        ids = [blank + row if left else row + blank for row, blank in zip(rows, fill, strict=True)]
        batch = {"input_ids": torch.tensor(ids)}
        for name in ("label", "label_ids"):
            if name in encoded_inputs[0]:
                batch[name] = torch.tensor([row[name] for row in encoded_inputs])
        return batch


def test_default_stacks_every_kind_of_column_and_keeps_its_meaning() -> None:
    rows = [
        {"a": 1, "b": 0.5, "c": np.ones(2, np.float16), "d": torch.ones(2), "text": "x", "none": None, "label": 3},
        {"a": 2, "b": 1.5, "c": np.ones(2, np.float16), "d": torch.ones(2), "text": "y", "none": None, "label": 4},
    ]
    batch = default_data_collator(rows)
    assert {name: value.dtype for name, value in batch.items()} == {
        "a": torch.int64,
        "b": torch.float32,
        "c": torch.float16,
        "d": torch.float32,
        "labels": torch.int64,
    }
    assert batch["labels"].tolist() == [3, 4]
    assert default_data_collator([{"label": 0.5}])["labels"].dtype == torch.float32
    assert default_data_collator([{"label_ids": [1, 2]}])["labels"].tolist() == [[1, 2]]


def test_default_takes_objects_with_attributes() -> None:
    @dataclass
    class Row:
        x: list[float]
        label: int

    assert default_data_collator([Row([0.5, 1.0], 1)])["x"].dtype == torch.float32


def test_default_names_the_column_that_does_not_stack() -> None:
    for ragged in ([[1], [1, 2]], [torch.ones(1), torch.ones(2)], [np.ones(1), np.ones(2)]):
        with pytest.raises(DataError, match=r"input_ids.*Pad them"):
            default_data_collator([{"input_ids": value} for value in ragged])
    with pytest.raises(DataError, match="train_dataset = tuple: A sample has no named columns"):
        default_data_collator([(1, 2)])
    with pytest.raises(DataError, match="tf"):
        default_data_collator([{"a": 1}], return_tensors="tf")


def test_padding_renames_labels() -> None:
    batch = DataCollatorWithPadding(Tokenizer())([{"input_ids": [1, 2], "label": 1}, {"input_ids": [3], "label": 0}])
    assert batch["input_ids"].tolist() == [[1, 2], [3, 0]]
    assert batch["labels"].tolist() == [1, 0]


@pytest.mark.parametrize(("side", "expected"), [("right", [[5, 6], [7, -100]]), ("left", [[5, 6], [-100, 7]])])
def test_sequence_to_sequence_pads_labels_on_the_tokenizers_side(side: str, expected: list[list[int]]) -> None:
    rows = [{"input_ids": [1, 2], "labels": [5, 6]}, {"input_ids": [3], "labels": [7]}]
    assert DataCollatorForSeq2Seq(Tokenizer(side))(rows)["labels"].tolist() == expected
    assert DataCollatorForSeq2Seq(Tokenizer(side), pad_to_multiple_of=4)(rows)["labels"].shape == (2, 4)
    whole = DataCollatorForSeq2Seq(Tokenizer(side), padding="max_length", max_length=5)(rows)
    assert whole["labels"].shape == (2, 5)
    assert "labels" not in DataCollatorForSeq2Seq(Tokenizer(side))([{"input_ids": [1]}])


def test_sequence_to_sequence_asks_the_model_for_decoder_inputs() -> None:
    class Model:
        def prepare_decoder_input_ids_from_labels(self, labels: torch.Tensor) -> torch.Tensor:
            return labels + 1

    batch = DataCollatorForSeq2Seq(Tokenizer(), model=Model())([{"input_ids": [1], "labels": [5]}])
    assert batch["decoder_input_ids"].tolist() == [[6]]


def test_language_modelling_predicts_everything_but_padding() -> None:
    batch = DataCollatorForLanguageModeling(Tokenizer(), mlm=False)([{"input_ids": [5, 6]}, {"input_ids": [7]}])
    assert batch["labels"].tolist() == [[5, 6], [7, -100]]


def test_masking_replaces_as_the_paper_says() -> None:
    torch.manual_seed(0)
    rows = [{"input_ids": [1, *range(2, 41)]} for _ in range(400)]
    batch = DataCollatorForLanguageModeling(Tokenizer(), mlm=True)(rows)
    targets = batch["labels"] != -100
    assert not targets[:, 0].any()  # a special token
    assert targets[:, 1:].float().mean().item() == pytest.approx(0.15, abs=0.01)
    masked = (batch["input_ids"] == 99) & targets
    kept = (batch["input_ids"] == batch["labels"]) & targets
    assert (masked.sum() / targets.sum()).item() == pytest.approx(0.8, abs=0.03)
    assert (kept.sum() / targets.sum()).item() == pytest.approx(0.1, abs=0.03)
    assert torch.equal(batch["input_ids"][~targets], torch.tensor([row["input_ids"] for row in rows])[~targets])


def test_masks_come_from_the_seed_of_the_collator_where_there_is_one() -> None:
    rows = [{"input_ids": list(range(2, 32))} for _ in range(4)]

    def masked(seed: int | None) -> list[torch.Tensor]:
        collate = DataCollatorForLanguageModeling(Tokenizer(), mlm_probability=0.4, seed=seed)
        return [collate(rows)["labels"] for _ in range(2)]

    torch.manual_seed(0)
    before = torch.get_rng_state()
    first, again = masked(5), masked(5)
    assert torch.equal(first[0], again[0])
    assert torch.equal(first[1], again[1])
    assert not torch.equal(first[0], first[1])  # the next batch gets another mask
    assert torch.equal(before, torch.get_rng_state())
    assert not torch.equal(masked(None)[0], masked(None)[0])
    assert not torch.equal(before, torch.get_rng_state())


def test_all_targets_may_be_masked_or_all_randomised() -> None:
    rows = [{"input_ids": list(range(2, 42))} for _ in range(20)]
    every = DataCollatorForLanguageModeling(
        Tokenizer(), mlm_probability=1.0, mask_replace_prob=1, random_replace_prob=0
    )
    assert (every(rows)["input_ids"] == 99).all()
    shuffled = DataCollatorForLanguageModeling(
        Tokenizer(), mlm_probability=1, mask_replace_prob=0, random_replace_prob=1
    )
    batch = shuffled(rows)
    assert (batch["input_ids"] < 50).all()
    assert (batch["input_ids"] != batch["labels"]).float().mean() > 0.9


@pytest.mark.parametrize("side", ["right", "left"])
def test_padding_is_never_a_target(side: str) -> None:
    class Plain(Tokenizer):
        all_special_ids: Any = ()

    rows = [{"input_ids": [5] * 9}, {"input_ids": [6]}]
    labels = DataCollatorForLanguageModeling(Plain(side), mlm_probability=1.0)(rows)["labels"]
    assert (labels != -100).sum().item() == 10


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({"mlm_probability": 1.5}, "mlm_probability = 1.5: The share must be from 0 to 1"),
        ({"mlm_probability": None}, "mlm_probability = None: The share must be from 0 to 1"),
        ({"mask_replace_prob": -0.1}, "mask_replace_prob = -0.1: The share must be from 0 to 1"),
        (
            {"random_replace_prob": 0.5},
            r"mask_replace_prob \+ random_replace_prob = 1.3: The share must be from 0 to 1",
        ),
        ({"whole_word_mask": True, "mlm": False}, "whole_word_mask = True: Whole words are masked for masked"),
    ],
)
def test_impossible_masking_is_refused(given: Any, expected: str) -> None:
    with pytest.raises(ConfigError, match=expected):
        DataCollatorForLanguageModeling(Tokenizer(), **given)


def test_masking_needs_a_mask_token() -> None:
    class Unmasked(Tokenizer):
        mask_token_id: Any = None

    with pytest.raises(ConfigError, match=r"mlm = True: The tokenizer has no mask token\. Give mlm=False"):
        DataCollatorForLanguageModeling(Unmasked())
    assert DataCollatorForLanguageModeling(Unmasked(), mlm=False)


def test_collators_that_draw_nothing_are_known_and_their_subclasses_are_not_trusted() -> None:
    class Noisy(DataCollatorWithPadding):
        pass

    assert is_pure_collator(DataCollatorWithPadding(Tokenizer()))
    assert is_pure_collator(DataCollatorForSeq2Seq(Tokenizer()))
    assert not is_pure_collator(Noisy(Tokenizer()))
    assert not is_pure_collator(DataCollatorForLanguageModeling(Tokenizer()))
