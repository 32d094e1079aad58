"""Parsed settings of evaluate: requirements, metrics, and benchmarks of lm-eval.

A requirement on a number is ``">= 0.9"``, ``">= 0.5, < 2"``, or ``{min: 0.5, max: 2}``.
"""

from __future__ import annotations

import math
import operator
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any

from pydantic import AfterValidator, BeforeValidator, Field
from pydantic_core import PydanticCustomError

from trainer_lib.base.metric_names import Benchmark, MetricCall, read_metrics
from trainer_lib.errors import ConfigError
from trainer_lib.evaluation.benchmarks import FIELD, is_task_file, read_task_files, require_lm_eval
from trainer_lib.protocol.recipe_names import ABOUT
from trainflow.tasks.settings.keyed_settings import Settings

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
        shown = f"{error.message.removesuffix('.')}: {error.value}."
        raise PydanticCustomError("metric", "not a metric", {"problem": shown, "hint": error.remedy}) from error
    return value if isinstance(value, str) or set(value) != {"name"} else str(value["name"])


def read_metric_list(values: list[str | dict[str, Any]]) -> list[str | dict[str, Any]]:
    """The metrics of a spec, unchanged. Raises PydanticCustomError if two results have one name."""
    try:
        read_metrics(values)
    except ConfigError as error:
        shown = f"{error.message.removesuffix('.')}: {error.value}."
        raise PydanticCustomError("metric", "not metrics", {"problem": shown, "hint": error.remedy}) from error
    return values


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
