"""`TrainingRun`: everything whose life is one training, with the request to stop it and a change of its global batch.

A checkpoint holds its `position` and its step history; everything else follows from the arguments.

A request to stop: SIGTERM or SIGINT sets a flag; every rank reads it at the same step boundary. With several processes,
each step starts one asynchronous all-reduce of an integer on the CPU side of the process group and reads it when the
step ends: the message travels while the step computes. Training stops at most one step after the request.

A position is a number of samples. With another global batch on resume it may lie inside a step: then the samples since
that step's start are trained on a second time, so that no sample is lost.
"""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from types import FrameType
from typing import Any

from trainer_lib.data.loading.loader import TrainSource
from trainer_lib.distributed.communicator import Communicator
from trainer_lib.errors import StorageError
from trainer_lib.trainer.history import Spike, StepHistory
from trainer_lib.trainer.weighting import MicroBatches, StepWeights


class StopAgreed(Exception):  # control flow inside the Trainer; never leaves it
    """All ranks have agreed to stop."""


class StopRequest:
    """Installs signal handlers for a `with` block, in the main thread only, and restores the old ones.

    A second SIGTERM changes nothing: the save under way continues. A second SIGINT raises KeyboardInterrupt, because a
    person at the keyboard wants the program to end: a save that it interrupts is not committed.
    """

    def __init__(self, comm: Communicator, *, on_sigterm: bool = True) -> None:
        self._comm = comm
        self._signals = [signal.SIGINT, signal.SIGTERM] if on_sigterm else [signal.SIGINT]
        self._old: dict[int, Any] = {}
        self.requested = False  # of this process; other ranks may not know of it yet
        self._agreed = False
        self._pending: Callable[[], bool] | None = None

    def __enter__(self) -> StopRequest:
        if threading.current_thread() is threading.main_thread():
            for number in self._signals:
                self._old[number] = signal.signal(number, self._note)
        return self

    def __exit__(self, *error: object) -> None:
        for number, handler in self._old.items():
            signal.signal(number, handler)
        self._old.clear()

    def _note(self, number: int, frame: FrameType | None) -> None:
        if number == signal.SIGINT and self.requested:
            raise KeyboardInterrupt
        self.requested = True

    def begin_step(self) -> None:
        """Start to exchange the flags of all ranks. Collective."""
        self._pending = self._comm.any_later(self.requested)

    def agreed(self) -> bool:
        """Whether to stop, equal on every rank; call it after `begin_step`. Collective."""
        if self._comm.world_size == 1:
            self._agreed = self.requested
        elif self._pending is not None:
            self._agreed = self._agreed or self._pending()
            self._pending = None
        return self._agreed

    def check_in_evaluation(self) -> None:
        """Between two batches of an evaluation: raise StopAgreed when any rank received a request. Collective."""
        # No step is under way to hide the exchange, so it blocks here; an evaluation is too long to wait for its end.
        self._agreed = self._agreed or self._comm.any(self.requested)
        if self._agreed:
            raise StopAgreed


def saved_batch(data: Mapping[str, Any], source: TrainSource) -> int | None:
    """The global batch of a checkpoint's position if it differs from the source's; None if it is equal or unknown."""
    saved = data.get("source", {}).get("global_batch")
    # 0 is a loader of the user's own whose batch is not known.
    return saved if saved and source.global_batch and saved != source.global_batch else None


def position_in(data: Mapping[str, Any], source: TrainSource) -> tuple[int, int]:
    """(steps of the epoch that are done, samples that are trained on again) for a position under this source."""
    samples = int(data["position"])
    # An epoch that was complete stays complete under any batch.
    if source.epoch_samples is not None and source.steps_per_epoch is not None and samples >= source.epoch_samples:
        return source.steps_per_epoch, 0
    return divmod(samples, source.global_batch)


@dataclass
class TimeSpent:
    """Seconds since the training began; what is not evaluated, saved (waited for) or restored is trained."""

    restored: float = 0.0
    evaluated: float = 0.0
    saved: float = 0.0
    _began: float = field(default_factory=time.monotonic)

    @contextmanager
    def count(self, name: str) -> Iterator[None]:
        """Count the block as "evaluated" or "saved"."""
        began = time.monotonic()
        try:
            yield
        finally:
            setattr(self, name, getattr(self, name) + time.monotonic() - began)

    def so_far(self) -> dict[str, float]:
        """Seconds by name until now: trained, evaluated, saved, restored."""
        trained = time.monotonic() - self._began - self.evaluated - self.saved
        spent = {"trained": trained, "evaluated": self.evaluated, "saved": self.saved, "restored": self.restored}
        return {name: round(seconds, 3) for name, seconds in spent.items()}


