"""`save_async` on several processes: one commit, one moment at which all learn of it, one failure for all."""

from __future__ import annotations

import errno
import os
import signal
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from tests.support.distributed import run_distributed
from tests.support.gates import Gate, until
from tests.support.toys import classification_rows
from tests.support.training import NoteSaves, assert_equal, final_state, trainer
from trainer_lib import TrainerCallback
from trainer_lib.checkpoint import writer
from trainer_lib.checkpoint.catalogue import find_newest_intact, list_checkpoints
from trainer_lib.checkpoint.snapshot import Snapshot
from trainer_lib.errors import InfrastructureError, StorageFullError
from trainer_lib.storage import Store

ROWS = classification_rows(48)
GIVEN: dict[str, Any] = {
    "global_batch_size": 8,
    "per_device_train_batch_size": 2,
    "max_steps": 12,
    "save_strategy": "steps",
    "save_steps": 3,
    "logging_strategy": "steps",
    "logging_steps": 1,
}


class Until(TrainerCallback):
    """Lets a gate open at the end of a step."""

    def __init__(self, step: int) -> None:
        self.step, self.event = step, threading.Event()

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == self.step:
            self.event.set()


def held_back(folder: str, save_async: bool, per_node: bool) -> dict[str, Any]:
    """Rank 0 begins to write step 3 when training is at step 5."""
    if per_node:
        os.environ.update(LOCAL_RANK="0", LOCAL_WORLD_SIZE="1")
        folder = f"{folder}/{os.environ['RANK']}"
    note, later = NoteSaves(), Until(5)
    if save_async:
        Gate(pytest.MonkeyPatch(), lambda step: until(later.event)(step) if step == 3 else None)
    given = {**GIVEN, "save_async": save_async, "save_on_each_node": per_node}
    one = trainer(folder, ROWS, callbacks=[note, later], **given)
    one.train()
    infos = list_checkpoints(Store.open(folder))
    digests = {
        (info.step, entry.path): entry.sha256
        for info in infos
        for entry in info.commit.files
        if entry.path != "training_args.json"
    }
    return {"state": final_state(one), "saved": note.saved, "digests": digests}


@pytest.mark.parametrize("per_node", [False, True])
def test_the_bytes_are_those_of_a_save_that_all_waited_for(per_node: bool, tmp_path: Path) -> None:
    waited = run_distributed(held_back, 2, str(tmp_path / "waited"), False, per_node)
    ranks = run_distributed(held_back, 2, str(tmp_path / "background"), True, per_node)
    for mine, theirs in zip(ranks, waited, strict=True):
        assert_equal(mine["state"], theirs["state"])
        assert mine["digests"] == theirs["digests"]
        assert {step for step, _ in mine["digests"]} == {3, 6, 9, 12}
    saved = ranks[0]["saved"]
    assert saved == ranks[1]["saved"]  # at the same step boundaries
    assert [step for step, _ in saved] == [3, 6, 9, 12]
    assert saved[0][1] >= 5
    assert waited[0]["saved"] == [(3, 3), (6, 6), (9, 9), (12, 12)]


def failing(folder: str, rank: int, allowed: int) -> dict[str, Any]:
    """A rank whose disk is full when step 3 is saved."""
    note, write = NoteSaves(), writer._write_rank

    def full(store: Store, snapshot: Snapshot, own: int) -> Any:
        if snapshot.step == 3 and own == rank:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return write(store, snapshot, own)

    pytest.MonkeyPatch().setattr(writer, "_write_rank", full)  # this process ends with the test
    one = trainer(folder, ROWS, callbacks=[note], save_async=True, max_failed_saves=allowed, **GIVEN)
    error = None
    try:
        one.train()
    except StorageFullError as caught:
        error = caught.rank
    return {"error": error, "at": note.step, "saved": [step for step, _ in note.saved]}


@pytest.mark.parametrize("rank", [0, 1])
def test_a_full_disk_of_one_rank_ends_all_at_one_step(rank: int, tmp_path: Path) -> None:
    zero, one = run_distributed(failing, 2, str(tmp_path), rank, 1)
    assert zero == one
    assert zero["error"] == rank
    assert zero["saved"] == []
    assert 3 < zero["at"] <= 6
    assert list_checkpoints(Store.open(tmp_path)) == []


def test_an_allowed_failure_of_one_rank_lets_all_go_on(tmp_path: Path) -> None:
    zero, one = run_distributed(failing, 2, str(tmp_path), 1, 2)
    assert zero == one
    assert (zero["error"], zero["saved"]) == (None, [6, 9, 12])


def killed(folder: str) -> str:
    """Rank 1 is killed while rank 0 is writing step 6; what rank 0 then says."""
    rank, started, dead = os.environ["RANK"], Path(folder, "started"), Path(folder, "dead")
    if rank == "1" and (pid := os.fork()):  # the helper that ran this function must live to return
        os.waitpid(pid, 0)
        dead.touch()
        return "killed"

    def before(step: int) -> None:
        if step == 6:
            started.touch()
            while not dead.exists():
                time.sleep(0.01)

    def kill() -> None:
        while not started.exists():
            time.sleep(0.01)
        os.kill(os.getpid(), signal.SIGKILL)

    if rank == "1":
        threading.Thread(target=kill, daemon=True).start()
    Gate(pytest.MonkeyPatch(), before)
    one = trainer(f"{folder}/out", ROWS, save_async=True, **GIVEN)
    try:
        one.train()
    except InfrastructureError as error:
        return str(error)
    raise AssertionError("was not noticed")


def test_a_rank_killed_while_a_save_is_under_way_hangs_nobody(tmp_path: Path) -> None:
    zero, one = run_distributed(killed, 2, str(tmp_path))
    assert one == "killed"
    assert "Another process of this job ended" in zero
    found = find_newest_intact(Store.open(tmp_path / "out"), on_damage=pytest.fail)
    assert found is not None
    assert found.step == 3
