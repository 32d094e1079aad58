"""Several processes save and load one checkpoint; a failure on one is the same failure on all."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.checkpoints import untrained
from tests.support.distributed import run_distributed
from trainer_lib import distributed
from trainer_lib.checkpoint import writer
from trainer_lib.checkpoint.catalogue import find_newest_intact, list_checkpoints
from trainer_lib.checkpoint.reader import load_checkpoint
from trainer_lib.checkpoint.rng import capture_rng
from trainer_lib.checkpoint.writer import save_checkpoint
from trainer_lib.errors import ConfigError, StorageFullError, TrainflowError
from trainer_lib.storage import Store


class Settings:
    use_cpu = True
    ddp_backend: str | None = None
    ddp_timeout = 30


def save_and_load(url: str, fail_on: int | None) -> dict[str, Any]:
    comm = distributed.init(Settings())
    root = Store.open(url)
    torch.manual_seed(1)
    state = untrained(2)
    torch.manual_seed(100 + comm.rank)
    state.rng = capture_rng()
    if comm.rank == fail_on:

        def full(*args: object, **kwargs: object) -> Any:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

        writer._write_rank = full  # this process ends with the test
    try:
        info = save_checkpoint(root, state, comm)
    except TrainflowError as error:
        return {"error": type(error).__name__, "rank": error.rank, "left": root.children()}
    loaded = load_checkpoint(root, info.name, comm)
    try:
        load_checkpoint(root, "checkpoint-7", comm)
    except ConfigError:
        absent = True
    own = loaded.read_rng(comm.rank)
    return {
        "info": (info.step, info.url, info.commit.content_digest, info.commit.meta["world_size"]),
        "files": [entry.path for entry in info.commit.files],
        "own": own == state.rng,
        "other": loaded.read_rng(1 - comm.rank) == state.rng,
        "weights": all(torch.equal(tensor, state.model[name]) for name, tensor in loaded.read_model().items()),
        "absent": absent,
    }


@pytest.mark.parametrize("where", ["file", "s3"])
def test_every_rank_has_its_own_random_state_in_one_checkpoint(where: str, tmp_path: Path, s3_url: str) -> None:
    url = str(tmp_path / "root") if where == "file" else s3_url
    zero, one = run_distributed(save_and_load, 2, url, None)
    assert zero == one
    assert zero["own"]
    assert not zero["other"]
    assert zero["weights"]
    assert zero["absent"]
    assert [name for name in zero["files"] if name.startswith("rng/")] == ["rng/rank-00000.json", "rng/rank-00001.json"]
    found = find_newest_intact(Store.open(url), on_damage=pytest.fail)
    assert found is not None
    assert found.commit.meta["world_size"] == 2


@pytest.mark.parametrize("rank", [0, 1])
def test_a_full_disk_on_one_rank_is_a_full_disk_on_all_and_nothing_is_committed(rank: int, tmp_path: Path) -> None:
    zero, one = run_distributed(save_and_load, 2, str(tmp_path), rank)
    assert (zero["error"], zero["rank"]) == (one["error"], one["rank"]) == (StorageFullError.__name__, rank)
    assert zero["left"] == []
    assert list_checkpoints(Store.open(tmp_path)) == []
