"""The callback that passes the Trainer's logs on to the trackers of `report_to`."""

from __future__ import annotations

import atexit
import logging
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from typing_extensions import override

from trainer_lib.callbacks.base import TrainerCallback
from trainer_lib.trackers.base import Tracker, numbers_only

_log = logging.getLogger(__name__)


class TrackingCallback(TrainerCallback):
    """Starts the trackers when training starts, passes every log on, and closes them when training ends.

    It acts on rank 0 only. Logs outside of training, such as those of an `evaluate()` afterwards, go to the same run.
    If the process ends without `on_train_end` because something raised, the trackers are closed at exit as FAILED,
    or as KILLED after Ctrl-C.
    """

    def __init__(self, trackers: Sequence[Tracker]) -> None:
        self.trackers = list(trackers)
        self._training = False
        self._started = False
        self._open = False

    @override
    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if not state.is_world_process_zero:
            return
        if self._open:  # an earlier attempt in this process raised before it reached `on_train_end`
            self.close("FAILED")
        self._training = True
        self._start(args, state, resume_step=int(state.global_step), model=kwargs.get("model"))

    @override
    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, Any] | None = None, **kwargs: Any) -> None:
        if not logs or not state.is_world_process_zero:
            return
        if not self._started:  # evaluate() or predict() without train()
            self._start(args, state, resume_step=0, model=kwargs.get("model"))
        self._mark_open()
        numbers = numbers_only(logs)
        for tracker in self.trackers:
            tracker.log(numbers, int(state.global_step))
        if not self._training:
            # No event announces the last evaluation, so each one outside of training closes what it opened.
            self.close("FINISHED")

    @override
    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._training = False
        self.close("FINISHED")

    def close(self, status: str = "FINISHED") -> None:
        """Close every tracker as "FINISHED", "FAILED" or "KILLED"; do nothing when none is open."""
        self._training = False
        if not self._open:
            return
        self._open = False
        atexit.unregister(self._close_at_exit)
        for tracker in self.trackers:
            tracker.close(status)

    def _prepare(self, args: Any) -> None:
        """Make the trackers; for a subclass that needs the arguments to do so."""

    def _start(self, args: Any, state: Any, *, resume_step: int, model: Any) -> None:
        self._prepare(args)
        self._started = True
        self._mark_open()
        for tracker in self.trackers:
            tracker.start(run_name=args.run_name, params=_params(args, model), resume_step=resume_step)

    def _mark_open(self) -> None:
        if not self._open:
            self._open = True
            atexit.register(self._close_at_exit)

    def _close_at_exit(self) -> None:
        # The interpreter leaves the exception that ended the program in `sys.last_value`.
        error = getattr(sys, "last_value", None)
        self.close("KILLED" if isinstance(error, KeyboardInterrupt) else "FAILED")


def _params(args: Any, model: Any) -> dict[str, Any]:
    """The model's configuration, if it has one, overlaid with the arguments."""
    config = getattr(model, "config", None)
    to_dict = getattr(config, "to_dict", None)
    values = to_dict() if callable(to_dict) else config
    return {**(values if isinstance(values, Mapping) else {}), **args.to_sanitized_dict()}
