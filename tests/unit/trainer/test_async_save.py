"""`save_async`: training goes on while a checkpoint is written, and nothing is said of it before it is committed."""

from __future__ import annotations

import logging
import os
import signal
import threading
import time
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from typing_extensions import override

from tests.support.faulty import Faults
from tests.support.gates import Gate, until
from tests.support.toys import classification_rows
from tests.support.training import (
    At,
    Note,
    NoteSaves,
    StopAt,
    assert_equal,
    final_state,
    measured,
    preempted_at,
    trained,
    trainer,
)
from trainer_lib.checkpoint.catalogue import find_newest_intact, list_checkpoints
from trainer_lib.checkpoint.snapshot import HostCopy
from trainer_lib.errors import OutOfMemoryError, StorageError, StorageFullError
from trainer_lib.storage import Store

ROWS = classification_rows(24)
ASYNC: dict[str, Any] = {"save_async": True, "save_strategy": "steps", "save_steps": 2, "max_steps": 6}


class Committed(NoteSaves):
    """Looks for the commit of every save that is announced."""

    @override
    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        assert (Path(args.output_dir) / f"checkpoint-{state.global_step}" / "COMMIT.json").exists()
        super().on_save(args, state, control, **kwargs)


def contents(folder: Path) -> dict[str, dict[str, str]]:
    """Checkpoint -> file -> digest, without the arguments: they differ on purpose."""
    return {
        info.name: {entry.path: entry.sha256 for entry in info.commit.files if entry.path != "training_args.json"}
        for info in list_checkpoints(Store.open(folder))
    }


