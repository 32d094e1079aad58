"""A setting that is a length of time, as people write it."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Annotated, Any

from pydantic import WrapValidator
from pydantic_core import PydanticCustomError

from trainer_lib.base.durations import FORMS, find_problem, read_seconds


def _read_duration(value: Any, read: Callable[[Any], timedelta]) -> timedelta:
    """Read seconds, what people write ("12h"), and the forms that pydantic takes besides (P1D, 01:30:00)."""
    seconds = read_seconds(value) if isinstance(value, str) else value
    problem = "This is not a duration." if isinstance(value, bool) else None
    if problem is None and isinstance(seconds, int | float):
        problem = find_problem(seconds)
    try:
        if problem is None:
            length = read(value if seconds is None else seconds)
            problem = find_problem(length.total_seconds())
    except (ValueError, OverflowError):
        problem = "This is not a duration."
    if problem is None:
        return length
    raise PydanticCustomError("duration", "{problem} {hint}", {"problem": problem, "hint": FORMS})


Duration = Annotated[timedelta, WrapValidator(_read_duration)]
"""A length of time above zero: seconds, "12h", "1d", or what else pydantic takes."""
