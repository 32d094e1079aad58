"""One trial in a process of its own: it trains in its folder, and reports its evaluations and its newest checkpoint.

::

    <output_dir>/run-<trial>             the trial; started again, it continues from its newest checkpoint
    <output_dir>/run-<trial>-<digest>    from the checkpoint of another trial on, with other values

A *pointer* names a checkpoint in JSON. It is all that a backend keeps for a trial: the checkpoint stays where it is.
"""

from __future__ import annotations

import contextlib
import copy
import hashlib
import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from typing_extensions import override

from trainer_lib.callbacks.base import DefaultFlowCallback, PrinterCallback, ProgressCallback, TrainerCallback
from trainer_lib.checkpoint.catalogue import list_checkpoints
from trainer_lib.errors import ConfigError, NonFiniteError, OutOfMemoryError, from_exception
from trainer_lib.search.base import SearchSettings, TrialRun, json_values, parse_objective
from trainer_lib.storage import Store
from trainer_lib.trackers.vendors import reporters

_GIVEN = (
    *("data_collator", "train_dataset", "eval_dataset", "processing_class", "model_init", "compute_loss_func"),
    *("compute_metrics", "optimizer_cls_and_kwargs", "preprocess_logits_for_metrics"),
)
_ADDED, _CALLBACK = "trainer.", "callbacks."
_new: Any = None  # the Trainer that this process makes


def take_apart(trainer: Any) -> dict[str, Any]:
    """The parts of a Trainer as it is now, by names that a user knows; its model is not among them."""
    args = copy.copy(trainer.args)
    # Trials are not pushed; their processes need no token.
    args.disable_tqdm, args.push_to_hub, args.hub_token = True, False, None
    args.output_dir = absolute_output(args.output_dir)
    parts: dict[str, Any] = {"class": type(trainer), "args": args}
    parts |= {name: getattr(trainer, name) for name in _GIVEN}
    parts |= {f"{_ADDED}{name}": value for name, value in _added(trainer).items()}
    made = {DefaultFlowCallback, PrinterCallback, ProgressCallback, *reporters(trainer.args.report_to or ())}
    for index, callback in enumerate(trainer.callback_handler.callbacks):
        # Those that the arguments ask for are made there; what they hold open belongs to this process.
        own = type(callback) in made
        parts[f"{_CALLBACK}{index}"] = type(callback).__name__ if own else callback
    return parts


@contextlib.contextmanager
def sent_as_reference(trainer: Any) -> Iterator[None]:
    """Inside, a part that refers to the Trainer takes along a reference to the new one, and not the Trainer."""
    trainer.__reduce_ex__ = lambda protocol: (_the_new_one, ())
    try:
        yield
    finally:
        del trainer.__reduce_ex__


def _the_new_one() -> Any:
    return _new


def put_together(cls: Any, fetch: Callable[[], Mapping[str, Any]]) -> Any:
    """Make the Trainer from its parts; `fetch` gets them, and those that refer to the Trainer find the new one."""
    global _new
    trainer = _new = cls.__new__(cls)
    parts = fetch()
    added = {name.removeprefix(_ADDED): value for name, value in parts.items() if name.startswith(_ADDED)}
    # Before, as a constructor sets them, and after, as they were changed later.
    vars(trainer).update(added)
    ours = next(base for base in cls.__mro__ if base.__module__.startswith("trainer_lib."))
    ours.__init__(trainer, args=parts["args"], **{name: parts[name] for name in _GIVEN})
    vars(trainer).update(added)
    handler = trainer.callback_handler
    own = {type(callback).__name__: callback for callback in handler.callbacks}
    wanted = [value for name, value in parts.items() if name.startswith(_CALLBACK)]
    callbacks = [own.get(callback) if isinstance(callback, str) else callback for callback in wanted]
    # Lines of several trials on one screen would be of no use.
    shown = (PrinterCallback, ProgressCallback)
    handler.callbacks[:] = [callback for callback in callbacks if callback is not None and type(callback) not in shown]
    return trainer


def absolute_output(output_dir: object) -> str:
    """The URL or the absolute path of a folder, which says the same in every process."""
    output = Store.open(str(output_dir), field="output_dir")
    return str(Path(output.local_path()).absolute()) if output.is_local else output.url.rstrip("/")


def _added(trainer: Any) -> dict[str, Any]:
    """Attributes that the library does not make: a subclass's own, and those that hide a default of the class."""
    cls, made = type(trainer), set[str]()
    for base in cls.__mro__:
        if base.__module__.startswith("trainer_lib."):
            made |= set(vars(base).get("__annotations__", {}))
    return {
        name: value
        for name, value in vars(trainer).items()
        if not name.startswith("_trainflow") and name != "__reduce_ex__" and (name not in made or hasattr(cls, name))
    }


