"""What code written for transformers' Trainer relies on between steps: streams, callbacks' states, modes, schedules."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.toys import classification_rows
from tests.support.training import trainer
from trainer_lib import Trainer

ROWS = classification_rows(32)
EVERY: dict[str, Any] = {"eval_strategy": "steps", "eval_steps": 1, "logging_strategy": "steps", "logging_steps": 1}
SAVING: dict[str, Any] = {"save_strategy": "steps", "save_steps": 2}


def _stream() -> Any:
    import datasets

    rows = [{"x": row["x"].tolist(), "labels": int(row["labels"]), "place": place} for place, row in enumerate(ROWS)]
    return datasets.Dataset.from_list(rows).to_iterable_dataset()


def test_evaluating_the_stream_that_is_trained_on_moves_neither_of_them(tmp_path: Path) -> None:
    places: list[int] = []

    def collate(rows: list[Any]) -> dict[str, torch.Tensor]:
        places.extend(row["place"] for row in rows)
        return {"x": torch.tensor([row["x"] for row in rows]), "labels": torch.tensor([row["labels"] for row in rows])}

    stream = _stream()
    given: dict[str, Any] = {"data_collator": collate, "eval_dataset": stream, "remove_unused_columns": False}
    given |= {**SAVING, "eval_strategy": "steps", "eval_steps": 2, "per_device_eval_batch_size": 4}
    trainer(tmp_path, stream, max_steps=2, **given).train()
    resumed = trainer(tmp_path, stream, max_steps=3, resume_from_checkpoint=True, **given)
    places.clear()
    resumed.train()
    assert places[:4] == [8, 9, 10, 11]
    places.clear()
    resumed.evaluate()
    assert places == list(range(32))
    places.clear()
    trainer(tmp_path / "new", stream, max_steps=1, data_collator=collate, remove_unused_columns=False).train()
    assert places == [0, 1, 2, 3]


@pytest.mark.parametrize("replaces", [False, True])
def test_the_state_of_a_callback_of_transformers_is_restored(tmp_path: Path, replaces: bool) -> None:
    from transformers import EarlyStoppingCallback

    def build(steps: int, **given: Any) -> tuple[Trainer, Any]:
        stopping: Any = EarlyStoppingCallback(early_stopping_patience=9, early_stopping_threshold=1e9)
        settings = {**EVERY, **SAVING, "metric_for_best_model": "loss", "load_best_model_at_end": True, **given}
        one = trainer(tmp_path, ROWS, eval_dataset=ROWS[:8], callbacks=[stopping], max_steps=steps, **settings)
        return one, stopping

    one, stopping = build(4)
    one.train()
    assert stopping.early_stopping_patience_counter == 3
    one, _ = build(6, resume_from_checkpoint=True, restore_callback_states_from_checkpoint=replaces)
    one.train()
    found = one.pop_callback(EarlyStoppingCallback)  # type: ignore[arg-type]
    assert found.early_stopping_patience_counter == 5  # type: ignore[union-attr]


class Logging(Trainer):
    modes: list[tuple[str, bool]]

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        name = next(name for name in logs if name.endswith("loss"))
        self.modes.append((name, self.model.training))
        super().log(logs, start_time)

    def evaluate(self, *args: Any, **kwargs: Any) -> dict[str, float]:
        metrics = super().evaluate(*args, **kwargs)
        self.log({"own_loss": 1.0})
        return metrics


def test_the_model_evaluates_until_the_evaluation_is_logged(tmp_path: Path) -> None:
    one = trainer(tmp_path, ROWS, cls=Logging, eval_dataset={"a": ROWS[:8], "b": ROWS[8:16]}, max_steps=2, **EVERY)
    one.modes = []  # type: ignore[attr-defined]
    one.train()
    step = [("loss", True), ("eval_a_loss", False), ("own_loss", False), ("eval_b_loss", False)]
    step += [("own_loss", False), ("own_loss", False)]
    assert one.modes == [*step, *step, ("train_loss", True)]  # type: ignore[attr-defined]
    assert one.model.training


def test_a_users_schedule_that_follows_a_metric_steps_with_it(tmp_path: Path) -> None:
    def build(steps: int, **given: Any) -> Trainer:
        from tests.support.toys import Classifier

        torch.manual_seed(0)
        model = Classifier()
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        schedule = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0, threshold=1e9)
        settings = {**EVERY, **SAVING, "max_steps": steps, **given}
        return trainer(tmp_path, ROWS, model=model, eval_dataset=ROWS[:8], optimizers=(optimizer, schedule), **settings)

    one = build(4)
    one.train()
    assert [entry["learning_rate"] for entry in one.state.log_history if "learning_rate" in entry] == pytest.approx(
        [1.0, 0.1, 0.01, 0.001]
    )
    resumed = build(5, resume_from_checkpoint=True)
    resumed.train()
    assert resumed.get_learning_rates() == pytest.approx([1e-5])


def test_other_data_on_resume_names_the_way_out(tmp_path: Path) -> None:
    trainer(tmp_path, ROWS, max_steps=2, **SAVING).train()
    more = [*ROWS, *ROWS[:4]]
    with pytest.raises(ValueError, match="ignore_data_skip"):
        trainer(tmp_path, more, max_steps=4, resume_from_checkpoint=True, **SAVING).train()
    one = trainer(tmp_path, more, max_steps=4, resume_from_checkpoint=True, ignore_data_skip=True, **SAVING)
    one.train()
    assert one.state.global_step == 4
