"""The TrialRunner: the trials of a search on one Trainer, which is afterwards as it was before.

Every trial trains with a copy of the user's arguments; the arguments themselves never change. The runner calls the
Trainer's documented methods (`train`, `evaluate`), so a subclass's override is what trains.
"""

from __future__ import annotations

import contextlib
import copy
import importlib
import importlib.util
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

from trainer_lib.arguments import compat
from trainer_lib.arguments.enums import HPSearchBackend
from trainer_lib.arguments.fields import field_map
from trainer_lib.base.outputs import BestRun
from trainer_lib.base.restore_process import variables_kept
from trainer_lib.base.suggestions import suggestion
from trainer_lib.distributed.communicator import Communicator
from trainer_lib.errors import ConfigError, MissingExtraError
from trainer_lib.search.base import SearchSettings, TrialPruned, TrialRun
from trainer_lib.search.optuna import OptunaSearch
from trainer_lib.trackers.vendors import TrackingCallback

if TYPE_CHECKING:
    from trainer_lib.search.ray_tune import RaySearch
    from trainer_lib.trainer.internals import Internals
    from trainer_lib.trainer.trainer import Trainer

# Read when the Trainer is built, or set by the search itself.
_FIXED = (
    *("output_dir", "run_name", "report_to", "disable_tqdm", "push_to_hub", "use_cpu", "local_rank", "ddp_backend"),
    "ddp_timeout",
)


class TrialRunner:
    """Runs the trials of `trainer`, and reports their evaluations to the search; `takes_trial` is of a `model_init`."""

    def __init__(
        self, trainer: Trainer, parts: Internals, *, takes_trial: Callable[[Callable[..., Any]], bool]
    ) -> None:
        self.trainer = trainer
        self._parts = parts
        self._takes_trial = takes_trial
        self._current: TrialRun | None = None
        trainer.hp_name = trainer.hp_space = trainer.compute_objective = None
        trainer.hp_search_backend = trainer.objective = trainer._trial = None

    @property
    def comm(self) -> Communicator:
        """The ranks that train together."""
        return self._parts.comm

    @property
    def origin(self) -> str | None:
        """URL of the checkpoint of another trial that the running trial starts from, with its own values."""
        return None if self._current is None else self._current.origin

    @property
    def is_trial_running(self) -> bool:
        """Whether the present training is a trial of a search."""
        return self._current is not None

    def search(self, settings: SearchSettings, backend: Any) -> BestRun | list[BestRun]:
        """Run all trials; return the best one, or the best ones of several objectives, on every rank. Collective.

        Raises ConfigError if trials cannot be trained or compared, or an option is refused.
        """
        trainer = self.trainer
        if trainer.model_init is None:
            what = "Every trial trains a fresh model."
            raise ConfigError(what, field="model_init", remedy="Give it to the Trainer, not a model.")
        # An `evaluate` of the user's own may know its data.
        if trainer.eval_dataset is None and "evaluate" not in vars(type(trainer)):
            what = "Trials are compared by their evaluation."
            raise ConfigError(what, field="eval_dataset", remedy="Give it to the Trainer.")
        search = create_backend(backend, self, settings)
        with self._searching(settings, search.name):
            return search.run()

    def train_one(self, settings: SearchSettings, backend: str, run: TrialRun) -> list[float]:
        """Train one trial of a search that another process leads; return its objective."""
        with self._searching(settings, backend):
            return self.run_trial(run)

    @contextlib.contextmanager
    def _searching(self, settings: SearchSettings, backend: str) -> Iterator[None]:
        """Show the search on the Trainer; afterwards the Trainer is as it was."""
        trainer, name_before = self.trainer, self.trainer.hp_name
        try:
            with self._parts.restored():
                trainer.hp_search_backend, trainer.hp_name = backend, settings.hp_name
                trainer.hp_space, trainer.compute_objective = settings.hp_space, settings.compute_objective
                yield
        finally:
            trainer.hp_name, trainer.hp_search_backend = name_before, None
            self.set_trial(None)

    def set_trial(self, trial: Any) -> None:
        """Note the trial, or the parameters, that the present training is given."""
        self.trainer._trial = trial

    def run_trial(self, run: TrialRun) -> list[float]:
        """Train with the trial's arguments; return the objective of its last evaluation. Collective.

        A trial that never evaluates while it trains is evaluated at its end. Raises TrialPruned if the search stops
        this trial.
        """
        trainer = self.trainer
        with self._trial_arguments(run):
            trainer.objective, self._current = None, run
            try:
                # "auto", not True: an interrupted trial may have died before its first checkpoint.
                continues = run.resumed or run.origin is not None
                trainer.train(resume_from_checkpoint="auto" if continues else False, trial=run.trial)
                if trainer.objective is None:
                    trainer.objective, _ = run.judge(trainer.evaluate(), None)
                return trainer.objective
            finally:
                self._current = None
                self._parts.release_model()  # the next trial builds its model before it replaces this one

    def report(self, step: int, metrics: Mapping[str, float]) -> None:
        """Report an evaluation of the running trial to the search; outside of a search, do nothing. Collective.

        Raises TrialPruned when the search stops the trial; on every rank at the same evaluation.
        """
        if self._current is None:
            return
        self.trainer.objective, prune = self._current.judge(metrics, step)
        if prune:
            raise TrialPruned(f"The search pruned this trial at step {step}.")

    @contextlib.contextmanager
    def _trial_arguments(self, run: TrialRun) -> Iterator[None]:
        """Use a copy of the arguments with the trial's values and folder; afterwards use the user's own again."""
        trainer, given = self.trainer, self.trainer.args
        args, names = copy.copy(given), field_map(given)
        self.check_names(run.values)
        for name, value in run.values.items():
            if name in names or name in compat.OLD_NAMES:  # else it is the model's
                setattr(args, name, value)
        args.output_dir = f"{str(given.output_dir).rstrip('/')}/{run.name}"
        # Otherwise every trial would push its model to the same target.
        args.run_name, args.push_to_hub = run.name, False
        # Another trial's position may be one of other batches.
        args.allow_global_batch_change = args.allow_global_batch_change or run.origin is not None
        try:
            trainer._trainflow_set_up(args)
            with contextlib.ExitStack() as stack:
                for callback in trainer.callback_handler.callbacks:
                    if isinstance(callback, TrackingCallback):
                        # Otherwise all trials would report into the run of the first.
                        stack.enter_context(callback.another_run())
                yield
        finally:
            trainer._trainflow_set_up(given)

    def check_names(self, values: Mapping[str, Any]) -> None:
        """Raise ConfigError for a fixed argument, and for no argument where `model_init` does not take the trial."""
        names, init = field_map(self.trainer.args), self.trainer.model_init
        for name, value in values.items():
            if name in _FIXED:
                what = "This argument cannot change from trial to trial."
                raise ConfigError(what, field=f"hp_space.{name}", value=value, remedy="Remove it.")
            known = name in names or name in compat.OLD_NAMES
            if not known and (init is None or not self._takes_trial(init)):
                what = "The name is not an argument, and model_init does not take the trial."
                remedy = suggestion(name, names, listing=False)
                raise ConfigError(what, field=f"hp_space.{name}", value=value, remedy=remedy)


