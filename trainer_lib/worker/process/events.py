"""Progress of a Trainer as events: what is logged, and in between a sign of life at most twice a second."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

from trainer_lib.arguments.configs.accelerator_config import describe_step
from trainer_lib.base.durations import describe_seconds
from trainer_lib.callbacks.base import TrainerCallback
from trainer_lib.data.loading.loader import has_length
from trainer_lib.worker.process.session import Events, Pace

if TYPE_CHECKING:
    from trainer_lib.arguments import TrainingArguments
    from trainer_lib.state import TrainerControl, TrainerState
    from trainer_lib.trainer import Trainer
    from trainer_lib.trainer.internals import Internals
    from trainer_lib.trainer.run import TrainingRun

_SHOWN = 300  # entries of an earlier attempt's log that a resumed one reports again
_FIRST_BATCHES = 3  # they are slow, so no time left is estimated from them


class _Counted(NamedTuple):
    """Progress of a training at a log."""

    trained_s: float = 0.0
    step: int = 0
    tokens: int = 0


class _Rows(NamedTuple):
    """Rows of an evaluation: their offset, their number, and the number of all rows."""

    before: int
    now: int
    total: int


class EventsCallback(TrainerCallback):
    """Turns callback events into progress events. It reads counters and never a tensor, so it never waits for a GPU.

    Attributes:
        resumed_from: the step training started from; None when it started at the beginning.
        flops, trained_s: model FLOPs of this process's training on all ranks, and its seconds in steps; set at the end.
        unlogged: (step, loss) of the steps after the last log; likewise.
    """

    def __init__(self, events: Events, samples_per_step: int = 0) -> None:
        self._events = events
        self._samples_per_step = samples_per_step
        self._pace = Pace()
        self._began = 0.0
        self._first_step = 0
        self._predicted = self._all_predicted = 0
        self._rows: _Rows | None = None
        self.resumed_from: int | None = None
        self.flops = self.trained_s = 0.0
        self.unlogged: list[tuple[int, float]] = []
        self._first_flops = 0.0
        self._run: Callable[[], TrainingRun | None] = lambda: None
        self._internals: Internals | None = None
        self._rated = _Counted()

    def begin_split(self, *, before: int, rows: int, total: int) -> None:
        """The next batches are of so many rows, behind `before` of `total`: without training, they are the progress."""
        if self._rows is None:
            self._began = time.monotonic()
        self._rows = _Rows(before, rows, total)

    def follow(self, trainer: Trainer) -> None:
        """Report where the time of this Trainer's training goes, and keep the losses that it does not log."""
        self._run = lambda: trainer._trainflow.run
        self._internals = trainer._trainflow

    def spent(self) -> dict[str, float] | None:
        """Seconds by name of the training under way; None outside of one."""
        run = self._run()
        return None if run is None else run.spent.so_far()

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Report the step that training continues from, and start the clock."""
        self._began, self._first_step = time.monotonic(), state.global_step
        self._rated = _Counted(step=state.global_step)
        self._first_flops = float(state.total_flos)
        if self._internals is not None:
            size = self._internals.world.comm.data_parallel.size
            step = describe_step(args, data_parallel_size=size, micro_batch=state.train_batch_size)
            self._events.emit("begin", message=step)
        if state.global_step:
            self.resumed_from = state.global_step
            message = f"continues from step {state.global_step}"
            history = state.log_history[:: 1 + len(state.log_history) // _SHOWN]
            where = {"step": state.global_step, "max_steps": state.max_steps}
            self._events.emit("resume", **where, message=message, history=history)

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Report the last position, and keep what is lost with the training."""
        self.flops = float(state.total_flos) - self._first_flops
        if (run := self._run()) is not None:
            self.unlogged = run.history.unlogged(state.global_step)
            self.trained_s = run.spent.so_far()["trained"]
        self._events.emit("progress", **self._where(state))

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Report a sign of life."""
        if self._pace.is_due():
            self._events.emit("progress", **self._where(state))

    def on_log(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        logs: Mapping[str, Any] | None = None,
        **kwargs: Any,
    ) -> None:
        """Report the logged values, with the position of the training."""
        numbers = {key: value for key, value in (logs or {}).items() if isinstance(value, int | float | str)}
        self._events.emit("log", loss=numbers.get("loss"), logs=numbers, **self._where(state))
        if "loss" in numbers:
            self._report_rates(state)

    def on_prediction_step(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Report a sign of life."""
        self._predicted += 1
        self._all_predicted += 1
        if not self._pace.is_due():
            return
        loader = kwargs.get("eval_dataloader")
        batches = len(loader) if has_length(loader) else 0  # type: ignore[arg-type]
        message = f"evaluating: batch {self._predicted:,}" + (f" of {batches:,}" if batches else "")
        where = self._where(state) or self._row(batches)
        if not state.max_steps and "eta_s" in where:
            message += f", {describe_seconds(where['eta_s'])} left"
        self._events.emit("progress", message=message, **where)

    def on_evaluate(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Start to count batches from zero."""
        self._predicted = 0

    def on_save(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Report that a checkpoint is committed."""
        self._events.emit("save", **self._where(state))

    def _report_rates(self, state: TrainerState) -> None:
        """Pass samples and tokens per second of training since the last log to the trackers."""
        spent, internals = self.spent(), self._internals
        if spent is None or internals is None:
            return
        counted = _Counted(spent["trained"], state.global_step, internals.counters.own_tokens)
        before, self._rated = self._rated, counted
        seconds = counted.trained_s - before.trained_s
        if seconds <= 0 or counted.step <= before.step:
            return
        rates = {"samples_per_second": (counted.step - before.step) * self._samples_per_step / seconds}
        if counted.tokens > before.tokens:
            # Of this rank's batches: those of the others are about as long.
            ranks = internals.world.comm.data_parallel.size
            rates["tokens_per_second"] = (counted.tokens - before.tokens) * ranks / seconds
        internals.events.report(rates)

    def _row(self, batches: int) -> dict[str, Any]:
        """The row that an evaluation of one split after the other has reached, and the time left."""
        if self._rows is None or not batches:
            return {}
        before, now, total = self._rows
        row = before + min(now, now * self._predicted // batches)
        where: dict[str, Any] = {"step": row, "max_steps": total}
        if row and self._all_predicted >= _FIRST_BATCHES:
            where["eta_s"] = (total - row) * (time.monotonic() - self._began) / row
        return where

    def _where(self, state: TrainerState) -> dict[str, Any]:
        """Position, speed and time left, as far as they are known."""
        if not state.max_steps:  # evaluation without training
            return {}
        where: dict[str, Any] = {"step": state.global_step, "max_steps": state.max_steps, "epoch": state.epoch}
        # Since this process took over: the steps before a resume took none of its time.
        steps, seconds = state.global_step - self._first_step, time.monotonic() - self._began
        if steps > 0 and seconds > 0:
            where["eta_s"] = (state.max_steps - state.global_step) * seconds / steps
            where["samples_per_second"] = steps * self._samples_per_step / seconds
        if (spent := self.spent()) is not None:
            where["spent"] = spent
        return where
