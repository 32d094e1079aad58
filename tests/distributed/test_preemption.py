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


@pytest.fixture(scope="module")
def prepared_data(tmp_path_factory: pytest.TempPathFactory) -> PreparedData:
    return tiny.prepared(tmp_path_factory.mktemp("prepared"))


def noticed(asked: Any, notice: Path, at: int, processes: int) -> TrainflowError:
    """The failure of a launch whose notice is given when step `at` is reported."""

    def give(event: dict[str, Any]) -> None:
        if event.get("step", 0) >= at:
            notice.touch()

    config = LaunchConfig(kind="torchrun", processes=processes, grace_s=20.0)
    with pytest.raises(TrainflowError) as caught:
        launch(asked, config, env=SLOW, on_line=lambda line: None, on_event=give)
    return caught.value


@pytest.mark.parametrize("processes", [1, 2])
def test_a_file_ends_it_saved_and_the_same_request_continues(
    processes: int, tmp_path: Path, prepared_data: PreparedData
) -> None:
    notice, output = tmp_path / "notice", tmp_path / "train"
    preemption = Preemption(file=str(notice), every_s=0.1)
    asked = replace(tiny.train_request(tmp_path, prepared_data, str(output), save_steps=500), preemption=preemption)
    error = noticed(asked, notice, 3, processes)
    assert type(error) is PreemptedByNotice
    assert (error.exit_code, error.retryable) == (19, False)
    assert error.message.startswith(f"This machine is about to be taken away (the file {notice} is there). Stopped")
    assert checkpoints(output / "checkpoints") == [error.step]
    notice.unlink()
    result = tiny.run(asked, processes=processes, kind="torchrun")
    assert result.resumed_from == error.step
    alone = tiny.train_request(tmp_path / "alone", prepared_data, str(tmp_path / "whole"), save_steps=500)
    tiny.run(alone, processes=processes, kind="torchrun")
    assert tiny.weights(str(output)) == tiny.weights(str(tmp_path / "whole"))


def test_a_notice_that_is_given_before_training_ends_it_at_its_first_step(
    tmp_path: Path, prepared_data: PreparedData
) -> None:
    notice = tmp_path / "notice"
    notice.touch()
    preemption = Preemption(file=str(notice), every_s=0.1)
    asked = replace(tiny.train_request(tmp_path, prepared_data, str(tmp_path / "train")), preemption=preemption)
    error = noticed(asked, notice, 1, 2)
    assert isinstance(error, PreemptedByNotice)
    assert error.step is not None
    assert error.step <= 5


@pytest.mark.parametrize("processes", [1, 2])
def test_slurms_signal_to_every_process_saves(processes: int, tmp_path: Path, prepared_data: PreparedData) -> None:
    output = tmp_path / "train"
    asked = tiny.train_request(tmp_path, prepared_data, str(output), save_steps=2)
    kind = "process" if processes == 1 else "torchrun"
    owner = Owner(tmp_path, asked, kind=kind, processes=processes, grace_s=20.0, env=SLOW)
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
