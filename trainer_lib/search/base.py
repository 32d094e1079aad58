"""What a search and the Trainer say to each other; the parts that are the same for every backend.

One trial, as told between the two::

    backend: ask -> hp_space(trial)             on rank 0; its answer goes to all ranks as JSON
    Trainer: run_trial: arguments set, train, evaluate
                 every evaluation -> objective -> report -> prune or go on     (decided on rank 0, agreed by all)
    backend: tell objective, pruned or failed   on rank 0
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from trainer_lib.agreement import run_on_all_ranks
from trainer_lib.arguments import TrainingArguments
from trainer_lib.arguments.fields import suggestion
from trainer_lib.distributed import Communicator
from trainer_lib.errors import ConfigError
from trainer_lib.state import BestRun

DIRECTIONS = ("minimize", "maximize")
_NO_METRIC = ("epoch", "num_input_tokens_seen")


class TrialPruned(Exception):  # control flow between Trainer and search; never leaves `hyperparameter_search`
    """The search has seen enough of this trial; raised on every rank at the same evaluation."""


@dataclass
class TrialRun:
    """One trial on its way through the Trainer.

    Attributes:
        name: of its folder below output_dir, and of its run.
        values: arguments to set, JSON.
        trial: what `model_init`, `hp_name` and `train` get as the trial.
        resumed: it goes on in the folder of one that was interrupted.
        judge: (metrics, optimizer step or None at the end) -> (objective, whether to prune); collective.
    """

    name: str
    values: dict[str, Any]
    trial: Any
    resumed: bool
    judge: Callable[[Mapping[str, float], int | None], tuple[list[float], bool]]


class SearchHooks(Protocol):
    """The Trainer, as a backend sees it."""

    args: TrainingArguments
    comm: Communicator

    def run_trial(self, run: TrialRun) -> list[float]:
        """Train once and measure; the objective's values. Raises TrialPruned. Collective."""


@dataclass
class SearchSettings:
    """What `hyperparameter_search` was asked for. `options` are the backend's own."""

    hp_space: Callable[[Any], Mapping[str, Any]]
    compute_objective: Callable[[dict[str, float]], float | Sequence[float]]
    n_trials: int | None
    directions: list[str]
    hp_name: Callable[[Any], str] | None
    options: dict[str, Any] = field(default_factory=dict)


class SearchBackend(Protocol):
    """A library that proposes hyperparameters."""

    def run(self) -> BestRun | list[BestRun]:
        """All trials; the best one, or the best ones of several objectives. The same on every rank. Collective."""


def default_hp_space(trial: Any) -> dict[str, Any]:
    """Learning rate, epochs, seed and micro-batch, in the ranges of the reference."""
    return {
        "learning_rate": trial.suggest_float("learning_rate", 1e-6, 1e-4, log=True),
        "num_train_epochs": trial.suggest_int("num_train_epochs", 1, 5),
        "seed": trial.suggest_int("seed", 1, 40),
        "per_device_train_batch_size": trial.suggest_categorical("per_device_train_batch_size", [4, 8, 16, 32, 64]),
    }


def default_compute_objective(metrics: Mapping[str, float]) -> float:
    """The loss when there is no other metric, else the sum of the others; times, counts and memory are none.

    Raises ConfigError when the evaluation gave nothing to compare.
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
        raise ConfigError(
            "The evaluation gave neither a loss nor a metric.",
            field="compute_objective",
            remedy="Give labels, compute_metrics, or a compute_objective.",
        )
    return loss


def checked_directions(direction: Any) -> list[str]:
    """A direction, or several, as texts. Raises ConfigError for anything else."""
    given = list(direction) if isinstance(direction, list | tuple) else [direction]
    texts = [str(getattr(each, "name", each)).lower() for each in given]
    for text in texts or [""]:
        if text not in DIRECTIONS:
            raise ConfigError("is no direction.", field="direction", value=text, remedy=suggestion(text, DIRECTIONS))
    return texts


def objective_values(given: Any, wanted: int) -> list[float]:
    """What `compute_objective` returned, as `wanted` floats; NaN is let through. Raises ConfigError otherwise."""
    values = list(given) if isinstance(given, list | tuple) else [given]
    try:
        numbers = [float(value) for value in values]
    except (TypeError, ValueError):
        numbers = []
    if len(numbers) != wanted:
        what = "a number" if wanted == 1 else f"{wanted} numbers, one per direction"
        raise ConfigError(
            f"did not return {what}.", field="compute_objective", value=str(given), remedy=f"Return {what}."
        )
    return numbers


def is_finite(values: Sequence[float]) -> bool:
    """Whether a trial with this objective can be compared."""
    return all(math.isfinite(value) for value in values)


class SharedTrial:
    """A trial of which every rank has one: the same parameters, the same answers.

    Parameters that are still unknown (`model_init` may ask for its own) are suggested on rank 0 and sent to all, so
    such a call is collective.

    Args:
        trial: the backend's own, on rank 0.
        number, params: as on rank 0.
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
        """A number from [low, high]."""
        return float(self._suggest("suggest_float", name, low, high, step=step, log=log))

    def suggest_int(self, name: str, low: int, high: int, *, step: int = 1, log: bool = False) -> int:
        """A whole number from low to high."""
        return int(self._suggest("suggest_int", name, low, high, step=step, log=log))

    def suggest_categorical(self, name: str, choices: Sequence[Any]) -> Any:
        """One of `choices`."""
        return self._suggest("suggest_categorical", name, choices)

    def set_user_attr(self, key: str, value: Any) -> None:
        """Keep a note with the trial."""
        self.user_attrs[key] = value
        if self._trial is not None:
            self._trial.set_user_attr(key, value)

    def _suggest(self, kind: str, name: str, *given: Any, **more: Any) -> Any:
        if name not in self.params:
            found = run_on_all_ranks(
                self._comm, lambda: None if self._trial is None else getattr(self._trial, kind)(name, *given, **more)
            )
            self.params[name] = self._comm.broadcast_json(found)
        return self.params[name]
