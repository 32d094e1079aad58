"""Data of `datasets` for models of transformers, and what is counted of it: tokens, operations."""

from __future__ import annotations

import json
from collections import UserDict
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.tiny_models import bert, llama, lm_rows, text_rows, tokenizer
from tests.support.toys import Classifier, TokenModel, classification_rows, token_rows
from tests.support.training import assert_equal, final_state, trainer
from trainer_lib import Trainer, default_data_collator

ROWS = lm_rows(16)


# -- datasets ----------------------------------------------------------------------------------------------------------
def text_data(count: int = 12) -> Any:
    """Encoded texts with a column of strings beside what the model takes."""
    from datasets import Dataset

    rows = text_rows(count)
    columns = {name: [torch.as_tensor(row[name]).tolist() for row in rows] for name in ("input_ids", "attention_mask")}
    labels = [row["labels"] for row in rows]
    return Dataset.from_dict({**columns, "label": labels, "text": [f"text {i}" for i in range(count)]})


@pytest.mark.parametrize("form", [None, "torch", "numpy"])
def test_a_dataset_loses_the_columns_the_model_does_not_take_in_any_format(form: str | None, tmp_path: Path) -> None:
    data = text_data().with_format(form)
    one = trainer(tmp_path, data, model=bert(), eval_dataset={"a": data, "b": data}, max_steps=2)
    batch = next(iter(one.get_train_dataloader().micros(0, 0))).batch
    assert set(batch) == {"input_ids", "attention_mask", "labels"}
    one.train()
    metrics = one.evaluate()
    assert metrics["eval_a_loss"] == metrics["eval_b_loss"]
    assert one.predict(data).predictions.shape == (12, 3)


def test_all_formats_of_a_dataset_train_alike(tmp_path: Path) -> None:
    states = []
    for form in (None, "torch", "numpy"):
        one = trainer(tmp_path / str(form), text_data().with_format(form), model=bert(), max_steps=3)
        one.train()
        states.append(final_state(one))
    assert_equal(states[0], states[1])
    assert_equal(states[0], states[2])


def test_an_iterable_dataset_loses_its_unused_columns_and_trains(tmp_path: Path) -> None:
    data = text_data().to_iterable_dataset()
    one = trainer(tmp_path, data, model=bert(), max_steps=4, eval_dataset=data)
    one.train()
    assert one.state.global_step == 4
    assert one.evaluate()["eval_loss"] > 0
    assert one.predict(data).predictions.shape == (12, 3)


def test_columns_may_be_kept(tmp_path: Path) -> None:
    def collate(samples: list[Any]) -> dict[str, Any]:
        seen.update(samples[0])
        return {
            "input_ids": torch.tensor([row["input_ids"] for row in samples]),
            "labels": torch.tensor([row["label"] for row in samples]),
        }

    seen: set[str] = set()
    given: dict[str, Any] = {"remove_unused_columns": False, "data_collator": collate, "max_steps": 1}
    trainer(tmp_path, text_data(), model=bert(), **given).train()
    assert "text" in seen


def test_a_tokenizers_padding_is_the_default_collator(tmp_path: Path) -> None:
    from datasets import Dataset

    encode = tokenizer()
    texts = ["the cat sat", "a dog", "the red dog ran under the old tree", "cat and dog"]
    data = Dataset.from_dict({"text": texts, "label": [0, 1, 2, 0]}).map(lambda row: encode(row["text"]))
    one = trainer(tmp_path, data, model=bert(), processing_class=encode, max_steps=1)
    batch = next(iter(one.get_train_dataloader().micros(0, 0))).batch
    assert batch["input_ids"].shape == (4, 8)
    one.train()


# -- tokens and operations ---------------------------------------------------------------------------------------------
def padded_rows() -> list[dict[str, torch.Tensor]]:
    rows = [dict(row) for row in ROWS]
    for number, row in enumerate(rows):
        row["attention_mask"] = (torch.arange(8) < 2 + number % 4).long()
        row["input_ids"] = row["input_ids"] * row["attention_mask"]
    return rows


