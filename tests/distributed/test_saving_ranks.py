"""Saves of several processes: one checkpoint, one failure for all, in the background, and on machines of their own."""

from __future__ import annotations

import errno
import os
import shutil
import signal
import threading
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.checkpoints import untrained
from tests.support.distributed import run_distributed
from tests.support.gates import Gate, until
from tests.support.launched import wait_until
from tests.support.toys import classification_rows
from tests.support.training import LOGGED, At, NoteSaves, StopAt, assert_equal, final_state, preempted_at, trainer
from trainer_lib import TrainingArguments
from trainer_lib.checkpoint import writer
from trainer_lib.checkpoint.catalogue import find_newest_intact, list_checkpoints
from trainer_lib.checkpoint.reader import load_checkpoint
from trainer_lib.checkpoint.snapshot import Snapshot
from trainer_lib.checkpoint.values import capture_rng
from trainer_lib.checkpoint.writer import save_checkpoint
from trainer_lib.distributed import communicator as distributed
from trainer_lib.errors import ConfigError, InfrastructureError, StorageError, StorageFullError, TrainflowError
from trainer_lib.storage import Store


def fill_disk(rank: int, step: int) -> None:
    """From now on, this process's part of a step's checkpoint finds no space on that rank."""
    write = writer._write_rank

    def full(store: Store, snapshot: Snapshot, number: int) -> Any:
        if snapshot.step == step and number == rank:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return write(store, snapshot, number)

    pytest.MonkeyPatch().setattr(writer, "_write_rank", full)  # this process ends with the test


def save_and_load(url: str, fail_on: int | None) -> dict[str, Any]:
    comm = distributed.init(TrainingArguments("out", use_cpu=True))
    root = Store.open(url)
    torch.manual_seed(1)
    state = untrained(2)
    torch.manual_seed(100 + comm.rank)
    state.rng = capture_rng()
    if fail_on is not None:
        fill_disk(fail_on, 2)
    try:
        info = save_checkpoint(root, state, comm)
    except TrainflowError as error:
        return {"error": type(error).__name__, "rank": error.rank, "left": root.children()}
    loaded = load_checkpoint(root, info.name, comm)
    assert [loaded.read_rng(rank) == state.rng for rank in (comm.rank, 1 - comm.rank)] == [True, False]
    assert all(torch.equal(tensor, state.model[name]) for name, tensor in loaded.read_model().items())
    with pytest.raises(ConfigError):
        load_checkpoint(root, "checkpoint-7", comm)
    files = [entry.path for entry in info.commit.files]
    return {"info": (info.step, info.url, info.commit.content_digest, info.commit.meta["world_size"]), "files": files}


def test_every_rank_has_its_own_random_state_in_one_checkpoint(s3_url: str) -> None:
    zero, one = run_distributed(save_and_load, 2, s3_url, None)
    assert zero == one
    assert [name for name in zero["files"] if name.startswith("rng/")] == ["rng/rank-00000.json", "rng/rank-00001.json"]
    newest = find_newest_intact(Store.open(s3_url), on_damage=pytest.fail)
    assert newest is not None
    assert newest.commit.meta["world_size"] == zero["info"][3] == 2


@pytest.mark.parametrize("rank", [0, 1])
def test_a_full_disk_on_one_rank_is_a_full_disk_on_all_and_nothing_is_committed(rank: int, tmp_path: Path) -> None:
    zero, one = run_distributed(save_and_load, 2, str(tmp_path), rank)
    assert zero == {"error": StorageFullError.__name__, "rank": rank, "left": []}
    assert (one["error"], one["rank"]) == (zero["error"], rank)  # the first rank tidies up
    assert list_checkpoints(Store.open(tmp_path)) == []


# -------------------------------------------------------------------------------------------------- in the background
ROWS = classification_rows(48)
SAVING: dict[str, Any] = {"global_batch_size": 8, "per_device_train_batch_size": 2, "max_steps": 12, **LOGGED}
SAVING |= {"save_strategy": "steps", "save_steps": 3}


