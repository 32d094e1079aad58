"""The state of a training run. Plain data, no torch.

`TrainerState` is the content of a checkpoint's ``trainer_state.json``. Its fields are those of the transformers
Trainer, so tools for one read the files of the other. "Step" means optimizer step throughout.
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from trainer_lib.base.json_text import read_json
from trainer_lib.errors import ConfigError, DamagedError

if TYPE_CHECKING:
    from trainer_lib.arguments import TrainingArguments


class ExportableState:
    """An object whose state is written into ``trainer_state.json`` and restored on resume, without pickle.

    A subclass implements `state`, as `EarlyStoppingCallback` does. The state holds JSON values and tensors (in lists,
    tuples and dicts): an average of the weights, for instance, is restored bit for bit.
    """

    def state(self) -> dict[str, Any]:
        """The state: ``{"args": the constructor's arguments, "attributes": attributes that were set afterwards}``."""
        raise NotImplementedError(f"{type(self).__name__} is an ExportableState and must implement state().")

    @classmethod
    def from_state(cls, state: Mapping[str, Any]) -> Self:
        """Build an instance in the state that `state` returned."""
        instance = cls(**state.get("args", {}))
        for name, value in state.get("attributes", {}).items():
            setattr(instance, name, value)
        return instance


def has_exportable_state(candidate: object) -> bool:
    """Whether an object has the two methods of `ExportableState`; transformers' callbacks derive from another class."""
    return callable(getattr(candidate, "state", None)) and callable(getattr(type(candidate), "from_state", None))


@dataclass
class TrainerControl(ExportableState):
    """Switches that callbacks set and the training loop obeys.

    Args:
        should_training_stop: end the training; cleared when a training begins.
        should_epoch_stop: end the epoch; cleared when an epoch begins.
        should_save: save a checkpoint after this step; cleared when a step begins, as the two below.
        should_evaluate: evaluate after this step.
        should_log: log after this step.
    """

    should_training_stop: bool = False
    should_epoch_stop: bool = False
    should_save: bool = False
    should_evaluate: bool = False
    should_log: bool = False

    def _new_step(self) -> None:
        self.should_save = self.should_evaluate = self.should_log = False

    def state(self) -> dict[str, Any]:
        """The five switches, as arguments of the constructor."""
        return {"args": dataclasses.asdict(self), "attributes": {}}


@dataclass
class TrainerState:
    """The progress of a training run.

    Args:
        epoch: passes over the data so far, with the fraction of the current one.
        global_step: optimizer steps done.
        max_steps: optimizer steps of the whole training.
        logging_steps, eval_steps, save_steps: intervals in steps; `compute_steps` resolves shares.
        train_batch_size: samples per process and micro-batch.
        num_train_epochs: passes of the whole training, rounded up.
        num_input_tokens_seen: tokens that all processes have fed to the model, if they are counted.
        total_flos: floating-point operations done, as the model estimates them.
        log_history: everything that was logged, in order; each entry has "step" and "epoch".
        best_metric, best_global_step, best_model_checkpoint: the best evaluation so far, its step and checkpoint.
        is_local_process_zero, is_world_process_zero: whether this process is rank 0 of its machine, of all machines.
        is_hyper_param_search, trial_name, trial_params: the hyperparameter search that this run belongs to.
        stateful_callbacks: states by class name (a list of states if there are several of a class). The constructor
            also takes the callbacks themselves.

    Attributes:
        num_samples_seen: samples that all processes trained on, those before a resume included; set when training ends.
            It is not a field: transformers reads trainer_state.json too, and refuses fields that it does not know.
    """

    epoch: float = 0
    global_step: int = 0
    max_steps: int = 0
    logging_steps: int = 500
    eval_steps: int = 500
    save_steps: int = 500
    train_batch_size: int | None = None
    num_train_epochs: int = 0
    num_input_tokens_seen: int = 0
    total_flos: float = 0
    log_history: list[dict[str, Any]] = field(default_factory=list)
    best_metric: float | None = None
    best_global_step: int | None = None
    best_model_checkpoint: str | None = None
    is_local_process_zero: bool = True
    is_world_process_zero: bool = True
    is_hyper_param_search: bool = False
    trial_name: str | None = None
    trial_params: dict[str, str | float | int | bool] | None = None
    stateful_callbacks: Any = field(default_factory=dict)

    def __post_init__(self) -> None:
        # Files of the transformers Trainer may hold null here.
        self.log_history = [] if self.log_history is None else self.log_history
        # Not a field: the file keeps the reference's form, and the count has its place in `data.json`.
        self.num_samples_seen = 0
        if not isinstance(self.stateful_callbacks, dict):
            self.stateful_callbacks = collect_callback_states(self.stateful_callbacks or ())

    def to_dict(self) -> dict[str, Any]:
        """All fields as JSON values (a copy)."""
        return dataclasses.asdict(self)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Self:
        """Build a state from the JSON of `to_dict`; fields of other versions are ignored.

        Raises:
            DamagedError: `values` is not a mapping, or a field has a value that it cannot have.
        """
        if not isinstance(values, Mapping):
            raise DamagedError(
                "The file trainer_state.json does not hold a mapping.", remedy="Resume from another checkpoint."
            )
        known = {attribute.name for attribute in dataclasses.fields(cls)}
        given = {name: value for name, value in values.items() if name in known}
        # Checked here, because a wrong value would otherwise fail in the middle of the training that uses it.
        for name, value in given.items():
            if problem := _find_problem(name, value):
                field, remedy = f"trainer_state.json: {name}", "Resume from another checkpoint."
                raise DamagedError(f"The value {problem}.", field=field, value=value, remedy=remedy)
        return cls(**given)

    def save_to_json(self, json_path: str | PathLike[str]) -> None:
        """Write the state to a local file."""
        Path(json_path).write_text(self.to_json_string(), encoding="utf-8")

    def to_json_string(self) -> str:
        """Render the state as indented JSON, keys sorted, one line break at the end."""
        return json.dumps(self.to_dict(), indent=2, sort_keys=True) + "\n"

    @classmethod
    def load_from_json(cls, json_path: str | PathLike[str]) -> Self:
        """Read a state from a local file.

        Raises:
            ConfigError: the file cannot be read.
            DamagedError: the file does not hold a state.
        """
        try:
            values = read_json(Path(json_path), dict)
        except OSError as error:
            what = f"The file cannot be read: {error.strerror}."
            raise ConfigError(what, field="json_path", value=str(json_path), remedy="Check the path.") from None
        except ValueError as error:
            what = f"The file is not JSON: {error}."
            remedy = "Resume from another checkpoint."
            raise DamagedError(what, field="json_path", value=str(json_path), remedy=remedy) from None
        return cls.from_dict(values)

    def compute_steps(self, args: TrainingArguments, max_steps: int) -> None:
        """Set the three intervals; shares of `max_steps` are resolved to steps, rounded up."""
        for name in ("logging_steps", "eval_steps", "save_steps"):
            interval = getattr(args, name)
            if interval is not None:  # eval_steps may be unset
                # 1 is one step; only what is below 1 is a share.
                setattr(self, name, interval if interval >= 1 else math.ceil(max_steps * interval))

    def init_training_references(self, trainer: Any, max_steps: int, num_train_epochs: int, trial: Any) -> None:
        """Record what is known when a training starts: its length, its processes, its trial."""
        # As in transformers, a search may have set the trial on the Trainer alone.
        current = trial if trial is not None else getattr(trainer, "_trial", None)
        hp_name = getattr(trainer, "hp_name", None)
        if hp_name is not None and current is not None:
            self.trial_name = hp_name(current)
        params = getattr(trial, "params", trial)
        self.trial_params = dict(params) if isinstance(params, Mapping) else None
        self.max_steps = max_steps
        self.num_train_epochs = num_train_epochs
        self.is_local_process_zero = trainer.is_local_process_zero()
        self.is_world_process_zero = trainer.is_world_process_zero()


def _is_number(value: Any) -> bool:
    # A bool is a number for isinstance, and so is a float64 of numpy, which is written as one.
    return isinstance(value, int | float) and not isinstance(value, bool) and not math.isnan(value)


def _is_amount(value: Any) -> bool:
    return _is_number(value) and 0 <= value < math.inf


def _are_states(value: Any) -> bool:
    """Whether a value holds states by class name; those of the control must be switches that its constructor takes."""
    if not isinstance(value, Mapping):
        return value is None
    listed = [saved for state in value.values() for saved in (state if isinstance(state, list) else [state])]
    parts = [saved.get(part, {}) if isinstance(saved, Mapping) else None for saved in listed for part in _STATE_PARTS]
    control = value.get(TrainerControl.__name__, {})
    switches = control.get("args", {}) if isinstance(control, Mapping) else None
    known = {attribute.name for attribute in dataclasses.fields(TrainerControl)}
    return all(isinstance(part, Mapping) for part in (*parts, switches)) and all(
        name in known and isinstance(switch, bool) for name, switch in (switches or {}).items()
    )


_STATE_PARTS = ("args", "attributes")
_OPTIONAL = ("train_batch_size", "best_global_step", "logging_steps", "eval_steps", "save_steps", "best_metric")
_KINDS: dict[str, tuple[str, Callable[[Any], bool]]] = {
    "global_step max_steps num_train_epochs num_input_tokens_seen train_batch_size best_global_step": (
        "is not a whole number",
        lambda value: _is_amount(value) and value < 2**62 and value == int(value),  # 3.0 counts as 3
    ),
    "epoch total_flos": ("is not a finite number of at least 0", _is_amount),
    "logging_steps eval_steps save_steps best_metric": ("is not a number", _is_number),
    "log_history": ("is not a list of entries", lambda v: isinstance(v or [], list) and all(map(_is_mapping, v or []))),
    "best_model_checkpoint trial_name": ("is not text", lambda value: isinstance(value or "", str)),
    "trial_params": ("is not a mapping", lambda value: _is_mapping(value or {})),
    "stateful_callbacks": ("does not hold states of callbacks", _are_states),
}


def _is_mapping(value: Any) -> bool:
    return isinstance(value, Mapping)


def _find_problem(name: str, value: Any) -> str | None:
    """Why a field of ``trainer_state.json`` cannot be used, as a predicate; None when it can."""
    if value is None and name in _OPTIONAL:
        return None
    return next((words for names, (words, good) in _KINDS.items() if name in names.split() and not good(value)), None)


def collect_callback_states(callbacks: Iterable[Any]) -> dict[str, Any]:
    """Collect the states of callbacks by class name; those of several callbacks of one class become a list, in order.

    Raises:
        ConfigError: a callback is not an `ExportableState`.
    """
    states: dict[str, Any] = {}
    for callback in callbacks:
        if not has_exportable_state(callback):
            what = "This callback has no state that can be saved."
            remedy = "Let its class inherit ExportableState and implement state()."
            raise ConfigError(what, field="stateful_callbacks", value=type(callback).__name__, remedy=remedy)
        name = type(callback).__name__
        if name not in states:
            states[name] = callback.state()
        else:
            # The second of a class turns the entry into a list, as in the reference.
            before = states[name] if isinstance(states[name], list) else [states[name]]
            states[name] = [*before, callback.state()]
    return states
