"""Seq2SeqTrainer with a model that owes nothing to transformers, and with T5 beside the reference's own."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from tests.support.seq2seq import END, PAD, WORDS, Copier, Tokens, rows, seq2seq_trainer, t5
from tests.support.tiny_models import masking_tokenizer
from tests.support.toys import Classifier, classification_rows
from trainer_lib import (
    DataCollatorForSeq2Seq,
    Seq2SeqTrainer,
    Seq2SeqTrainingArguments,
    Trainer,
    TrainingArguments,
    default_data_collator,
)
from trainer_lib.errors import ConfigError

ROWS = rows(10)
ROWS7 = rows(7)
ANSWERED = [{"input_ids": [5, 6, 7], "labels": [8, 9]}, {"input_ids": [5], "labels": [8, 9, 10, 11]}]


def test_predictions_are_what_generate_gives_padded_to_the_common_length(tmp_path: Path) -> None:
    model = Copier()
    one = seq2seq_trainer(tmp_path, model)
    found = one.predict(ROWS)
    assert found.predictions.shape == found.label_ids.shape == (10, 8)
    for row, generated, labels in zip(ROWS, found.predictions, found.label_ids, strict=True):
        assert generated.tolist() == [*row["input_ids"], *[PAD] * (8 - len(row["input_ids"]))]
        assert labels[: len(row["labels"])].tolist() == row["labels"]
        assert set(labels[len(row["labels"]) :].tolist()) <= {-100, PAD}
    assert [each["batch"][0] for each in model.asked] == [3, 3, 3, 1]
    plain = seq2seq_trainer(tmp_path, model, predict_with_generate=False).predict(ROWS).metrics["test_loss"]
    assert found.metrics["test_loss"] == pytest.approx(plain, rel=1e-6)
    unlabelled = one.predict([{"input_ids": row["input_ids"]} for row in ROWS])
    assert np.array_equal(unlabelled.predictions, found.predictions)
    assert unlabelled.label_ids is None and "test_loss" not in unlabelled.metrics


def test_metrics_see_generated_tokens_and_labels_with_minus_100_where_the_collator_padded(tmp_path: Path) -> None:
    def compute(given: Any) -> dict[str, float]:
        assert (given.predictions != -100).all()
        # rows 0, 1, 2 have 3, 4 and 5 label tokens: the collator pads to 5 with -100, the rest is the pad token
        assert given.label_ids[0].tolist()[3:] == [-100, -100, PAD, PAD, PAD]
        return {"exact": 1.0}

    metrics = seq2seq_trainer(tmp_path, Copier(), eval_dataset=ROWS, compute_metrics=compute).evaluate()
    assert metrics["eval_exact"] == 1.0 and "eval_loss" in metrics


def test_generation_arguments_hold_for_one_call_even_if_it_fails_and_for_every_set(tmp_path: Path) -> None:
    model = Copier()
    one = seq2seq_trainer(tmp_path, model, generation_num_beams=2, compute_metrics=lambda p: {"n": len(p.predictions)})
    with pytest.raises(ConfigError, match=r"top_k = 3: Copier\.generate does not take this setting"):
        one.predict(ROWS[:1], top_k=3)
    assert one.predict(ROWS[:1], max_length=4, num_beams=3).predictions.shape == (1, 4)
    assert one.predict(ROWS[:1]).predictions.shape == (1, 8)
    one.args.generation_max_length = 5
    assert one.predict(ROWS[:1], num_beams=None).predictions.shape == (1, 5)
    metrics = one.evaluate({"a": ROWS[:2], "b": ROWS[2:3]}, max_length=6)
    assert (metrics["eval_a_n"], metrics["eval_b_n"]) == (2, 1)
    asked = [(each["max_length"], each["num_beams"]) for each in model.asked]
    assert asked == [(4, 3), (8, 2), (5, 2), (6, 2), (6, 2)]


def test_evaluations_during_training_generate_too(tmp_path: Path) -> None:
    given: dict[str, Any] = {"train_dataset": ROWS, "eval_dataset": ROWS[:3], "eval_strategy": "epoch"}
    given["compute_metrics"] = lambda p: {"width": p.predictions.shape[1]}
    one = seq2seq_trainer(tmp_path, Copier(), num_train_epochs=2, **given)
    one.train()
    widths = [entry["eval_width"] for entry in one.state.log_history if "eval_width" in entry]
    assert widths == [8, 8] and len(one.model.asked) == 2


def test_only_the_loss_when_that_is_all_that_is_asked(tmp_path: Path) -> None:
    model = Copier()
    found = seq2seq_trainer(tmp_path, model, prediction_loss_only=True).predict(ROWS)
    assert found.predictions is None and found.metrics["test_loss"] > 0
    assert seq2seq_trainer(tmp_path, model, eval_dataset=ROWS).evaluate()["eval_loss"] > 0  # no metrics: no generation
    assert model.asked == []


def test_what_pads_follows_from_the_length_and_the_tokens_there_are(tmp_path: Path) -> None:
    class Endless(Tokens):
        pad_token_id = None

    unbounded = seq2seq_trainer(tmp_path, Copier(), generation_max_length=None).predict(ROWS).predictions
    assert unbounded.shape == (10, 7) and unbounded[9].tolist()[-2:] != [PAD, PAD]
    assert unbounded[0].tolist() == [*ROWS[0]["input_ids"], PAD, PAD, -100, -100]
    endless = seq2seq_trainer(tmp_path, Copier(), processing_class=Endless()).predict(ROWS[:1]).predictions
    assert endless[0].tolist() == [*ROWS[0]["input_ids"], *[END] * 5]
    with pytest.raises(ConfigError, match=r"pad_token_id: Generated sequences have to be padded"):
        seq2seq_trainer(tmp_path, Copier(), processing_class=None).predict(ROWS)


class Generating(Copier):
    """Has another `generate`."""

    def __init__(self, generate: Any) -> None:
        super().__init__()
        self.generate = generate  # type: ignore[method-assign]


def test_a_generate_of_another_signature_is_served_or_refused(tmp_path: Path) -> None:
    def short(input_ids: torch.Tensor) -> torch.Tensor:
        return input_ids

    def other(tokens: torch.Tensor) -> Any:
        return {"sequences": tokens}

    def sequences(tokens: torch.Tensor) -> Any:
        return SimpleNamespace(sequences=tokens)

    def twice(input_ids: torch.Tensor, **settings: Any) -> torch.Tensor:
        return input_ids.repeat(2, 1)

    given: dict[str, Any] = {"generation_max_length": None}
    with pytest.raises(ConfigError, match=r"predict_with_generate = True: Classifier has no generate\(\)"):
        seq2seq_trainer(tmp_path, Classifier(), train_dataset=classification_rows(4))
    assert seq2seq_trainer(tmp_path, Classifier(), predict_with_generate=False)
    with pytest.raises(ConfigError, match=r"max_length = 8: Generating.generate does not take this setting"):
        seq2seq_trainer(tmp_path, Generating(short))
    for generate in (short, sequences):
        one = seq2seq_trainer(tmp_path, Generating(generate), **given)
        assert one.predict(ROWS[:2]).predictions.shape == (2, 4)
    with pytest.raises(ConfigError, match="returned dict for 1 samples"):
        seq2seq_trainer(tmp_path, Generating(other), **given).predict(ROWS[:1])
    with pytest.raises(ConfigError, match=r"s generate returned \(6, 5\) for 3 samples.*num_return_sequences"):
        seq2seq_trainer(tmp_path, Generating(twice)).predict(ROWS)


def test_overriding_the_prediction_step_takes_effect(tmp_path: Path) -> None:
    class Mine(Seq2SeqTrainer):
        def prediction_step(self, *args: Any, **kwargs: Any) -> Any:
            loss, generated, labels = super().prediction_step(*args, max_length=4, **kwargs)
            return loss, generated + 1, labels

    found = seq2seq_trainer(tmp_path, Copier(), cls=Mine).predict(ROWS[:1])
    assert found.predictions[0].tolist() == [*(token + 1 for token in ROWS[0]["input_ids"]), PAD + 1]


def test_generation_settings_have_their_trainer(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    assert isinstance(Seq2SeqTrainer(Copier()).args, Seq2SeqTrainingArguments)
    with pytest.raises(ConfigError, match="args = TrainingArguments: The arguments have no generation settings"):
        Seq2SeqTrainer(Copier(), TrainingArguments(str(tmp_path), use_cpu=True))
    Trainer(Copier(), Seq2SeqTrainingArguments(str(tmp_path), use_cpu=True))
    assert "has no effect" not in caplog.text
    given: dict[str, Any] = {"predict_with_generate": True, "generation_num_beams": 2}
    Trainer(Copier(), Seq2SeqTrainingArguments(str(tmp_path), use_cpu=True, **given))
    for name, value in given.items():
        assert f"{name} = {value} has no effect without Seq2SeqTrainer." in caplog.text


def _trainer(folder: Path, model: Any = None, **given: Any) -> Any:
    model, tokens = t5() if model is None else model, masking_tokenizer()
    collate = DataCollatorForSeq2Seq(tokens, model=model)
    return seq2seq_trainer(folder, model, processing_class=tokens, data_collator=collate, **given)


def _theirs(folder: Path, model: Any, **given: Any) -> Any:
    """The same Trainer, of transformers."""
    import transformers

    settings: dict[str, Any] = {"use_cpu": True, "per_device_eval_batch_size": 3, "report_to": "none"}
    settings |= {"predict_with_generate": True, "generation_max_length": 8, "disable_tqdm": True}
    args = transformers.Seq2SeqTrainingArguments(str(folder), **{**settings, **given})
    tokens = masking_tokenizer()
    collate = transformers.DataCollatorForSeq2Seq(tokens, model=model)
    return transformers.Seq2SeqTrainer(model, args, data_collator=collate, processing_class=tokens)


@pytest.mark.filterwarnings("ignore")  # theirs
@pytest.mark.parametrize("per_call", [{}, {"max_length": 8, "num_beams": 2}, {"max_new_tokens": 4}])
def test_predictions_and_labels_are_those_of_transformers_own_trainer(tmp_path: Path, per_call: dict[str, Any]) -> None:
    model = t5()
    model.generation_config.max_length = 8
    theirs = _theirs(tmp_path / "theirs", model).predict(ROWS7, **per_call)
    ours = _trainer(tmp_path / "ours", model).predict(ROWS7, **per_call)
    width = ours.predictions.shape[1]
    assert np.array_equal(theirs.predictions[:, :width], ours.predictions)
    assert set(theirs.predictions[:, width:].reshape(-1).tolist()) <= {PAD}
    # Batch by batch theirs takes the mean of micro-batch means, ours of tokens: losses are not compared.
    seen = min(width, theirs.label_ids.shape[1])
    assert np.array_equal(theirs.label_ids[:, :seen], ours.label_ids[:, :seen])


def test_a_decoder_prompt_of_ones_own_is_continued(tmp_path: Path) -> None:
    prompted = [{"input_ids": row["input_ids"], "decoder_input_ids": [PAD, 5, 6]} for row in ROWS7]
    equal = [{**row, "input_ids": (row["input_ids"] * 3)[:5]} for row in prompted]
    one = seq2seq_trainer(tmp_path, t5(), processing_class=masking_tokenizer(), data_collator=default_data_collator)
    assert one.predict(equal).predictions[:, :3].tolist() == [[PAD, 5, 6]] * 7


def test_a_generation_configuration_of_every_form_holds_for_new_models_too(
    tmp_path: Path,
) -> None:
    from transformers import GenerationConfig

    make: Any = GenerationConfig
    config = make(max_length=5, num_beams=2, pad_token_id=PAD, eos_token_id=1, decoder_start_token_id=PAD)
    config.save_pretrained(tmp_path / "folder")
    for given in (config, config.to_dict(), tmp_path / "folder", str(tmp_path / "folder" / "generation_config.json")):
        one = _trainer(tmp_path, generation_config=given, generation_max_length=None)
        assert one.model.generation_config.num_beams == 2 and one.predict(ROWS7[:2]).predictions.shape == (2, 5)
        assert one.predict(ROWS7[:2], max_length=6).predictions.shape == (2, 6)
    assert one.model.generation_config is not config
    given = {"generation_config": config, "generation_max_length": None, "train_dataset": ROWS7, "max_steps": 1}
    one = _trainer(tmp_path, **given)
    one.model_init, one.model = t5, t5()
    one.train()
    assert one.predict(ROWS7[:2]).predictions.shape == (2, 5)


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
    one = _trainer(tmp_path, model, generation_max_length=None)
    assert one.predict(ROWS7[:2]).predictions.shape == (2, 4)
    assert one.predict(ROWS7[:2], max_length=7).predictions.shape == (2, 7)
    assert one.predict(ROWS7[:2], max_new_tokens=5).predictions.shape == (2, 6)


def test_a_decoder_only_model_continues_its_input(tmp_path: Path) -> None:
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    kind: Any = GPT2Config
    config = kind(
        vocab_size=WORDS, n_positions=32, n_embd=16, n_layer=1, n_head=2, bos_token_id=1, eos_token_id=1, pad_token_id=0
    )
    model: Any = GPT2LMHeadModel(config)
    equal = [{"input_ids": [2, 3, 4], "labels": [2, 3, 4]} for _ in range(4)]
    found = _trainer(tmp_path, model, generation_max_length=None).predict(equal, max_new_tokens=2)
    assert found.predictions.shape == (4, 5) and found.predictions[:, :3].tolist() == [[2, 3, 4]] * 4


# ----------------------------------------------------------------------------------- collators against transformers'


def test_labels_as_arrays_and_tensors_are_padded_like_lists() -> None:
    tokens = masking_tokenizer()
    expected = DataCollatorForSeq2Seq(tokens)([dict(row) for row in ANSWERED])["labels"]
    for make in (np.array, torch.tensor):
        given = [{"input_ids": row["input_ids"], "labels": make(row["labels"])} for row in ANSWERED]
        assert torch.equal(DataCollatorForSeq2Seq(tokens)(given)["labels"], expected)