@pytest.mark.parametrize(
    ("asked", "expected"), [("all", 16 * 8), (True, 16 * 8), ("non_padding", 4 * (2 + 3 + 4 + 5)), ("no", 0)]
)
@pytest.mark.parametrize("masked", [True, False])
def test_tokens_are_counted_as_asked(asked: Any, expected: int, masked: bool, tmp_path: Path) -> None:
    rows = padded_rows()
    if not masked:  # padding is then what the tokenizer says it is
        rows = [{name: value for name, value in row.items() if name != "attention_mask"} for row in rows]
    given: dict[str, Any] = {"num_train_epochs": 1, "logging_strategy": "steps", "logging_steps": 4}
    one = trainer(
        tmp_path,
        rows,
        model=llama(),
        include_num_input_tokens_seen=asked,
        processing_class=tokenizer(),
        data_collator=default_data_collator,
        **given,
    )
    one.train()
    assert one.state.num_input_tokens_seen == expected
    assert one.state.log_history[0].get("num_input_tokens_seen") == (expected or None)


def test_a_batch_without_tokens_is_said_once_and_counts_nothing(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    given: dict[str, Any] = {"include_num_input_tokens_seen": "all", "max_steps": 2}
    one = trainer(tmp_path, classification_rows(8), **given)
    one.train()
    assert one.state.num_input_tokens_seen == 0
    assert [record.message for record in caplog.records if "No tokens are counted" in record.message] == [
        "No tokens are counted: batches have no 'input_ids' (give the model a main_input_name)."
    ]


def test_tokens_per_second_are_reported_per_device(tmp_path: Path) -> None:
    output = trainer(tmp_path, ROWS, model=llama(), max_steps=2, include_tokens_per_second=True).train()
    speed, runtime = output.metrics["train_tokens_per_second"], output.metrics["train_runtime"]
    assert speed * runtime == pytest.approx(2 * 4 * 8, rel=0.02)


def test_num_tokens_enumerates_a_loader(tmp_path: Path) -> None:
    batches = [{"input_ids": torch.zeros(4, 8)}, {"input_ids": torch.zeros(2, 8)}]
    assert Trainer.num_tokens(batches) == 48
    assert Trainer.num_tokens(batches, max_steps=5) == 160


def test_operations_are_six_per_token_and_parameter_outside_the_embeddings(tmp_path: Path) -> None:
    model = llama()
    # transformers' BatchEncoding is a UserDict.
    given: dict[str, Any] = {"data_collator": lambda rows: UserDict(default_data_collator(rows))}
    one = trainer(tmp_path, ROWS, model=model, max_steps=2, **given)
    assert one.train().metrics["total_flos"] == 6 * model.num_parameters(exclude_embeddings=True) * 2 * 4 * 8
    assert one._trainflow.counters.own_tokens == 2 * 4 * 8


def test_operations_of_plain_modules_count_tokens_or_samples(tmp_path: Path) -> None:
    tokens = trainer(tmp_path / "t", token_rows(8), model=TokenModel(), max_steps=2).train()
    assert tokens.metrics["total_flos"] == 6 * (8 * 11 + 11) * 2 * 4 * 7  # the head; the table multiplies nothing
    samples = trainer(tmp_path / "s", classification_rows(8), max_steps=2).train()
    assert samples.metrics["total_flos"] == 6 * sum(p.numel() for p in Classifier().parameters()) * 2 * 4


def test_a_model_may_count_its_operations_itself(tmp_path: Path) -> None:
    class Counting(Classifier):
        def floating_point_ops(self, inputs: Any) -> int:
            return 1000 * len(inputs["x"])

    one = trainer(tmp_path, classification_rows(8), model=Counting(), max_steps=2, save_strategy="steps", save_steps=1)
    assert one.train().metrics["total_flos"] == 8000
    state = json.loads((tmp_path / "checkpoint-1" / "trainer_state.json").read_text())
    assert state["total_flos"] == 4000
