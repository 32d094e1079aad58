"""A second run into a folder with checkpoints goes on with a warning unless it would replace or hide one."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.toys import Classifier, classification_rows
from tests.support.training import StopAt, trainer
from trainer_lib.errors import ConfigError, Preempted
from trainer_lib.trainer.output_dir import Occupied, SavePlan

ROWS = classification_rows(24)  # 6 steps of 4 in an epoch
STEPS: dict[str, Any] = {"save_strategy": "steps", "save_steps": 2}


def _earlier(folder: Path) -> dict[str, bytes]:
    """Checkpoints of the steps 2 and 3."""
    trainer(folder, ROWS, max_steps=3, **STEPS).train()
    return _content(folder, 2, 3)


def _content(folder: Path, *steps: int) -> dict[str, bytes]:
    files = [path for step in steps for path in sorted((folder / f"checkpoint-{step}").rglob("*")) if path.is_file()]
    return {str(path.relative_to(folder)): path.read_bytes() for path in files}


def _names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.glob("checkpoint-*"))


@pytest.mark.parametrize(
    ("given", "new"),
    [
        ({"save_strategy": "no"}, []),
        ({"save_strategy": "steps", "save_steps": 4}, [4, 8, 12]),
        ({"save_strategy": "steps", "save_steps": 4, "save_total_limit": 1}, [12]),
        ({"save_strategy": "epoch", "num_train_epochs": 2, "max_steps": -1}, [6, 12]),
    ],
)
def test_a_run_whose_checkpoints_are_all_newer_goes_on_and_spares_the_others(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, given: dict[str, Any], new: list[int]
) -> None:
    before = _earlier(tmp_path)
    with caplog.at_level(logging.WARNING, logger="trainer_lib"):
        trainer(tmp_path, ROWS, **{"max_steps": 12, **given}).train()
    assert "checkpoint-3 is the newest" in caplog.text
    assert _content(tmp_path, 2, 3) == before
    assert _names(tmp_path) == sorted(f"checkpoint-{step}" for step in (2, 3, *new))


@pytest.mark.parametrize(
    "given",
    [
        {"save_strategy": "steps", "save_steps": 2},  # replaces checkpoint-2
        {"save_strategy": "steps", "save_steps": 1},
        {"save_strategy": "steps", "save_steps": 500, "max_steps": 3},  # replaces checkpoint-3, the last step's
        {"save_strategy": "steps", "save_steps": 500, "max_steps": 1},  # lies below checkpoint-3
        {"save_strategy": "best", "eval_strategy": "steps", "eval_steps": 1, "metric_for_best_model": "loss"},
    ],
)
def test_a_run_that_would_replace_or_hide_a_checkpoint_is_refused(tmp_path: Path, given: dict[str, Any]) -> None:
    before = _earlier(tmp_path)
    one = trainer(tmp_path, ROWS, **{"max_steps": 12, "eval_dataset": ROWS[:4], **given})
    with pytest.raises(ConfigError, match="earlier run") as refused:
        one.train()
    assert refused.value.field == "output_dir"
    assert one.state.global_step == 0
    assert _content(tmp_path, 2, 3) == before


def test_a_stop_below_an_earlier_checkpoint_is_not_saved(tmp_path: Path) -> None:
    before = _earlier(tmp_path)
    for step in (2, 1):
        one = trainer(tmp_path, ROWS, max_steps=12, save_strategy="steps", save_steps=6, callbacks=[StopAt(step)])
        with pytest.raises(Preempted, match="is not saved"):
            one.train()
    assert _names(tmp_path) == ["checkpoint-2", "checkpoint-3"]
    assert _content(tmp_path, 2, 3) == before
    with pytest.raises(Preempted, match="is committed"):
        trainer(tmp_path, ROWS, max_steps=12, save_strategy="steps", save_steps=6, callbacks=[StopAt(5)]).train()
    resumed = trainer(tmp_path, ROWS, max_steps=12, save_strategy="steps", save_steps=6)
    resumed.train(resume_from_checkpoint=True)
    assert _names(tmp_path) == ["checkpoint-12", "checkpoint-2", "checkpoint-3", "checkpoint-5", "checkpoint-6"]


def test_a_save_that_a_callback_asks_for_replaces_nothing(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    from trainer_lib import TrainerCallback

    saved: list[int] = []

    class Asking(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            control.should_save = True

        def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            saved.append(state.global_step)

    before = _earlier(tmp_path)
    trainer(tmp_path, ROWS, max_steps=5, save_strategy="no", callbacks=[Asking()]).train()
    assert saved == [4, 5]
    assert _content(tmp_path, 2, 3) == before
    assert "Step 2 is not saved" in caplog.text


@pytest.mark.parametrize(("step", "goes_on"), [(3, True), (4, False), (100, True)])
def test_checkpoints_of_another_program_are_in_the_way_only_where_they_would_be_replaced(
    tmp_path: Path, step: int, goes_on: bool
) -> None:
    theirs = tmp_path / f"checkpoint-{step}" / "optimizer.pt"
    theirs.parent.mkdir()
    theirs.write_bytes(b"weeks of work")
    one = trainer(tmp_path, ROWS, max_steps=4, **STEPS)
    if goes_on:
        one.train()
        assert {"checkpoint-2", "checkpoint-4"} < set(_names(tmp_path))
    else:
        with pytest.raises(ConfigError, match="another program wrote"):
            one.train()
    assert theirs.read_bytes() == b"weeks of work"


def test_plans_know_every_step_that_is_saved() -> None:
    assert [step for step in range(12) if SavePlan(4, 10).includes(step) and step] == [4, 8, 10]
    assert (SavePlan(0, 10).first, SavePlan(None, 10).first, SavePlan(500, 10).first) == (None, 1, 10)
    assert not Occupied(newest=3).forbids(4)


def test_an_earlier_runs_checkpoints_stay_after_a_resume(tmp_path: Path) -> None:
    before = _earlier(tmp_path)
    given: dict[str, Any] = {"max_steps": 12, "save_strategy": "steps", "save_steps": 4, "save_total_limit": 1}
    for step in (5, 7):  # the checkpoint of a resumed run names them too
        one = trainer(tmp_path, ROWS, resume_from_checkpoint=step > 5, callbacks=[StopAt(step)], **given)
        with pytest.raises(Preempted, match="is committed"):
            one.train()
        assert _names(tmp_path) == ["checkpoint-2", "checkpoint-3", f"checkpoint-{step}"]
    trainer(tmp_path, ROWS, resume_from_checkpoint=True, **given).train()
    assert _names(tmp_path) == ["checkpoint-12", "checkpoint-2", "checkpoint-3"]
    assert _content(tmp_path, 2, 3) == before


def test_an_earlier_runs_checkpoints_stay_when_memory_runs_out(tmp_path: Path) -> None:
    class Hungry(Classifier):
        calls = 0

        def forward(self, x: torch.Tensor, labels: torch.Tensor | None = None) -> dict[str, torch.Tensor]:
            self.calls += 1
            if self.calls > 5 and len(x) > 2:
                raise torch.OutOfMemoryError("CUDA out of memory.")
            return super().forward(x, labels)

    before = _earlier(tmp_path)
    given: dict[str, Any] = {"max_steps": 12, "save_strategy": "steps", "save_steps": 4, "save_total_limit": 1}
    one = trainer(tmp_path, ROWS, model=Hungry(), auto_find_batch_size=True, **given)
    one.train()
    assert one.state.train_batch_size == 2
    assert _names(tmp_path) == ["checkpoint-12", "checkpoint-2", "checkpoint-3"]
    assert _content(tmp_path, 2, 3) == before
