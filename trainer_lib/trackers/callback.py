"""The protocol of a tracker, and the callback that passes the Trainer's logs on to trackers.

A tracker stores numbers. It must never slow training down and never end it: `log` neither waits for a network nor
raises.
"""

from __future__ import annotations

import atexit
import math
import sys
from collections.abc import Mapping, Sequence
from typing import Any, Protocol, SupportsFloat

from typing_extensions import override

from trainer_lib.callbacks.base import TrainerCallback


class Tracker(Protocol):
    """One destination of metrics."""

    name: str

    def start(self, *, run_name: str | None, params: Mapping[str, Any], resume_step: int) -> None:
        """Begin an attempt at training.

        Args:
            run_name: the run's name; None lets the tracker choose one.
            params: the arguments and the model's configuration, secrets included: mask them (`names.flatten_params`).
            resume_step: the optimizer step that training continues from; 0 for a new training.
        """

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        """Record the values of one optimizer step. Returns at once and never raises. Usable again after `close`."""

    def close(self, status: str = "FINISHED") -> None:
        """End the attempt as "FINISHED", "FAILED" or "KILLED", after waiting a bounded time for the last values."""


def numbers_only(logs: Mapping[str, Any]) -> dict[str, float]:
    """Return the entries of a log that are numbers, as floats.

    Numbers are those of Python and NumPy, and arrays or tensors without dimensions. Text, lists and other values are
    left out. NaN and infinities stay, because a diverged loss is what a reader looks for.
    """
    numbers: dict[str, float] = {}
    # A text such as "0.5" would become a number, and an array of one value too.
    for key, value in logs.items():
        if isinstance(value, str | bytes) or getattr(value, "ndim", 0) != 0 or not isinstance(value, SupportsFloat):
            continue
        try:
            numbers[key] = float(value)
        except OverflowError:  # a Python int beyond float's range
            numbers[key] = math.inf if value > 0 else -math.inf  # type: ignore[operator]
        except (TypeError, ValueError):
            continue
    return numbers


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
            # No event announces the last evaluation, so every one outside of training closes what it opened.
            self.close("FINISHED")

    @override
    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
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

    def _start(self, args: Any, state: Any, *, resume_step: int, model: Any) -> None:
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
