"""Benchmarks: task files, results of lm-eval as metrics, what is refused, and the key. lm-eval is a stand-in here."""

from __future__ import annotations

import json
import math
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from trainer_lib.base.metric_names import Benchmark
from trainer_lib.errors import ConfigError, MissingExtraError
from trainer_lib.evaluation.benchmarks import FIELD, Function, Suite, read_results, read_task_files
from trainflow.flows.spec.spec import PipelineSpec, load_spec
from trainflow.tasks.configs import EvaluateConfig
from trainflow.tasks.keys.keys import evaluate_key
from trainflow.tasks.stage.context import StageContext
from trainflow.tasks.stage.manifest import StageManifest

BASE = "dataset_path: json\noutput_type: multiple_choice\nmetric_list: [{metric: acc}]\n"
QA = (
    "task: qa\ninclude: _base.yaml\nprocess_docs: !function helper.shorten\n"
    "dataset_kwargs: {data_files: {test: rows.jsonl}}\n"
)
SPEC = """
name: chats
recipe: supervised-fine-tuning
prepare: {sources: [tasks/rows.jsonl]}
"""


@pytest.fixture
def tasks(tmp_path: Path) -> Path:
    """A folder of task files below that of a spec."""
    folder = tmp_path / "project" / "tasks"
    folder.mkdir(parents=True)
    (folder / "_base.yaml").write_text(BASE)
    (folder / "qa.yaml").write_text(QA)
    (folder / "helper.py").write_text("def shorten(docs):\n    return docs[:2]\n")
    (folder / "rows.jsonl").write_text(json.dumps({"question": "a?", "gold": 0}) + "\n")
    (folder.parent / "pipeline.yaml").write_text(SPEC)
    return folder


class Task(SimpleNamespace):
    """A task as lm-eval's manager makes it."""

    def get_config(self, key: str) -> Any:
        return self.config.get(key)

    def set_config(self, key: str, value: Any) -> None:
        self.config[key] = value

    def set_fewshot_seed(self, seed: int) -> None:
        self.seed = seed


class LmEval:
    """The part of lm-eval that is used, and what it was asked."""

    def __init__(self) -> None:
        self.asked: list[dict[str, Any]] = []
        self.value: Any = 0.5
        self.failure: Exception | None = None

    def TaskManager(self, include_defaults: bool) -> Any:
        return SimpleNamespace(all_tasks=["arc_easy", "piqa"] if include_defaults else [], load=self.load)

    def load(self, entries: list[Any]) -> dict[str, Any]:
        if self.failure is not None:
            raise self.failure
        configs = [entry if isinstance(entry, dict) else {"task": entry, "num_fewshot": 0} for entry in entries]
        return {"tasks": {config["task"]: Task(config=dict(config)) for config in configs}}

    def evaluate(self, **asked: Any) -> dict[str, Any]:
        self.asked.append(asked)
        return {"results": {task: {"acc,none": self.value, "alias": task} for task in asked["task_dict"]["tasks"]}}


@pytest.fixture
def lm_eval(monkeypatch: pytest.MonkeyPatch) -> LmEval:
    stand_in = LmEval()
    found: dict[str, dict[str, Any]] = {"": {}, ".models": {}, ".models.huggingface": {"HFLM": dict}}
    found |= {".tasks": {"TaskManager": stand_in.TaskManager}, ".evaluator": {"evaluate": stand_in.evaluate}}
    for name, members in found.items():
        module = ModuleType(f"lm_eval{name}")
        vars(module).update(members)
        monkeypatch.setitem(sys.modules, f"lm_eval{name}", module)
    monkeypatch.setattr("trainer_lib.evaluation.benchmarks.importlib.util.find_spec", lambda name: object())
    monkeypatch.setenv("DISABLE_MULTIPROC", "1")
    return stand_in


def measure(folder: Path, *benchmarks: Benchmark, model: Any = None) -> tuple[dict[str, dict[str, float]], list[str]]:
    model = SimpleNamespace(generate=lambda: None) if model is None else model
    suite = Suite(benchmarks, str(folder), "tokenizer", lambda kind, message: None)
    return suite.measure(model, 3, None), suite.warnings


def test_a_task_file_has_what_it_includes_and_paths_from_its_folder(tasks: Path) -> None:
    [task] = read_task_files(str(tasks), str(tasks.parent))
    assert (task.name, task.config["dataset_path"], task.code) == ("qa", "json", (tasks / "helper.py",))
    assert task.config["dataset_kwargs"] == {"data_files": {"test": str(tasks / "rows.jsonl")}}
    assert set(task.files) == {tasks / name for name in ("qa.yaml", "_base.yaml", "rows.jsonl")}
    function = task.config["process_docs"]
    assert isinstance(function, Function) and function.load()([1, 2, 3]) == [1, 2]
    assert read_task_files(str(tasks / "qa.yaml"), str(tasks.parent)) == [task]


