"""`hyperparameter_search`: many trainings of one Trainer. The `TrialRunner` runs them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from trainer_lib.outputs import BestRun
from trainer_lib.search.base import (
    SearchSettings,
    default_compute_objective,
    default_hp_space,
    parse_directions,
)
from trainer_lib.trainer.loop import LoopMixin


class SearchMixin(LoopMixin):
    """Search."""

    def hyperparameter_search(
        self,
        hp_space: Callable[[Any], Mapping[str, Any]] | None = None,
        compute_objective: Callable[[dict[str, float]], float | Sequence[float]] | None = None,
        n_trials: int | None = 20,
        direction: str | Sequence[str] = "minimize",
        backend: Any = None,
        hp_name: Callable[[Any], str] | None = None,
        **kwargs: Any,
    ) -> BestRun | list[BestRun]:
        """Train `n_trials` times, each time with other arguments; return the best run, on every rank. Collective.

        A search needs `model_init`, which may take the trial. Each trial writes to ``output_dir/run-<number>`` and
        trains with a copy of the arguments; afterwards the Trainer's model, state and callbacks are what they were.
        Trials are not pushed to a hub. A trial whose loss stays NaN, or (with one process) whose memory runs out,
        counts as failed, and the search continues.

        Args:
            hp_space: trial -> {argument: value}, called on rank 0 only; default: learning rate, epochs, seed and
                micro-batch.
            compute_objective: metrics of an evaluation -> the number to optimize, or one number per direction. The
                default is the sum of all metrics but the loss, and the loss where it is the only one. The last
                evaluation of a trial counts.
            n_trials: number of trials in this call; None = until `timeout`.
            direction: "minimize" or "maximize"; a list of them for several objectives.
            backend: "optuna".
            hp_name: trial -> name of its folder and run; default: ``run-<number>``.
            kwargs: `storage`, `study_name`, `load_if_exists`, `sampler`, `pruner` of `optuna.create_study`; `timeout`
                (seconds), `catch`, `gc_after_trial` of `Study.optimize`.

        Returns:
            The best run; with several directions, all runs that no other run beats in every direction.

        Raises:
            ConfigError: there is no `model_init` or no `eval_dataset`, an argument is unknown or refused, or no trial
                was completed. MissingExtraError: optuna is not installed. Errors of a training pass through.
        """
        settings = SearchSettings(
            hp_space=hp_space or default_hp_space,
            compute_objective=compute_objective or default_compute_objective,
            n_trials=n_trials,
            directions=parse_directions(direction),
            hp_name=hp_name,
            options=kwargs,
        )
        return self._trainflow_trials.search(settings, backend)