@pytest.mark.parametrize("optim", ["adamw_torch", "adafactor"])
def test_its_bytes_are_those_of_one_waited_for(optim: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    given: dict[str, Any] = {**ASYNC, "optim": optim, "logging_strategy": "steps", "logging_steps": 1}
    waited = trained(tmp_path / "waited", ROWS, **{**given, "save_async": False})

    went_on = threading.Event()
    gate = Gate(monkeypatch, lambda step: until(went_on)(step) if step == 2 else None)
    one = trained(tmp_path / "background", ROWS, callbacks=[At(4, went_on.set)], **given)
    assert_equal(final_state(waited), final_state(one))
    assert contents(tmp_path / "background") == contents(tmp_path / "waited")
    assert contents(tmp_path / "waited").keys() == {"checkpoint-2", "checkpoint-4", "checkpoint-6"}
    assert gate.threads == ["trainflow-save-2", "trainflow-save-4", "trainflow-save-6"]


def test_the_next_save_waits_for_the_one_before(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    release = threading.Event()
    order: list[str] = []

    def before(step: int) -> None:
        if step == 2:
            until(release)(step)
            order.append("released")

    Gate(monkeypatch, before)
    steps = [At(step, partial(order.append, f"step {step}")) for step in range(1, 7)]
    later = At(4, lambda: threading.Timer(0.2, release.set).start())
    trainer(tmp_path, ROWS, callbacks=[*steps, later], **ASYNC).train()
    assert order == ["step 1", "step 2", "step 3", "step 4", "released", "step 5", "step 6"]


def test_the_best_is_only_the_best_once_it_is_committed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    went_on = threading.Event()
    seen: list[str | None] = []

    def look() -> None:
        seen.append(one.state.best_model_checkpoint)
        went_on.set()

    Gate(monkeypatch, until(went_on))
    given: dict[str, Any] = {"eval_steps": 2, "save_total_limit": 1, "load_best_model_at_end": True, **ASYNC}
    one = trainer(tmp_path, ROWS, callbacks=[At(3, look)], **measured(0.5, 0.9, 0.7), **given)
    one.train()
    assert seen == [None]
    assert one.state.best_model_checkpoint == str(tmp_path / "checkpoint-4")
    assert sorted(contents(tmp_path)) == ["checkpoint-4"]


# ------------------------------------------------------------------------------------------------------------ failures
@pytest.mark.parametrize("save_async", [True, False])
def test_a_failed_save_ends_training(
    save_async: bool, faulty_url: str, faults: Faults, monkeypatch: pytest.MonkeyPatch
) -> None:
    saved, failed = Note("on_save", lambda state, **_: state.global_step), threading.Event()

    def full(step: int) -> None:
        if step == 4:
            faults.plan(3, "full")
            failed.set()

    Gate(monkeypatch, full)
    waiting = At(5, lambda: failed.wait(30) or pytest.fail("the save of step 4 did not come"))
    given: dict[str, Any] = {**ASYNC, "max_steps": 9, "save_async": save_async}
    one = trainer(faulty_url, ROWS, callbacks=[saved, waiting], **given)
    with pytest.raises(StorageFullError, match=r"checkpoint-4/.*no space left"):
        one.train()
    faults.plan(None)
    assert saved.kept == [2]
    assert one.state.global_step in ((4, 5, 6) if save_async else (4,))  # the next boundary, or save
    found = find_newest_intact(Store.open(faulty_url), on_damage=pytest.fail)
    assert found is not None and found.step == 2


@pytest.mark.parametrize("save_async", [True, False])
def test_some_failed_saves_in_a_row_can_be_allowed(
    save_async: bool, faulty_url: str, faults: Faults, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    saved = Note("on_save", lambda state, **_: state.global_step)
    Gate(monkeypatch, lambda step: faults.plan(2 if step in (2, 3, 5, 6) else None, "error"))
    given: dict[str, Any] = {**ASYNC, "save_steps": 1, "save_async": save_async, "max_failed_saves": 3}
    given |= {"greater_is_better": True, "save_total_limit": 1, "eval_steps": 1}
    one = trainer(faulty_url, ROWS, callbacks=[saved], **measured(0.1, 0.9, 0.2, 0.3, 0.2, 0.1), **given)
    with caplog.at_level(logging.ERROR, logger="trainer_lib"), pytest.raises(StorageError, match="checkpoint-6"):
        one.train()  # what fails last is tried once more, and then raised: three in a row or not
    faults.plan(None)
    assert saved.kept == [1, 4]
    told = [record.message.split(" could")[0] for record in caplog.records if "could not be saved" in record.message]
    assert told == [f"The checkpoint of step {step}" for step in (2, 3, 5, 6)]
    # 0.9 was lost with its checkpoint: the best is what can be loaded.
    assert (one.state.best_metric, one.state.best_global_step) == (0.3, 4)
    assert [info.step for info in list_checkpoints(Store.open(faulty_url))] == [4]


def test_a_failed_last_save_is_made_again(faulty_url: str, faults: Faults, monkeypatch: pytest.MonkeyPatch) -> None:
    tries: list[int] = []

    def once(step: int) -> None:
        tries.append(step)
        faults.plan(2 if tries == [4] else None)

    Gate(monkeypatch, once)
    trainer(faulty_url, ROWS, **{**ASYNC, "save_steps": 4, "max_steps": 5, "max_failed_saves": 9}).train()
    assert tries == [4, 5]
    assert [info.step for info in list_checkpoints(Store.open(faulty_url))] == [5]


def test_saves_may_wait(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    def refuse(self: HostCopy, size: int) -> torch.Tensor:
        raise OutOfMemoryError("The host has no room.")

    monkeypatch.setattr(HostCopy, "_require_block", refuse)
    gate = Gate(monkeypatch, lambda step: None)
    with caplog.at_level(logging.WARNING, logger="trainer_lib"):
        trainer(tmp_path, ROWS, **ASYNC).train()
    assert gate.threads == ["MainThread"] * 3
    assert "Training waits for the checkpoint of step 2: The host has no room." in caplog.text
    assert len(contents(tmp_path)) == 3


# ------------------------------------------------------------------------------------------------------------- endings
@pytest.mark.parametrize("how", [ValueError("mine"), KeyboardInterrupt(), SystemExit(0)])
def test_whatever_ends_training_the_save_under_way_is_finished_and_told(
    how: BaseException, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    raised = threading.Event()
    gate = Gate(monkeypatch, until(raised))

    def fail() -> None:
        assert gate.started.wait(30)
        threading.Timer(0.1, raised.set).start()
        raise how

    with caplog.at_level(logging.WARNING, logger="trainer_lib"), pytest.raises(type(how)):
        trainer(tmp_path, ROWS, callbacks=[At(3, fail)], **ASYNC).train()
    assert contents(tmp_path).keys() == {"checkpoint-2"} and f"{tmp_path / 'checkpoint-2'} is committed" in caplog.text


@pytest.mark.parametrize("is_committed", [False, True], ids=["still-written", "committed-by-now"])
def test_who_does_not_want_to_wait_is_told_that_it_does_not_count(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, is_committed: bool
) -> None:
    release, interrupted = threading.Event(), threading.Event()
    gate = Gate(monkeypatch, until(release))

    def interrupt() -> None:
        while not interrupted.wait(0.05):  # the first is a request to stop; two at once would be one
            os.kill(os.getpid(), signal.SIGINT)

    def fail() -> None:
        assert gate.started.wait(30)
        threading.Timer(0.1, interrupt).start()
        raise ValueError("mine")

    one = trainer(tmp_path, ROWS, callbacks=[At(3, fail)], **ASYNC)
    with caplog.at_level(logging.ERROR, logger="trainer_lib"), pytest.raises(KeyboardInterrupt):
        try:
            one.train()
        finally:
            interrupted.set()
    assert "the checkpoint that is being written does not count" in caplog.text
    assert contents(tmp_path) == {}
    release.set()
    one.pop_callback(At)
    while is_committed and not contents(tmp_path):
        time.sleep(0.01)
    one.train()  # waits for what was left and starts again
    assert contents(tmp_path).keys() == {"checkpoint-2", "checkpoint-4", "checkpoint-6"}


def test_a_save_that_fails_while_training_ends_is_told_beside_the_reason(
    faulty_url: str, faults: Faults, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    raised = threading.Event()

    def before(step: int) -> None:
        until(raised)(step)
        faults.plan(1)

    gate = Gate(monkeypatch, before)

    def fail() -> None:
        assert gate.started.wait(30)
        raised.set()
        raise ValueError("mine")

    with caplog.at_level(logging.ERROR, logger="trainer_lib"), pytest.raises(ValueError, match="mine"):
        trainer(faulty_url, ROWS, callbacks=[At(3, fail)], **ASYNC).train()
    faults.plan(None)
    assert "The checkpoint was not committed; earlier ones are intact" in caplog.text
    assert list_checkpoints(Store.open(faulty_url)) == []


def test_a_stop_commits_what_is_under_way_and_then_the_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    note, stopping = Committed(), threading.Event()
    Gate(monkeypatch, until(stopping))
    callbacks = [note, StopAt(3), At(3, lambda: threading.Timer(0.1, stopping.set).start())]
    assert preempted_at(trainer(tmp_path, ROWS, callbacks=callbacks, **ASYNC)) == 3
    assert note.saved == [(2, 3), (3, 3)]


def test_asked_to_stop_a_failure_of_the_one_before_does_not_keep_the_step_from_being_saved(
    faulty_url: str, faults: Faults, monkeypatch: pytest.MonkeyPatch
) -> None:
    stopping = threading.Event()

    def before(step: int) -> None:
        until(stopping)(step)
        faults.plan(2 if step == 2 else None)

    Gate(monkeypatch, before)
    assert preempted_at(trainer(faulty_url, ROWS, callbacks=[StopAt(3), At(3, stopping.set)], **ASYNC)) == 3
    assert [info.step for info in list_checkpoints(Store.open(faulty_url))] == [3]


@pytest.mark.parametrize("save_async", [True, False])
def test_a_stop_saves_a_whole_checkpoint_even_when_only_models_are_saved(save_async: bool, tmp_path: Path) -> None:
    given: dict[str, Any] = {**ASYNC, "save_async": save_async, "save_only_model": True, "save_total_limit": 1}
    whole = trained(tmp_path / "whole", ROWS, **given)
    assert preempted_at(trainer(tmp_path / "cut", ROWS, callbacks=[StopAt(2)], **given)) == 2
    resumed = trainer(tmp_path / "cut", ROWS, **given)
    resumed.train("auto")
    assert_equal(final_state(whole), final_state(resumed))
