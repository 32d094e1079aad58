"""Progress of the stages, for every display: the terminal, Prefect's progress artifact, Prefect's logs.

An event is a small dict. `event` says which: "stage" (it started, was cached, committed, failed or will be retried),
"line" (a line that a worker printed), "wait" (for a device), or what workers report: "start", "progress", "log",
"save", "begin", "resume", "warning". Every event names its `stage`.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from trainer_lib.base.durations import describe_seconds
from trainer_lib.base.suggestions import number_words
from trainer_lib.errors import TrainflowError
from trainer_lib.secrets import mask
from trainflow.tasks.prefect.prefect_client import RunLink
from trainflow.tasks.prefect.prefect_internals import api_log_handlers, set_up_logging

Event = dict[str, Any]
Listener = Callable[[Event], None]

# Displays of this process, as `logging` keeps its handlers: no result of the work passes through here.
_listeners: list[Listener] = []
_log = logging.getLogger(__name__)


def publish(event: Mapping[str, Any]) -> None:
    """Pass an event to every listener. One that raises is dropped: a display must not end the work."""
    # A copy: a listener that fails is removed below.
    for listener in tuple(_listeners):
        try:
            listener(dict(event))
        except Exception:
            _log.warning("A progress display failed and is switched off.", exc_info=True)
            with contextlib.suppress(ValueError):
                _listeners.remove(listener)


@contextlib.contextmanager
def subscribe(listener: Listener) -> Iterator[None]:
    """Call `listener` with every event inside the block, in the thread where it happens."""
    _listeners.append(listener)
    try:
        yield
    finally:
        with contextlib.suppress(ValueError):
            _listeners.remove(listener)


class StageProgress:
    """One attempt's events and lines: published, logged to the Prefect run, and drawn as its progress artifact.

    Outside of a Prefect run only the listeners receive them. An unreachable Prefect server never holds the work up.
    """

    def __init__(self, stage: str) -> None:
        self.stage = stage
        self._logger = _run_logger()
        self._link = RunLink.of_context(stage)
        self._shown: Event = {}
        # Where the attempt's time went, as its worker reported last ("spent"), and at its newest save ("kept"); the
        # seconds for which it waited for devices ("waited").
        self.times: dict[str, Any] = {}

    def is_cancelled(self) -> bool:
        """Whether the flow run was cancelled in Prefect. Never waits; False outside of a Prefect run."""
        return self._link is not None and self._link.is_cancelled()

    def line(self, text: str) -> None:
        """A line that a worker printed."""
        masked = mask(text)
        publish({"event": "line", "stage": self.stage, "message": masked})
        if self._logger is not None:
            self._logger.info("%s", masked)

    def event(self, event: Mapping[str, Any]) -> None:
        """An event that a worker reported."""
        publish({**event, "stage": self.stage})
        if isinstance(event.get("spent"), Mapping):
            self.times["spent"] = dict(event["spent"])
            if event.get("event") == "save":
                self.times["kept"] = self.times["spent"]
        if event.get("waited_s"):
            self.times["waited"] = float(event["waited_s"]) + self.times.get("waited", 0.0)
        if self._logger is None:
            return
        if event.get("event") in ("warning", "begin", "resume", "save", "wait") and event.get("message"):
            level = logging.WARNING if event["event"] == "warning" else logging.INFO
            self._logger.log(level, "%s", mask(str(event["message"])))
        elif event.get("event") == "log" and (text := measured(event) or describe(event)):
            self._logger.info("%s", text)
        # Each event holds a part of the state; the artifact shows all that is known.
        self._shown = {**self._shown, **{name: value for name, value in event.items() if value is not None}}
        if self._link is not None and event.get("max_steps"):
            share = 100.0 * float(self._shown.get("step") or 0) / float(self._shown["max_steps"])
            self._link.draw(share, describe(self._shown))

    def complete(self) -> None:
        """The stage is committed: its progress ends at 100 percent."""
        if self._link is not None:
            # A training says where it ended, perhaps early; of rows the last event may be far from the last row.
            trained = describe({**self._shown, "eta_s": None}) if self.stage == "train" else ""
            self._link.draw(100.0, trained or "committed")

    def close(self) -> None:
        """Draw the newest state."""
        if self._link is not None:
            self._link.close()


def describe(event: Mapping[str, Any]) -> str:
    """``step 120/560, loss 0.231, 1,930 samples/s, 12 s left`` from what an event holds."""
    parts = []
    if event.get("step") is not None:
        parts.append(f"step {event['step']}" + (f"/{event['max_steps']}" if event.get("max_steps") else ""))
    if isinstance(event.get("loss"), int | float):
        parts.append(f"loss {number_words(event['loss'])}")
    if isinstance(event.get("samples_per_second"), int | float):
        parts.append(f"{event['samples_per_second']:,.0f} samples/s")
    if isinstance(event.get("eta_s"), int | float):
        parts.append(f"{describe_seconds(event['eta_s'])} left")
    return ", ".join(parts)


def measured(event: Mapping[str, Any]) -> str:
    """``step 120: eval_accuracy 0.98, eval_loss 0.06`` from the log of an evaluation, else an empty text."""
    timings = ("_runtime", "_per_second")
    logs = event.get("logs") or {}
    values = [
        f"{name} {number_words(value)}"
        for name, value in logs.items()
        if name.startswith("eval_") and isinstance(value, int | float) and not name.endswith(timings)
    ]
    where = f"step {event['step']}: " if event.get("step") else ""
    return where + ", ".join(values) if values else ""


def _without_trace(record: logging.LogRecord) -> bool:
    """Take the traceback from a record about a typed failure: its message names place, reason and remedy."""
    if isinstance(record.exc_info, tuple) and isinstance(record.exc_info[1], TrainflowError):
        record.exc_info = None
        record.exc_text = None
    return True


def _masked(record: logging.LogRecord) -> bool:
    """Mask secrets in the message and the traceback of a record."""
    # A record whose arguments do not fit its message is reported by the handler.
    with contextlib.suppress(Exception):
        text = record.getMessage()
        if (masked := mask(text)) != text:
            record.msg, record.args = masked, ()
    if isinstance(record.exc_info, tuple) and record.exc_info[0] is not None:
        trace = logging.Formatter().formatException(record.exc_info)
        if (masked := mask(trace)) != trace:
            record.exc_info, record.exc_text = None, masked
    return True


@contextlib.contextmanager
def _filtered(places: Sequence[logging.Filterer], change: Callable[[logging.LogRecord], bool]) -> Iterator[None]:
    for place in places:
        place.addFilter(change)
    try:
        yield
    finally:
        for place in places:
            place.removeFilter(change)


def masked_api_logs() -> contextlib.AbstractContextManager[None]:
    """Inside the block no record reaches Prefect's API with a secret in it."""
    set_up_logging()
    return _filtered(api_log_handlers(), _masked)


def quiet_failures(enabled: bool = True) -> contextlib.AbstractContextManager[None]:
    """Inside the block Prefect's run logs show typed failures without a traceback."""
    names = ("prefect.flow_runs", "prefect.task_runs") if enabled else ()
    return _filtered([logging.getLogger(name) for name in names], _without_trace)


def _run_logger() -> logging.Logger | logging.LoggerAdapter[logging.Logger] | None:
    from prefect.context import FlowRunContext, TaskRunContext
    from prefect.logging import get_run_logger

    # get_run_logger raises outside of a run.
    if TaskRunContext.get() is None and FlowRunContext.get() is None:
        return None
    return get_run_logger()
