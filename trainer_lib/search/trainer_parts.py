"""A Trainer as parts that another process makes it from again: its class, what it was given, and what was added to it.

The parts are live objects; what brings them to the other process is the backend's transport. A part may refer to the
Trainer itself: there it is the new one.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from trainer_lib.arguments import TrainingArguments
from trainer_lib.callbacks.flow import DefaultFlowCallback
from trainer_lib.callbacks.progress_bar import PrinterCallback, ProgressCallback
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
    parts: dict[str, Any] = {"class": type(trainer), "args": _arguments_of_trials(trainer.args)}
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
    trainer.__reduce_ex__ = _reduce
    try:
        yield
    finally:
        del trainer.__reduce_ex__


def _reduce(protocol: object) -> tuple[Callable[[], Any], tuple[()]]:
    return _the_new_one, ()


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
    ours = next(each for each in cls.__mro__ if each.__module__.startswith("trainer_lib."))
    ours.__init__(trainer, args=parts["args"], **{name: parts[name] for name in _GIVEN})
    vars(trainer).update(added)
    handler = trainer.callback_handler
    own = {type(each).__name__: each for each in handler.callbacks}
    wanted = [value for name, value in parts.items() if name.startswith(_CALLBACK)]
    callbacks = [own.get(each) if isinstance(each, str) else each for each in wanted]
    # Lines of several trials on one screen would be of no use.
    shown = (PrinterCallback, ProgressCallback)
    handler.callbacks[:] = [each for each in callbacks if each is not None and type(each) not in shown]
    return trainer


def _arguments_of_trials(given: TrainingArguments) -> TrainingArguments:
    args = copy.copy(given)
    # Trials are not pushed; their processes need no token.
    args.disable_tqdm, args.push_to_hub, args.hub_token = True, False, None
    args.output_dir = absolute_output(given.output_dir)
    return args


def absolute_output(output_dir: object) -> str:
    """The URL or the absolute path of a folder, which says the same in every process."""
    output = Store.open(str(output_dir), field="output_dir")
    return str(Path(output.local_path()).absolute()) if output.is_local else output.url.rstrip("/")


def _added(trainer: Any) -> dict[str, Any]:
    """Attributes that the library does not make: a subclass's own, and those that hide a default of the class."""
    cls, made = type(trainer), set[str]()
    for each in cls.__mro__:
        if each.__module__.startswith("trainer_lib."):
            made |= set(vars(each).get("__annotations__", {}))
    return {
        name: value
        for name, value in vars(trainer).items()
        if not name.startswith("_trainflow") and name != "__reduce_ex__" and (name not in made or hasattr(cls, name))
    }
