"""The base of all sections' settings: unknown keys are refused, and settings declare what they can change."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator
from pydantic_core import PydanticCustomError

from trainer_lib.base.suggestions import nearest

Affects = Literal["result", "selection", "nothing"]
"""The effect of a setting: the stage's result, only which weights evaluations choose, or nothing that is kept.

The content keys hold the settings that affect the result (`trainflow.tasks.keys.keys`), and no other.
"""


@dataclass(frozen=True)
class _AffectsMark:
    """The declaration of a field, kept in its metadata; it is not part of the JSON schema."""

    what: Affects


def setting(*, affects: Affects, **field: Any) -> Any:
    """Declare a setting of a stage: a pydantic `Field`, with what it can change."""
    info = Field(**field)
    # Not `json_schema_extra`: Prefect's form, which is drawn from the schema, would show it.
    info.metadata.append(_AffectsMark(affects))
    return info


def refuse_unknown(data: Any, known: list[str]) -> Any:
    """Return the data unchanged.

    Raises:
        PydanticCustomError: a key is unknown; the error names the nearest known one.
    """
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
