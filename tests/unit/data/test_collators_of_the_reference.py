"""Collators: as transformers' on equal input, in tensors and arrays; what they mask, and what they refuse."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch

import trainer_lib
from tests.support.tiny_models import masking_tokenizer as tokens
from trainer_lib import (
    DataCollatorForLanguageModeling,
    DataCollatorForSeq2Seq,
    DataCollatorWithPadding,
    default_data_collator,
)
from trainer_lib.base.public_names import attach
from trainer_lib.data.loading.loader import is_pure_collator
from trainer_lib.errors import ConfigError, DataError, MissingExtraError

transformers = pytest.importorskip("transformers")
MASK = 2
KINDS = ["pt", "np"]
EXPORTS = (
    *("DataCollatorForLanguageModeling", "DataCollatorForMultipleChoice", "DataCollatorForPermutationLanguageModeling"),
    *("DataCollatorForSeq2Seq", "DataCollatorForTokenClassification", "DataCollatorWithFlattening"),
    *("DataCollatorWithPadding", "DefaultDataCollator", "default_data_collator", "DataCollator"),
)
RARE = [name for name in EXPORTS if name.endswith(("Choice", "PermutationLanguageModeling", "TokenClassification"))]


def assert_same(ours: Any, theirs: Any) -> None:
    """Compare names, types, shapes, kinds of number and values."""
    theirs = {name: value for name, value in theirs.items() if value is not None}
    assert set(ours) == set(theirs)
    for name, value in theirs.items():
        assert type(ours[name]) is type(value), name
        if isinstance(value, int):
            assert ours[name] == value
            continue
        assert tuple(ours[name].shape) == tuple(value.shape), name
        assert torch.as_tensor(ours[name]).is_floating_point() == torch.as_tensor(value).is_floating_point()
        assert np.allclose(np.asarray(ours[name]), np.asarray(value)), name


def test_every_export_of_the_reference_is_one_of_ours() -> None:
    import transformers.data.data_collator as module

    names = {name for name in dir(transformers) if "ollator" in name and name.isidentifier()}
    assert names - {"data_collator"} <= set(EXPORTS) <= set(trainer_lib.__all__)
    assert hasattr(module, "DataCollatorMixin")


@pytest.mark.parametrize("name", [*RARE, "DataCollatorWithFlattening"])
def test_a_rare_collator_is_that_of_transformers_and_missed_by_name(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert getattr(trainer_lib, name) is getattr(transformers, name)
    monkeypatch.setitem(sys.modules, "transformers", None)
    lookup, names, public = attach("trainer_lib", trainer_lib.__file__)
    assert name not in public and "Trainer" in public and "Trainer" in names()
    with pytest.raises(MissingExtraError, match=rf"{name} is that of transformers.*trainflow\[transformers\]"):
        lookup(name)


def both(name: str, *given: Any, features: list[Any], kind: str, **settings: Any) -> tuple[Any, Any]:
    """The batches of our collator of this name and of the reference's."""
    made = [getattr(lib, name)(*given, **settings, return_tensors=kind) for lib in (trainer_lib, transformers)]
    return tuple(collate([dict(row) for row in features]) for collate in made)


ROWS: list[Any] = [{"input_ids": [5, 6, 7]}, {"input_ids": [8]}]
PAIRS: list[Any] = [{"input_ids": [5, 6, 7], "labels": [8, 9]}, {"input_ids": [5], "labels": [8, 9, 10]}]
MIXED: list[list[Any]] = [
    [{"a": 1, "label": 2}, {"a": 2, "label": 0}],
    [{"x": [1, 2], "label_ids": [0, 1]}, {"x": [3, 4], "label_ids": [1, 1]}],
    [{"x": np.ones(2, np.float32), "label": 0.5}, {"x": np.zeros(2, np.float32), "label": 1.5}],
]
WIDTHS: list[dict[str, Any]] = [{}, {"pad_to_multiple_of": 4}, {"padding": "max_length", "max_length": 5}]
# Collator -> whether it has a tokenizer, features, settings.
EQUAL: dict[str, tuple[bool, list[list[Any]], list[dict[str, Any]]]] = {
    "DataCollatorForSeq2Seq": (True, [PAIRS, ROWS], WIDTHS),
    "DataCollatorWithPadding": (True, [[{**row, "label": 1} for row in ROWS]], [{}]),
    "DataCollatorForLanguageModeling": (True, [ROWS], [{"mlm": False}]),
    "DefaultDataCollator": (False, MIXED, [{}]),
}  # fmt: skip


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("side", ["right", "left"])
@pytest.mark.parametrize("name", EQUAL)
def test_batches_are_those_of_transformers(name: str, side: str, kind: str) -> None:
    has_tokenizer, features, settings = EQUAL[name]
    positional = (tokens(padding_side=side),) if has_tokenizer else ()
    for rows in features:
        for more in settings:
            assert_same(*both(name, *positional, features=rows, kind=kind, **more))


