"""Parsed settings of prepare: mixtures, which are sources with weights, and the cluster that prepares sources.

Nothing of a cluster's package is imported: whether it is installed is all that can be seen before anything is placed.
"""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import BeforeValidator, Field, ValidationError, model_validator
from pydantic_core import PydanticCustomError

from trainer_lib.data.rows.mixture import merge_weights
from trainer_lib.errors import ConfigError, MissingExtraError
from trainflow.tasks.settings.keyed_settings import Settings

if TYPE_CHECKING:
    from trainflow.tasks.configs import LaunchSettings

# What the cluster decides, or what holds for one machine only.
_DECIDED = ("engine", "node_rank", "rendezvous", "devices", "device_order", "per_device", "config_file", "interface")
_ADDRESSES = {
    "dask": (r"((tcp|tls|ws|wss)://)?[^/\s]+:\d+", "Give that of its scheduler: tcp://host:8786."),
    "ray": (r"auto|[^/\s]+:\d+", "Give host:port of its head, or auto for the cluster of this machine."),
}
_NAME = r"^[A-Za-z0-9][A-Za-z0-9_.-]{0,63}$"
Weight = Annotated[float, Field(ge=0, allow_inf_nan=False)]


class RunnerSettings(Settings):
    """prepare.runner: the cluster whose machines prepare the sources."""

    kind: Literal["dask", "ray"] = Field(
        description="Cluster that runs the workers as tasks of Prefect: dask or ray (the extras of these names)."
    )
    address: str | None = Field(
        default=None,
        description="The cluster: tcp://host:8786 of Dask's scheduler; host:port of Ray's head, or auto. unset: one on "
        "this machine, started for the stage and ended with it.",
    )
    workers: int = Field(
        ge=1, le=1000, description="Worker processes: mapped tasks that pull sources until none is left."
    )


def check_runner(runner: RunnerSettings, launch: LaunchSettings, *, is_sharded: bool) -> None:
    """Check what can be checked without a cluster; `launch` starts each worker."""
    for package in (runner.kind, f"prefect_{runner.kind}"):
        if importlib.util.find_spec(package) is None:  # finds it without importing it
            what = f"This runner belongs to the package {package.replace('_', '-')}, which is not installed."
            raise MissingExtraError(what, extra=runner.kind, field="prepare.runner.kind", value=runner.kind)
    if not is_sharded:
        what = "The recipe prepares its data in one process: it has no function 'prepare_shard'."
        remedy = "Define list_sources and prepare_shard (docs/recipes/many-sources.md), or remove prepare.runner."
        raise ConfigError(what, field="prepare.runner.kind", value=runner.kind, remedy=remedy)
    form, remedy = _ADDRESSES[runner.kind]
    if runner.address is not None and not re.fullmatch(form, runner.address):
        what = f"This is not the address of a {runner.kind.capitalize()} cluster."
        raise ConfigError(what, field="prepare.runner.address", value=runner.address, remedy=remedy)
    wrong = [name for name in _DECIDED if getattr(launch, name) is not None]
    wrong += ["kind"] if launch.kind not in ("auto", "process") else []
    wrong += ["processes"] if launch.processes not in ("auto", 1) else []
    wrong += ["nodes"] if str(launch.nodes) != "1" else []
    for name in wrong:
        what = "The runner decides this: it starts one process for each worker, wherever the cluster has room."
        remedy = "Remove it, or remove prepare.runner."
        raise ConfigError(what, field=f"prepare.launch.{name}", value=getattr(launch, name), remedy=remedy)


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
    """The section `prepare` with the sources of its mixture. Raises PydanticCustomError if it has others as well."""
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
