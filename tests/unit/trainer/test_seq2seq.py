"""Seq2SeqTrainer with a model that owes nothing to transformers, and what is refused before anything is computed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.support.seq2seq import END, PAD, Copier, Tokens, rows, seq2seq_trainer
from tests.support.toys import Classifier, classification_rows
from trainer_lib import Seq2SeqTrainer, Seq2SeqTrainingArguments, Trainer, TrainingArguments
from trainer_lib.errors import ConfigError

ROWS = rows(10)


def test_predictions_are_what_generate_gives_padded_to_the_common_length(tmp_path: Path) -> None:
    model = Copier()
    found = seq2seq_trainer(tmp_path, model).predict(ROWS)
    assert found.predictions.shape == found.label_ids.shape == (10, 8)
    for row, generated, labels in zip(ROWS, found.predictions, found.label_ids, strict=True):
        assert generated.tolist() == [*row["input_ids"], *[PAD] * (8 - len(row["input_ids"]))]
        assert labels[: len(row["labels"])].tolist() == row["labels"]
        assert set(labels[len(row["labels"]) :].tolist()) <= {-100, PAD}
    assert found.metrics["test_loss"] > 0
    assert [each["batch"][0] for each in model.asked] == [3, 3, 3, 1]


def test_the_loss_beside_generation_is_that_of_a_plain_evaluation(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = Copier()
    generating = seq2seq_trainer(tmp_path, model).predict(ROWS).metrics["test_loss"]
    plain = seq2seq_trainer(tmp_path, model, predict_with_generate=False).predict(ROWS).metrics["test_loss"]
    assert generating == pytest.approx(plain, rel=1e-6)


def test_metrics_see_generated_tokens_and_labels_with_minus_100_where_the_collator_padded(tmp_path: Path) -> None:
    seen: list[Any] = []

    def compute(given: Any) -> dict[str, float]:
        seen.append((np.array(given.predictions), np.array(given.label_ids)))
        return {"exact": 1.0}

    metrics = seq2seq_trainer(tmp_path, Copier(), eval_dataset=ROWS, compute_metrics=compute).evaluate()
    assert metrics["eval_exact"] == 1.0
    assert "eval_loss" in metrics
    ((predictions, labels),) = seen
    assert (predictions != -100).all()
    # rows 0, 1, 2 have 3, 4 and 5 label tokens: the collator pads to 5 with -100, the rest is the pad token
    assert labels[0].tolist()[3:] == [-100, -100, PAD, PAD, PAD]


def test_generation_arguments_hold_for_one_call(tmp_path: Path) -> None:
    model = Copier()
    trainer = seq2seq_trainer(tmp_path, model, generation_num_beams=2)
    assert trainer.predict(ROWS[:1], max_length=4, num_beams=3).predictions.shape == (1, 4)
    assert trainer.predict(ROWS[:1]).predictions.shape == (1, 8)
    trainer.args.generation_max_length = 5
    assert trainer.predict(ROWS[:1], num_beams=None).predictions.shape == (1, 5)
    assert [(each["max_length"], each["num_beams"]) for each in model.asked] == [(4, 3), (8, 2), (5, 2)]


def test_a_call_that_fails_leaves_no_generation_arguments_behind(tmp_path: Path) -> None:
    model = Copier()
    trainer = seq2seq_trainer(tmp_path, model)
    with pytest.raises(ConfigError, match=r"top_k = 3: Copier\.generate does not take this setting"):
        trainer.predict(ROWS[:1], top_k=3)
    assert trainer.predict(ROWS[:1]).predictions.shape == (1, 8)


def test_generation_arguments_reach_every_set_of_a_dict(tmp_path: Path) -> None:
    model = Copier()
    sets = {"a": ROWS[:2], "b": ROWS[2:3]}
    trainer = seq2seq_trainer(tmp_path, model, eval_dataset=sets, compute_metrics=lambda p: {"n": len(p.predictions)})
    metrics = trainer.evaluate(max_length=6)
    assert (metrics["eval_a_n"], metrics["eval_b_n"]) == (2, 1)
    assert [each["max_length"] for each in model.asked] == [6, 6]


def test_evaluations_during_training_generate_too(tmp_path: Path) -> None:
    model = Copier()
    trainer = seq2seq_trainer(
        tmp_path,
        model,
        train_dataset=ROWS,
        eval_dataset=ROWS[:3],
        eval_strategy="epoch",
        num_train_epochs=2,
        compute_metrics=lambda p: {"width": p.predictions.shape[1]},
    )
    trainer.train()
    widths = [entry["eval_width"] for entry in trainer.state.log_history if "eval_width" in entry]
    assert widths == [8, 8]
    assert len(model.asked) == 2


def test_only_the_loss_when_that_is_all_that_is_asked(tmp_path: Path) -> None:
    model = Copier()
    found = seq2seq_trainer(tmp_path, model, prediction_loss_only=True).predict(ROWS)
    assert found.predictions is None
    assert found.metrics["test_loss"] > 0
    assert seq2seq_trainer(tmp_path, model, eval_dataset=ROWS).evaluate()["eval_loss"] > 0  # no metrics: no generation
    assert model.asked == []


def test_without_labels_there_are_predictions_and_no_loss(tmp_path: Path) -> None:
    found = seq2seq_trainer(tmp_path, Copier()).predict([{"input_ids": row["input_ids"]} for row in ROWS])
    assert found.predictions.shape == (10, 8)
    assert found.label_ids is None
    assert "test_loss" not in found.metrics


def test_where_nothing_bounds_the_length_batches_are_padded_with_minus_100(tmp_path: Path) -> None:
    found = seq2seq_trainer(tmp_path, Copier(), generation_max_length=None).predict(ROWS)
    assert found.predictions.shape == (10, 7)
    assert found.predictions[9].tolist()[-2:] != [PAD, PAD]
    assert found.predictions[0].tolist() == [*ROWS[0]["input_ids"], PAD, PAD, -100, -100]


def test_the_end_token_pads_where_there_is_no_pad_token(tmp_path: Path) -> None:
    class Endless(Tokens):
        pad_token_id = None

    found = seq2seq_trainer(tmp_path, Copier(), processing_class=Endless()).predict(ROWS[:1])
    assert found.predictions[0].tolist() == [*ROWS[0]["input_ids"], *[END] * 5]


def test_padding_without_a_token_to_pad_with_is_refused(tmp_path: Path) -> None:
    trainer = seq2seq_trainer(tmp_path, Copier(), processing_class=None)
    with pytest.raises(ConfigError, match=r"pad_token_id: Generated sequences have to be padded"):
        trainer.predict(ROWS)


def test_a_model_that_cannot_generate_is_refused_before_the_first_step(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"predict_with_generate = True: Classifier has no generate\(\)"):
        seq2seq_trainer(tmp_path, Classifier(), train_dataset=classification_rows(4))
    assert seq2seq_trainer(tmp_path, Classifier(), predict_with_generate=False)


def test_a_setting_that_generate_does_not_take_is_refused_before_the_first_step(tmp_path: Path) -> None:
    class Short(Copier):
        def generate(self, input_ids: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
            return input_ids

    with pytest.raises(ConfigError, match=r"max_length = 8: Short.generate does not take this setting"):
        seq2seq_trainer(tmp_path, Short())
    found = seq2seq_trainer(tmp_path, Short(), generation_max_length=None).predict(ROWS[:2])
    assert found.predictions.shape == (2, 4)


def test_several_sequences_per_sample_are_refused(tmp_path: Path) -> None:
    class Twice(Copier):
        def generate(self, input_ids: torch.Tensor, **settings: Any) -> torch.Tensor:  # type: ignore[override]
            return input_ids.repeat(2, 1)

    with pytest.raises(ConfigError, match=r"s generate returned \(6, 5\) for 3 samples.*num_return_sequences"):
        seq2seq_trainer(tmp_path, Twice()).predict(ROWS)


def test_a_generate_whose_parameter_has_another_name_gets_the_input(tmp_path: Path) -> None:
    class Other(Copier):
        def generate(self, tokens: torch.Tensor) -> Any:  # type: ignore[override]
            return {"sequences": tokens}

    class Sequences(Other):
        def generate(self, tokens: torch.Tensor) -> Any:  # type: ignore[override]
            return type("Output", (), {"sequences": tokens})()

    given: dict[str, Any] = {"generation_max_length": None}
    assert seq2seq_trainer(tmp_path, Sequences(), **given).predict(ROWS[:1]).predictions.shape == (1, 3)
    with pytest.raises(ConfigError, match="returned dict for 1 samples"):
        seq2seq_trainer(tmp_path, Other(), **given).predict(ROWS[:1])


def test_overriding_the_prediction_step_takes_effect(tmp_path: Path) -> None:
    class Mine(Seq2SeqTrainer):
        def prediction_step(self, *args: Any, **kwargs: Any) -> Any:
            loss, generated, labels = super().prediction_step(*args, max_length=4, **kwargs)
            return loss, generated + 1, labels

    found = seq2seq_trainer(tmp_path, Copier(), cls=Mine).predict(ROWS[:1])
    assert found.predictions[0].tolist() == [*(token + 1 for token in ROWS[0]["input_ids"]), PAD + 1]


def test_arguments_without_generation_settings_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="args = TrainingArguments: The arguments have no generation settings"):
        Seq2SeqTrainer(Copier(), TrainingArguments(str(tmp_path), use_cpu=True))


@pytest.mark.parametrize("given", [{"predict_with_generate": True}, {"generation_num_beams": 2}])
def test_a_plain_trainer_ignores_generation_settings_with_a_word(
    tmp_path: Path, given: Any, caplog: pytest.LogCaptureFixture
) -> None:
    Trainer(Copier(), Seq2SeqTrainingArguments(str(tmp_path), use_cpu=True, **given))
    [(name, value)] = given.items()
    assert f"{name} = {value} has no effect without Seq2SeqTrainer." in caplog.text
    caplog.clear()
    Trainer(Copier(), Seq2SeqTrainingArguments(str(tmp_path), use_cpu=True))
    assert "has no effect" not in caplog.text


def test_without_arguments_there_are_basic_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    assert isinstance(Seq2SeqTrainer(Copier()).args, Seq2SeqTrainingArguments)