def test_the_default_function_takes_settings_by_call() -> None:
    for kind in KINDS:
        for rows in MIXED:
            theirs = transformers.default_data_collator(rows, return_tensors=kind)
            assert_same(default_data_collator(rows, return_tensors=kind), theirs)


def test_default_stacks_every_kind_of_column_and_keeps_its_meaning() -> None:
    rows = [
        {"a": 1, "b": 0.5, "c": np.ones(2, np.float16), "d": torch.ones(2), "text": "x", "none": None, "label": 3},
        {"a": 2, "b": 1.5, "c": np.ones(2, np.float16), "d": torch.ones(2), "text": "y", "none": None, "label": 4},
    ]
    batch = default_data_collator(rows)
    dtypes = {"a": torch.int64, "b": torch.float32, "c": torch.float16, "d": torch.float32, "labels": torch.int64}
    assert {name: value.dtype for name, value in batch.items()} == dtypes
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
    with pytest.raises(DataError, match=r'return_tensors = tf: .*Give "pt" for torch or "np"'):
        default_data_collator([{"a": 1}], return_tensors="tf")


def test_sequence_to_sequence_asks_the_model_for_decoder_inputs() -> None:
    class Model:
        def prepare_decoder_input_ids_from_labels(self, labels: torch.Tensor) -> torch.Tensor:
            return labels + 1

    batch = DataCollatorForSeq2Seq(tokens(), model=Model())([{"input_ids": [1], "labels": [5]}])
    assert batch["decoder_input_ids"].tolist() == [[6]]


# ------------------------------------------------------------------------------------------------------------- masking
def _words(lengths: list[int]) -> dict[str, Any]:
    """A sample whose words have these numbers of tokens, with an end-of-sequence token."""
    offsets, at = [], 0
    for length in lengths:
        offsets += [(at + token, at + token + 1) for token in range(length)]
        at += length + 1  # a space
    ids = [3 + number % 37 for number in range(len(offsets))]
    return {"input_ids": [*ids, 1], "offset_mapping": [*offsets, (0, 0)], "special_tokens_mask": [0] * len(ids) + [1]}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("side", ["right", "left"])
def test_whole_words_are_masked_with_all_their_tokens(kind: str, side: str) -> None:
    lengths = [[1, 3, 2, 4], [2, 2]]
    collate = DataCollatorForLanguageModeling(
        tokens(padding_side=side), whole_word_mask=True, mlm_probability=0.5, return_tensors=kind, seed=3
    )
    seen = set()
    for _ in range(20):
        batch = collate([_words(each) for each in lengths])
        ids, labels = torch.as_tensor(batch["input_ids"]), torch.as_tensor(batch["labels"])
        assert "offset_mapping" not in batch
        for row, each in enumerate(lengths):
            start = 0 if side == "right" else ids.shape[1] - sum(each) - 1
            for length in each:
                word = labels[row, start : start + length] != -100
                assert word.all() or not word.any()
                assert (ids[row, start : start + length][word] == MASK).all()
                seen.add(bool(word.all()))
                start += length
            assert labels[row, start] == -100  # the special token
    assert seen == {True, False}


def test_whole_words_have_transformers_own_share() -> None:
    lengths = [[1, 2, 3, 1, 2, 3, 1, 2] for _ in range(200)]
    shares = []
    for lib in (trainer_lib, transformers):
        torch.manual_seed(0)
        collate = lib.DataCollatorForLanguageModeling(
            tokens(), whole_word_mask=True, mask_replace_prob=1.0, random_replace_prob=0.0, mlm_probability=0.3
        )
        batch = collate([_words(each) for each in lengths])
        shares.append((batch["labels"] != -100).float().mean().item())
        assert ((batch["input_ids"] == MASK) == (batch["labels"] != -100)).all()
    assert shares[0] == pytest.approx(shares[1], abs=0.03)


def test_masks_need_a_mask_token_and_words_their_offsets() -> None:
    unmasked = tokens()
    unmasked.mask_token = None
    with pytest.raises(ConfigError, match=r"mlm = True: The tokenizer has no mask token\. Give mlm=False"):
        DataCollatorForLanguageModeling(unmasked)
    assert DataCollatorForLanguageModeling(unmasked, mlm=False)
    with pytest.raises(DataError, match="offset_mapping"):
        DataCollatorForLanguageModeling(tokens(), whole_word_mask=True)([{"input_ids": [5, 6]}])


