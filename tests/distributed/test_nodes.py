"""Two machines with disks of their own, each simulated by one or two ranks: `save_on_each_node`, logs per machine."""

from __future__ import annotations

import io
import logging
import os
import shutil
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

import pytest

from tests.support.distributed import run_distributed
from tests.support.toys import classification_rows
from tests.support.training import StopAt, assert_equal, final_state, preempted_at, trainer
from trainer_lib.errors import ConfigError, StorageError

ROWS = classification_rows(26)
GIVEN: dict[str, Any] = {"num_train_epochs": 2, "global_batch_size": 8, "per_device_train_batch_size": 2}


def on_node(ranks_per_node: int) -> int:
    """Make this process believe that machines have that many ranks each; the number of its machine."""
    rank = int(os.environ["RANK"])
    os.environ["LOCAL_RANK"] = str(rank % ranks_per_node)
    os.environ["LOCAL_WORLD_SIZE"] = str(ranks_per_node)
    return rank // ranks_per_node


def _stopped_and_resumed(folder: str, ranks_per_node: int, damaged: bool) -> tuple[Any, list[str], int]:
    node = on_node(ranks_per_node)
    disk = Path(folder, f"node-{node}")
    given: dict[str, Any] = {**GIVEN, "save_on_each_node": True, "save_strategy": "steps", "save_steps": 2}
    stopped = trainer(disk / "out", ROWS, callbacks=[StopAt(5)], **given)
    step = preempted_at(stopped)
    assert step in (5, 6)  # several ranks learn of it a step later at most
    stopped._trainflow.comm.barrier()
    if damaged and stopped._trainflow.comm.rank == ranks_per_node:  # this machine's newest one is lost
        shutil.rmtree(disk / "out" / f"checkpoint-{step}")
    stopped._trainflow.comm.barrier()
    resumed = trainer(disk / "out", ROWS, **given)
    seen: list[int] = []
    begin = resumed._trainflow.restore.open

    def note(url: str) -> Any:
        seen.append(int(url.rpartition("-")[2]))
        return begin(url)

    setattr(resumed._trainflow.restore, "open", note)  # noqa: B010
    resumed.train(resume_from_checkpoint=True)
    files = sorted(path.name for path in (disk / "out").glob("checkpoint-*/rng/*"))
    return final_state(resumed), files, seen[0]


def _whole(folder: str) -> Any:
    one = trainer(folder, ROWS, **GIVEN)
    one.train()
    return final_state(one)


@pytest.mark.parametrize(("ranks_per_node", "damaged"), [(1, False), (1, True), (2, False)])
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


def _one_disk_fails(folder: str) -> str:
    node = on_node(1)
    disk = Path(folder, f"node-{node}")
    if node == 1:
        disk.parent.mkdir(parents=True, exist_ok=True)
        disk.write_text("not a folder")
    try:
        one = trainer(disk, ROWS, save_on_each_node=True, save_strategy="steps", save_steps=1, max_steps=2)
        one.train()
    except (StorageError, ConfigError) as error:
        return type(error).__name__
    return "nothing"


def test_a_disk_that_fails_on_one_machine_fails_on_all(tmp_path: Path) -> None:
    first, second = run_distributed(_one_disk_fails, 2, str(tmp_path))
    assert first == second != "nothing"


def _exports(folder: str) -> list[str]:
    disk = Path(folder, f"node-{on_node(1)}")
    one = trainer(disk, ROWS, save_on_each_node=True, max_steps=1)
    one.train()
    one.save_model()
    one._trainflow.comm.barrier()
    return sorted(path.name for path in disk.iterdir())


def test_the_exported_model_is_on_every_machine(tmp_path: Path) -> None:
    assert run_distributed(_exports, 2, str(tmp_path)) == [["model.safetensors", "training_args.json"]] * 2


# ---------------------------------------------------------------------------------------------------- logs per machine
def _levels(folder: str, ranks_per_node: int, given: dict[str, Any]) -> tuple[str, bool, str]:
    on_node(ranks_per_node)
    one = trainer(folder, ROWS, max_steps=1, logging_strategy="steps", logging_steps=1, **given)
    shown = io.StringIO()
    with redirect_stdout(shown):
        one.train()
    level = logging.getLevelName(logging.getLogger("trainer_lib").level)
    return level, one.args.should_log, "printed" if "loss" in shown.getvalue() else "silent"


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({}, [("INFO", True), ("INFO", True)]),
        ({"log_on_each_node": False}, [("INFO", True), ("WARNING", False)]),
        (
            {"log_level": "error", "log_level_replica": "debug", "log_on_each_node": False},
            [("ERROR", True), ("DEBUG", False)],
        ),
        ({"log_level": "debug"}, [("DEBUG", True), ("DEBUG", True)]),
    ],
)
def test_log_levels_by_process_and_machine(given: Any, expected: list[tuple[str, bool]], tmp_path: Path) -> None:
    assert [told[:2] for told in run_distributed(_levels, 2, str(tmp_path), 1, given)] == expected


def test_replicas_of_one_machine_are_quiet_and_print_nothing(tmp_path: Path) -> None:
    told = run_distributed(_levels, 2, str(tmp_path), 2, {"log_level": "info", "log_level_replica": "error"})
    assert told == [("INFO", True, "printed"), ("ERROR", False, "silent")]
