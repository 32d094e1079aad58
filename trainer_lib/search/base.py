"""The interface between a search backend and the Trainer, and the parts that every backend shares.

One trial::

    backend: ask -> hp_space(trial)             on rank 0, which broadcasts the values as JSON
    runner:  run_trial: copy of the arguments, train, evaluate
                 every evaluation -> objective -> report -> prune or continue     (decided on rank 0, broadcast)
    backend: record the trial as complete, pruned or failed                       on rank 0
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from trainer_lib.base.json_text import parse_json
from trainer_lib.base.suggestions import require_known
from trainer_lib.distributed.communicator import Communicator, run_on_all_ranks
from trainer_lib.errors import ConfigError

DIRECTIONS = ("minimize", "maximize")
_NO_METRIC = ("epoch", "num_input_tokens_seen")


class TrialPruned(Exception):  # control flow between the Trainer and a search; never leaves `hyperparameter_search`
    """The search stops this trial early; raised on every rank at the same evaluation."""


@dataclass
class TrialRun:
    """One trial that the Trainer is to train, in the folder `name` below output_dir, with values of arguments.

    `trial` is passed to `model_init`, `hp_name` and `train`. `resumed`: it continues an interrupted one, in that one's
    folder. `origin` is the URL of another trial's checkpoint, from which it starts with its own values. `judge` is
    collective: (metrics, optimizer step or None at the end) -> (objective, whether to prune).
    """

    name: str
    values: dict[str, Any]
    trial: Any
    resumed: bool
    judge: Callable[[Mapping[str, float], int | None], tuple[list[float], bool]]
    origin: str | None = None


@dataclass
class SearchSettings:
    """The arguments of `hyperparameter_search`; `options` are passed to the backend, which may have a default space."""

    hp_space: Callable[[Any], Mapping[str, Any]] | None
    compute_objective: Callable[[dict[str, float]], float | Sequence[float]]
    n_trials: int | None
    directions: list[str]
    hp_name: Callable[[Any], str] | None
    options: dict[str, Any] = field(default_factory=dict)


def require_end(settings: SearchSettings, limit: str) -> None:
    """Refuse a search without an end, or without a trial; the option `limit` ends it as well as `n_trials`."""
    trials = settings.n_trials
    if trials is None and settings.options.get(limit) is None:
        remedy = f"Give n_trials or {limit}."
        raise ConfigError("The search would never end.", field="n_trials", value="none", remedy=remedy)
    if trials is not None and trials < 1:
        remedy = "Give a number."
        raise ConfigError("A search needs at least one trial.", field="n_trials", value=trials, remedy=remedy)


def default_hp_space_optuna(trial: Any) -> dict[str, Any]:
    """Learning rate, epochs, seed and micro-batch, in the ranges of transformers' `default_hp_space_optuna`."""
    return {
        "learning_rate": trial.suggest_float("learning_rate", 1e-6, 1e-4, log=True),
        "num_train_epochs": trial.suggest_int("num_train_epochs", 1, 5),
        "seed": trial.suggest_int("seed", 1, 40),
        "per_device_train_batch_size": trial.suggest_categorical("per_device_train_batch_size", [4, 8, 16, 32, 64]),
    }


def default_compute_objective(metrics: Mapping[str, float]) -> float:
    """The sum of the metrics other than the loss, or the loss where it is the only one.

    Times, speeds, counters and memory are not metrics here.

    Raises:
        ConfigError: the evaluation returned neither a loss nor a metric.
    """
    scores = {
        name: value
        for name, value in metrics.items()
        if name not in _NO_METRIC and not name.endswith(("_runtime", "_per_second")) and "_mem_" not in name
    }
    loss = scores.pop("eval_loss", None)
    if scores:
        return sum(scores.values())
    if loss is None:
        what = "The evaluation returned neither a loss nor a metric."
        remedy = "Give labels, compute_metrics, or a compute_objective."
        raise ConfigError(what, field="compute_objective", remedy=remedy)
    return loss