def test_masking_replaces_as_the_paper_says() -> None:
    torch.manual_seed(0)
    rows = [{"input_ids": [1, *range(3, 40)]} for _ in range(400)]
    batch = DataCollatorForLanguageModeling(tokens(), mlm=True)(rows)
    targets = batch["labels"] != -100
    assert not targets[:, 0].any()  # a special token
    assert targets[:, 1:].float().mean().item() == pytest.approx(0.15, abs=0.01)
    masked = (batch["input_ids"] == MASK) & targets
    kept = (batch["input_ids"] == batch["labels"]) & targets
    assert (masked.sum() / targets.sum()).item() == pytest.approx(0.8, abs=0.03)
    assert (kept.sum() / targets.sum()).item() == pytest.approx(0.1, abs=0.03)
    assert torch.equal(batch["input_ids"][~targets], torch.tensor([row["input_ids"] for row in rows])[~targets])


def test_masks_come_from_the_seed_of_the_collator_where_there_is_one() -> None:
    rows = [{"input_ids": list(range(3, 33))} for _ in range(4)]

    def masked(seed: int | None) -> list[torch.Tensor]:
        collate = DataCollatorForLanguageModeling(tokens(), mlm_probability=0.4, seed=seed)
        return [collate(rows)["labels"] for _ in range(2)]

    torch.manual_seed(0)
    before = torch.get_rng_state()
    first, again = masked(5), masked(5)
    assert torch.equal(first[0], again[0]) and torch.equal(first[1], again[1])
    assert not torch.equal(first[0], first[1])  # the next batch gets another mask
    assert torch.equal(before, torch.get_rng_state())
    assert not torch.equal(masked(None)[0], masked(None)[0])
    assert not torch.equal(before, torch.get_rng_state())


def test_all_targets_may_be_masked_or_all_randomised() -> None:
    rows = [{"input_ids": list(range(3, 40))} for _ in range(20)]
    every = DataCollatorForLanguageModeling(tokens(), mlm_probability=1.0, mask_replace_prob=1, random_replace_prob=0)
    assert (every(rows)["input_ids"] == MASK).all()
    shuffled = DataCollatorForLanguageModeling(tokens(), mlm_probability=1, mask_replace_prob=0, random_replace_prob=1)
    batch = shuffled(rows)
    assert (batch["input_ids"] < 40).all() and (batch["input_ids"] != batch["labels"]).float().mean() > 0.9


@pytest.mark.parametrize("side", ["right", "left"])
def test_padding_is_never_a_target(side: str, monkeypatch: pytest.MonkeyPatch) -> None:
    plain = tokens(padding_side=side)
    monkeypatch.setattr(type(plain), "all_special_ids", ())
    rows = [{"input_ids": [5] * 9}, {"input_ids": [6]}]
    assert (DataCollatorForLanguageModeling(plain, mlm_probability=1.0)(rows)["labels"] != -100).sum().item() == 10


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({"mlm_probability": 1.5}, "mlm_probability = 1.5: The share must be from 0 to 1"),
        ({"mlm_probability": None}, "mlm_probability = None: The share must be from 0 to 1"),
        ({"mask_replace_prob": -0.1}, "mask_replace_prob = -0.1: The share must be from 0 to 1"),
        ({"random_replace_prob": 0.5}, r"mask_replace_prob \+ random_replace_prob = 1.3: The share must be from 0 to"),
        ({"whole_word_mask": True, "mlm": False}, "whole_word_mask = True: Whole words are masked for masked"),
    ],
)
def test_impossible_masking_is_refused(given: Any, expected: str) -> None:
    with pytest.raises(ConfigError, match=expected):
        DataCollatorForLanguageModeling(tokens(), **given)


def test_collators_that_draw_nothing_are_known_and_their_subclasses_are_not_trusted() -> None:
    class Noisy(DataCollatorWithPadding):
        pass

    assert is_pure_collator(DataCollatorWithPadding(tokens())) and is_pure_collator(DataCollatorForSeq2Seq(tokens()))
    assert not is_pure_collator(Noisy(tokens())) and not is_pure_collator(DataCollatorForLanguageModeling(tokens()))


# ---------------------------------------------------------------------------------------------------------- subclasses
def test_overrides_of_the_reference_s_methods_take_effect() -> None:
    class Every(DataCollatorForLanguageModeling):
        def torch_mask_tokens(self, inputs: Any, special_tokens_mask: Any = None) -> Any:  # type: ignore[override]
            return inputs * 0, inputs

        def numpy_call(self, features: Any) -> Any:
            return {"mine": np.zeros(1)}

    batch = Every(tokens())([{"input_ids": [5, 6]}])
    assert batch["input_ids"].tolist() == [[0, 0]] and batch["labels"].tolist() == [[5, 6]]
    assert list(Every(tokens())([{"input_ids": [5]}], return_tensors="np")) == ["mine"]
