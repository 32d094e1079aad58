"""Trainings whose loss spikes at chosen samples, stopped or killed at chosen moments, on any number of processes."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import torch

from tests.support.toys import Classifier, classification_rows
from tests.support.training import arguments, final_state
from trainer_lib import Trainer, TrainerCallback, distributed
from trainer_lib.errors import Preempted

SETTINGS: dict[str, Any] = {
    "per_device_train_batch_size": 2,
    "global_batch_size": 4,
    "num_train_epochs": 2,  # 40 rows: 10 steps per epoch
    "train_sampling_strategy": "sequential",  # step s of an epoch has rows 4s-4 … 4s-1
    "logging_strategy": "steps",
    "logging_steps": 3,
    "save_strategy": "steps",
    "save_steps": 4,
    "lr_scheduler_type": "linear",
    "warmup_steps": 2,
    "loss_spike_sigma": 20.0,
    "loss_spike_window": 4,
}


class Scaled(Classifier):
    """Multiplies its loss by the largest scale in the batch, and notes the rows that it was trained on."""

    def __init__(self) -> None:
        super().__init__()
        self.trained: list[int] = []

    def forward(self, x: Any, labels: Any = None, scale: Any = None, row: Any = None) -> dict[str, torch.Tensor]:
        out = super().forward(x, labels)
        if self.training and row is not None:
            self.trained += row.tolist()
        return out if scale is None else {**out, "loss": out["loss"] * scale.max()}


class SignalAt(TrainerCallback):
    """Sends this process a signal at the end of the n-th step that it takes, those before a rollback counted."""

    def __init__(self, count: int, number: int) -> None:
        self.left, self.number = count, number

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.left -= 1
        if self.left == 0:
            os.kill(os.getpid(), self.number)


def spiky_rows(*spikes: int, count: int = 40, scale: float = 1000.0) -> list[dict[str, Any]]:
    """Rows of which those numbered in `spikes` have a loss that is `scale` times as large."""
    rows = classification_rows(count)
    return [
        {**row, "scale": torch.tensor(scale if number in spikes else 1.0), "row": number}
        for number, row in enumerate(rows)
    ]


def make(folder: str, rows: Any, *callbacks: TrainerCallback, cls: type[Trainer] = Trainer, **given: Any) -> Trainer:
    """A Trainer around `Scaled`, always with the same initial weights; dropout is on."""
    torch.manual_seed(0)
    args = arguments(folder, **{**SETTINGS, **given})
    return cls(Scaled(), args, train_dataset=rows, callbacks=list(callbacks))


def train_in_group(folder: str, spikes: tuple[int, ...], at: int, number: int, given: dict[str, Any]) -> dict[str, Any]:
    """On each rank: continue the training in `folder`, and return what it ended with.

    Args:
        spikes: rows whose loss spikes.
        at: the step, counted as they are taken, at whose end a process gets the signal `number`; 0 = none. Every rank
            gets a SIGKILL, only the last one a SIGTERM.
        given: further training arguments.
    """
    trainer = make(folder, spiky_rows(*spikes), **given)
    last = trainer.args.process_index == trainer.args.world_size - 1
    if at and (number == signal.SIGKILL or last):
        trainer.add_callback(SignalAt(at, number))
    try:
        done = trainer.train(resume_from_checkpoint="auto")
    except Preempted as stopped:
        return {"stopped": stopped.step}
    spiked = [(each["step"], each["loss_spikes"]) for each in trainer.state.log_history if "loss_spikes" in each]
    model: Any = trainer.model
    return {
        "end": final_state(trainer),
        "spiked": spiked,
        "trained": model.trained,
        "samples": trainer.state.num_samples_seen,
        "spikes": done.metrics.get("loss_spikes"),
    }


def stop_and_resume(
    folder: str, spikes: tuple[int, ...], at: int, given: dict[str, Any]
) -> tuple[int, list[int], dict[str, Any]]:
    """On each rank: stop the training in `folder` at step `at`, and continue it with another Trainer.

    Returns:
        The step at which it stopped, the steps of the checkpoints then, and what it ended with.
    """
    stopped = train_in_group(folder, spikes, at, signal.SIGTERM, given)["stopped"]
    found = checkpoints(Path(folder))
    distributed.init(arguments(folder)).barrier()  # before another rank saves
    return stopped, found, train_in_group(folder, spikes, 0, 0, given)


def train_sharded(folder: str, at: int, given: dict[str, Any]) -> tuple[Any, int]:
    """Continue a training of a sharded model, every rank killed at step `at` if given; its rollbacks and samples."""
    trainer = make(folder, spiky_rows(25), *([SignalAt(at, signal.SIGKILL)] if at else []), **given)
    done = trainer.train(resume_from_checkpoint="auto")
    distributed.shutdown()
    return done.metrics.get("loss_spikes"), trainer.state.num_samples_seen


def checkpoints(folder: Path) -> list[int]:
    """Steps of the checkpoints in a folder."""
    return sorted(int(each.parent.name.removeprefix("checkpoint-")) for each in folder.glob("checkpoint-*/COMMIT.json"))