OBJECTIVE, STEP, ENDED, FAILURE, FOLDER = "objective", "step", "trial_ended", "trial_failure", "trial_folder"
_REMEDY = "Return a dict of argument names and spaces."

Pointer = Mapping[str, Any]
Report = Callable[[dict[str, Any], Pointer | None], None]


@dataclass(frozen=True)
class Place:
    """A trial's folder, and the checkpoint of another trial that it starts from."""

    folder: str
    origin: str | None = None


def find_place(output: str, trial: str, name: str, values: Mapping[str, Any], pointer: Pointer | None) -> Place:
    """The place where a trial continues: `output` is the URL of the search's folder, `name` that of the trial's.

    `pointer` is the checkpoint that the backend starts it from, None at its first start. Raises ConfigError where that
    is gone, and no later one is there.
    """
    if pointer is None:
        return Place(name)
    if pointer["trial"] == trial and pointer["values"] == values:
        return Place(str(pointer["folder"]))
    saved = list_checkpoints(_child(output, pointer["folder"]))
    found = [checkpoint for checkpoint in saved if checkpoint.step >= pointer["step"]]
    if not found:
        what = f"The checkpoint that trial {trial} is to start from was removed."
        raise ConfigError(what, field="save_total_limit", remedy="Keep more checkpoints.")
    # The same beginning has the same folder: a trial that is started again continues there.
    origin = json.dumps([pointer["folder"], pointer["step"], values], sort_keys=True)
    digest = hashlib.sha256(origin.encode()).hexdigest()[:8]
    return Place(f"{name}-{digest}", found[-1].url)


def _child(output: str, folder: str) -> Store:
    return Store.open(f"{output.rstrip('/')}/{folder}", field="output_dir")


def report_failure(error: Exception, report: Report, *, step: int = 0) -> None:
    """Report that the trial failed, and whether it fails alone: other values may do better."""
    failure = from_exception(error)
    alone = isinstance(failure, NonFiniteError | OutOfMemoryError)
    # Every report has a number for the objective: schedulers ask for it.
    result = {OBJECTIVE: float("nan"), STEP: step, FAILURE: json.dumps({**failure.to_record(), "alone": alone})}
    report(result, None)


class TrialProcess(TrainerCallback):
    """Trains one trial on a Trainer that was made for it, whose callback it is.

    `report` passes the values of an evaluation, and a pointer to the newest checkpoint, to the backend.
    """

    def __init__(self, trainer: Any, settings: SearchSettings, trial: str, report: Report) -> None:
        self._trainer = trainer
        self._settings = settings
        self._trial = trial
        self._report = report
        self._output = str(trainer.args.output_dir)  # of the search: while it trains, the Trainer has the trial's
        self._pending: dict[str, Any] | None = None
        self._values: dict[str, Any] = {}
        self._place = Place("")
        self._origin: Pointer | None = None

    def run(self, backend: str, given: Mapping[str, Any], pointer: Pointer | None) -> None:
        """Train from where the trial is to its end. What goes wrong is reported, not raised."""
        try:
            values = self._values = json_values(given, _REMEDY)
            name, hp_name = f"run-{self._trial}", self._settings.hp_name
            if hp_name is not None:
                name = f"{hp_name(values)}-{self._trial}".replace("/", "-")
            place = self._place = find_place(self._output, self._trial, name, values, pointer)
            self._origin = pointer if place.origin is not None else None
            self._trainer.callback_handler.add_callback(self)
            run = TrialRun(place.folder, values, values, resumed=True, judge=self._judge, origin=place.origin)
            self._trainer._trainflow.trials.train_one(self._settings, backend, run)
            self._flush(ended=True)
        except Exception as error:
            report_failure(error, self._report, step=self._trainer.state.global_step)

    def _judge(self, metrics: Mapping[str, float], step: int | None) -> tuple[list[float], bool]:
        values = parse_objective(self._settings.compute_objective(dict(metrics)), 1)
        numbers = {name: value for name, value in metrics.items() if isinstance(value, int | float)}
        self._pending = {**numbers, OBJECTIVE: values[0], STEP: self._trainer.state.global_step}
        return values, False

    @override
    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._flush()

    @override
    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._flush()

    def _flush(self, *, ended: bool = False) -> None:
        """Report the newest evaluation, unless it was: after its step was saved, if it is saved at all."""
        result, self._pending = self._pending, None
        if result is None:
            return
        state = self._trainer.state
        done = ended or 0 < state.max_steps <= state.global_step
        newest = next(iter(list_checkpoints(_child(self._output, self._place.folder))), None)
        pointer = self._origin  # it has not saved anything yet
        if newest is not None:
            place = self._place.folder
            pointer = {"trial": self._trial, "folder": place, "step": newest.step, "values": self._values}
        folder = self._place.folder if pointer is None else pointer["folder"]
        self._report({**result, ENDED: done, FOLDER: folder}, pointer)
