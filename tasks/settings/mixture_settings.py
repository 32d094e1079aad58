"""prepare.mixture: sources that are trained on together, each by its weight."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Annotated, Any

from pydantic import BeforeValidator, Field, ValidationError, model_validator
from pydantic_core import PydanticCustomError

from trainer_lib.data.rows.mixture import merge_weights
from trainer_lib.errors import ConfigError
from trainflow.tasks.settings.keyed_settings import Settings

_NAME = r"^[A-Za-z0-9][A-Za-z0-9_.-]{0,63}$"
Weight = Annotated[float, Field(ge=0, allow_inf_nan=False)]


class MixtureSource(Settings):
    """A source of prepare.mixture."""

    source: str = Field(min_length=1, description="As of prepare.sources.")
    name: str | None = Field(default=None, pattern=_NAME, description="Its name in curves; unset: that of the file.")
    weight: Weight | None = Field(
        default=None, description="Its share of the rows, relative to the others'; unset: by size, times epochs."
    )
    epochs: float | None = Field(
        default=None, gt=0, allow_inf_nan=False, description="Passes in an epoch, at most; unset: as many as its share."
    )
    tokens: int | None = Field(default=None, gt=0, description="Tokens in an epoch, at most, in place of epochs.")

    @model_validator(mode="after")
    def _have_one_budget(self) -> MixtureSource:
        if self.epochs is not None and self.tokens is not None:
            raise PydanticCustomError("two_budgets", "It has epochs and tokens. Remove one of them.")
        return self

    @property
    def title(self) -> str:
        """Its name: as given, else the last part of the address, without ending and patterns."""
        parts = [part for part in re.split(r"[/\\:]", self.source) if part and not set(part) & set("*?[")]
        stem = parts[-1].partition(".")[0] or parts[-1] if parts else ""
        return self.name or re.sub(r"[^A-Za-z0-9]+", "_", stem).strip("_")[:64] or "source"


class MixtureSettings(Settings):
    """prepare.mixture: a list of sources, or the sources with a temperature and a schedule."""

    sources: list[MixtureSource] = Field(min_length=1, description="What is mixed.")
    temperature: float = Field(
        default=1.0, gt=0, allow_inf_nan=False, description="T: sources without weight get size^(1/T); 1: by size."
    )
    schedule: dict[Annotated[int, Field(gt=0)], dict[str, Weight]] = Field(
        default={}, description="Optimizer step -> weights from it on; sources that are not named keep theirs."
    )

    @property
    def names(self) -> tuple[str, ...]:
        """The names of the sources, in their order."""
        return tuple(entry.title for entry in self.sources)

    @model_validator(mode="after")
    def _can_be_mixed(self) -> MixtureSettings:
        if twice := [name for name in self.names if self.names.count(name) > 1]:
            raise PydanticCustomError("name", "two sources are called '{name}': give one a name.", {"name": twice[0]})
        weights = {entry.title: entry.weight for entry in self.sources}
        if len({weight is None for weight in weights.values()}) == 2:
            raise PydanticCustomError("weights", "some sources have a weight, and some have none: give all or none.")
        known = {name: 1.0 if weight is None else weight for name, weight in weights.items()}
        try:
            for _, changed in [(0, {}), *sorted(self.schedule.items())]:
                known = merge_weights(known, changed, field="schedule")
        except ConfigError as error:
            words = {"what": f"{error.message} It is {error.value}. {error.remedy}"}
            raise PydanticCustomError("weights", "{what}", words) from None
        return self

    def to_info(self) -> dict[str, Any]:
        """These settings as `trainer_lib.data.rows.mixture.Mixture.of` reads them."""
        entries = [entry.model_dump(include={"weight", "epochs", "tokens"}) for entry in self.sources]
        return {
            "sources": [{"name": name, **entry} for name, entry in zip(self.names, entries, strict=True)],
            "temperature": self.temperature,
            "schedule": [[step, dict(weights)] for step, weights in sorted(self.schedule.items())],
        }


def _read_list(value: Any) -> Any:
    return {"sources": value} if isinstance(value, list) else value


MixtureField = Annotated[MixtureSettings, BeforeValidator(_read_list)]


def fill_sources(section: Any) -> Any:
    """The section `prepare` with the sources of its mixture.

    Raises:
        PydanticCustomError: it has other sources as well.
    """
    if not isinstance(section, Mapping) or section.get("mixture") is None:
        return section
    mixture, given = section["mixture"], section.get("sources")
    try:
        known = mixture if isinstance(mixture, MixtureSettings) else MixtureSettings.model_validate(_read_list(mixture))
    except ValidationError:  # the field itself says what is wrong, and where
        return section
    sources = [entry.source for entry in known.sources]
    if given and list(given) != sources:
        raise PydanticCustomError("sources", "prepare.mixture names the sources. Remove prepare.sources.")
    return {**section, "sources": sources}
