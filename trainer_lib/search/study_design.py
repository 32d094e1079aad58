"""What the study of a sweep varies, and how its values are kept."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from typing import Any

from trainer_lib.base.json_text import parse_json

_FEW = 100_000


@dataclass(frozen=True)
class Axis:
    """One field that is varied.

    Attributes:
        choices: the values, for a list of them; None: a range of numbers.
        step: distance of two values; None: any value.
        is_whole: whether the values of a range are whole numbers.
    """

    name: str
    choices: tuple[Any, ...] | None = None
    low: float = 0.0
    high: float = 0.0
    step: float | None = None
    is_log: bool = False
    is_whole: bool = False

    @property
    def num_points(self) -> float:
        """How many values there are; infinity for a range without a step."""
        if self.choices is not None:
            return len(self.choices)
        if self.step is None and not self.is_whole:
            return math.inf
        return int((self.high - self.low) / (self.step or 1) + 1e-9) + 1

    def points(self) -> list[Any]:
        """All values of a list, or of a range with a step."""
        if self.choices is not None:
            return list(self.choices)
        values = [self.low + (self.step or 1) * number for number in range(int(self.num_points))]
        return [int(value) if self.is_whole else float(f"{value:.12g}") for value in values]


@dataclass(frozen=True)
class Design:
    """What a study varies, optimises and ends early.

    Attributes:
        trials: how many; None: all points of a grid.
        pruner: "asha", "median" or None; `after`, `factor` and `startup` count evaluations, rungs and trials.
    """

    axes: tuple[Axis, ...]
    directions: tuple[str, ...]
    sampler: str = "tpe"
    trials: int | None = None
    seed: int = 0
    pruner: str | None = None
    after: int = 1
    factor: int = 3
    startup: int = 5

    @property
    def is_finite(self) -> bool:
        """Whether there are few enough points to try none twice."""
        return self.sampler == "grid" or math.prod(axis.num_points for axis in self.axes) <= _FEW

    @property
    def num_trials(self) -> int:
        """How many trials there are to be: no more than there are points."""
        if not self.is_finite:
            return self.trials or 1
        points = int(math.prod(axis.num_points for axis in self.axes))
        return points if self.trials is None else min(points, self.trials)


def encode_value(axis: Axis, value: Any) -> Any:
    """A value as Optuna keeps it: lists and mappings as JSON text."""
    return value if axis.choices is None or _is_plain(axis) else json.dumps(value, sort_keys=True)


def decode_value(axis: Axis, value: Any) -> Any:
    """The value that Optuna keeps as the field has it."""
    if axis.choices is None and axis.step is not None and not axis.is_whole:
        return float(f"{value:.12g}")  # 0.3, and not the sum 0.30000000000000004
    return value if axis.choices is None or _is_plain(axis) else parse_json(value)


def _is_plain(axis: Axis) -> bool:
    return all(isinstance(each, bool | int | float | str | None) for each in axis.choices or ())
