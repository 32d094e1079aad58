"""The protocol of a tracker, and one callback per name that `report_to` takes, under the reference's class name.

A tracker stores numbers. It must never slow training down and never end it: `log` neither waits for a network nor
raises.

Our own trackers serve jsonl, mlflow and tensorboard. The callback that transformers ships serves every other name,
when its package and transformers are installed: a subclass that logs its first exception and then ignores events.
A name whose package is missing is refused when the Trainer is built.

`validation.REPORTERS` is the table of all names. A new vendor is a row there and a name in `trainer_lib/__init__.pyi`;
a tracker of our own is a file with the tracker, a row, and a callback here that makes it.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import importlib
import importlib.util
import json
import logging
import math
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, ClassVar, Protocol, SupportsFloat

from typing_extensions import override

from trainer_lib.arguments.validation import REPORTERS, Reporter
from trainer_lib.callbacks.base import EVENTS, TrainerCallback
from trainer_lib.errors import ConfigError, MissingExtraError, first_line
from trainer_lib.storage import Store
from trainer_lib.trackers.names import flatten_params, sectioned

_log = logging.getLogger(__name__)


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
    """Starts a tracker when training starts, passes every log on, and closes it when training ends.

    It acts on rank 0 only. Logs outside of training, such as those of an `evaluate()` afterwards, go to the same run.
    If the process ends without `on_train_end` because something raised, the tracker is closed at exit as FAILED,
    or as KILLED after Ctrl-C. Without a `tracker`, `create` makes it as soon as the arguments are known.
    """

    reporter: ClassVar[str]

    def __init__(self, tracker: Tracker | None = None) -> None:
        if tracker is None:
            _require(self.reporter)
        self.tracker = tracker
        self._is_given = tracker is not None
        self._training = False
        self._started = False
        self._open = False

    def create(self, args: Any) -> Tracker:
        """Make the tracker; imports its module, and with it the vendor's package, only then."""
        raise NotImplementedError

    @override
    def on_init_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        # Made here and not with the first log: a tracker that cannot be made is an error before the first step.
        if state.is_world_process_zero:
            self._prepare(args)

    @override
    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if not state.is_world_process_zero:
            return
        if self._open:  # an earlier attempt in this process raised before it reached `on_train_end`
            self.close("FAILED")
        self._training = True
        self._start(args, resume_step=int(state.global_step), model=kwargs.get("model"))

    @override
    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, Any] | None = None, **kwargs: Any) -> None:
        if not logs or not state.is_world_process_zero:
            return
        if not self._started:  # evaluate() or predict() without train()
            self._start(args, resume_step=0, model=kwargs.get("model"))
        self._mark_open()
        self._prepare(args).log(numbers_only(logs), int(state.global_step))
        if not self._training:
            # No event announces the last evaluation, so every one outside of training closes what it opened.
            self.close("FINISHED")

    @override
    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.close("FINISHED")

    def close(self, status: str = "FINISHED") -> None:
        """Close the tracker as "FINISHED", "FAILED" or "KILLED"; do nothing when it is not open."""
        self._training = False
        if not self._open:
            return
        self._open = False
        atexit.unregister(self._close_at_exit)
        if self.tracker is not None:
            self.tracker.close(status)

    @contextlib.contextmanager
    def another_run(self) -> Iterator[None]:
        """Give a run inside this one, such as a trial of a search, a separate tracker, made from its arguments."""
        kept = self.tracker, self._started
        if not self._is_given:
            self.tracker, self._started = None, False
        try:
            yield
        finally:
            self.tracker, self._started = kept

    def _prepare(self, args: Any) -> Tracker:
        if self.tracker is None:
            self.tracker = self.create(args)
        return self.tracker

    def _start(self, args: Any, *, resume_step: int, model: Any) -> None:
        tracker, self._started = self._prepare(args), True
        self._mark_open()
        config = getattr(model, "config", None)
        to_dict = getattr(config, "to_dict", None)
        values = to_dict() if callable(to_dict) else config
        params = {**(values if isinstance(values, Mapping) else {}), **args.to_sanitized_dict()}
        tracker.start(run_name=args.run_name, params=params, resume_step=resume_step)

    def _mark_open(self) -> None:
        if not self._open:
            self._open = True
            atexit.register(self._close_at_exit)

    def _close_at_exit(self) -> None:
        # The interpreter leaves the exception that ended the program in `sys.last_value`.
        error = getattr(sys, "last_value", None)
        self.close("KILLED" if isinstance(error, KeyboardInterrupt) else "FAILED")


