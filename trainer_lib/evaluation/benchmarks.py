"""Benchmarks of language models: tasks of lm-eval, by name or from files next to the spec.

    {"task": "arc_easy"}                 one that lm-eval brings, with data that this machine has
    {"task": "/project/tasks/qa.yaml"}   a file of one, with data in files next to it; or a folder of such files

Task files are read here and not by lm-eval: paths of their data start from the file's folder, and their bytes count in
the key of evaluate. A task file is code, as a recipe is: it belongs below the spec's folder.
"""

from __future__ import annotations

import contextlib
import copy
import importlib
import importlib.util
import math
import os
import random
import re
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import NormalDist
from typing import Any

from trainer_lib.base.metric_names import Benchmark
from trainer_lib.base.suggestions import suggestion
from trainer_lib.base.yaml_text import Tagged, YamlProblem, parse_yaml
from trainer_lib.errors import ConfigError, MissingExtraError, TrainflowError, first_line

FIELD = "evaluate.benchmarks"
FUNCTION = "!function"
_ENDINGS = (".yaml", ".yml")
_RESAMPLES = 1000  # for errors of metrics that have no formula
_SEED = 1234
_CONFIDENCE = 0.95


@dataclass(frozen=True)
class Function:
    """A function that a task file names: of a Python file next to it, or of an installed module (`file` is None)."""

    name: str
    module: str
    file: Path | None

    def load(self) -> Any:
        """Import it."""
        if self.file is None:
            return getattr(importlib.import_module(self.module), self.name)
        spec = importlib.util.spec_from_file_location(self.module, self.file)
        if spec is None or spec.loader is None:
            raise ImportError(f"{self.file} cannot be imported")
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        return getattr(module, self.name)


@dataclass(frozen=True)
class TaskFile:
    """A task of a file."""

    name: str
    config: dict[str, Any]  # its settings as lm-eval has them, with absolute paths and with `Function`s
    files: tuple[Path, ...]  # the file, those that it includes, and its data
    code: tuple[Path, ...]  # Python files with its functions


def is_task_file(task: str) -> bool:
    """Whether an entry is a file or folder, and not the name of a task."""
    return "/" in task or task.endswith(_ENDINGS)


def require_lm_eval() -> None:
    """Raise MissingExtraError where lm-eval is not installed."""
    if importlib.util.find_spec("lm_eval") is None:  # finds it without importing it
        raise MissingExtraError("Benchmarks need the package lm-eval.", extra="benchmarks", field=FIELD)


def read_task_files(place: str, folder: str) -> list[TaskFile]:
    """The tasks of a file, or of the files in a folder; those without `task` are parts of others. Raises ConfigError.

    `folder`: that of the spec.
    """
    path, root = Path(place), Path(folder).resolve()
    if path.is_file():
        return [_read_task(path, root)]
    paths = sorted(file for file in path.rglob("*") if file.suffix in _ENDINGS) if path.is_dir() else []
    tasks = [_read_task(file, root) for file in paths if "task" in _parse(file)]
    if not tasks:
        what = "This folder has no task file." if path.is_dir() else "There is no such task file or folder."
        raise _refuse(what, place, "Give the path of a task's YAML file, from the spec's folder.")
    return tasks


def _read_task(path: Path, root: Path) -> TaskFile:
    files: dict[Path, None] = {}
    code: dict[Path, None] = {}
    config = _read(path, root, files, code)
    name = config.get("task")
    if not isinstance(name, str) or not name or "group" in config:
        raise _refuse("A task file has one task.", path, "Set task: NAME in it; of several files give the folder.")
    return TaskFile(name, config, tuple(files), tuple(code))


def _read(path: Path, root: Path, files: dict[Path, None], code: dict[Path, None]) -> dict[str, Any]:
    """The settings in a file, on those of the files that it includes."""

    def find_function(value: Any) -> Any:
        if not isinstance(value, Tagged):
            return value
        module, _, name = value.rpartition(".")
        file = path.parent / f"{module.replace('.', '/')}.py"
        if not module or not file.is_file():
            return Function(name, module, None)
        _require_inside(file, root)
        code[file] = None
        return Function(name, module, file)

    def find_data(value: Any) -> str:
        file = path.parent / str(value)
        if not file.is_file():
            remedy = "Name local files in dataset_kwargs.data_files, from the task file's folder."
            raise _refuse(f"There is no data file {value}.", path, remedy)
        files[file] = None
        return str(file)

    if path in files:
        raise _refuse("The file includes itself.", path, "Remove include from it.")
    files[path] = None
    _require_inside(path, root)
    config = _change(_parse(path), find_function)
    includes = config.pop("include", None) or []
    merged: dict[str, Any] = {}
    for name in includes if isinstance(includes, list) else [includes]:
        merged |= _read(path.parent / str(name), root, files, code)
    data, place = config.get("dataset_kwargs") or {}, config.get("dataset_path")
    is_folder = isinstance(place, str) and "data_files" not in data and (path.parent / place).is_dir()
    if is_folder or data.get("trust_remote_code"):
        what = "A task file has its data in files, and runs no code of a data set."
        raise _refuse(what, path, "Set dataset_path: json, and name the files in dataset_kwargs.data_files.")
    if "data_files" in data:
        config["dataset_kwargs"] = {**data, "data_files": _change(data["data_files"], find_data)}
    return {**merged, **config}


