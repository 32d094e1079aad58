"""The base of all sections' settings: unknown keys are refused, and settings declare what they can change."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, PlainSerializer, WrapValidator, model_validator
from pydantic_core import PydanticCustomError, PydanticUndefined

from trainer_lib.base.durations import FORMS, find_problem, read_seconds
from trainer_lib.base.suggestions import nearest, suggestion
from trainer_lib.protocol.recipe_names import ABOUT, is_recipe_name, recipe_file, recipe_name

Affects = Literal["result", "selection", "nothing"]
"""The effect of a setting: the stage's result, only which weights evaluations choose, or nothing that is kept.

The content keys hold the settings that affect the result (`trainflow.tasks.keys.keys`), and no other.
"""


@dataclass(frozen=True)
class _AffectsMark:
    """The declaration of a field, kept in its metadata; it is not part of the JSON schema."""

    what: Affects


def setting(default: Any = PydanticUndefined, description: str | None = None, *, affects: Affects, **field: Any) -> Any:
    """Declare a setting of a stage: a pydantic `Field`, with what it can change."""
    info = Field(default, description=description, **field)
    # Not `json_schema_extra`: Prefect's form, which is drawn from the schema, would show it.
    info.metadata.append(_AffectsMark(affects))
    return info


#: `setting` by what a setting affects.
result = functools.partial(setting, affects="result")
selection = functools.partial(setting, affects="selection")
nothing = functools.partial(setting, affects="nothing")


def refuse_unknown(data: Any, known: list[str]) -> Any:
    """Return the data unchanged. Raises PydanticCustomError, with the nearest name, for an unknown key."""
    if not isinstance(data, dict):
        return data
    for key in data:
        if key in known:
            continue
        near = nearest(str(key), known)
        hint = f"Did you mean '{near}'?" if near else f"Known here: {', '.join(known)}."
        raise PydanticCustomError(
            "unknown_key", "unknown key '{key}'. {hint}", {"key": str(key), "nearest": near, "hint": hint}
        )
    return data


class Settings(BaseModel):
    """Base of every settings class: frozen, and unknown keys are refused with the nearest name."""

    # Frozen: a key is computed from these settings, which must not change afterwards.
    model_config = ConfigDict(extra="forbid", frozen=True, validate_default=True)

    # Before pydantic's own check, whose message names no nearest key.
    @model_validator(mode="before")
    @classmethod
    def _refuse_unknown_settings(cls, data: Any) -> Any:
        return refuse_unknown(data, list(cls.model_fields))


class KeyedSettings(Settings):
    """Settings of a stage, each of which declares what it can change."""

    @classmethod
    def affects(cls) -> dict[str, Affects]:
        """Effects of settings, by name."""
        return {
            name: mark.what
            for name, field in cls.model_fields.items()
            for mark in field.metadata
            if isinstance(mark, _AffectsMark)
        }


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


def _read_recipe(value: Any) -> Any:
    """The file of a recipe that is given by name; a path stays as it is."""
    if not is_recipe_name(value):
        return value
    try:
        return recipe_file(value)
    except KeyError:
        hint = f"{suggestion(value, ABOUT)} A file of your own is named like recipe.py."
        raise PydanticCustomError("recipe_name", "no recipe {value}. {hint}", {"value": value, "hint": hint}) from None


RecipePath = Annotated[str, BeforeValidator(_read_recipe), PlainSerializer(recipe_name)]
"""A recipe's file. A spec may name one of trainflow's own, and is written down with that name on every machine."""