def _missing(row: Reporter) -> list[str]:
    """The packages that a name needs and this process lacks. None is imported."""
    needed = ([] if row.is_ours else ["transformers"]) + ([row.package] if row.package else [])
    return [name for name in needed if importlib.util.find_spec(name) is None]


def _is_served(row: Reporter) -> bool:
    return not _missing(row) and (row.variable is None or row.variable in os.environ)


def _require(name: str) -> None:
    """Raise MissingExtraError when a package that a name needs, or its launcher, is not there."""
    row = REPORTERS[name]
    elsewhere = "report to jsonl, mlflow or tensorboard."
    if missing := _missing(row):
        what = f"This tracker needs {' and '.join(missing)}, not installed here."
        remedy = f"Install it (pip install {' '.join(missing)}), or {elsewhere}"
        raise MissingExtraError(what, field="report_to", value=name, remedy=remedy)
    if not _is_served(row):
        what = f"This tracker needs {row.title}, whose controller sets {row.variable}."
        remedy = f"Start the training there, or {elsewhere}"
        raise MissingExtraError(what, field="report_to", value=name, remedy=remedy)


class JsonlCallback(TrackingCallback):
    """Writes `metrics.jsonl` in output_dir."""

    reporter = "jsonl"

    @override
    def create(self, args: Any) -> Tracker:
        from trainer_lib.trackers.jsonl import JsonlTracker

        if not args.output_dir:
            what = 'The "jsonl" tracker writes into output_dir, which is not set.'
            raise ConfigError(what, field="output_dir", remedy="Set output_dir.")
        return JsonlTracker(args.output_dir)


class MLflowCallback(TrackingCallback):
    """Logs to MLflow through `trackers.mlflow`."""

    reporter = "mlflow"

    @override
    def create(self, args: Any) -> Tracker:
        from trainer_lib.trackers.mlflow.tracker import MLflowTracker

        return MLflowTracker(args.output_dir)


class TensorBoardCallback(TrackingCallback):
    """Writes TensorBoard's event files, or into a `tb_writer` (a SummaryWriter) of your own, which stays open."""

    reporter = "tensorboard"

    def __init__(self, tb_writer: Any = None) -> None:
        super().__init__(None if tb_writer is None else TensorBoardTracker(None, writer=tb_writer))

    @property
    def tb_writer(self) -> Any:
        """The `SummaryWriter` in use, for subclasses that write images or texts; None when there is none."""
        return getattr(self.tracker, "writer", None)

    @override
    def create(self, args: Any) -> Tracker:
        return TensorBoardTracker(args.logging_dir or f"{(args.output_dir or '.').rstrip('/')}/runs")


OURS: dict[str, type[TrackingCallback]] = {
    cls.reporter: cls for cls in (JsonlCallback, MLflowCallback, TensorBoardCallback)
}


def vendor_callback(reporter: str) -> type[TrainerCallback]:
    """The callback that transformers has for a name of `report_to`, guarded. Raises MissingExtraError."""
    _require(reporter)
    if reporter == "wandb" and "WANDB_RUN_ID" in os.environ:
        os.environ.setdefault("WANDB_RESUME", "allow")  # wandb would overwrite the run that it names
    # Loaded here: the package behind it may take seconds to import.
    module = importlib.import_module("transformers.integrations.integration_utils")
    return _guarded(reporter, getattr(module, REPORTERS[reporter].callback))