@dataclass
class TrainingRun:
    """One training, from its first step (or the one after a checkpoint) to its last."""

    source: TrainSource
    history: StepHistory  # losses and gradient norms since the last log
    weights: StepWeights  # target items and weights of the step under way
    stop: StopRequest
    max_steps: int
    num_epochs: int
    micros_per_step: int = 1  # micro-batches of a full step, as one process counts them
    micros_per_epoch: int = 1
    pass_samples: int = 0  # of the newest whole pass over a stream without a length; 0 before its first end
    trial: Any = None  # the search's trial, or its parameters
    ignore_keys: list[str] | None = None  # keys of the model's output that evaluations leave out of predictions
    epoch: int = 0
    step_in_epoch: int = 0  # so many steps of `epoch` are done
    samples: int = 0  # trained on by all ranks since the run started, resumed ones included
    rate: Any = None  # learning rate of the newest step
    first_step: int = 0  # where this process took over, as the three below
    first_samples: int = 0
    first_tokens: int = 0
    started: float = field(default_factory=time.time)
    restored_past: Any = None  # the model's memory (`past_index`) out of a checkpoint, until the next epoch opens
    saved_step: int = -1  # of the newest committed checkpoint; -1 without one
    announced_step: int = -1  # of the newest checkpoint that callbacks know of
    save_error: StorageError | None = None  # why the newest save failed
    failed_saves: int = 0  # in a row
    kept_best: tuple[float | None, int | None] = (None, None)  # best metric and step that a committed checkpoint has
    stopping: bool = False  # the step under way is saved because of a request to stop
    rollback_step: int = 0  # of the checkpoint that a loss spike goes back to; 0 = the start
    spikes: list[Spike] = field(default_factory=list)  # those that training went back for
    skip_until: int = 0  # the steps up to this one are counted and not trained
    spent: TimeSpent = field(default_factory=TimeSpent)

    def open_epoch(self) -> MicroBatches:
        """The micro-batches of the current epoch, from the current step on."""
        self.weights.batches = MicroBatches(self.source, self.epoch, self.step_in_epoch)
        return self.weights.batches

    def note_pass(self, samples: int) -> None:
        """Take the length of the newest whole pass over a stream as that of the next ones."""
        if samples and self.source.steps_per_epoch is None:
            self.pass_samples = samples
            self.micros_per_epoch = -(-samples // (self.source.global_batch or 1)) * self.micros_per_step

    def position(self) -> dict[str, Any]:
        """Epoch, step and sample position, as JSON."""
        return {
            "epoch": self.epoch,
            "step_in_epoch": self.step_in_epoch,
            "position": self.step_in_epoch * self.source.global_batch,  # samples: a resume may have another batch
            "samples_seen": self.samples,
            "pass_samples": self.pass_samples,
            "source": self.source.state(),
            "history": self.history.state(),
            "spikes": [asdict(spike) for spike in self.spikes],
        }

    def load_position(self, data: dict[str, Any], *, from_position: bool) -> None:
        """Continue where `position` was written; without `from_position` the epoch's data starts again."""
        self.epoch, self.step_in_epoch = int(data["epoch"]), int(data["step_in_epoch"])
        self.samples = self.first_samples = int(data.get("samples_seen", 0))
        self.note_pass(int(data.get("pass_samples", 0)))
        self.history.load_state(data.get("history", {}))
        records = data.get("spikes", [])
        self.spikes = [Spike(int(record["after"]), int(record["step"]), str(record["reason"])) for record in records]
        if not from_position:
            self.step_in_epoch = 0
            return
        state = data.get("source", {})
        if saved_batch(data, self.source) is not None:  # a change that was not allowed has been refused before
            self.step_in_epoch, _ = position_in(data, self.source)
            state = {**state, "global_batch": self.source.global_batch}
        self.source.load_state(state, epoch=self.epoch, step=self.step_in_epoch)
