"""Notice of preemption to a running training: saved on all ranks, ended as preempted, continued by the same request."""

from __future__ import annotations

import signal
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.support import tiny
from tests.support.checkpoints import checkpoints
from tests.support.launched import Owner, wait_until
from trainer_lib.errors import Preempted, PreemptedByNotice, TrainflowError, from_record
from trainer_lib.launch import LaunchConfig, launch
from trainer_lib.preemption import Preemption
from trainer_lib.requests import PreparedData

SLOW = {"OMP_NUM_THREADS": "1", "STEP_S": "0.05"}


def noticed(asked: Any, notice: Path, at: int) -> TrainflowError:
    """The failure of a launch on two processes whose notice is given when step `at` is reported."""

    def give(event: dict[str, Any]) -> None:
        if event.get("step", 0) >= at:
            notice.touch()

    config = LaunchConfig(kind="torchrun", processes=2, grace_s=20.0)
    with pytest.raises(TrainflowError) as caught:
        launch(asked, config, env=SLOW, on_line=lambda line: None, on_event=give)
    return caught.value


def test_a_file_ends_it_saved_and_the_same_request_continues(
    tmp_path: Path, prepared_data: PreparedData, uninterrupted_weights: str
) -> None:
    notice, output = tmp_path / "notice", tmp_path / "train"
    preemption = Preemption(file=str(notice), every_s=0.1)
    asked = replace(tiny.train_request(tmp_path, prepared_data, str(output), save_steps=500), preemption=preemption)
    error = noticed(asked, notice, 3)
    assert type(error) is PreemptedByNotice
    assert (error.exit_code, error.retryable) == (19, False)
    assert error.message.startswith(f"This machine is about to be taken away (the file {notice} is there). Stopped")
    assert checkpoints(output / "checkpoints") == [error.step]
    # A notice that is there before training begins ends it at the next step.
    again = noticed(asked, notice, 1)
    assert isinstance(again, PreemptedByNotice) and again.step is not None and error.step is not None
    assert error.step < again.step <= error.step + 5
    notice.unlink()
    result = tiny.run(asked, processes=2, kind="torchrun")
    assert result.resumed_from == again.step
    assert tiny.weights(str(output)) == uninterrupted_weights


def test_slurms_signal_to_every_process_saves(tmp_path: Path, prepared_data: PreparedData) -> None:
    output = tmp_path / "train"
    asked = tiny.train_request(tmp_path, prepared_data, str(output), save_steps=2)
    owner = Owner(tmp_path, asked, kind="torchrun", processes=2, grace_s=20.0, env=SLOW)
    try:
        wait_until(lambda: bool(checkpoints(output / "checkpoints")), 60)
        for process in owner.tree():
            process.send_signal(signal.SIGUSR2)
        owner.process.wait(timeout=60)
        error = from_record(owner.outcome())
        assert owner.gone() == []
    finally:
        owner.close()
    assert type(error) is Preempted, error
    assert error.step in checkpoints(output / "checkpoints")
