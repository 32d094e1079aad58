"""The ledger of a sweep: an Optuna study in a sqlite file, which several processes share and any of them may lose.

    <folder>/study.db        the study: values, intermediate values and state of every trial
    <folder>/claim.lock      held while a trial is claimed
    <folder>/trials/<n>      held by the process that works on trial n

A trial is written in one step, with all its values; who works on it holds its lock, which the kernel releases however
the process ends. So a trial whose lock is free and that has not ended was interrupted: it is claimed again, with the
same values.
"""

from __future__ import annotations

import contextlib
import fcntl
import itertools
import json
import math
import sqlite3
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any, Literal

from trainer_lib.base.json_text import parse_json, seal_of
from trainer_lib.errors import ConfigError, DamagedError, MissingExtraError, StorageError, first_line
from trainer_lib.locks.file_lock import try_lock
from trainflow.flows.spec.sweep_settings import Range, SweepSettings

DATABASE = "study.db"
_STUDY = "sweep"
_NOTES, _SEAL = "trainflow:notes", "trainflow:seal"
_BUSY_S = 60
_FEW = 100_000
"""Points of a space in which none is tried twice."""

State = Literal["waiting", "running", "complete", "pruned", "failed"]


@dataclass(frozen=True)
class TrialState:
    """One trial, as the ledger has it: field -> value, what it reached at its end, and what its process wrote down."""

    number: int
    state: State
    values: Mapping[str, Any]
    objective: tuple[float, ...] | None
    notes: Mapping[str, Any] = field(default_factory=dict)


class Claim:
    """A trial that this process works on, perhaps one that another process began. `release` gives its lock back."""

    def __init__(self, ledger: Ledger, trial: Any, lock: IO[str], *, is_resumed: bool) -> None:
        self.number = int(trial.number)
        # Written with the trial; Optuna notes them when they are asked for.
        self.values: dict[str, Any] = {
            name: _decode(dimension, trial._suggest(name, _distribution(dimension)))
            for name, dimension in ledger.settings.space.items()
        }
        self.is_resumed = is_resumed
        self._file, self._study = ledger.file, ledger.study
        self._trial, self._lock = trial, lock

    @property
    def seconds_before(self) -> float:
        """Seconds that earlier tries of this trial noted."""
        return float(self._trial.user_attrs.get(_NOTES, {}).get("seconds") or 0.0)

    def report(self, step: int, value: float) -> bool:
        """Write down what an evaluation at an optimizer step reached; whether the trial is to end here."""
        with _reached(self._file):
            steps = sorted({*self._trial.user_attrs.get("steps", ()), step})
            # Counted in evaluations: trials with other batches have other steps.
            if steps != self._trial.user_attrs.get("steps"):
                self._trial.set_user_attr("steps", steps)
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # a training that was resumed reports some evaluations again
                self._trial.report(value, steps.index(step) + 1)
            return bool(self._trial.should_prune())

    def note(self, **notes: Any) -> None:
        """Write down more about the trial; None values are left out."""
        with _reached(self._file):
            known = self._trial.user_attrs.get(_NOTES, {})
            new = {key: value for key, value in notes.items() if value is not None}
            self._trial.set_user_attr(_NOTES, {**known, **new})

    def complete(self, objective: Sequence[float]) -> None:
        """The trial has reached its end."""
        with _reached(self._file):
            # Before the end: a trial that ends without its seal would count as changed.
            self._trial.set_user_attr(_SEAL, _seal(self._study.get_trials(deepcopy=False)[self.number], objective))
            self._study.tell(self.number, list(objective))

    def end(self, state: Literal["pruned", "failed"], reason: str) -> None:
        """The trial was ended early, or cannot reach its end, however often it is tried."""
        from optuna.trial import TrialState as States

        self.note(reason=reason)
        with _reached(self._file):
            self._study.tell(self.number, state=States.PRUNED if state == "pruned" else States.FAIL)

    def release(self) -> None:
        """Give the lock back: a trial that has not ended can be claimed again."""
        self._lock.close()


