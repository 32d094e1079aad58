"""A train stage with checkpoints of no training, and followers of it whose workers are a function."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.support.checkpoints import save_untrained
from trainer_lib.checkpoint.catalogue import list_checkpoints
from trainer_lib.locks.removal import is_kept
from trainer_lib.protocol.requests import CheckpointMetrics, EvaluateCheckpointRequest, PreparedSplit
from trainer_lib.storage import Store
from trainflow.tasks import follow as module
from trainflow.tasks.configs import LaunchSettings, TrainConfig
from trainflow.tasks.follow import Follower, Job, Listener, check_settings
from trainflow.tasks.stage.context import StageContext
from trainflow.tasks.stage.facts import PrepareFacts
from trainflow.tasks.stage.manifest import StageManifest

LOSSES = {1: 0.5, 2: 0.2, 3: 0.3, 4: 0.2, 5: math.nan}
Measure = Callable[[EvaluateCheckpointRequest], CheckpointMetrics]


def measure(request: EvaluateCheckpointRequest) -> CheckpointMetrics:
    """Return what a worker would answer."""
    step = int(request.checkpoint.rpartition("-")[2])
    return CheckpointMetrics(step, {"eval_loss": LOSSES[step], "epoch": step / 2})


class FollowedStage:
    """A train stage with checkpoints, and followers of it whose workers are a function."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch, stage: Store | None = None) -> None:
        self.stage = stage or Store.open(folder / "stage")
        self.root = self.stage.child("checkpoints")
        self.said: list[str] = []
        self.evaluated: list[tuple[int, bool]] = []
        self.asked: list[EvaluateCheckpointRequest] = []
        self.measure: Measure = measure
        (folder / "recipe.py").write_text("")
        self.context = StageContext(name="toy", recipe=str(folder / "recipe.py"), storage=str(folder), root=str(folder))
        monkeypatch.setattr(module, "_PAUSE_S", 0.0)
        monkeypatch.setattr(module, "launch", self._launch)

    def _launch(self, request: EvaluateCheckpointRequest, how: Any, **more: Any) -> CheckpointMetrics:
        self.asked.append(request)
        return self.measure(request)

    def follower(self, **args: Any) -> Follower:
        config = TrainConfig(eval_split="test", args={"use_cpu": True, **args})
        facts = PrepareFacts(splits={"test": PreparedSplit(4), "train": PreparedSplit(4)})
        job = Job(
            config=config,
            launch=LaunchSettings(kind="process", processes=1),
            use_cpu=False,
            context=self.context,
            stage=self.stage,
            data=StageManifest("prepare-data", "k" * 64, self.stage.url, "d" * 64, facts=facts),
            poll_s=0.05,
        )
        listener = Listener(self.said.append, evaluated=lambda each, best: self.evaluated.append((each.step, best)))
        return Follower(job, check_settings(config, self.context), None, listener)

    def save(self, *which: int) -> None:
        for step in which:
            save_untrained(self.root, step)

    @property
    def kept(self) -> list[str]:
        return [info.name for info in list_checkpoints(self.root) if is_kept(self.root.child(info.name))]
