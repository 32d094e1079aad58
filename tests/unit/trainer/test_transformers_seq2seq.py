"""Seq2SeqTrainer and the collators with real models and tokenizers of transformers, held against its own."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.support.seq2seq import PAD, WORDS, rows, seq2seq_trainer, t5
from trainer_lib import (
    DataCollatorForLanguageModeling,
    DataCollatorForSeq2Seq,
    DataCollatorWithPadding,
    Seq2SeqTrainer,
    default_data_collator,
)
from trainer_lib.errors import ConfigError

ROWS = rows(7)


def _tokenizer(**settings: Any) -> Any:
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from transformers import PreTrainedTokenizerFast

    names = ["<pad>", "</s>", "<mask>", *(f"w{number}" for number in range(3, 40))]
    model = Tokenizer(WordLevel({name: number for number, name in enumerate(names)}, unk_token="</s>"))
    special: Any = {"pad_token": "<pad>", "eos_token": "</s>", "mask_token": "<mask>"}
    fast: Any = PreTrainedTokenizerFast
    return fast(tokenizer_object=model, **special, **settings)


def _trainer(folder: Path, model: Any = None, **given: Any) -> Any:
    model = t5() if model is None else model
    tokens = _tokenizer()
    return seq2seq_trainer(
        folder,
        model,
        processing_class=tokens,
        data_collator=DataCollatorForSeq2Seq(tokens, model=model),
        **given,
    )


def _theirs(folder: Path, model: Any, **given: Any) -> Any:
    """The same Trainer, of transformers."""
    import transformers

    settings: dict[str, Any] = {
        "predict_with_generate": True,
        "generation_max_length": 8,
        "use_cpu": True,
        "per_device_eval_batch_size": 3,
        "report_to": "none",
        "disable_tqdm": True,
    }
    args = transformers.Seq2SeqTrainingArguments(str(folder), **{**settings, **given})
    tokens = _tokenizer()
    collate = transformers.DataCollatorForSeq2Seq(tokens, model=model)
    return transformers.Seq2SeqTrainer(model, args, data_collator=collate, processing_class=tokens)


def _generated(model: Any, row: dict[str, list[int]], **settings: Any) -> list[int]:
    tokens: list[int] = model.eval().generate(input_ids=torch.tensor([row["input_ids"]]), **settings)[0].tolist()
    return tokens


@pytest.mark.parametrize("beams", [1, 3])
def test_predictions_are_those_of_generate_row_by_row(tmp_path: Path, beams: int) -> None:
    model = t5()
    found = _trainer(tmp_path, model, generation_num_beams=beams).predict(ROWS)
    assert found.predictions.shape == (7, 8)
    for row, tokens in zip(ROWS, found.predictions, strict=True):
        alone = _generated(model, row, max_length=8, num_beams=beams)
        assert tokens.tolist() == [*alone, *[PAD] * (8 - len(alone))]


@pytest.mark.filterwarnings("ignore")  # theirs
@pytest.mark.parametrize("per_call", [{}, {"max_length": 8, "num_beams": 2}, {"max_new_tokens": 4}])
def test_predictions_and_labels_are_those_of_transformers_own_trainer(tmp_path: Path, per_call: dict[str, Any]) -> None:
    model = t5()
    model.generation_config.max_length = 8
    theirs = _theirs(tmp_path / "theirs", model).predict(ROWS, **per_call)
    ours = _trainer(tmp_path / "ours", model).predict(ROWS, **per_call)
    width = ours.predictions.shape[1]
    assert np.array_equal(theirs.predictions[:, :width], ours.predictions)
    assert set(theirs.predictions[:, width:].reshape(-1).tolist()) <= {PAD}
    # Batch by batch theirs takes the mean of micro-batch means, ours of tokens: losses are not compared.
    seen = min(width, theirs.label_ids.shape[1])
    assert np.array_equal(theirs.label_ids[:, :seen], ours.label_ids[:, :seen])


def test_decoder_inputs_made_from_labels_are_kept_from_generation(tmp_path: Path) -> None:
    """The collator adds them (it was given the model); continuing them would leak the answer."""
    with_decoder_inputs = _trainer(tmp_path, t5()).predict(ROWS).predictions
    collate = DataCollatorForSeq2Seq(_tokenizer())
    without = seq2seq_trainer(tmp_path, t5(), processing_class=_tokenizer(), data_collator=collate)
    assert np.array_equal(with_decoder_inputs, without.predict(ROWS).predictions)


def test_a_decoder_prompt_of_ones_own_is_continued(tmp_path: Path) -> None:
    prompted = [{"input_ids": row["input_ids"], "decoder_input_ids": [PAD, 5, 6]} for row in ROWS]
    equal = [{**row, "input_ids": (row["input_ids"] * 3)[:5]} for row in prompted]
    trainer = seq2seq_trainer(tmp_path, t5(), processing_class=_tokenizer(), data_collator=default_data_collator)
    assert trainer.predict(equal).predictions[:, :3].tolist() == [[PAD, 5, 6]] * 7


def test_a_generation_configuration_comes_as_object_mapping_file_or_folder(tmp_path: Path) -> None:
    from transformers import GenerationConfig

    make: Any = GenerationConfig
    config = make(max_length=5, num_beams=2, pad_token_id=PAD, eos_token_id=1, decoder_start_token_id=PAD)
    config.save_pretrained(tmp_path / "folder")
    for given in (config, config.to_dict(), tmp_path / "folder", str(tmp_path / "folder" / "generation_config.json")):
        trainer = _trainer(tmp_path, generation_config=given, generation_max_length=None)
        assert trainer.model.generation_config.num_beams == 2
        assert trainer.predict(ROWS[:2]).predictions.shape == (2, 5)
        assert trainer.predict(ROWS[:2], max_length=6).predictions.shape == (2, 6)
    assert trainer.model.generation_config is not config


def test_a_generation_configuration_holds_for_models_made_anew(tmp_path: Path) -> None:
    from transformers import GenerationConfig

    make: Any = GenerationConfig
    config = make(max_length=5, pad_token_id=PAD, eos_token_id=1, decoder_start_token_id=PAD)
    trainer = _trainer(tmp_path, generation_config=config, generation_max_length=None, train_dataset=ROWS, max_steps=1)
    trainer.model_init, trainer.model = t5, t5()
    trainer.train()
    assert trainer.predict(ROWS[:2]).predictions.shape == (2, 5)


@pytest.mark.filterwarnings("ignore:.*GenerationConfig.*")
def test_a_generation_configuration_that_cannot_be_used_is_refused(tmp_path: Path) -> None:
    from transformers import GenerationConfig

    with pytest.raises(ConfigError, match=r"generation_config = .*nowhere: The generation settings cannot be used"):
        _trainer(tmp_path, generation_config=str(tmp_path / "nowhere"))
    with pytest.raises(ConfigError, match=r'generation_config\.num_beam = 2: .*"num_beams"'):
        _trainer(tmp_path, generation_config={"num_beam": 2})
    make: Any = GenerationConfig
    with pytest.raises(ConfigError, match="GenerationConfig: The generation settings cannot be used"):
        _trainer(tmp_path, generation_config=make(do_sample=False, temperature=0.5))


def test_the_calls_limit_beats_the_configurations(tmp_path: Path) -> None:
    model = t5()
    model.generation_config.max_new_tokens = 3
    model.generation_config.eos_token_id = None
    trainer = _trainer(tmp_path, model, generation_max_length=None)
    assert trainer.predict(ROWS[:2]).predictions.shape == (2, 4)
    assert trainer.predict(ROWS[:2], max_length=7).predictions.shape == (2, 7)
    assert trainer.predict(ROWS[:2], max_new_tokens=5).predictions.shape == (2, 6)


def test_a_decoder_only_model_continues_its_input(tmp_path: Path) -> None:
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    kind: Any = GPT2Config
    config = kind(
        vocab_size=WORDS, n_positions=32, n_embd=16, n_layer=1, n_head=2, bos_token_id=1, eos_token_id=1, pad_token_id=0
    )
    model: Any = GPT2LMHeadModel(config)
    equal = [{"input_ids": [2, 3, 4], "labels": [2, 3, 4]} for _ in range(4)]
    trainer = _trainer(tmp_path, model, generation_max_length=None)
    found = trainer.predict(equal, max_new_tokens=2)
    assert found.predictions.shape == (4, 5)
    assert found.predictions[:, :3].tolist() == [[2, 3, 4]] * 4


def test_training_with_accumulation_weighs_every_target_token_alike(tmp_path: Path) -> None:
    """T5 takes any keyword and ignores the number of items: its means must be weighted by their tokens."""
    states = []
    for micro, accumulation in ((4, 1), (1, 4)):
        trainer = _trainer(
            tmp_path / str(micro),
            t5(),
            train_dataset=ROWS[:4],
            per_device_train_batch_size=micro,
            gradient_accumulation_steps=accumulation,
            max_steps=3,
            optim="sgd",
            learning_rate=0.1,
        )
        trainer.train()
        states.append(trainer.model.state_dict())
    for name, value in states[0].items():
        torch.testing.assert_close(states[1][name], value, rtol=1e-4, atol=1e-6)


def test_everything_the_reference_class_has_exists_here() -> None:
    import transformers

    theirs = {name for name in vars(transformers.Seq2SeqTrainer) if not name.startswith("__")}
    assert theirs <= set(dir(Seq2SeqTrainer))


# ----------------------------------------------------------------------------------- collators against transformers'
FEATURES = [{"input_ids": [5, 6, 7], "labels": [8, 9]}, {"input_ids": [5], "labels": [8, 9, 10, 11]}]


def _same(one: Any, other: Any) -> None:
    assert set(one) == set(other)
    for name in one:
        assert torch.equal(torch.as_tensor(one[name]), torch.as_tensor(other[name])), name


@pytest.mark.parametrize("side", ["right", "left"])
@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"pad_to_multiple_of": 8},
        {"padding": "max_length", "max_length": 6},
        {"padding": "longest", "label_pad_token_id": 0},
    ],
)
def test_sequence_to_sequence_batches_are_transformers_own(side: str, settings: Any) -> None:
    from transformers import DataCollatorForSeq2Seq as Theirs

    tokens, model = _tokenizer(padding_side=side), t5()
    for given in (FEATURES, [{"input_ids": [3, 4], "label": [5]}], [{"input_ids": [3]}]):
        theirs = Theirs(tokens, model=model, **settings)([dict(row) for row in given])
        ours = DataCollatorForSeq2Seq(tokens, model=model, **settings)([dict(row) for row in given])
        _same(ours, {name: value for name, value in theirs.items() if value is not None})


def test_labels_as_arrays_and_tensors_are_padded_like_lists() -> None:
    tokens = _tokenizer()
    expected = DataCollatorForSeq2Seq(tokens)([dict(row) for row in FEATURES])["labels"]
    for make in (np.array, torch.tensor):
        given = [{"input_ids": row["input_ids"], "labels": make(row["labels"])} for row in FEATURES]
        assert torch.equal(DataCollatorForSeq2Seq(tokens)(given)["labels"], expected)


@pytest.mark.parametrize("settings", [{}, {"pad_to_multiple_of": 4}, {"padding": "max_length", "max_length": 6}])
def test_padded_batches_are_transformers_own(settings: Any) -> None:
    from transformers import DataCollatorWithPadding as Theirs

    for label in ("label", "labels"):
        given = [{"input_ids": [5, 6, 7], label: 1}, {"input_ids": [5], label: 0}]
        ours = DataCollatorWithPadding(_tokenizer(), **settings)([dict(row) for row in given])
        _same(ours, Theirs(_tokenizer(), **settings)([dict(row) for row in given]))


@pytest.mark.parametrize("settings", [{}, {"pad_to_multiple_of": 4}])
def test_batches_for_causal_models_are_transformers_own(settings: Any) -> None:
    from transformers import DataCollatorForLanguageModeling as Theirs

    for given in ([{"input_ids": [5, 6, 7]}, {"input_ids": [5]}], [[5, 6], [7]]):
        ours = DataCollatorForLanguageModeling(_tokenizer(), mlm=False, **settings)(list(given))
        theirs = Theirs(_tokenizer(), mlm=False, **settings)(list(given))
        if "attention_mask" not in theirs:  # of bare lists theirs makes none, and padding is attended to
            assert torch.equal(ours.pop("attention_mask"), (ours["input_ids"] != PAD).long())
        _same(ours, theirs)


@pytest.mark.parametrize(
    "given",
    [
        [{"a": 1, "b": 0.5, "label": 2}, {"a": 2, "b": 1.5, "label": 0}],
        [{"x": [1, 2], "label_ids": [0, 1]}, {"x": [3, 4], "label_ids": [1, 1]}],
        [{"x": np.ones(2, np.float32), "label": 0.5}, {"x": np.zeros(2, np.float32), "label": 1.5}],
        [{"x": torch.ones(2), "labels": torch.tensor(1), "name": "a"}] * 2,
    ],
)
def test_default_batches_are_transformers_own(given: Any) -> None:
    from transformers import default_data_collator as theirs

    _same(default_data_collator([dict(row) for row in given]), theirs([dict(row) for row in given]))
