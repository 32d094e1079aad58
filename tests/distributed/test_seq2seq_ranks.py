"""Generation under several processes: the same predictions as one, in the dataset's order, none twice."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.support.distributed import loaded, run_distributed
from tests.support.seq2seq import Copier, Tokens, rows, seq2seq_trainer, t5
from trainer_lib import DataCollatorForSeq2Seq
from trainer_lib.errors import ConfigError

ROWS = rows(11)  # 3 a batch and rank: the last round leaves one rank with two rows and another with none


@pytest.fixture(scope="module", autouse=True)
def _loaded() -> Iterator[None]:
    with loaded("transformers.models.t5.modeling_t5"):
        yield


def predicted(folder: str, kind: str) -> dict[str, Any]:
    seen: list[int] = []

    def compute(given: Any) -> dict[str, float]:
        seen.append(len(given.predictions))
        return {"tokens": float(given.predictions.sum()), "samples": len(given.predictions)}

    model = t5() if kind == "t5" else Copier()
    collate = DataCollatorForSeq2Seq(Tokens(), model=model)
    trainer = seq2seq_trainer(folder, model, eval_dataset=ROWS, compute_metrics=compute, data_collator=collate)
    if kind == "copier":
        model.table.weight.data.fill_(0.5)
    found = trainer.predict(ROWS, max_length=7)
    metrics = trainer.evaluate(num_beams=2)
    return {
        "predictions": None if found.predictions is None else np.array(found.predictions),
        "labels": None if found.label_ids is None else np.array(found.label_ids),
        "loss": found.metrics["test_loss"],
        "evaluated": {name: metrics[name] for name in ("eval_loss", "eval_tokens", "eval_samples")},
        "calls": seen,
    }


@pytest.mark.parametrize("kind", ["t5", "copier"])
def test_two_processes_predict_what_one_does(tmp_path: Path, kind: str) -> None:
    alone = predicted(str(tmp_path / "one"), kind)
    first, second = run_distributed(predicted, 2, str(tmp_path / "two"), kind)
    assert alone["predictions"].shape == (11, 7)
    assert np.array_equal(first["predictions"], alone["predictions"])
    assert np.array_equal(
        np.where(first["labels"] == -100, 0, first["labels"]), np.where(alone["labels"] == -100, 0, alone["labels"])
    )
    assert second["predictions"] is None
    assert first["calls"] == [11, 11]
    assert second["calls"] == []
    for rank in (first, second):
        assert rank["loss"] == pytest.approx(alone["loss"], rel=1e-6)
        assert rank["evaluated"] == pytest.approx(alone["evaluated"], rel=1e-6)


def trained(folder: str) -> dict[str, Any]:
    trainer = seq2seq_trainer(
        folder,
        t5(),
        train_dataset=ROWS,
        eval_dataset=ROWS[:5],
        eval_strategy="epoch",
        num_train_epochs=1,
        global_batch_size=4,
        per_device_train_batch_size=1,
        compute_metrics=lambda p: {"width": p.predictions.shape[1], "samples": len(p.predictions)},
    )
    trainer.train()
    return dict(next(entry for entry in trainer.state.log_history if "eval_width" in entry))


def test_evaluations_in_a_training_of_two_processes_generate(tmp_path: Path) -> None:
    alone = trained(str(tmp_path / "one"))
    for rank in run_distributed(trained, 2, str(tmp_path / "two")):
        assert (rank["eval_width"], rank["eval_samples"]) == (8, 5)
        assert rank["eval_loss"] == pytest.approx(alone["eval_loss"], rel=1e-4)


def refused(folder: str) -> None:
    seq2seq_trainer(folder, Copier()).predict(ROWS, top_p=0.5)


def test_what_generate_does_not_take_is_refused_on_every_process(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"top_p = 0.5: Copier.generate does not take this setting"):
        run_distributed(refused, 2, str(tmp_path))