def held_back(folder: str, save_async: bool, per_node: bool) -> dict[str, Any]:
    """Rank 0 begins to write step 3 when training is at step 5."""
    if per_node:
        folder = f"{folder}/{on_node(1)}"
    note, later = NoteSaves(), threading.Event()
    if save_async:
        Gate(pytest.MonkeyPatch(), lambda step: until(later)(step) if step == 3 else None)
    settings = {**SAVING, "save_async": save_async, "save_on_each_node": per_node}
    training = trainer(folder, ROWS, callbacks=[note, At(5, later.set)], **settings)
    training.train()
    digests = {
        (info.step, entry.path): entry.sha256
        for info in list_checkpoints(Store.open(folder))
        for entry in info.commit.files
        if entry.path != "training_args.json"
    }
    return {"state": final_state(training), "saved": note.saved, "digests": digests}


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


def failing(folder: str, rank: int, allowed: int) -> tuple[int | None, int, list[int]]:
    """A rank whose disk is full when step 3 is saved."""
    note, error = NoteSaves(), None
    fill_disk(rank, 3)
    try:
        trainer(folder, ROWS, callbacks=[note], save_async=True, max_failed_saves=allowed, **SAVING).train()
    except StorageFullError as caught:
        error = caught.rank
    return error, note.step, [step for step, _ in note.saved]


@pytest.mark.parametrize(("rank", "allowed"), [(0, 1), (1, 1), (1, 2)])
def test_a_full_disk_of_one_rank_ends_all_at_one_step_unless_a_failure_is_allowed(
    rank: int, allowed: int, tmp_path: Path
) -> None:
    zero, one = run_distributed(failing, 2, str(tmp_path), rank, allowed)
    assert zero == one
    error, step, saved = zero
    if allowed == 2:
        assert (error, saved) == (None, [6, 9, 12])
    else:
        assert (error, saved) == (rank, [])
        assert 3 < step <= 6
        assert list_checkpoints(Store.open(tmp_path)) == []


def killed(folder: str) -> str:
    """Rank 1 is killed while rank 0 is writing step 6; what rank 0 then says."""
    rank, started, dead = os.environ["RANK"], Path(folder, "started"), Path(folder, "dead")
    if rank == "1" and (pid := os.fork()):  # the process that was asked for this must live to return
        os.waitpid(pid, 0)
        dead.touch()
        return "killed"

    def before(step: int) -> None:
        if step == 6:
            started.touch()
            wait_until(dead.exists, 30)

    def kill() -> None:
        wait_until(started.exists, 30)
        os.kill(os.getpid(), signal.SIGKILL)

    if rank == "1":
        threading.Thread(target=kill, daemon=True).start()
    Gate(pytest.MonkeyPatch(), before)
    training = trainer(f"{folder}/out", ROWS, save_async=True, **SAVING)
    with pytest.raises(InfrastructureError) as caught:
        training.train()
    return str(caught.value)


def test_a_rank_killed_while_a_save_is_under_way_hangs_nobody(tmp_path: Path) -> None:
    zero, one = run_distributed(killed, 2, str(tmp_path))
    assert one == "killed"
    assert "Another process of this job ended" in zero
    newest = find_newest_intact(Store.open(tmp_path / "out"), on_damage=pytest.fail)
    assert newest is not None
    assert newest.step == 3


# -------------------------------------------------------- machines with disks of their own, of one or two ranks each
NODE_ROWS = classification_rows(26)
EPOCHS: dict[str, Any] = {"num_train_epochs": 2, "global_batch_size": 8, "per_device_train_batch_size": 2}


