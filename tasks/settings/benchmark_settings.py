"""evaluate.benchmarks: tasks of lm-eval that a language model is measured by."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any

from pydantic import AfterValidator, BeforeValidator, Field
from pydantic_core import PydanticCustomError

from trainer_lib.base.metric_names import Benchmark
from trainer_lib.errors import ConfigError
from trainer_lib.evaluation.benchmarks import FIELD, is_task_file, read_task_files, require_lm_eval
from trainer_lib.protocol.recipe_names import ABOUT
from trainflow.tasks.settings.keyed_settings import Settings

_RECIPES = ("causal-language-modeling", "feedback-optimization", "preference-optimization", "supervised-fine-tuning")


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
    """The names that metrics of the benchmarks begin with: those of files, and of tasks or groups by name.

    Raises:
        ConfigError: a file cannot be used.
    """
    tasks = [benchmark.task for benchmark in benchmarks]
    files = [file for task in tasks if is_task_file(task) for file in read_task_files(task, folder)]
    return [*(task for task in tasks if not is_task_file(task)), *(file.name for file in files)]


def check_benchmarks(
    benchmarks: Sequence[BenchmarkSettings], tasks: Sequence[str], *, splits: Sequence[str], recipe: str
) -> None:
    """Refuse benchmarks that could not be measured after the training, as far as the spec shows.

    Args:
        tasks: those that they have, as `list_tasks` names them.
        recipe: the recipe by name, or its file.

    Raises:
        ConfigError: lm-eval is missing, two tasks have one name, or the recipe trains another kind of model.
    """
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
