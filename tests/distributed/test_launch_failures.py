"""The failure table of docs/distributed.md: what was done to a real process, and what the user sees."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.support import tiny
from tests.support.checkpoints import checkpoints
from tests.support.launched import Owner, kept_files, request, wait_until
from tests.support.memory_group import limited
from tests.support.repository import ROOT
from trainer_lib.errors import HangError, Preempted, PreemptedByNotice, TrainflowError, from_record
from trainer_lib.launch.base import launch
from trainer_lib.launch.settings.config import LaunchConfig
from trainer_lib.protocol.requests import Preemption, PreparedData


def test_a_rank_that_does_not_come_to_a_collective_is_a_hang(tmp_path: Path) -> None:
    """Without `timeout_s`, `ddp_timeout` ends the wait, and torch's words for it do not say who is missing."""
    data = tiny.prepared(tmp_path / "prepared")
    asked = tiny.train_request(tmp_path, data, str(tmp_path / "train"), ddp_timeout=6)
    stuck = 'time.sleep(300 if self.training and os.environ["RANK"] == "1" else 0)'
    (tmp_path / "recipe.py").write_text(tiny.RECIPE.replace('time.sleep(float(os.environ.get("STEP_S", "0")))', stuck))
    with pytest.raises(HangError, match="A rank did not come to a collective within ddp_timeout") as caught:
        tiny.run(asked, processes=2, grace_s=2.0)
    assert "rank 1 in forward" in caught.value.message
    assert caught.value.retryable
    with kept_files(caught.value) as folder:
        assert {path.name for path in folder.glob("trace-*")} == {"trace-0.json", "trace-1.json"}
        assert "in forward" in (folder / "stack-1.txt").read_text()


# Rank 1 takes all memory; rank 0 waits for it in vain.
HUNGRY = """
import os, time

if os.environ["RANK"] == "1":
    kept = [bytearray(1 << 20) for _ in range(1 << 20)]
time.sleep(300)

def prepare(options, out):
    return {}

build_model = prepare
"""


@pytest.mark.needs("cgroup")
def test_a_kill_by_the_kernel_for_memory_is_told_from_any_other(tmp_path: Path) -> None:
    with limited(700 << 20) as prefix:
        owner = Owner(tmp_path, request(tmp_path, HUNGRY), prefix, kind="torchrun", processes=2, grace_s=2.0)
        try:
            owner.process.wait(timeout=60)
            outcome = owner.outcome()
        finally:
            owner.close()
    assert outcome["class"] == "OutOfMemoryError", outcome
    assert outcome["message"] == ("Rank 1 was killed by the kernel: the machine's (or container's) memory ran out.")
    assert "per_device_train_batch_size" in outcome["remedy"]


def test_a_script_under_torchrun_is_told_what_failed_not_only_that_it_did(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(
        "import os\n"
        "from tests.support.toys import classification_rows\n"
        "from tests.support.training import trainer\n"
        "from trainer_lib.errors import DataError\n"
        "one = trainer('out', classification_rows(16), max_steps=2, save_strategy='no')\n"
        "if os.environ['RANK'] == '1':\n"
        "    raise DataError('Row 7 is empty.', field='train', value=7, remedy='Repair it.')\n"
        "one.train()\n"
    )
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command += ["--log-dir", str(tmp_path / "logs"), "script.py"]
    variables: dict[str, Any] = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=tmp_path, env=variables, capture_output=True, text=True, timeout=120)
    assert done.returncode == 1
    summary = done.stderr.partition("Root Cause")[2]
    assert "rank      : 1" in summary
    assert "DataError: train = 7: Row 7 is empty. Repair it." in summary


SLOW = {"OMP_NUM_THREADS": "1", "STEP_S": "0.05"}


def test_a_file_and_slurms_signal_end_it_saved_and_the_same_request_continues(
    tmp_path: Path, prepared_data: PreparedData, uninterrupted_weights: str
) -> None:
    """The file ends the first training, Slurm's signal to every process the second; the third reaches the end."""
    notice, output = tmp_path / "notice", tmp_path / "train"

    def give(event: dict[str, Any]) -> None:
        if event.get("step", 0) >= 3:
            notice.touch()

    asked = tiny.train_request(tmp_path, prepared_data, str(output), save_steps=500)
    noticed = replace(asked, preemption=Preemption(file=str(notice), every_s=0.1))
    config = LaunchConfig(kind="torchrun", processes=2, grace_s=20.0)
    with pytest.raises(PreemptedByNotice) as caught:
        launch(noticed, config, env=SLOW, on_line=lambda line: None, on_event=give)
    error = caught.value
    assert (error.exit_code, error.retryable) == (19, False)
    assert error.message.startswith(f"This machine is about to be taken away (the file {notice} is there). Stopped")
    assert checkpoints(output / "checkpoints") == [error.step]
    signaled = signal_every_process(replace(asked, args={**asked.args, "save_steps": 2}), tmp_path, output)
    assert signaled.step is not None and error.step is not None and signaled.step > error.step
    assert tiny.on_ranks(asked).resumed_from == signaled.step
    assert tiny.weights(str(output)) == uninterrupted_weights


def signal_every_process(asked: Any, folder: Path, output: Path) -> TrainflowError:
    """The end of a training whose processes all get Slurm's notice after its first save."""
    before = checkpoints(output / "checkpoints")
    owner = Owner(folder, asked, kind="torchrun", processes=2, grace_s=20.0, env=SLOW)
    try:
        wait_until(lambda: checkpoints(output / "checkpoints") != before, 60)
        for process in owner.tree():
            process.send_signal(signal.SIGUSR2)
        owner.process.wait(timeout=60)
        error = from_record(owner.outcome())
        assert owner.gone() == []
    finally:
        owner.close()
    assert type(error) is Preempted, error
    assert error.step in checkpoints(output / "checkpoints")
    return error


def test_a_notice_that_is_there_before_training_begins_ends_it_at_once(
    tmp_path: Path, prepared_data: PreparedData
) -> None:
    asked = tiny.train_request(tmp_path, prepared_data, str(tmp_path / "train"), save_steps=500)
    (notice := tmp_path / "notice").touch()
    with pytest.raises(PreemptedByNotice) as caught:
        tiny.run(replace(asked, preemption=Preemption(file=str(notice), every_s=0.1)), SLOW, kind="in_process")
    assert caught.value.step is not None and caught.value.step <= 5