@functools.cache
def _guarded(reporter: str, theirs: type[TrainerCallback]) -> type[TrainerCallback]:
    """A callback class that logs the first exception of an event, and ignores all later events."""

    def guard(event: str) -> Callable[..., None]:
        method = getattr(theirs, event)

        @functools.wraps(method)
        def call(self: Any, *args: Any, **kwargs: Any) -> None:
            if getattr(self, "_trainflow_failed", False):
                return
            try:
                method(self, *args, **kwargs)
            except Exception as error:  # a tracking client must not end training, whatever it raises
                self._trainflow_failed = True
                _log.warning("Nothing more is reported to %s: %s", reporter, first_line(error))

        return call

    # Only the events that it handles: the handler of events skips a callback without the method.
    events = {event: guard(event) for event in EVENTS if callable(getattr(theirs, event, None))}
    return type(theirs.__name__, (theirs,), {**events, "__doc__": theirs.__doc__, "__module__": __name__})


def is_reporter(callback: TrainerCallback) -> bool:
    """Whether a callback is that of a tracker, or derived from one."""
    names = {row.callback for row in REPORTERS.values()}
    return any(cls.__name__ in names for cls in type(callback).__mro__) or isinstance(callback, TrackingCallback)


def reporters(report_to: Iterable[str]) -> list[type[TrainerCallback]]:
    """Return the callback classes behind the names of `report_to` (as the arguments hold it), without repetitions.

    Raises MissingExtraError where the package of a name is not installed; "all" leaves such names out instead.
    """
    chosen: list[str] = []
    for name in report_to:
        chosen += [served for served, row in REPORTERS.items() if _is_served(row)] if name == "all" else [name]
    for name in chosen:
        _require(name)
    return [OURS[name] if name in OURS else vendor_callback(name) for name in dict.fromkeys(chosen)]


class TensorBoardTracker:
    """Writes scalars under `train/`, `eval/` and `test/`, and the arguments as text.

    Args:
        folder: a local folder for the event files, because events are appended.
        writer: the caller's own `SummaryWriter`, which stays open; also the one in use, None before a start.

    Raises ConfigError when the folder is on a remote store.
    """

    name = "tensorboard"

    def __init__(self, folder: str | None, *, writer: Any = None) -> None:
        self._own = writer is None
        self.writer = writer
        self._folder = ""
        if folder is not None:
            store = Store.open(folder, field="logging_dir")
            if not store.is_local:
                what = "The folder is not local, and TensorBoard appends to its event files."
                remedy = "Give logging_dir a local folder, or use the jsonl or mlflow tracker."
                raise ConfigError(what, field="logging_dir", value=store.url, remedy=remedy)
            self._folder = str(store.local_path())

    def start(self, *, run_name: str | None, params: Mapping[str, Any], resume_step: int) -> None:
        """Open a new event file. After a resume TensorBoard hides the older points beyond `resume_step`."""
        try:
            self._open(purge_step=resume_step + 1 if resume_step else None)
            self.writer.add_text("args", "```\n" + json.dumps(flatten_params(params), indent=2) + "\n```")
        except OSError as error:
            _log.warning("Metrics no longer go to TensorBoard: %s cannot be written: %s", self._folder, error)
            self.writer = None

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        """Add the values of one step."""
        try:
            if self.writer is None:
                # Only a writer of the caller's own has no folder.
                if not self._folder:
                    return
                self._open(purge_step=None)
            for name, value in sectioned(metrics).items():
                self.writer.add_scalar(name, value, step)
        except OSError as error:
            _log.warning("A step's metrics are missing in TensorBoard: %s", error)

    def close(self, status: str = "FINISHED") -> None:
        """Write what is buffered; close a writer that is not the caller's."""
        if self.writer is None:
            return
        self.writer.flush()
        if self._own:
            self.writer.close()
            self.writer = None

    def _open(self, *, purge_step: int | None) -> None:
        if self.writer is None:
            from torch.utils.tensorboard import SummaryWriter

            self.writer = SummaryWriter(self._folder, purge_step=purge_step)
