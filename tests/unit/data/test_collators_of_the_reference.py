"""Our collators and transformers' on equal input: tensors and arrays, every export of the reference."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

import trainer_lib
from trainer_lib import (
    DataCollatorForLanguageModeling,
    DataCollatorForPermutationLanguageModeling,
    DataCollatorWithFlattening,
)
from trainer_lib.errors import ConfigError, DataError

transformers = pytest.importorskip("transformers")
MASK = 2
KINDS = ["pt", "np"]
EXPORTS = (
    *("DataCollatorForLanguageModeling", "DataCollatorForMultipleChoice", "DataCollatorForPermutationLanguageModeling"),
    *("DataCollatorForSeq2Seq", "DataCollatorForTokenClassification", "DataCollatorWithFlattening"),
    *("DataCollatorWithPadding", "DefaultDataCollator", "default_data_collator", "DataCollator"),
)


def tokens(**settings: Any) -> Any:
    """A fast tokenizer of 40 words."""
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel

    names = ["<pad>", "</s>", "<mask>", *(f"w{number}" for number in range(3, 40))]
    model = Tokenizer(WordLevel({name: number for number, name in enumerate(names)}, unk_token="</s>"))
    fast: Any = transformers.PreTrainedTokenizerFast
    special = {"pad_token": "<pad>", "eos_token": "</s>", "mask_token": "<mask>"}
    return fast(tokenizer_object=model, **special, **settings)


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


def both(name: str, *given: Any, features: list[Any], kind: str, **settings: Any) -> tuple[Any, Any]:
    """The batches of our collator of this name and of the reference's."""
    made = [getattr(lib, name)(*given, **settings, return_tensors=kind) for lib in (trainer_lib, transformers)]
    return tuple(collate([dict(row) for row in features]) for collate in made)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("side", ["right", "left"])
@pytest.mark.parametrize("label", ["labels", "label", None])
def test_token_classification(kind: str, side: str, label: str | None) -> None:
    features: list[Any] = [{"input_ids": [5, 6, 7]}, {"input_ids": [8]}]
    if label is not None:
        features = [{**row, label: list(range(len(row["input_ids"])))} for row in features]
    name = "DataCollatorForTokenClassification"
    for settings in ({}, {"pad_to_multiple_of": 4}, {"label_pad_token_id": -1}):
        assert_same(*both(name, tokens(padding_side=side), features=features, kind=kind, **settings))


@pytest.mark.parametrize("kind", KINDS)
def test_sequence_to_sequence_and_padding(kind: str) -> None:
    features = [{"input_ids": [5, 6, 7], "labels": [8, 9]}, {"input_ids": [5], "labels": [8, 9, 10]}]
    assert_same(*both("DataCollatorForSeq2Seq", tokens(), features=features, kind=kind, pad_to_multiple_of=4))
    plain = [{"input_ids": [5, 6, 7], "label": 1}, {"input_ids": [5], "label": 0}]
    assert_same(*both("DataCollatorWithPadding", tokens(), features=plain, kind=kind))


def test_several_choices() -> None:
    features = [
        {"input_ids": [[5, 6], [7]], "labels": 1},
        {"input_ids": [[8], [9, 10, 11]], "labels": 0},
    ]
    assert_same(*both("DataCollatorForMultipleChoice", tokens(), features=features, kind="pt"))
    ours = trainer_lib.DataCollatorForMultipleChoice(tokens())(features, return_tensors="np")
    assert ours["input_ids"].shape == (2, 2, 3) and isinstance(ours["labels"], np.ndarray)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    "features",
    [
        [{"a": 1, "label": 2}, {"a": 2, "label": 0}],
        [{"x": [1, 2], "label_ids": [0, 1]}, {"x": [3, 4], "label_ids": [1, 1]}],
        [{"x": np.ones(2, np.float32), "label": 0.5}, {"x": np.zeros(2, np.float32), "label": 1.5}],
    ],
)
def test_the_default_collator_as_an_object(kind: str, features: list[Any]) -> None:
    assert_same(*both("DefaultDataCollator", features=features, kind=kind))
    ours = trainer_lib.default_data_collator(features, return_tensors=kind)
    assert_same(ours, transformers.default_data_collator(features, return_tensors=kind))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"return_position_ids": False},
        {"return_flash_attn_kwargs": True, "return_seq_idx": True},
        {"separator_id": -7, "position_ids_start": 2},
    ],
)
def test_flattening(kind: str, settings: Any) -> None:
    features = [{"input_ids": [5, 6, 7], "labels": [5, -100, 7]}, {"input_ids": [8], "labels": [8]}]
    unlabelled = [{"input_ids": row["input_ids"]} for row in features]
    for given in (features, unlabelled):
        assert_same(*both("DataCollatorWithFlattening", features=given, kind=kind, **settings))
    ours = DataCollatorWithFlattening(**settings)(features, separator_id=3)
    assert ours["labels"][0, 0] == 3


@pytest.mark.parametrize("kind", KINDS)
def test_causal_batches_as_arrays(kind: str) -> None:
    features = [{"input_ids": [5, 6, 7]}, {"input_ids": [5]}]
    assert_same(*both("DataCollatorForLanguageModeling", tokens(), features=features, kind=kind, mlm=False))


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


def test_whole_words_need_offsets_and_a_masked_model() -> None:
    collate = DataCollatorForLanguageModeling(tokens(), whole_word_mask=True)
    with pytest.raises(DataError, match="offset_mapping"):
        collate([{"input_ids": [5, 6]}])
    with pytest.raises(ConfigError, match="whole_word_mask"):
        DataCollatorForLanguageModeling(tokens(), whole_word_mask=True, mlm=False)


@pytest.mark.parametrize("kind", KINDS)
def test_permuted_batches_have_the_shapes_and_rules_of_the_reference(kind: str) -> None:
    features = [{"input_ids": [5, 6, 7, 8, 9, 10, 11, 1]}, {"input_ids": [12, 13, 14, 15, 16, 17, 18, 1]}]
    torch.manual_seed(0)
    ours, theirs = both("DataCollatorForPermutationLanguageModeling", tokens(), features=features, kind=kind)
    assert set(ours) == set(theirs)
    for name, value in theirs.items():
        assert type(ours[name]) is type(value) and tuple(ours[name].shape) == tuple(value.shape)
    for batch in (ours, theirs):
        ids, labels = torch.as_tensor(batch["input_ids"]), torch.as_tensor(batch["labels"])
        mask = torch.as_tensor(batch["perm_mask"])
        targets = labels != -100
        assert (ids[targets] == MASK).all() and not targets[:, -1].any()
        assert (mask[:, :, :][~targets[:, None, :].expand_as(mask)] == 0).all()  # only targets are hidden
        assert all((mask[row].diagonal()[targets[row]] == 1).all() for row in range(2))  # and each from itself
        assert torch.equal(torch.as_tensor(batch["target_mapping"]), torch.eye(8).repeat(2, 1, 1))


def test_a_permuted_batch_needs_an_even_length_and_a_mask_token() -> None:
    collate = DataCollatorForPermutationLanguageModeling(tokens())
    with pytest.raises(DataError, match="even"):
        collate([{"input_ids": [5, 6, 7]}])
    unmasked = tokens()
    unmasked.mask_token = None
    with pytest.raises(ConfigError, match="no mask token"):
        DataCollatorForPermutationLanguageModeling(unmasked)


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


def test_another_kind_of_tensor_is_refused() -> None:
    with pytest.raises(DataError, match=r'return_tensors = tf: .*Give "pt" for torch or "np"'):
        trainer_lib.default_data_collator([{"a": 1}], return_tensors="tf")