@pytest.mark.parametrize(
    ("text", "says", "remedy"),
    [
        (None, "no such task file", "YAML file"),
        ("task: [a\n", "not valid YAML: line", "Correct"),
        ("- task\n", "no settings by name", "task: NAME"),
        ("task: !!python/name:os.system x\n", "not valid YAML", "Correct"),
        ("output_type: multiple_choice\n", "has one task", "folder"),
        ("group: all\ntask: [qa]\n", "has one task", "folder"),
        ("task: a\ninclude: nowhere.yaml\n", "cannot be read: No such file", "path"),
        ("task: a\ninclude: bad.yaml\n", "includes itself", "include"),
        ("task: a\ndataset_kwargs: {data_files: nowhere.json}\n", "no data file nowhere.json", "data_files"),
        ("task: a\ndataset_kwargs: {data_files: 'https://a.b/c.json'}\n", "no data file", "local files"),
        ("task: a\ndataset_kwargs: {trust_remote_code: true}\n", "runs no code of a data set", "data_files"),
        ("task: a\ndataset_path: ../tasks\n", "data in files", "data_files"),
        ("task: a\ninclude: ../../strange.yaml\n", "belongs to the spec's folder", "Copy it"),
        ("task: a\nprocess_docs: !function ../../strange.f\n", "", ""),
    ],
)
def test_task_files_that_cannot_be_used_are_refused(tasks: Path, text: str | None, says: str, remedy: str) -> None:
    (tasks.parents[1] / "strange.yaml").write_text("task: b\n")
    path = tasks / "bad.yaml"
    if text is not None:
        path.write_text(text)
    if not says:  # no file beside it: an installed module, which there is not
        assert read_task_files(str(path), str(tasks.parent))[0].code == ()
        return
    with pytest.raises(ConfigError, match=says) as caught:
        read_task_files(str(path), str(tasks.parent))
    assert caught.value.field == FIELD and str(caught.value.value).endswith(".yaml")
    assert remedy in str(caught.value.remedy)


def test_results_become_metrics_with_intervals_of_1_96_errors() -> None:
    given: dict[str, Any] = {"acc,none": 0.5, "acc_stderr,none": 0.1, "exact_match,strict-match": 1, "alias": "a"}
    given |= {"exact_match_stderr,strict-match": "N/A", "f1,none": math.nan, "f1_stderr,none": math.nan}
    values = read_results({"a::b": given}, 0.95)["a_b"]
    assert values.keys() == {"acc", "acc_low", "acc_high", "exact_match_strict-match", "f1"}
    assert (values["acc_low"], values["acc_high"]) == pytest.approx((0.5 - 0.196, 0.5 + 0.196), abs=1e-4)
    assert math.isnan(values["f1"]) and values["exact_match_strict-match"] == 1


def test_tasks_are_measured_as_the_spec_says(tasks: Path, lm_eval: LmEval) -> None:
    file = Benchmark(str(tasks / "qa.yaml"), chat=True)
    metrics, warnings = measure(tasks.parent, file, Benchmark("arc_easy", fewshot=3, limit=7))
    assert (metrics, warnings) == ({"qa": {"acc": 0.5}, "arc_easy": {"acc": 0.5}}, [])
    ours, theirs = lm_eval.asked
    assert ours["lm"] == {"pretrained": ours["lm"]["pretrained"], "tokenizer": "tokenizer", "batch_size": 3}
    assert (ours["apply_chat_template"], ours["confirm_run_unsafe_code"], ours["limit"]) == (True, True, None)
    assert (theirs["apply_chat_template"], theirs["confirm_run_unsafe_code"], theirs["limit"]) == (False, False, 7)
    assert theirs["task_dict"]["tasks"]["arc_easy"].config["num_fewshot"] == 3, "also of a task that says 0"
    config = ours["task_dict"]["tasks"]["qa"].config
    assert config["process_docs"]([1, 2, 3]) == [1, 2]
    assert not Path(config["dataset_kwargs"]["cache_dir"]).exists(), "nothing stays"


@pytest.mark.parametrize(
    ("task", "failure", "says", "remedy"),
    [
        ("arc_esy", None, "no task of this name", "arc_easy"),
        ("piqa", ConnectionError("no route"), "cannot load this task: ConnectionError: no route", "HF_HUB_OFFLINE=0"),
        ("piqa", KeyError("gold"), "cannot load this task: KeyError: 'gold'", "Correct the task file"),
    ],
)
def test_a_lost_task_is_named(
    tasks: Path, lm_eval: LmEval, task: str, failure: Exception | None, says: str, remedy: str
) -> None:
    lm_eval.failure = failure
    with pytest.raises(ConfigError, match=says) as caught:
        measure(tasks.parent, Benchmark(task))
    assert (caught.value.field, caught.value.value) == (FIELD, task)
    assert remedy in str(caught.value.remedy)


