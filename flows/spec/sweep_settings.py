"""The settings of a sweep: which fields of a spec are varied, what is measured, and who proposes the next values."""

from __future__ import annotations

import math
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, model_validator
from pydantic_core import PydanticCustomError

from trainflow.tasks.settings import Settings

SWEEP, TRIAL, OBJECTIVE = "trainflow.sweep", "trainflow.trial", "trainflow.objective"
"""Tags of the runs of a sweep: its name, the number of the trial, and the metrics that it is for."""


def _problem(what: str, remedy: str) -> PydanticCustomError:
    return PydanticCustomError("sweep", "{problem} {hint}", {"problem": what, "hint": remedy})


class Range(Settings):
    """Numbers from `low` to `high`, both included: whole ones where low, high and step are whole."""

    low: int | float = Field(description="The smallest value.")
    high: int | float = Field(description="The largest value.")
    step: int | float | None = Field(default=None, gt=0, description="Distance of two values; unset: any value.")
    log: bool = Field(default=False, description="Draw evenly on a logarithmic scale.")

    @model_validator(mode="after")
    def _check_bounds(self) -> Range:
        if not (math.isfinite(self.low) and math.isfinite(self.high)):
            raise _problem("A bound of the range is not a finite number.", "Give numbers for low and high.")
        if self.low >= self.high:
            raise _problem(
                f"The range is empty: low is {self.low:g} and high is {self.high:g}.", "Let low be below high."
            )
        if self.log and self.low <= 0:
            raise _problem(
                f"A logarithmic range begins above zero, and low is {self.low:g}.", "Raise low, or remove log."
            )
        if self.log and self.step is not None:
            raise _problem("A logarithmic range has no step.", "Remove step or log, or list the values.")
        return self

    @property
    def is_whole(self) -> bool:
        """Whether its values are whole numbers."""
        return all(isinstance(number, int) for number in (self.low, self.high, self.step or 1))

    @property
    def count(self) -> float:
        """The number of its values; infinity where they cannot be counted."""
        if self.step is None and not self.is_whole:
            return math.inf
        return int((self.high - self.low) / (self.step or 1) + 1e-9) + 1

    def values(self) -> list[int | float]:
        """All its values, which can be counted."""
        return [self.rounded(self.low + (self.step or 1) * number) for number in range(int(self.count))]

    def rounded(self, value: float) -> int | float:
        """A value as it is meant: 0.3, and not the sum 0.30000000000000004."""
        return value if self.is_whole or self.step is None else float(f"{value:.12g}")


def _read_dimension(value: Any) -> Any:
    if isinstance(value, list):
        if len(value) < 2:
            raise _problem("There is nothing to choose from.", "List two values or more, or set the field itself.")
        return value
    if isinstance(value, dict):
        return Range.model_validate(value)
    raise _problem(
        "This is neither a list of values nor a range.", "Write [16, 32, 64], or {low: 1e-4, high: 1e-1, log: true}."
    )


Dimension = Annotated[list[Any] | Range, BeforeValidator(_read_dimension)]


class PrunerSettings(Settings):
    """sweep.pruner: which trials are ended early, by what they reach while they train."""

    kind: Literal["asha", "median"] = Field(
        description="asha: at each rung only the best 1/factor continue; median: trials below the median of the others "
        "at the same evaluation end."
    )
    after: int = Field(default=1, ge=1, description="Evaluations before the first decision.")
    factor: int = Field(default=3, ge=2, description="asha: of as many trials one continues from rung to rung.")
    startup: int = Field(default=5, ge=0, description="median: trials that are complete before any is ended.")
    metric: str | None = Field(
        default=None,
        description="Metric of the evaluations while training (eval_<name>); unset: that of the objective's name.",
    )


def _as_list(value: Any) -> Any:
    return [value] if isinstance(value, str) else value


class SweepSettings(Settings):
    """sweep: many trainings of one spec, and the best of them."""

    name: str = Field(
        default="sweep",
        pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$",
        description="Name of the study; another name begins another one. Letters, digits, '.', '_' and '-'.",
    )
    space: dict[str, Dimension] = Field(
        min_length=1,
        description="Field -> its values: a list ([16, 32]) or a range ({low: 1e-4, high: 0.1, log: true}).",
    )
    objective: Annotated[list[str], BeforeValidator(_as_list)] = Field(
        min_length=1,
        description="Metric to optimise, as evaluate reports it (validation_accuracy), or as the last evaluation while "
        "training did (eval_accuracy); several: a list.",
    )
    direction: Annotated[list[Literal["maximize", "minimize"]], BeforeValidator(_as_list)] = Field(
        description="maximize or minimize; several objectives: a list as long as theirs."
    )
    trials: int | None = Field(
        default=None, ge=1, le=10_000, description="How many trials; needed unless the sampler is grid: all points."
    )
    sampler: Literal["tpe", "random", "grid"] = Field(
        default="tpe",
        description="Who proposes values: tpe learns from the trials, random, or grid, which takes every point.",
    )
    pruner: Annotated[
        PrunerSettings | None, BeforeValidator(lambda value: {"kind": value} if isinstance(value, str) else value)
    ] = Field(
        default=None, description="Ends poor trials early: asha or median, or their settings; unset: none is ended."
    )
    parallel: int = Field(
        default=1, ge=1, le=64, description="Trials at the same time; those that need one GPU wait for it in turn."
    )
    runner: Literal["processes", "prefect"] = Field(
        default="processes",
        description="processes: slots alone; prefect: they are also a flow of Prefect with a task for each trial.",
    )
    seed: int = Field(default=0, ge=0, le=2**31 - 1, description="Decides what tpe and random propose.")

    @model_validator(mode="after")
    def _check_together(self) -> SweepSettings:
        if len(self.direction) != len(self.objective):
            what = f"There are {len(self.objective)} objectives and {len(self.direction)} directions."
            raise _problem(what, "Give one direction for each objective, in their order.")
        if self.pruner is not None and len(self.objective) > 1:
            what = "Trials of several objectives cannot be ended early: none of them is better in everything."
            raise _problem(what, "Remove sweep.pruner, or keep one objective.")
        if self.sampler != "grid" and self.trials is None:
            raise _problem("The sweep would never end.", "Set sweep.trials.")
        if self.sampler == "grid":
            endless = [
                key for key, values in self.space.items() if isinstance(values, Range) and math.isinf(values.count)
            ]
            if endless:
                what = f"A grid needs values that can be counted, and those of {endless[0]} cannot."
                raise _problem(what, "Give it a step, list its values, or take another sampler.")
        return self