def _parse(path: Path) -> dict[str, Any]:
    try:
        config: Any = parse_yaml(path.read_text(encoding="utf-8"), tag=FUNCTION)
    except OSError as error:
        raise _refuse(f"The task file cannot be read: {error.strerror}.", path, "Correct the path.") from error
    except (YamlProblem, UnicodeDecodeError) as error:
        raise _refuse(f"The task file is not valid YAML: {first_line(error)}.", path, "Correct the file.") from error
    if not isinstance(config, dict) or not isinstance(config.get("dataset_kwargs") or {}, dict):
        raise _refuse("The task file has no settings by name.", path, "Begin it with task: NAME.")
    return config


def _change(value: Any, change: Callable[[Any], Any]) -> Any:
    """The value with what is neither a list nor a mapping in it changed."""
    if isinstance(value, dict):
        return {name: _change(inner, change) for name, inner in value.items()}
    return [_change(inner, change) for inner in value] if isinstance(value, list) else change(value)


def _require_inside(path: Path, root: Path) -> None:
    if path.exists() and not path.resolve().is_relative_to(root):
        what = "A task file may run code, so it belongs to the spec's folder, as a recipe does."
        raise _refuse(what, path, f"Copy it to a folder below {root}.")


def _refuse(what: str, value: object, remedy: str) -> ConfigError:
    return ConfigError(what, field=FIELD, value=str(value), remedy=remedy)


# -- with lm-eval, in a worker -----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Suite:
    """The benchmarks of an evaluation by a spec in `folder`; `emit` takes events.

    `tokenizer`: that of the model; None: the recipe keeps none. `warnings`: what was measured and is not finite.
    """

    benchmarks: Sequence[Benchmark]
    folder: str
    tokenizer: Any
    emit: Callable[..., object]
    warnings: list[str] = field(default_factory=list)

    def require(self, *, is_divided: bool) -> None:
        """Raise ConfigError for a model that is divided, or has no tokenizer, or none with a template for chats."""
        if is_divided:
            remedy = "Set evaluate.args.fsdp and evaluate.args.deepspeed to null, and evaluate.launch.processes=1."
            what = "Benchmarks need the whole model in one process, and the arguments divide it."
            raise _refuse(what, self.benchmarks[0].task, remedy)
        for benchmark in self.benchmarks:
            if self.tokenizer is None:
                what = "The recipe keeps no tokenizer, which benchmarks need."
                raise _refuse(what, benchmark.task, "Take a recipe of language models by name.")
            if benchmark.chat and not self.tokenizer.chat_template:
                raise _refuse("The tokenizer has no chat template.", benchmark.task, "Set chat: false.")

    def load(self, cache: str) -> list[Any]:
        """Have lm-eval load the tasks, benchmark by benchmark; reads the data. Raises ConfigError.

        `cache`: a folder for the data of task files while they are measured.
        """
        require_lm_eval()
        by_name = any(not is_task_file(benchmark.task) for benchmark in self.benchmarks)
        manager = importlib.import_module("lm_eval.tasks").TaskManager(include_defaults=by_name)
        loaded = []
        for benchmark in self.benchmarks:
            task = benchmark.task
            if not is_task_file(task) and task not in manager.all_tasks:
                remedy = suggestion(task, manager.all_tasks, listing=False)
                raise _refuse("lm-eval has no task of this name.", task, remedy)
            files = read_task_files(task, self.folder) if is_task_file(task) else ()
            with _failures_of(task, "load"):
                tasks = manager.load([_to_lm_eval(file.config, cache) for file in files] or [task])
                for made in tasks["tasks"].values():
                    if benchmark.fewshot is not None or made.get_config("num_fewshot") is None:
                        made.set_config(key="num_fewshot", value=benchmark.fewshot or 0)
                    made.set_fewshot_seed(seed=_SEED)
            loaded.append(tasks)
        return loaded

    def measure(self, model: Any, batch_size: int, confidence: float | None) -> dict[str, dict[str, float]]:
        """The metrics of the tasks with their intervals, of a confidence of 0.95 unless given. Raises ConfigError.

        `model` generates, and is whole on the device of this process.
        """
        if not callable(getattr(model, "generate", None)):
            what = "Benchmarks are for language models, and this model has no method generate."
            raise _refuse(what, type(model).__name__, f"Remove {FIELD}.")
        os.environ.setdefault("DISABLE_MULTIPROC", "1")  # a fork of a process with threads may hang
        metrics: dict[str, dict[str, float]] = {}
        with tempfile.TemporaryDirectory(prefix="trainflow-") as cache:
            loaded = self.load(cache)
            with _failures_of(type(model).__name__, "take the model for"):
                hflm = importlib.import_module("lm_eval.models.huggingface").HFLM
                # A copy: it gives the tokenizer a token for padding.
                lm = hflm(pretrained=model, tokenizer=copy.deepcopy(self.tokenizer), batch_size=batch_size)
            for benchmark, tasks in zip(self.benchmarks, loaded, strict=True):
                self.emit("progress", message=f"benchmark {Path(benchmark.task).stem}")
                with _failures_of(benchmark.task, "measure"):
                    metrics |= read_results(_evaluate(lm, benchmark, tasks), confidence or _CONFIDENCE)
        values = [(task, name, value) for task, measured in metrics.items() for name, value in measured.items()]
        for task, name, _ in (entry for entry in values if not math.isfinite(entry[2])):
            self.warnings.append(f"The benchmark {task} has no finite {name}, so no gate on it is met.")
            self.emit("warning", message=self.warnings[-1])
        return metrics