def test_a_failure_of_the_device_stays_what_it_is(tasks: Path, lm_eval: LmEval) -> None:
    lm_eval.failure = RuntimeError("CUDA out of memory")
    with pytest.raises(RuntimeError, match="out of memory"):
        measure(tasks.parent, Benchmark("piqa"))


def test_what_is_not_a_number_is_kept_and_warned_of(tasks: Path, lm_eval: LmEval) -> None:
    lm_eval.value = math.nan
    metrics, warnings = measure(tasks.parent, Benchmark("piqa"))
    assert math.isnan(metrics["piqa"]["acc"]) and metrics["piqa"].keys() == {"acc"}
    assert warnings == ["The benchmark piqa has no finite acc, so no gate on it is met."]


def test_a_model_that_generates_nothing_is_refused(tasks: Path) -> None:
    with pytest.raises(ConfigError, match="no method generate") as caught:
        measure(tasks.parent, Benchmark("piqa"), model=SimpleNamespace())
    assert caught.value.field == FIELD


@pytest.mark.parametrize(
    ("tokenizer", "is_divided", "says"),
    [
        (None, False, "keeps no tokenizer"),
        (SimpleNamespace(chat_template=None), False, "no chat template"),
        (SimpleNamespace(chat_template="x"), True, "whole model in one process"),
    ],
)
def test_recipes_and_layouts_without_benchmarks_are_refused(tokenizer: Any, is_divided: bool, says: str) -> None:
    suite = Suite((Benchmark("piqa", chat=True),), ".", tokenizer, print)
    with pytest.raises(ConfigError, match=says) as caught:
        suite.require(is_divided=is_divided)
    assert (caught.value.field, caught.value.value) == (FIELD, "piqa") and caught.value.remedy


def test_the_key_follows_files_data_and_functions_of_tasks(tasks: Path) -> None:
    recipe = tasks.parent / "recipe.py"
    recipe.write_text("def build_model(options, data): return None\n")
    context = StageContext(name="a", recipe=str(recipe), storage=str(tasks / "store"))
    data, model = (StageManifest(stage, "", "", stage[0] * 64) for stage in ("prepare-data", "train"))

    def key(*benchmarks: Any) -> str:
        return evaluate_key(EvaluateConfig(benchmarks=list(benchmarks)), context, data, model).digest

    path = str(tasks / "qa.yaml")
    seen = [key(), key("piqa"), key({"task": "piqa", "limit": 5}), key(path), key({"task": path, "chat": True})]
    assert key("piqa") == seen[1] and key(path) == seen[3]
    for name, text in (("_base.yaml", BASE + "num_fewshot: 1\n"), ("rows.jsonl", "{}\n"), ("qa.yaml", QA + "tag: a\n")):
        (tasks / name).write_text(text)
        seen.append(key(path))
    (tasks / "helper.py").write_text("def shorten(docs):\n    return docs[:1]\n")
    seen.append(key(path))
    assert len(set(seen)) == len(seen)


def load(tasks: Path, *overrides: str) -> PipelineSpec:
    return load_spec(tasks.parent / "pipeline.yaml", overrides)


def test_a_spec_has_its_paths_and_gates_on_tasks(tasks: Path, lm_eval: LmEval, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tasks.parent / "pipeline.yaml"
    file.write_text(SPEC + "evaluate: {benchmarks: [tasks/, arc_easy], require: {qa_acc_low: '> 0.3'}}\n")
    spec = load(tasks)
    assert [entry.task for entry in spec.evaluate.benchmarks] == [str(tasks), "arc_easy"]
    assert spec.benchmark_tasks == ["arc_easy", "qa"] and not spec.counted_on
    spec.check()
    with pytest.raises(ConfigError, match="begins with that of a split"):
        load(tasks, "evaluate.require.qb_acc=> 0").check()
    with pytest.raises(ConfigError, match="name of another one or of a split") as caught:
        load(tasks, "evaluate.splits=[qa]").check()
    assert (caught.value.field, caught.value.value) == (FIELD, "qa")
    with pytest.raises(ConfigError, match="trains another kind"):
        load(tasks, "recipe=text-classification").check()
    with pytest.raises(ConfigError, match="is there twice"):
        load(tasks, "evaluate.benchmarks=[piqa, {task: piqa, fewshot: 2}]")
    monkeypatch.setattr("trainer_lib.evaluation.benchmarks.importlib.util.find_spec", lambda name: None)
    with pytest.raises(MissingExtraError, match="lm-eval") as missing:
        spec.check()
    assert missing.value.remedy == 'Install it: pip install "trainflow[benchmarks]".'
