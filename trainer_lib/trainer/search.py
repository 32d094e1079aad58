"""`hyperparameter_search`: many trainings of one Trainer, which is afterwards as it was before."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from trainer_lib.arguments import compat
from trainer_lib.arguments.fields import field_map, suggestion
from trainer_lib.errors import ConfigError
from trainer_lib.search.backends import create_backend
from trainer_lib.search.base import (
    SearchSettings,
    TrialRun,
    checked_directions,
    default_compute_objective,
    default_hp_space,
)
from trainer_lib.state import BestRun
from trainer_lib.trackers.vendors import ReporterCallback
from trainer_lib.trainer.inspecting import takes_trial
from trainer_lib.trainer.loop import LoopMixin

# Read when the Trainer is built, or set by the search itself.
_FIXED = (
    *("output_dir", "run_name", "report_to", "disable_tqdm", "push_to_hub", "use_cpu", "local_rank", "ddp_backend"),
    "ddp_timeout",
)


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
        """Train `n_trials` times with other arguments each, and say which were best. The same answer on every rank.

        Needs `model_init`, which may take the trial. Each trial writes below ``output_dir/run-<number>``; arguments,
        model, state and callbacks' view of them are afterwards what they were before. Trials are not pushed to a hub. A
        trial whose loss stays NaN or whose memory runs out (one process) counts as failed, and the search goes on.

        Args:
            hp_space: trial -> {argument: value}; learning rate, epochs, seed and micro-batch when not given. Called
                on rank 0 only.
            compute_objective: metrics of an evaluation -> the number to optimise, or one per direction; the loss when
                there is no other metric, else the sum of the others. The last evaluation of a trial counts.
            n_trials: trainings of this call; None = until `timeout`.
            direction: "minimize" or "maximize"; a list of them for several objectives.
            backend: "optuna".
            hp_name: trial -> name of its folder and run; ``run-<number>`` when not given.
            kwargs: `storage`, `study_name`, `load_if_exists`, `sampler`, `pruner` of `optuna.create_study`; `timeout`
                (seconds), `catch`, `gc_after_trial` of `Study.optimize`.

        Returns:
            The best run; with several directions the list of those that no other run beats in all of them.

        Raises:
            ConfigError: no `model_init`, nothing to evaluate on, an argument that does not exist or is refused, or no
                trial that was completed; MissingExtraError without optuna; whatever a training raises.
        """
        self._check_searchable()
        settings = SearchSettings(
            hp_space=hp_space or default_hp_space,
            compute_objective=compute_objective or default_compute_objective,
            n_trials=n_trials,
            directions=checked_directions(direction),
            hp_name=hp_name,
            options=kwargs,
        )
        search = create_backend(backend, self, settings)
        with self._searching(settings):
            return search.run()

    def _check_searchable(self) -> None:
        if self.model_init is None:
            raise ConfigError(
                "Every trial trains a fresh model.", field="model_init", remedy="Give it to the Trainer, not a model."
            )
        if self.eval_dataset is None and "evaluate" not in vars(type(self)):
            raise ConfigError("Trials are compared on it.", field="eval_dataset", remedy="Give it to the Trainer.")

    @contextlib.contextmanager
    def _searching(self, settings: SearchSettings) -> Iterator[None]:
        """Everything that trials change is put back: this Trainer can train, evaluate or search as before."""
        handler = self.callback_handler
        mine = {name: getattr(self, name) for name in ("model", "model_wrapped", "state", "control", "hp_name")}
        optimizer, scheduler = self.optimizer, self.lr_scheduler
        self.hp_search_backend, self.hp_name = "optuna", settings.hp_name
        self.hp_space, self.compute_objective = settings.hp_space, settings.compute_objective
        try:
            yield
        finally:
            for name, value in mine.items():
                setattr(self, name, value)
            self.optimizer, self.lr_scheduler = optimizer, scheduler
            handler.model, handler.optimizer, handler.lr_scheduler = self.model, optimizer, scheduler
            self._look_at_model()
            self._trial = self.hp_search_backend = None

    # -- one trial, as the backend asks for it ------------------------------------------------------------------------

    def run_trial(self, run: TrialRun) -> list[float]:
        """Train with the trial's arguments; the objective of its last evaluation, made afterwards if there was none."""
        with self._trial_arguments(run):
            self.objective, self._trial_run = None, run
            try:
                self.train(resume_from_checkpoint="auto" if run.resumed else False, trial=run.trial)
                if self.objective is None:
                    self.objective, _ = run.judge(self.evaluate(), None)
                return self.objective
            finally:
                self._trial_run = None
                # The next model is made before this one would be let go.
                self.model = self.model_wrapped = self.callback_handler.model = None  # type: ignore[assignment]
                self._reset_optimizer()

    @contextlib.contextmanager
    def _trial_arguments(self, run: TrialRun) -> Iterator[None]:
        """The trial's values in `args`, its own folder, and what follows from both; then the old ones again."""
        before = copy.copy(vars(self.args))
        try:
            self._set_arguments(run.values)
            self.args.output_dir = f"{str(self.args.output_dir).rstrip('/')}/{run.name}"
            self.args.run_name = run.name
            self.args.push_to_hub = False
            self._follow_arguments()
            with contextlib.ExitStack() as stack:
                for callback in self.callback_handler.callbacks:
                    if isinstance(callback, ReporterCallback):
                        stack.enter_context(callback.another_run())
                yield
        finally:
            vars(self.args).clear()
            vars(self.args).update(before)
            self._follow_arguments()

    def _follow_arguments(self) -> None:
        """Make anew what was made from the arguments when this Trainer was built."""
        self._set_up_process(self.args)
        self._memory_allows = None
        self._eval_loaders.clear()

    def _set_arguments(self, values: Mapping[str, Any]) -> None:
        """Set arguments from a trial; their types and bounds are checked with the others, by `validate`.

        Raises ConfigError for a name that is no argument, unless `model_init` takes the trial: it may be the model's.
        """
        names = field_map(self.args)
        for name, value in values.items():
            if name in _FIXED:
                raise ConfigError(
                    "cannot change from trial to trial.", field=f"hp_space.{name}", value=value, remedy="Remove it."
                )
            if name in names or name in compat.OLD_NAMES:
                setattr(self.args, name, value)
            elif self.model_init is None or not takes_trial(self.model_init):
                raise ConfigError(
                    "is not an argument, and model_init does not take the trial.",
                    field=f"hp_space.{name}",
                    value=value,
                    remedy=suggestion(name, names, listing=False),
                )