def parse_directions(direction: Any) -> list[str]:
    """One direction or several, as a list of "minimize" and "maximize". Raises ConfigError for anything else."""
    given = list(direction) if isinstance(direction, list | tuple) else [direction]
    # Optuna's StudyDirection counts by its name.
    texts = [str(getattr(choice, "name", choice)).lower() for choice in given]
    # An empty list is refused like an unknown direction.
    for text in texts or [""]:
        require_known(text, DIRECTIONS, "The direction is unknown.", field="direction")
    return texts


def parse_objective(given: Any, wanted: int) -> list[float]:
    """The return value of `compute_objective` as `wanted` floats, NaN included. Raises ConfigError otherwise."""
    values = list(given) if isinstance(given, list | tuple) else [given]
    try:
        numbers = [float(value) for value in values]
    except (TypeError, ValueError):
        numbers = []
    if len(numbers) != wanted:
        what = "a number" if wanted == 1 else f"{wanted} numbers, one per direction"
        message = f"The function did not return {what}."
        raise ConfigError(message, field="compute_objective", value=str(given), remedy=f"Return {what}.")
    return numbers


def json_values(given: Any, remedy: str) -> dict[str, Any]:
    """Parameters as JSON values. Raises ConfigError when they are not a mapping, or a value is not JSON."""
    if not isinstance(given, Mapping):
        what = "The function did not return a mapping of arguments to values."
        raise ConfigError(what, field="hp_space", value=type(given).__name__, remedy=remedy)
    try:
        values: dict[str, Any] = parse_json(json.dumps({str(name): _plain(value) for name, value in given.items()}))
    except (TypeError, ValueError) as error:
        what = f"The function returned a value that is not JSON: {error}."
        raise ConfigError(what, field="hp_space", remedy="Return numbers, texts, lists or mappings.") from error
    return values


def _plain(value: Any) -> Any:
    """An enum counts as its value, as arguments take it; a number of numpy as Python's."""
    value = getattr(value, "value", value)
    return value.item() if hasattr(value, "item") and getattr(value, "ndim", None) == 0 else value


class SharedTrial:
    """A trial that has the same parameters on every rank.

    `model_init` may suggest parameters of its own. One that is not known yet is suggested on rank 0, which alone has
    the backend's `trial`, and broadcast: such a call is collective.
    """

    def __init__(self, trial: Any, comm: Communicator, number: int, params: Mapping[str, Any]) -> None:
        self._trial = trial
        self._comm = comm
        self.number = number
        self.params = dict(params)
        self.user_attrs: dict[str, Any] = {}

    def suggest_float(
        self, name: str, low: float, high: float, *, step: float | None = None, log: bool = False
    ) -> float:
        """A float in [low, high]."""
        return float(self._suggest("suggest_float", name, low, high, step=step, log=log))

    def suggest_int(self, name: str, low: int, high: int, *, step: int = 1, log: bool = False) -> int:
        """An integer in [low, high]."""
        return int(self._suggest("suggest_int", name, low, high, step=step, log=log))

    def suggest_categorical(self, name: str, choices: Sequence[Any]) -> Any:
        """One of `choices`."""
        return self._suggest("suggest_categorical", name, choices)

    def set_user_attr(self, key: str, value: Any) -> None:
        """Store a value with the trial."""
        self.user_attrs[key] = value
        if self._trial is not None:
            self._trial.set_user_attr(key, value)

    def _suggest(self, kind: str, name: str, *given: Any, **more: Any) -> Any:
        # Optuna, too, returns the first value again when a name is suggested twice.
        if name not in self.params:
            found = run_on_all_ranks(
                self._comm, lambda: None if self._trial is None else getattr(self._trial, kind)(name, *given, **more)
            )
            self.params[name] = self._comm.broadcast_json(found)
        return self.params[name]
