"""Progress of a Trainer as events: what is logged, and in between a sign of life at most twice a second."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from trainer_lib.callbacks.base import TrainerCallback
from trainer_lib.worker.session import Events

if TYPE_CHECKING:
    from trainer_lib.arguments import TrainingArguments
    from trainer_lib.state import TrainerControl, TrainerState

QUIET_S = 0.5  # the least time between two signs of life


class EventsCallback(TrainerCallback):
    """Turns callback events into progress events. It reads counters and never a tensor, so it never waits for a GPU.

    Args:
        events: where they go.
        samples_per_step: of the global batch.

    Attributes:
        resumed_from: the step training started from; None when it started at the beginning.
    """

    def __init__(self, events: Events, samples_per_step: int = 0) -> None:
        self._events = events
        self._samples_per_step = samples_per_step
        self._quiet_until = 0.0
        self._began = 0.0
        self._first_step = 0
        self._predicted = 0
        self.resumed_from: int | None = None

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Report the step that training continues from, and start the clock."""
        self._began, self._first_step = time.monotonic(), state.global_step
        if state.global_step:
            self.resumed_from = state.global_step
            message = f"continues from step {state.global_step}"
            self._events.emit("resume", step=state.global_step, max_steps=state.max_steps, message=message)

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Report a sign of life."""
        if self._due():
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

    def on_prediction_step(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Report a sign of life."""
        self._predicted += 1
        if self._due():
            self._events.emit("progress", message=f"evaluating: batch {self._predicted}", **self._where(state))

    def on_evaluate(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Start to count batches from zero."""
        self._predicted = 0

    def on_save(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Report that a checkpoint is committed."""
        self._events.emit("save", **self._where(state))

    def _due(self) -> bool:
        now = time.monotonic()
        if now < self._quiet_until:
            return False
        self._quiet_until = now + QUIET_S
        return True

    def _where(self, state: TrainerState) -> dict[str, Any]:
        """Position, speed and time left, as far as they are known."""
        if not state.max_steps:  # evaluation without training
            return {}
        where = {"step": state.global_step, "max_steps": state.max_steps, "epoch": state.epoch}
        # Since this process took over: the steps before a resume took none of its time.
        steps, seconds = state.global_step - self._first_step, time.monotonic() - self._began
        if steps > 0 and seconds > 0:
            where["eta_s"] = (state.max_steps - state.global_step) * seconds / steps
            where["samples_per_second"] = steps * self._samples_per_step / seconds
        return where
