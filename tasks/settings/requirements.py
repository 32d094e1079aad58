"""Requirements on a number, as a spec writes them: ``">= 0.9"``, ``">= 0.5, < 2"``, or ``{min: 0.5, max: 2}``."""

from __future__ import annotations

import math
import operator
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from pydantic_core import PydanticCustomError

from trainer_lib.base.metric_names import MetricCall, read_metrics
from trainer_lib.errors import ConfigError

_OPERATORS: dict[str, Callable[[float, float], bool]] = {
    ">=": operator.ge,
    ">": operator.gt,
    "<=": operator.le,
    "<": operator.lt,
    "==": operator.eq,
}
_CONDITION = re.compile(r"\s*(>=|<=|==|>|<)\s*(\S+)\s*")
_BOUNDS = {"min": ">=", "max": "<="}
_HELP = 'Write a comparison with a finite number (">= 0.9"; several with commas), or give min, max or both.'


@dataclass(frozen=True)
class Requirement:
    """Conditions that a number has to meet, all of them: (operator, number) each."""

    conditions: tuple[tuple[str, float], ...]

    def is_met(self, value: float) -> bool:
        """Whether `value` meets every condition. NaN meets none."""
        return all(_OPERATORS[sign](value, number) for sign, number in self.conditions)

    def __str__(self) -> str:
        # Every digit: the text is read again. Without the ".0" of a whole number.
        return ", ".join(f"{sign} {str(number).removesuffix('.0')}" for sign, number in self.conditions)


def parse_requirement(text: str) -> Requirement:
    """Read ``">= 0.9"``, or several conditions with commas between them.

    Raises:
        ValueError: it is something else, or its number is not finite.
    """
    found = [_CONDITION.fullmatch(part) for part in text.split(",")]
    conditions = tuple((match[1], float(match[2])) for match in found if match is not None)
    if len(conditions) < len(found) or not all(math.isfinite(number) for _, number in conditions):
        raise ValueError(f"not a requirement: {text!r}")
    return Requirement(conditions)


def read_requirement(value: Any) -> str:
    """A requirement of a spec in its one form: text.

    Raises:
        PydanticCustomError: it is not a requirement.
    """
    try:
        if isinstance(value, Mapping):
            if not value or not set(value) <= set(_BOUNDS):
                raise ValueError(f"not bounds: {value!r}")
            value = ", ".join(f"{_BOUNDS[name]} {bound}" for name, bound in value.items())
        return str(parse_requirement(value if isinstance(value, str) else ""))
    except ValueError as error:
        raise PydanticCustomError("requirement", "not a requirement", {"hint": _HELP}) from error


def read_metric(value: Any) -> str | dict[str, Any]:
    """A metric of a spec: its name, or a mapping with its name and what it is called with.

    Raises:
        PydanticCustomError: it is not a metric; the error has the nearest name.
    """
    try:
        MetricCall.of(value)
    except ConfigError as error:
        shown = f"{error.message.removesuffix('.')}: {error.value}."
        raise PydanticCustomError("metric", "not a metric", {"problem": shown, "hint": error.remedy}) from error
    return value if isinstance(value, str) or set(value) != {"name"} else str(value["name"])


def read_metric_list(values: list[str | dict[str, Any]]) -> list[str | dict[str, Any]]:
    """The metrics of a spec, as they are.

    Raises:
        PydanticCustomError: two have one name among the results.
    """
    try:
        read_metrics(values)
    except ConfigError as error:
        shown = f"{error.message.removesuffix('.')}: {error.value}."
        raise PydanticCustomError("metric", "not metrics", {"problem": shown, "hint": error.remedy}) from error
    return values
