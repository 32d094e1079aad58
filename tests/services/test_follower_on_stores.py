"""A follower's evaluations, on every kind of store."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest

from tests.support.following import FollowedStage
from trainer_lib.checkpoint.catalogue import rotate_checkpoints
from trainer_lib.storage import Store


def test_each_checkpoint_is_evaluated_once_oldest_first_and_the_best_is_kept(
    any_store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    project = FollowedStage(tmp_path, monkeypatch, any_store)
    project.save(1, 3)
    follower = project.follower()
    assert (follower.begin(), follower.work()) == ([], 2)
    project.save(2, 4, 5)
    assert follower.work() == 3
    # Of equal ones the earlier is the best, and NaN never is.
    assert project.evaluated == [(1, True), (3, True), (2, True), (4, False), (5, False)]
    assert project.kept == ["checkpoint-2"]
    assert rotate_checkpoints(project.root, keep=1, protect=()) == ["checkpoint-1", "checkpoint-3", "checkpoint-4"]

    again = project.follower()
    known = again.begin()
    assert again.work() == 0
    assert [each.step for each in known] == [1, 2, 3, 4, 5]
    assert math.isnan(known[-1].metrics["eval_loss"])
    assert again.best is not None
    assert again.best.step == 2
    # Nothing is left of the leases, and the records are strict JSON.
    assert not project.stage.child("follow", "claims").list()
    for file in project.stage.child("follow").list():
        json.loads(project.stage.read_bytes(f"follow/{file.path}"), parse_constant=pytest.fail)
