"""`Events`: the callbacks, and the two things they share with the Trainer: `state`, which they read, and `control`."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from trainer_lib.callbacks.base import CallbackHandler, TrainerCallback
from trainer_lib.callbacks.flow import DefaultFlowCallback
from trainer_lib.callbacks.progress_bar import PrinterCallback, ProgressCallback
from trainer_lib.state import TrainerControl, TrainerState, has_exportable_state
from trainer_lib.trackers.callback import TrackingCallback
from trainer_lib.trackers.vendors import VendorCallback, reporters

if TYPE_CHECKING:
    from trainer_lib.trainer.trainer import Trainer


class Events:
    """Owner of `callback_handler`, `state` and `control`."""

    def __init__(self, trainer: Trainer) -> None:
        self._trainer = trainer

    def create(self, given: Sequence[TrainerCallback | type[TrainerCallback]], *, rank: int) -> None:
        """Make the handler with the default callbacks and those given; fires `on_init_end`."""
        trainer = self._trainer
        own: list[TrainerCallback | type[TrainerCallback]] = [DefaultFlowCallback]
        # Every rank looks for the trackers, so that all ranks refuse one that cannot be served; rank 0 uses them.
        reporting = reporters(trainer.args.report_to or ())
        own += reporting if rank == 0 else []
        shown = PrinterCallback if trainer.args.disable_tqdm else ProgressCallback
        # First the one that sets `control`, so that the user's callbacks see it; last the one that shows the step.
        trainer.callback_handler = CallbackHandler(
            [*own, *given, shown], trainer.model, trainer.processing_class, trainer.optimizer, trainer.lr_scheduler
        )
        self.use_control(TrainerControl())
        self.use_state(
            TrainerState(
                is_local_process_zero=trainer.is_local_process_zero(),
                is_world_process_zero=trainer.is_world_process_zero(),
                stateful_callbacks=self.stateful(),
            )
        )
        self.fire("on_init_end")

    def fire(self, event: str, *more: Any, state: TrainerState | None = None) -> None:
        """Call one event of every callback and keep the control that they return.

        Args:
            event: name of the method, such as "on_step_end".
            more: what the event takes beside arguments, state and control.
            state: given to the callbacks in place of the current one.
        """
        trainer = self._trainer
        call = getattr(trainer.callback_handler, event)
        trainer.control = call(trainer.args, trainer.state if state is None else state, trainer.control, *more)

    def report(self, values: dict[str, Any], step: int | None = None) -> None:
        """Pass values to the trackers of `report_to` alone, on the main process; the log history has no entry of them.

        Args:
            values: numbers by name.
            step: the step that they belong to; default: the Trainer's.
        """
        trainer = self._trainer
        state = trainer.state if step is None else dataclasses.replace(trainer.state, global_step=step)
        for callback in trainer.callback_handler.callbacks:
            on_log = getattr(callback, "on_log", None)
            if isinstance(callback, TrackingCallback | VendorCallback) and on_log is not None:
                on_log(trainer.args, state, trainer.control, logs=dict(values), model=trainer.model)

    def use_state(self, state: TrainerState) -> None:
        """Make `state` the Trainer's."""
        self._trainer.state = state

    def use_control(self, control: TrainerControl) -> None:
        """Make `control` the Trainer's."""
        self._trainer.control = control

    def show_parts(self) -> None:
        """Give callbacks the model, optimizer and schedule that train now."""
        handler, trainer = self._trainer.callback_handler, self._trainer
        handler.model, handler.optimizer, handler.lr_scheduler = trainer.model, trainer.optimizer, trainer.lr_scheduler

    def stateful(self) -> list[Any]:
        """The callbacks, and the control, whose state checkpoints hold."""
        every = [*self._trainer.callback_handler.callbacks, self._trainer.control]
        return [each for each in every if has_exportable_state(each)]

    def close_trackers(self, status: str) -> None:
        """Finish every tracker's run with `status`: FINISHED, FAILED or KILLED."""
        for callback in self._trainer.callback_handler.callbacks:
            if isinstance(callback, TrackingCallback):
                callback.close(status)
