"""The state of one `train()`: where in the data it stands, and what the micro-step under way weighs.

What a checkpoint holds of it is `position` and the step history; everything else follows from the arguments.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from trainer_lib.data.loader import TrainSource
from trainer_lib.errors import StorageError
from trainer_lib.state import TrainerState
from trainer_lib.trainer.batch_change import position_in, saved_batch
from trainer_lib.trainer.history import StepHistory


class MicroBatches:
    """This rank's micro-batches of an epoch as plain batches; remembers which of them were fillers."""

    def __init__(self, source: TrainSource, epoch: int, start_step: int) -> None:
        self._micros = source.micros(epoch, start_step)
        self._flags: list[bool] = []

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        micro = next(self._micros)
        self._flags.append(micro.real)
        return micro.batch

    def take_flags(self, count: int) -> list[bool]:
        """Whether each of the last `count` batches was real; earlier ones are forgotten."""
        flags, self._flags = self._flags[len(self._flags) - count :], []
        return flags


@dataclass(frozen=True)
class Saving:
    """A save that was begun: where to, whether of the best model so far, and the state as it was at that step."""

    url: str
    best: bool
    state: TrainerState


@dataclass
class TrainingRun:
    """One training, from its first step (or the one after a checkpoint) to its last.

    Attributes:
        source: the micro-batches.
        history: losses and norms since the last log.
        max_steps, num_epochs: where it ends.
        epoch, step_in_epoch: the position: steps of `epoch` that are done.
        items: target items of each micro-batch of the step under way, on this rank (0 for fillers).
        rate: learning rate of the newest step.
        samples: samples trained on by all ranks since the run began, resumed ones included.
        first_step, first_samples, first_tokens: where this process took up.
        num_items: target items of the step under way over all ranks.
        past: what a checkpoint gave back of the model's memory (`past_index`), until the epoch goes on.
        micro_step: the micro-batch under way, counted within its step.
        saved_step, announced_step: of the newest committed checkpoint, and of the newest whose commit was told; or -1.
        saving: the newest save that was begun.
        save_error, failed_saves: why the newest save failed (None: it did not), and how many did in a row.
        kept_best: best metric and its step, as far as a checkpoint of it is committed.
        stopping: whether the step under way is saved because somebody asked for a stop.
    """

    source: TrainSource
    history: StepHistory
    data_parallel_size: int
    max_steps: int
    num_epochs: int
    epoch: int = 0
    step_in_epoch: int = 0
    first_step: int = 0
    started: float = field(default_factory=time.time)
    items: list[int] = field(default_factory=list)
    num_items: Any = None
    micro_step: int = 0
    micro_steps: int = 1
    past: Any = None
    saved_step: int = -1
    announced_step: int = -1
    saving: Saving | None = None
    save_error: StorageError | None = None
    failed_saves: int = 0
    kept_best: tuple[float | None, int | None] = (None, None)
    stopping: bool = False
    samples: int = 0
    first_samples: int = 0
    first_tokens: int = 0
    rate: Any = None
    _batches: MicroBatches | None = None
    _reals: list[bool] = field(default_factory=list)

    def open_epoch(self) -> MicroBatches:
        """The current epoch's micro-batches from the current step on."""
        self._batches = MicroBatches(self.source, self.epoch, self.step_in_epoch)
        return self._batches

    def close_epoch(self, *, exhausted: bool) -> None:
        """Move on to the next epoch, unless training ends inside this one: it may be prolonged later."""
        if exhausted or self.step_in_epoch == self.source.steps_per_epoch:
            self.epoch, self.step_in_epoch = self.epoch + 1, 0

    def take_past(self) -> Any:
        """What the model remembers of the batch before; nothing at an epoch's beginning."""
        past, self.past = self.past, None
        return past

    def reals(self, count: int) -> list[bool]:
        """Whether each of the step's `count` micro-batches holds this rank's own samples."""
        self._reals = self._batches.take_flags(count) if self._batches is not None else [True] * count
        return self._reals

    @property
    def syncs(self) -> bool:
        """Whether gradients are exchanged after the micro-step under way: it is the last of its step."""
        return self.micro_step == self.micro_steps - 1

    def weight(self, divided: bool, *, average_over_ranks: bool) -> float:
        """What the micro-batch's loss counts in the step.

        A mean over n of the step's N items counts n/N; a loss that was divided by N counts 1. Gradients are averaged
        over ranks afterwards, so both are scaled by the number of data-parallel processes when N was counted over all
        ranks. A dummy batch counts 0.
        """
        items = self.items[self.micro_step] if self.micro_step < len(self.items) else 1
        if items == 0:
            return 0.0
        scale = float(self.data_parallel_size) if average_over_ranks else 1.0
        return scale if divided or not self.num_items else scale * items / float(self.num_items)

    def position(self) -> dict[str, Any]:
        """Epoch, step and sample position, JSON."""
        return {
            "epoch": self.epoch,
            "step_in_epoch": self.step_in_epoch,
            "position": self.step_in_epoch * self.source.global_batch,
            "samples_seen": self.samples,
            "source": self.source.state(),
            "history": self.history.state(),
        }

    def load_position(self, data: dict[str, Any], *, from_position: bool) -> None:
        """Take up where `position` was written; without `from_position` the epoch's data begins anew."""
        self.epoch, self.step_in_epoch = int(data["epoch"]), int(data["step_in_epoch"])
        self.samples = self.first_samples = int(data.get("samples_seen", 0))
        self.history.load_state(data.get("history", {}))
        if not from_position:
            self.step_in_epoch = 0
            return
        state = data.get("source", {})
        if saved_batch(data, self.source) is not None:  # allowed, or it would have been refused
            self.step_in_epoch, _ = position_in(data, self.source)
            state = {**state, "global_batch": self.source.global_batch}
        self.source.load_state(state, epoch=self.epoch, step=self.step_in_epoch)
