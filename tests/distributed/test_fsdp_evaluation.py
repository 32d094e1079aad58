"""Measuring a divided model: no rank waits for one that has no batch, and nothing is counted twice."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader

from tests.distributed.test_fsdp import ROWS
from tests.support.distributed import run_distributed
from tests.support.overrides import SURFACE, exercise
from tests.support.toys import Classifier, StatefulStream
from tests.support.training import trainer
from trainer_lib import Trainer, TrainingArguments
from trainer_lib.errors import ConfigError
from trainer_lib.evaluation.stream import stream_predictions

DIVIDED: dict[str, Any] = {"fsdp": "shard_grad_op", "fsdp_config": {"min_num_params": 20}}
#: Computed or written by rank 0 for all.
FIRST_RANK = {"_save", "create_model_card", "metrics_format"}
#: The strategy moves the model to the device itself, part by part: the whole may not fit there.
UNCALLED = {"_move_model_to_device"}


class OwnLoader(Trainer):
    """An evaluation loader of one's own."""

    def get_eval_dataloader(self, eval_dataset: Any = None) -> Any:
        return DataLoader(eval_dataset, batch_size=2, collate_fn=self.data_collator)


def metrics(p: Any) -> dict[str, float]:
    return {"accuracy": float((p.predictions.argmax(-1) == p.label_ids).mean()), "rows": float(len(p.label_ids))}


def measured(folder: str, given: dict[str, Any]) -> dict[str, Any]:
    """Evaluations before and after a training, of sets with whole, ragged and missing batches."""
    found: dict[str, Any] = {}
    options: dict[str, Any] = {"per_device_eval_batch_size": 3, "eval_accumulation_steps": 2, "max_steps": 2, **given}
    torch.manual_seed(0)
    one = trainer(folder, ROWS, model=Classifier(dropout=0.0), compute_metrics=metrics, **options)
    for when in ("before", "after"):
        for count in (1, 6, 10):
            result = one.evaluate(ROWS[:count])
            found[f"{when} {count}"] = [result["eval_loss"], result["eval_accuracy"], result["eval_rows"]]
        result = one.evaluate(StatefulStream(ROWS[:7]))
        found[f"{when} stream"] = [result["eval_loss"], result["eval_accuracy"], result["eval_rows"]]
        predictions = one.predict(ROWS[:4]).predictions
        found[f"{when} predictions"] = None if predictions is None else np.asarray(predictions).tolist()
        if when == "before":
            one.train()
    own = trainer(f"{folder}-own", ROWS, cls=OwnLoader, model=Classifier(dropout=0.0), compute_metrics=metrics, **given)
    result = own.evaluate(ROWS[:5])
    found["own loader"] = [result["eval_rows"]]
    return found


def alone_and_gathered(folder: str) -> list[Any]:
    """Streaming on one rank: served while the model is whole, refused afterwards; what the accelerator gathers."""
    one = trainer(folder, ROWS, model=Classifier(dropout=0.0), max_steps=1, **DIVIDED)
    rank = one._trainflow.comm.rank
    rows = [each.tolist() for each, _ in stream_predictions(one, ROWS, start=3 * rank, stop=3 * rank + 1 + rank)]
    one.train()
    with pytest.raises(ConfigError, match="none of them can predict by itself"):
        list(stream_predictions(one, ROWS, start=0, stop=1))
    gathered = one.accelerator.gather_for_metrics(torch.tensor([rank])).tolist()
    norm = one.accelerator.clip_grad_norm_(one.model.parameters(), 1.0)
    return [rows, gathered, float(norm)]


def both(folder: str) -> tuple[dict[str, Any], list[Any]]:
    return measured(f"{folder}/measured", DIVIDED), alone_and_gathered(f"{folder}/alone")


def test_every_row_is_measured_once_whatever_is_left_for_a_rank(tmp_path: Path) -> None:
    expected = measured(str(tmp_path / "one"), {})
    results = run_distributed(both, 2, str(tmp_path / "two"))
    (first, alone), (second, _) = results
    for name, value in expected.items():
        if not name.endswith("predictions"):
            assert first[name] == second[name]
        if name.startswith("before") or name == "own loader":
            assert np.allclose(first[name], value, rtol=1e-6), name
    # Another global batch was trained on than on one process; each row is still counted once.
    assert [first[f"after {count}"][2] for count in (1, 6, 10)] == [1.0, 6.0, 10.0]
    assert first["after stream"][2] == 7.0
    assert second["before predictions"] is None
    assert alone[:2] == [[[0]], [0, 1]]
    assert results[1][1][0] == [[3, 4]]


# ------------------------------------------------------------------------------------------------------------ overrides
def exercised(folder: str) -> list[str]:
    """`exercise`, with every Trainer of this process divided."""
    original = TrainingArguments.__post_init__

    def divided(self: TrainingArguments) -> None:
        self.fsdp, self.fsdp_config = "full_shard", {"state_dict_type": "FULL_STATE_DICT"}
        original(self)

    TrainingArguments.__post_init__ = divided  # type: ignore[method-assign]
    return exercise(folder)


def test_every_overridable_method_is_called_on_both_ranks(tmp_path: Path) -> None:
    first, second = run_distributed(exercised, 2, str(tmp_path))
    assert set(first) == set(SURFACE["called"]) - UNCALLED
    assert set(first) - set(second) <= FIRST_RANK
