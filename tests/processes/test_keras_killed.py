"""A training of a Keras model that is killed resumes from its last checkpoint and ends with the same bytes."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.repository import ROOT

pytestmark = pytest.mark.needs("keras")

SCRIPT = """
import os, signal, sys
from tests.support.keras_toys import classifier, keras, pairs, trainer
from trainer_lib import TrainerCallback

folder, kill_at = sys.argv[1], int(sys.argv[2])


class Kill(TrainerCallback):
    def on_step_end(self, args, state, control, **kwargs):
        if state.global_step == kill_at:
            os.kill(os.getpid(), signal.SIGKILL)


schedule = keras().optimizers.schedules.CosineDecay(1e-2, 12)
one = trainer(
    folder, pairs(24), model=classifier(0.5, norm=True), save_strategy="steps", save_steps=3, callbacks=[Kill()],
    optimizers=(keras().optimizers.Adam(schedule), schedule),
)
one.train(resume_from_checkpoint="auto")
"""


def run(folder: Path, kill_at: int = -1) -> int:
    command = [sys.executable, "-W", "ignore", "-c", SCRIPT, str(folder), str(kill_at)]
    done = subprocess.run(
        command, cwd=ROOT, env={**os.environ, "PYTHONPATH": str(ROOT)}, capture_output=True, timeout=120
    )
    assert done.returncode in (0, -signal.SIGKILL), done.stderr.decode()
    return done.returncode


def files(folder: Path) -> dict[str, bytes]:
    """The last checkpoint's tensors and random states."""
    last = folder / "checkpoint-12"
    found = [last / "model.safetensors", last / "optimizer.safetensors", *sorted((last / "rng").iterdir())]
    return {path.name: path.read_bytes() for path in found}


def test_a_killed_training_ends_with_the_same_bytes(tmp_path: Path) -> None:
    assert run(tmp_path / "whole") == 0
    assert run(tmp_path / "cut", 8) == -signal.SIGKILL
    assert not (tmp_path / "cut" / "checkpoint-9").exists()
    assert run(tmp_path / "cut") == 0
    assert len(files(tmp_path / "cut")) == 3
    assert files(tmp_path / "whole") == files(tmp_path / "cut")