def _to_lm_eval(config: Mapping[str, Any], cache: str) -> Any:
    """The settings of a task file with its functions, and with a place for its data."""
    functions = _change(dict(config), lambda value: value.load() if isinstance(value, Function) else value)
    return {**functions, "dataset_kwargs": {**(functions.get("dataset_kwargs") or {}), "cache_dir": cache}}


def _evaluate(lm: Any, benchmark: Benchmark, tasks: Any) -> Any:
    random.seed(_SEED)
    return importlib.import_module("lm_eval.evaluator").evaluate(
        lm=lm,
        task_dict=tasks,
        limit=benchmark.limit,
        bootstrap_iters=_RESAMPLES,
        log_samples=False,
        apply_chat_template=benchmark.chat,
        fewshot_as_multiturn=benchmark.chat,
        confirm_run_unsafe_code=is_task_file(benchmark.task),
    )["results"]


def read_results(results: Mapping[str, Mapping[str, Any]], confidence: float) -> dict[str, dict[str, float]]:
    """Results of lm-eval as metrics by task: ``acc,none`` is `acc`, with `acc_low` and `acc_high` from its error.

    `results`: task -> ``<metric>,<filter>`` and ``<metric>_stderr,<filter>``, a number or a text for none.
    """
    quantile = NormalDist().inv_cdf((1 + confidence) / 2)
    metrics: dict[str, dict[str, float]] = {}
    for task, measured in results.items():
        values = metrics.setdefault(_plain(task), {})
        for key, value in measured.items():
            metric, _, kind = key.partition(",")
            if not kind or metric.endswith("_stderr") or not isinstance(value, int | float):
                continue
            name = _plain(metric if kind == "none" else f"{metric}_{kind}")
            values[name] = float(value)
            error = measured.get(f"{metric}_stderr,{kind}")
            if isinstance(error, int | float) and math.isfinite(value) and math.isfinite(error):
                values |= {f"{name}_low": value - quantile * error, f"{name}_high": value + quantile * error}
    return metrics


def _plain(name: str) -> str:
    return re.sub(r"[^A-Za-z0-9_.-]+", "_", name)


@contextlib.contextmanager
def _failures_of(task: str, what: str) -> Iterator[None]:
    """Say of which task a failure is; one of the device or of trainflow's own passes."""
    try:
        yield
    except (TrainflowError, MemoryError, RuntimeError):  # a device without memory is a RuntimeError
        raise
    except Exception as error:
        said = f"lm-eval cannot {what} this task: {type(error).__name__}: {first_line(error)}"
        remedy = (
            "Correct the task file, or remove the task. The data of a task by name is fetched once, with the network "
        )
        raise _refuse(said, task, f"{remedy}and HF_HUB_OFFLINE=0.") from error
