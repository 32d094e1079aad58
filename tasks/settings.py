"""Building blocks of the settings: their base, and the parsed values of prepare and evaluate.

Unknown keys are refused, and settings declare what they can change. A requirement on a number is ``">= 0.9"``,
``">= 0.5, < 2"``, or ``{min: 0.5, max: 2}``. Nothing of a cluster's package is imported: whether it is installed is all
that can be seen before anything is placed.
"""

from __future__ import annotations

import functools
import importlib.util
import math
import operator
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    PlainSerializer,
    ValidationError,
    WrapValidator,
    model_validator,
)
from pydantic_core import PydanticCustomError, PydanticUndefined

from trainer_lib.base.durations import FORMS, find_problem, read_seconds
from trainer_lib.base.metric_names import Benchmark, MetricCall, read_metrics
from trainer_lib.base.suggestions import nearest, suggestion
from trainer_lib.data.rows.mixture import merge_weights
from trainer_lib.errors import ConfigError, MissingExtraError
from trainer_lib.evaluation.benchmarks import FIELD, is_task_file, read_task_files, require_lm_eval
from trainer_lib.protocol.recipe_names import ABOUT, is_recipe_name, recipe_file, recipe_name

if TYPE_CHECKING:
    from trainflow.tasks.configs import LaunchSettings

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
    """Read seconds, what people write ("12h"), and other forms that pydantic takes (P1D, 01:30:00)."""
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


# -- evaluate ----------------------------------------------------------------------------------------------------------

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
_RECIPES = ("causal-language-modeling", "feedback-optimization", "preference-optimization", "supervised-fine-tuning")


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
    """Read ``">= 0.9"``, or several conditions with commas between them. Raises ValueError for anything else."""
    found = [_CONDITION.fullmatch(part) for part in text.split(",")]
    conditions = tuple((match[1], float(match[2])) for match in found if match is not None)
    if len(conditions) < len(found) or not all(math.isfinite(number) for _, number in conditions):
        raise ValueError(f"not a requirement: {text!r}")
    return Requirement(conditions)


def read_requirement(value: Any) -> str:
    """A requirement of a spec in its one form: text. Raises PydanticCustomError for anything else."""
    try:
        if isinstance(value, Mapping):
            if not value or not set(value) <= set(_BOUNDS):
                raise ValueError(f"not bounds: {value!r}")
            value = ", ".join(f"{_BOUNDS[name]} {bound}" for name, bound in value.items())
        return str(parse_requirement(value if isinstance(value, str) else ""))
    except ValueError as error:
        raise PydanticCustomError("requirement", "not a requirement", {"hint": _HELP}) from error


def read_metric(value: Any) -> str | dict[str, Any]:
    """A metric of a spec: its name, or a mapping with its name and what it is called with."""
    try:
        MetricCall.of(value)
    except ConfigError as error:
        raise _not_a_metric(error) from error
    return value if isinstance(value, str) or set(value) != {"name"} else str(value["name"])


def read_metric_list(values: list[str | dict[str, Any]]) -> list[str | dict[str, Any]]:
    """The metrics of a spec, unchanged. Raises PydanticCustomError if two results have one name."""
    try:
        read_metrics(values)
    except ConfigError as error:
        raise _not_a_metric(error) from error
    return values


def _not_a_metric(error: ConfigError) -> PydanticCustomError:
    shown = f"{error.message.removesuffix('.')}: {error.value}."
    return PydanticCustomError("metric", "not a metric", {"problem": shown, "hint": error.remedy})


class BenchmarkSettings(Settings):
    """A task of evaluate.benchmarks."""

    task: str = Field(min_length=1, description="Its name in lm-eval, or a YAML file of a task, or a folder of these.")
    fewshot: int | None = Field(default=None, ge=0, description="Examples before a question; unset: as the task says.")
    limit: int | None = Field(default=None, ge=2, description="Rows, at most; unset: all.")
    chat: bool = Field(default=False, description="Ask in the tokenizer's chat template.")

    def to_request(self, limit: int | None) -> Benchmark:
        """These settings as the worker takes them, with the rows of a check of the pipeline as a limit."""
        limits = [rows for rows in (self.limit, limit) if rows is not None]
        return Benchmark(self.task, self.fewshot, min(limits, default=None), self.chat)


def _read_entry(value: Any) -> Any:
    return {"task": value} if isinstance(value, str) else value


def _differ(entries: list[BenchmarkSettings]) -> list[BenchmarkSettings]:
    tasks = [entry.task for entry in entries]
    if twice := [task for task in tasks if tasks.count(task) > 1]:
        raise PydanticCustomError("benchmarks", "the task '{task}' is there twice: remove one.", {"task": twice[0]})
    return entries


BenchmarkList = Annotated[list[Annotated[BenchmarkSettings, BeforeValidator(_read_entry)]], AfterValidator(_differ)]


def list_tasks(benchmarks: Sequence[BenchmarkSettings], folder: str) -> list[str]:
    """The names that metrics of the benchmarks begin with: those of files, and of tasks or groups by name."""
    tasks = [benchmark.task for benchmark in benchmarks]
    files = [file for task in tasks if is_task_file(task) for file in read_task_files(task, folder)]
    return [*(task for task in tasks if not is_task_file(task)), *(file.name for file in files)]


def check_benchmarks(
    benchmarks: Sequence[BenchmarkSettings], tasks: Sequence[str], *, splits: Sequence[str], recipe: str
) -> None:
    """Refuse benchmarks, with `tasks` as `list_tasks` names them, that could not be measured after the training."""
    if not benchmarks:
        return
    if recipe in ABOUT and recipe not in _RECIPES:
        what = "Benchmarks are for language models, and this recipe trains another kind."
        raise ConfigError(what, field=FIELD, value=recipe, remedy="Remove evaluate.benchmarks.")
    require_lm_eval()
    taken = [*splits, "overall"]
    for name in tasks:
        if name in taken:
            what = "This task has the name of another one or of a split, and metrics begin with it."
            raise ConfigError(what, field=FIELD, value=name, remedy="Rename the task.")
        taken.append(name)


# -- prepare -----------------------------------------------------------------------------------------------------------

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