def on_node(ranks_per_node: int) -> int:
    """Make this process believe that machines have that many ranks each; the number of its machine."""
    rank = int(os.environ["RANK"])
    os.environ["LOCAL_RANK"] = str(rank % ranks_per_node)
    os.environ["LOCAL_WORLD_SIZE"] = str(ranks_per_node)
    return rank // ranks_per_node


def _stopped_and_resumed(folder: str, ranks_per_node: int, damaged: bool) -> tuple[Any, list[str], int]:
    disk = Path(folder, f"node-{on_node(ranks_per_node)}")
    settings: dict[str, Any] = {**EPOCHS, "save_on_each_node": True, "save_strategy": "steps", "save_steps": 2}
    stopped = trainer(disk / "out", NODE_ROWS, callbacks=[StopAt(5)], **settings)
    step = preempted_at(stopped)
    assert step in (5, 6)  # several ranks learn of it a step later at most
    stopped._trainflow.comm.barrier()
    if damaged and stopped._trainflow.comm.rank == ranks_per_node:  # this machine's newest one is lost
        shutil.rmtree(disk / "out" / f"checkpoint-{step}")
    stopped._trainflow.comm.barrier()
    resumed = trainer(disk / "out", NODE_ROWS, **settings)
    opened: list[int] = []
    begin = resumed._trainflow.restore.open

    def note(url: str) -> Any:
        opened.append(int(url.rpartition("-")[2]))
        return begin(url)

    setattr(resumed._trainflow.restore, "open", note)  # noqa: B010
    resumed.train(resume_from_checkpoint=True)
    files = sorted(path.name for path in (disk / "out").glob("checkpoint-*/rng/*"))
    return final_state(resumed), files, opened[0]


def _whole(folder: str) -> Any:
    training = trainer(folder, NODE_ROWS, **EPOCHS)
    training.train()
    return final_state(training)


@pytest.mark.parametrize(("ranks_per_node", "damaged"), [(1, True), (2, False)])
def test_each_machine_keeps_whole_checkpoints_and_resumes_from_the_newest_that_all_have(
    ranks_per_node: int, damaged: bool, tmp_path: Path
) -> None:
    world = 2 * ranks_per_node
    resumed = run_distributed(_stopped_and_resumed, world, str(tmp_path), ranks_per_node, damaged)
    whole = run_distributed(_whole, world, str(tmp_path / "whole"))
    for (state, files, first), expected in zip(resumed, whole, strict=True):
        if world > 2:  # the order in which four ranks' losses are added depends on how many are added at once
            state["logs"] = expected["logs"] = None
        assert_equal(state, expected)
        assert {"rank-00000.json", f"rank-{ranks_per_node - 1:05d}.json"} == set(files)
        assert first == 4 if damaged else first in (5, 6)
    for node in range(2):
        kept = {path.name for path in (tmp_path / f"node-{node}" / "out").glob("checkpoint-*/*")}
        assert {"COMMIT.json", "model.safetensors", "optimizer.safetensors", "trainer_state.json"} <= kept


def _exports_and_fails(folder: str) -> tuple[list[str], str]:
    node = on_node(1)
    disk = Path(folder, f"node-{node}")
    training = trainer(disk, NODE_ROWS, save_on_each_node=True, max_steps=1)
    training.train()
    training.save_model()
    training._trainflow.comm.barrier()
    broken = Path(folder, f"broken-{node}")
    if node == 1:
        broken.write_text("not a folder")
    with pytest.raises((StorageError, ConfigError)) as caught:
        trainer(broken, NODE_ROWS, save_on_each_node=True, save_strategy="steps", save_steps=1, max_steps=2).train()
    return sorted(path.name for path in disk.iterdir()), type(caught.value).__name__


def test_the_exported_model_is_on_every_machine_and_a_disk_that_fails_on_one_fails_on_all(tmp_path: Path) -> None:
    first, second = run_distributed(_exports_and_fails, 2, str(tmp_path))
    assert first == second
    assert first[0] == ["model.safetensors", "training_args.json"]