class Ledger:
    """The study in a folder of this machine; `study` is Optuna's own. `close` releases the database."""

    def __init__(self, folder: Path, settings: SweepSettings) -> None:
        """Open the study, or make it. Raises ConfigError if the file is not a study, or out of reach."""
        self.folder = folder
        self.file = folder / DATABASE
        self.settings = settings
        self.study: Any = None
        self._optuna = _optuna()
        self._storage: Any = None
        try:
            (folder / "trials").mkdir(parents=True, exist_ok=True)
            with self._locked():
                self._open()
        except Exception as error:
            self.close()
            raise ConfigError(
                f"The sweep's ledger cannot be opened: {first_line(error)}.",
                field=str(self.file),
                remedy="Repair the disk or its permissions; or give the sweep another name (sweep.name): what is "
                "trained already is not trained again.",
            ) from error

    @property
    def num_trials(self) -> int:
        """The number of trials to run: at most the number of points."""
        if not self._is_small:
            return self.settings.trials or 1
        points = math.prod(map(len, map(_points, self.settings.space.values())))
        return points if self.settings.trials is None else min(points, self.settings.trials)

    @property
    def _is_small(self) -> bool:
        """Whether there are few enough points to try none twice."""
        dimensions = self.settings.space.values()
        counts = (values.count if isinstance(values, Range) else len(values) for values in dimensions)
        return self.settings.sampler == "grid" or math.prod(counts) <= _FEW

    def read_note(self, name: str) -> Any:
        """The note of `write_note`; None before."""
        with _reached(self.file):
            return self.study.user_attrs.get(f"trainflow:{name}")

    def write_note(self, name: str, value: Any) -> None:
        """Write something down with the study."""
        with _reached(self.file):
            self.study.set_user_attr(f"trainflow:{name}", value)

    def start_again(self) -> None:
        """Forget the study: none of its trials came to an end."""
        with self._locked():
            self._optuna.delete_study(study_name=_STUDY, storage=self._storage)
            self._create()

    def trials(self) -> list[TrialState]:
        """Every trial, by its number. Raises DamagedError for one whose values were changed after its end."""
        with _reached(self.file):
            return [self._state(trial) for trial in self._read_trials()]

    def best(self) -> list[int]:
        """The numbers of the best trial, or of all that no other beats in every objective; none before one ended."""
        if not any(trial.state == "complete" for trial in self.trials()):
            return []
        if len(self.settings.direction) > 1:
            return sorted(trial.number for trial in self.study.best_trials)
        return [int(self.study.best_trial.number)]

    def claim(self) -> Claim | None:
        """The next trial: one that was interrupted, else a new one; None when there is nothing to claim."""
        with _reached(self.file), self._locked():
            trials = self._read_trials()
            for trial in trials:
                if trial.state.name == "RUNNING" and (lock := self._take(trial.number)) is not None:
                    again = self._optuna.trial.Trial(self.study, trial._trial_id)
                    return Claim(self, again, lock, is_resumed=True)
            if not any(trial.state.name == "WAITING" for trial in trials):
                if len(trials) >= self.num_trials:
                    return None
                self.study.enqueue_trial(self._propose(trials))
            new = self.study.ask()
            lock = self._take(new.number)
            return None if lock is None else Claim(self, new, lock, is_resumed=False)

    def is_done(self) -> bool:
        """Whether every trial has ended."""
        with _reached(self.file):
            trials = self.study.get_trials(deepcopy=False)
        return len(trials) >= self.num_trials and all(trial.state.is_finished() for trial in trials)

    def _read_trials(self) -> list[Any]:
        trials = list(self.study.get_trials(deepcopy=False))
        for trial in trials:
            if trial.state.name == "COMPLETE" and trial.user_attrs.get(_SEAL) != _seal(trial, trial.values):
                raise DamagedError(
                    f"The ledger's values of trial {trial.number} were changed after the trial had ended.",
                    field=str(self.file),
                    value=trial.values,
                    remedy="Restore the file, or give the sweep another name (sweep.name): no committed training is "
                    "repeated.",
                )
        return trials

    def close(self) -> None:
        """Release the database."""
        if self._storage is not None:
            self._storage.remove_session()
            self._storage.engine.dispose()

    # -- the study ----------------------------------------------------------------------------------------------------

    def _open(self) -> None:
        from sqlalchemy import URL

        with contextlib.closing(sqlite3.connect(self.file, timeout=_BUSY_S)) as database:  # Optuna would leave it open
            database.execute("PRAGMA schema_version")
        url = URL.create("sqlite", database=str(self.folder.absolute() / DATABASE))
        self._storage = self._optuna.storages.RDBStorage(
            url.render_as_string(), engine_kwargs={"connect_args": {"timeout": _BUSY_S}}
        )
        self._create()

    def _create(self) -> None:
        self.study = self._optuna.create_study(
            storage=self._storage,
            study_name=_STUDY,
            directions=self.settings.direction,
            pruner=self._pruner(),
            load_if_exists=True,
        )

    def _pruner(self) -> Any:
        pruners, chosen = self._optuna.pruners, self.settings.pruner
        if chosen is None:
            return pruners.NopPruner()
        if chosen.kind == "asha":
            return pruners.SuccessiveHalvingPruner(min_resource=chosen.after, reduction_factor=chosen.factor)
        return pruners.MedianPruner(n_startup_trials=chosen.startup, n_warmup_steps=chosen.after)

    @contextlib.contextmanager
    def _locked(self) -> Iterator[None]:
        with (self.folder / "claim.lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            yield

    def _take(self, number: int) -> IO[str] | None:
        """The lock of a trial; None while another process holds it."""
        lock = (self.folder / "trials" / str(number)).open("w")
        if try_lock(lock.fileno()):
            return lock
        lock.close()
        return None

    # -- values -------------------------------------------------------------------------------------------------------

    def _propose(self, trials: Sequence[Any]) -> dict[str, Any]:
        """The values of the next trial: a function of the settings and of the trials so far, written nowhere."""
        space, is_grid = self.settings.space, self.settings.sampler == "grid"
        proposed = {} if is_grid else self._ask(trials)
        tried = [self._state(trial).values for trial in trials]
        decoded = {name: _decode(space[name], value) for name, value in proposed.items()}
        if not is_grid and (decoded not in tried or not self._is_small):
            return proposed
        points = (dict(zip(space, point, strict=True)) for point in itertools.product(*map(_points, space.values())))
        new = next(point for point in points if point not in tried)
        return {name: _encode(space[name], value) for name, value in new.items()}

    def _ask(self, trials: Sequence[Any]) -> dict[str, Any]:
        """The sampler's proposal, which may have been tried before."""
        settings, samplers = self.settings, self._optuna.samplers
        seed = settings.seed + len(trials)
        sampler = samplers.RandomSampler(seed) if settings.sampler == "random" else samplers.TPESampler(seed=seed)
        draft = self._optuna.create_study(directions=settings.direction, sampler=sampler)
        for trial in trials:
            draft.add_trial(trial)
        distributions = {name: _distribution(dimension) for name, dimension in settings.space.items()}
        return dict(draft.ask(distributions).params)

    def _state(self, trial: Any) -> TrialState:
        params = trial.params or trial.system_attrs.get("fixed_params", {})
        state: State = "failed" if trial.state.name == "FAIL" else trial.state.name.lower()
        return TrialState(
            trial.number,
            state,
            {name: _decode(self.settings.space[name], value) for name, value in params.items()},
            tuple(trial.values) if state == "complete" else None,
            dict(trial.user_attrs.get(_NOTES, {})),
        )


def _points(dimension: list[Any] | Range) -> list[Any]:
    return dimension.values() if isinstance(dimension, Range) else dimension


def _encode(dimension: list[Any] | Range, value: Any) -> Any:
    """A value as Optuna keeps it: lists and mappings as JSON text."""
    return value if _is_plain(dimension) else json.dumps(value, sort_keys=True)


def _decode(dimension: list[Any] | Range, value: Any) -> Any:
    """The value that Optuna keeps as the field has it."""
    if isinstance(dimension, Range):
        return dimension.rounded(value)
    return value if _is_plain(dimension) else parse_json(value)


def _is_plain(dimension: list[Any] | Range) -> bool:
    return isinstance(dimension, Range) or all(
        isinstance(value, bool | int | float | str | None) for value in dimension
    )


def _distribution(dimension: list[Any] | Range) -> Any:
    """Optuna's distribution of a field."""
    from optuna import distributions as kinds

    if not isinstance(dimension, Range):
        return kinds.CategoricalDistribution([_encode(dimension, value) for value in dimension])
    bounds: dict[str, Any] = {"low": dimension.low, "high": dimension.high, "log": dimension.log}
    if dimension.is_whole:
        return kinds.IntDistribution(**bounds, step=int(dimension.step or 1))
    return kinds.FloatDistribution(**bounds, step=dimension.step)


def _seal(trial: Any, objective: Sequence[float]) -> str:
    reports, notes = sorted(trial.intermediate_values.items()), trial.user_attrs.get(_NOTES)
    return seal_of({"trial": [trial.number, trial.params, reports, notes, [float(value) for value in objective]]})


@contextlib.contextmanager
def _reached(file: Path) -> Iterator[None]:
    """Name a database that is gone, locked or full inside of the block as such."""
    from optuna.exceptions import StorageInternalError
    from sqlalchemy.exc import SQLAlchemyError

    try:
        if not file.exists():  # sqlite writes into a file that was removed, without a word
            raise FileNotFoundError(f"{file} is gone")
        yield
    except (OSError, SQLAlchemyError, StorageInternalError) as error:
        cause = error.__cause__ if isinstance(error, StorageInternalError) and error.__cause__ else error
        raise StorageError(
            f"The sweep's ledger cannot be read or written: {first_line(getattr(cause, 'orig', None) or cause)}.",
            field="sweep",
            value=str(file),
            remedy="Bring the file or its disk back, and give the same command again: no training that is committed is "
            "repeated, not even where the file is lost for good.",
        ) from error


def _optuna() -> Any:
    try:
        import optuna
    except ImportError:
        raise MissingExtraError(
            "A sweep needs the package optuna.", field="sweep", value="optuna", extra="search"
        ) from None
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    return optuna
