"""A sweep as an object: its trials as a data frame, the best of them as a run and as a spec."""

from __future__ import annotations

from typing import TYPE_CHECKING

from typing_extensions import override

from trainer_lib.errors import ConfigError
from trainer_lib.storage import Store
from trainflow.flows.sweeps.sweep_result import SweepResult
from trainflow.recorded_run import Run, framed

if TYPE_CHECKING:
    import pandas as pd


class Sweep:
    """The result of a sweep.

    Attributes:
        result: everything of it, as plain values.
    """

    def __init__(self, result: SweepResult) -> None:
        self.result = result

    @property
    def trials(self) -> pd.DataFrame:
        """A row for each trial: state, the objectives, the values by field, steps, seconds and run."""
        import pandas as pd

        rows = []
        for trial in self.result.trials:
            reached = dict(zip(self.result.objective, trial.objective or (), strict=False))
            notes = {name: trial.notes.get(name) for name in ("steps", "seconds", "run", "mlflow_run_id", "reason")}
            rows.append({"trial": trial.number, "state": trial.state, **reached, **trial.values, **notes})
        return pd.DataFrame(rows).set_index("trial") if rows else pd.DataFrame()

    @property
    def best(self) -> list[int]:
        """The number of the best trial; several where none is best in every objective; none before one is complete."""
        return list(self.result.best)

    def run(self, trial: int | None = None) -> Run:
        """The run of a trial; of the best one unless a number is given.

        Raises:
            ConfigError: there is no best trial, or several of which none is best in every objective.
        """
        number = self._best() if trial is None else trial
        return Run(str(self.result.trial(number).notes["run"]), storage=self.result.storage)

    def spec_file(self, trial: int | None = None) -> str:
        """The spec of the best trial, for `Spec.load`: with everything else that the sweep's spec has on.

        Args:
            trial: one of `best`.

        Raises:
            ConfigError: there is no best trial, several of which none is best in every objective, or not this one.
        """
        number = self._best() if trial is None else trial
        if number not in self.result.best_specs:
            raise ConfigError(
                "This trial is not among the best, and has no spec.",
                field="trial",
                value=number,
                remedy=f"Choose one of {self.best}.",
            )
        return self.result.best_specs[number]

    def _best(self) -> int:
        if len(self.best) == 1:
            return self.best[0]
        raise ConfigError(
            "No trial is best in every objective: the choice is yours." if self.best else "No trial is complete yet.",
            field="trial",
            remedy=f"Name one of {self.best}, the trials that no other beats in everything." if self.best else "",
        )

    def report(self) -> str:
        """Its report, a whole page of HTML that loads nothing; its address is `result.report_url`.

        Raises:
            StorageError: the storage cannot be read.
        """
        folder, _, name = str(self.result.report_url).rpartition("/")
        return Store.open(folder).read_bytes(name).decode()

    @override
    def __repr__(self) -> str:
        from trainflow.flows.sweeps.sweep_result import count_words

        return f"Sweep({self.result.name!r}, {count_words(self.result)}, best={self.best})"

    def _repr_html_(self) -> str:
        """The report, inside of a notebook."""
        return framed(self.report())