_WHY_NOT = {
    "sigopt": "SigOpt has been discontinued.",
    "wandb": "A sweep of Weights & Biases needs its vendor's server, which proposes the values.",
}


def create_backend(name: Any, runner: TrialRunner, settings: SearchSettings) -> OptunaSearch | RaySearch:
    """The backend of that name; None = optuna. Raises ConfigError for any other name."""
    wanted = "optuna" if name is None else str(getattr(name, "value", name)).lower()
    if wanted == "optuna":
        return OptunaSearch(runner, settings)
    if wanted == "ray":
        ray: RaySearch = _ray().RaySearch(runner, settings)
        return ray
    what, remedy = "This backend does not exist.", suggestion(wanted, list(HPSearchBackend))
    if wanted in _WHY_NOT:
        what = _WHY_NOT[wanted]
        remedy = 'Use backend="optuna"; several processes may work on one storage at the same time.'
    raise ConfigError(what, field="backend", value=wanted, remedy=remedy)


def default_hp_space_ray(trial: Any) -> dict[str, Any]:
    """Spaces of `ray.tune`: learning rate, epochs, seed and micro-batch. Raises MissingExtraError without ray."""
    space: dict[str, Any] = _ray().default_space(trial)
    return space


def _ray() -> Any:
    if importlib.util.find_spec("ray") is None:
        what = "A search with Ray Tune needs the package ray."
        raise MissingExtraError(what, field="backend", value="ray", extra="ray")
    with variables_kept({}, "RAY_CLIENT_MODE"):  # set by an import of Ray, and read by that alone
        return importlib.import_module("trainer_lib.search.ray_tune")
