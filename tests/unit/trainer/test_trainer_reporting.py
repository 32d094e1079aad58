"""`report_to` by every name: served and read back, or refused with the way out before the first step."""

from __future__ import annotations

import importlib
import sys
import types
from pathlib import Path
from typing import Any

import pytest

import trainer_lib
from tests.support.surface import SURFACE
from tests.support.toys import classification_rows
from tests.support.training import StopAt, preempted_at, trained, trainer
from trainer_lib import MLflowCallback, TensorBoardCallback
from trainer_lib.arguments.validation import REPORTERS
from trainer_lib.errors import ConfigError, MissingExtraError
from trainer_lib.trackers.vendors import OURS

ROWS = classification_rows(12)
LOGGED: dict[str, Any] = {"logging_strategy": "steps", "logging_steps": 1, "num_train_epochs": 1}
TWO, ALL = ["JsonlCallback", "TensorBoardCallback"], ["JsonlCallback", "MLflowCallback", "TensorBoardCallback"]


def scalars(folder: Path) -> dict[str, list[tuple[int, float]]]:
    """What TensorBoard itself reads from the event files."""
    accumulator = importlib.import_module("tensorboard.backend.event_processing.event_accumulator")
    events = accumulator.EventAccumulator(str(folder))
    events.Reload()
    return {name: [(each.step, each.value) for each in events.Scalars(name)] for name in events.Tags()["scalars"]}


def names(one: Any) -> list[str]:
    return [type(each).__name__ for each in one.callback_handler.callbacks]


# --------------------------------------------------------------------------------------------------------- tensorboard
def test_tensorboard_event_files_are_written_and_read_back(tmp_path: Path) -> None:
    one = trained(tmp_path, ROWS, eval_dataset=ROWS, eval_strategy="epoch", report_to="tensorboard", **LOGGED)
    found = scalars(tmp_path / "runs")
    logged = {entry["step"]: pytest.approx(entry["loss"]) for entry in one.state.log_history if "loss" in entry}
    assert dict(found["train/loss"]) == logged
    assert {"eval/loss", "train/learning_rate", "train/train_loss"} <= found.keys()


def test_tensorboard_goes_to_logging_dir_and_has_no_step_twice_after_a_resume(tmp_path: Path) -> None:
    given: dict[str, Any] = {"report_to": ["tensorboard"], "logging_dir": str(tmp_path / "tb"), **LOGGED}
    assert preempted_at(trainer(tmp_path / "out", ROWS, callbacks=[StopAt(2)], **given)) == 2
    trainer(tmp_path / "out", ROWS, **given).train(resume_from_checkpoint=True)
    assert [step for step, _ in scalars(tmp_path / "tb")["train/loss"]] == [1, 2, 3]


def test_tensorboard_needs_a_local_folder(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"logging_dir = memory://far/runs: The folder is not local.*use the jsonl"):
        trainer("memory://far", ROWS, report_to="tensorboard")


def test_a_summary_writer_of_ones_own_is_used_and_left_open(tmp_path: Path) -> None:
    from torch.utils.tensorboard import SummaryWriter

    writer = SummaryWriter(str(tmp_path / "mine"))
    trainer(tmp_path / "out", ROWS, callbacks=[TensorBoardCallback(writer)], **LOGGED).train()
    writer.add_scalar("after", 1.0, 9)
    writer.close()
    assert {"after", "train/loss"} <= scalars(tmp_path / "mine").keys()


# --------------------------------------------------------------------------------------------------------- other names


@pytest.mark.parametrize(("given", "expected"), [("none", []), ([], []), (["jsonl", "tensorboard"], TWO), ("all", ALL)])
def test_report_to_takes_lists_all_and_none(given: Any, expected: list[str], tmp_path: Path) -> None:
    one = trainer(tmp_path, ROWS, report_to=given)
    assert [type(each).__name__ for each in one.callback_handler.callbacks if type(each) in OURS.values()] == expected


@pytest.mark.parametrize("name", [name for name in REPORTERS if name not in OURS])
def test_a_tracker_whose_package_is_missing_is_refused_with_the_way_out(name: str, tmp_path: Path) -> None:
    with pytest.raises(MissingExtraError, match=f"report_to = {name}: .*needs .*(Install it|Start the training there)"):
        trainer(tmp_path, ROWS, report_to=[name])
    assert list(tmp_path.iterdir()) == []


def test_every_name_of_the_reference_has_its_class() -> None:
    assert {*SURFACE["report_to"], "jsonl"} == {*REPORTERS}
    for name in SURFACE["integration_callbacks"]:
        assert isinstance(getattr(trainer_lib, name), type)


class Theirs:
    """What transformers has for a tracker, standing on a package that is not installed here."""

    told: list[str]

    def __init__(self) -> None:
        Theirs.told = []

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.told.append(f"begin {args.run_name} {kwargs['model'] is not None}")

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
        self.told.append(f"log {state.global_step}")
        if state.global_step == 2:
            raise ConnectionError("the server is gone")


def test_a_tracker_of_another_package_is_served_by_its_own_callback_and_cannot_end_training(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    package = types.ModuleType("comet_ml")
    package.__spec__ = importlib.machinery.ModuleSpec("comet_ml", None)
    monkeypatch.setitem(sys.modules, "comet_ml", package)
    monkeypatch.setattr(importlib.import_module("transformers.integrations.integration_utils"), "CometCallback", Theirs)
    one = trainer(tmp_path, ROWS, report_to="comet_ml", run_name="mine", **LOGGED)
    assert any(isinstance(callback, Theirs) for callback in one.callback_handler.callbacks)
    one.train()
    assert one.state.global_step == 3
    assert Theirs.told == ["begin mine True", "log 1", "log 2"]
    assert "Nothing more is reported to comet_ml: the server is gone" in caplog.text


# --------------------------------------------------------------------------------------------------- removing by class
def test_ours_is_found_by_the_class_that_transformers_has_for_it(tmp_path: Path) -> None:
    transformers, trackers = (importlib.import_module(name) for name in ("transformers", "transformers.integrations"))
    one = trainer(tmp_path, ROWS, report_to=["mlflow"], disable_tqdm=False, **LOGGED)
    one.remove_callback(transformers.PrinterCallback)
    one.remove_callback(transformers.ProgressCallback)
    assert isinstance(one.pop_callback(trackers.MLflowCallback), MLflowCallback)
    assert names(one) == ["DefaultFlowCallback"]
