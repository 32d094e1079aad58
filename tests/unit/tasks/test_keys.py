"""Content keys: what changes them, what does not, and how a difference is told."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tasks.configs import (
    EvaluateConfig,
    KeyedSettings,
    LaunchSettings,
    PredictConfig,
    PreemptionSettings,
    PrepareConfig,
    PublishConfig,
    TrainConfig,
)
from tasks.runner_settings import RunnerSettings
from tasks.stage import keys as _keys
from tasks.stage.context import StageContext
from tasks.stage.keys import Difference, differences, stage_key
from tasks.stage.manifest import StageManifest, explain_miss
from tests.support.toy import project
from trainer_lib.errors import ConfigError

DATA, MODEL = (StageManifest(stage, "", "", letter * 64) for stage, letter in (("prepare-data", "d"), ("train", "m")))


def at(recipe: str) -> StageContext:
    return StageContext(name="toy", recipe=recipe, storage=".trainflow")


@pytest.fixture
def recipe(tmp_path: Path) -> str:
    return str(project(tmp_path / "project").with_name("recipe.py"))


def train_digest(recipe: str, processes: int = 1, data: StageManifest = DATA, **changes: Any) -> str:
    args = {"per_device_train_batch_size": 8, **changes.pop("args", {})}
    launch = LaunchSettings(kind="auto", processes=processes)
    return _keys.train_key(TrainConfig(args=args, launch=launch, **changes), at(recipe), data).digest


def test_a_key_is_the_same_wherever_the_project_and_the_storage_are(tmp_path: Path) -> None:
    recipes = [str(project(tmp_path / name).with_name("recipe.py")) for name in ("one", "two")]
    assert train_digest(recipes[0]) == train_digest(recipes[1])
    keys = [_keys.prepare_key(PrepareConfig(sources=[recipe]), at(recipe)) for recipe in recipes]
    assert keys[0].digest == keys[1].digest
    assert str(tmp_path) not in json.dumps(keys[0].fields)


CHANGED: dict[type[KeyedSettings], dict[str, Any]] = {
    PrepareConfig: {
        "recipe": "OTHER",
        "options": {"x": 1},
        "retries": 0,
        "sources": ["RECIPE"],
        "shard_rows": 7,
        "allow_nan": True,
        "launch": LaunchSettings(threads=1),
        "runner": RunnerSettings(kind="dask", workers=2),
    },
    TrainConfig: {
        "recipe": "OTHER",
        "options": {"x": 1},
        "retries": 0,
        "model": {"width": 3},
        "args": {"seed": 7},
        "launch": LaunchSettings(threads=1, max_restarts=2),
        "train_split": "other",
        "eval_split": "test",
        "preemption": PreemptionSettings(file="notice"),
    },
    EvaluateConfig: {
        "recipe": "OTHER",
        "options": {"x": 1},
        "retries": 0,
        "enabled": False,
        "splits": ["train"],
        "require": {"test_error": "< 1"},
        "resamples": 5,
        "confidence": 0.9,
        "metrics": ["f1_macro"],
        "slices": ["sex"],
        "rows_per_range": 5,
        "args": {"eval_use_gather_object": True},
        "launch": LaunchSettings(threads=1),
    },
    PredictConfig: {
        "recipe": "OTHER",
        "options": {"x": 1},
        "retries": 0,
        "enabled": False,
        "split": "train",
        "rows_per_file": 7,
        "sort_by": "x",
        "args": {"eval_use_gather_object": True},
        "launch": LaunchSettings(threads=1),
    },
    PublishConfig: {
        "enabled": False,
        "to": "hf://org/model",
        "private": False,
        "revision": "v2",
        "title": "Digits",
        "description": "What it is for.",
        "license": "mit",
        "tags": ["a"],
        "base_model": "org/base",
        "recipe": "OTHER",
        "options": {"x": 1},
        "args": {"bf16_full_eval": True},
        "code": False,
        "merge_adapters": True,
        "hardest_rows": True,
        "retries": 0,
    },
}
"""A changed value of every setting of every stage. OTHER and RECIPE stand for files of the test's project."""
KEY_OF: dict[type[KeyedSettings], tuple[Callable[..., _keys.StageKey], tuple[StageManifest, ...]]] = {
    PrepareConfig: (_keys.prepare_key, ()),
    TrainConfig: (_keys.train_key, (DATA,)),
    EvaluateConfig: (_keys.evaluate_key, (DATA, MODEL)),
    PredictConfig: (_keys.predict_key, (DATA, MODEL)),
    PublishConfig: (_keys.publish_key, (DATA, MODEL)),
}


@pytest.mark.parametrize("cls", CHANGED, ids=lambda cls: cls.__name__)
def test_each_setting_is_part_of_the_key_as_it_declares(cls: type[KeyedSettings], recipe: str) -> None:
    other = Path(recipe).with_name("other.py")
    other.write_text("def prepare(options, out): return {}\ndef build_model(options, data): return None\n")
    key, inputs = KEY_OF[cls]
    before = key(cls(), at(recipe), *inputs).digest
    assert cls.affects().keys() == cls.model_fields.keys() == CHANGED[cls].keys()
    for name, affects in cls.affects().items():
        value = CHANGED[cls][name]
        value = {"OTHER": str(other)}.get(value, value) if isinstance(value, str) else value
        value = [recipe] if value == ["RECIPE"] else value
        after = key(cls(**{name: value}), at(recipe), *inputs).digest
        assert (after != before) == (affects == "result"), name


@pytest.mark.parametrize(
    "changes",
    [
        {"args": {"learning_rate": 1e-3}},
        {"args": {"per_device_train_batch_size": 4}},
        {"args": {"seed": 7}},
        {"args": {"max_steps": 5}},
        {"model": {"width": 3}},
        {"options": {"x": 1}},
        {"train_split": "other"},
        {"data": StageManifest("prepare-data", "", "", "e" * 64)},
    ],
)
def test_what_changes_the_model_changes_the_train_key(recipe: str, changes: dict[str, Any]) -> None:
    assert train_digest(recipe, **changes) != train_digest(recipe)


@pytest.mark.parametrize(
    "changes",
    [
        {"args": {"logging_steps": 7}},
        {"args": {"save_steps": 7}},
        {"args": {"save_total_limit": 1}},
        {"args": {"report_to": "none"}},
        {"args": {"dataloader_num_workers": 2}},
        {"args": {"learning_rate": "5e-5"}},  # the default, spelt as text
        {"args": {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 2}},
        {"args": {"per_device_train_batch_size": 2, "global_batch_size": 8}},
        {"processes": 2, "args": {"per_device_train_batch_size": 4}},
        {"retries": 0},
        {"eval_split": "test"},  # evaluating while training changes no weight
    ],
)
def test_what_does_not_change_the_model_does_not_change_the_train_key(recipe: str, changes: dict[str, Any]) -> None:
    assert train_digest(recipe, **changes) == train_digest(recipe)


def test_the_evaluated_split_counts_where_it_chooses_the_model(recipe: str) -> None:
    args = {"load_best_model_at_end": True, "eval_strategy": "steps", "eval_steps": 500}
    one, other = (train_digest(recipe, args=args, eval_split=split) for split in ("a", "b"))
    assert one != other


@pytest.mark.parametrize(
    "code",
    [
        "class Stop:\n    def on_evaluate(self, args, state, control, **more):\n"
        "        control.should_training_stop = True\n\n\ndef callbacks(options):\n    return [Stop()]\n",
        "from torch.optim.lr_scheduler import ReduceLROnPlateau as Slower\nfrom trainer_lib import Trainer as Base\n"
        "\n\nclass Trainer(Base):\n    def create_scheduler(self, steps, optimizer=None):\n"
        "        return Slower(optimizer)\n",
    ],
)
def test_settings_of_evaluation_count_where_the_recipe_lets_evaluations_change_training(recipe: str, code: str) -> None:
    file = Path(recipe)
    file.write_text(f"{file.read_text()}\n\n{code}")
    splits = {train_digest(recipe, eval_split=split) for split in ("a", "b")}
    steps = {train_digest(recipe, args={"eval_strategy": "steps", "eval_steps": each}) for each in (5, 50)}
    assert (len(splits), len(steps)) == (2, 2)


def test_versions_that_change_numerics_count(recipe: str, monkeypatch: pytest.MonkeyPatch) -> None:
    before = train_digest(recipe)
    monkeypatch.setattr(_keys, "NUMERICS", _keys.NUMERICS + 1)
    assert train_digest(recipe) != before
    fields = _keys.train_key(TrainConfig(), at(recipe), DATA).fields
    assert set(fields["versions"]) == {"python", "torch", "numpy", "trainer_lib"}
    assert "versions" not in _keys.prepare_key(PrepareConfig(), at(recipe)).fields


def test_evaluate_and_predict_ignore_how_the_work_is_cut_up(recipe: str) -> None:
    def key(**args: Any) -> tuple[str, str]:
        one = _keys.evaluate_key(EvaluateConfig(args=args), at(recipe), DATA, MODEL)
        other = _keys.predict_key(PredictConfig(args=args), at(recipe), DATA, MODEL)
        return one.digest, other.digest

    assert key(per_device_eval_batch_size=3, learning_rate=1.0, num_train_epochs=9) == key()
    assert all(a != b for a, b in zip(key(bf16_full_eval=True), key(), strict=True))


def test_a_stage_with_a_recipe_of_its_own_does_not_follow_the_pipelines(recipe: str) -> None:
    own = Path(recipe).with_name("metrics.py")
    own.write_text("def compute_metrics(p): return {}\n")
    config = EvaluateConfig(recipe=str(own))
    before = _keys.evaluate_key(config, at(recipe), DATA, MODEL).digest
    Path(recipe).write_text(Path(recipe).read_text() + "\nx = 1\n")
    assert _keys.evaluate_key(config, at(recipe), DATA, MODEL).digest == before


def test_differences_are_told_by_field() -> None:
    old = {"args": {"lr": 1e-3, "seed": 1}, "recipe": {"recipe.py": "a" * 64, "old.py": "b" * 64}, "gone": 1}
    new = {"args": {"lr": 1e-4, "seed": 1}, "recipe": {"recipe.py": "c" * 64, "new.py": "b" * 64}, "splits": ["a"]}
    found = {str(difference) for difference in differences(old, new)}
    assert found == {
        "args.lr: 0.001 -> 0.0001",
        "recipe.recipe.py changed",
        "recipe.new.py added",
        "recipe.old.py removed",
        "gone: 1 -> unset",
        'splits: unset -> ["a"]',
    }


def test_equal_keys_have_no_differences_and_order_does_not_matter() -> None:
    assert differences({"a": 1, "b": [1, 2]}, {"b": [1, 2], "a": 1}) == []
    assert stage_key("x", {"a": 1, "b": 2}).digest == stage_key("x", {"b": 2, "a": 1}).digest
    assert stage_key("x", {"a": 1}).digest != stage_key("y", {"a": 1}).digest
    assert stage_key("x", {"a": 1}).digest != stage_key("x", {"a": True}).digest


def test_lists_of_mappings_are_compared_item_by_item() -> None:
    old = {"sources": [{"source": "a.csv", "digest": "a" * 64}]}
    new = {"sources": [{"source": "a.csv", "digest": "b" * 64}]}
    assert differences(old, new) == [Difference("sources[0].digest", "a" * 64, "b" * 64)]


def test_a_key_holds_plain_data_only() -> None:
    with pytest.raises(ConfigError, match="object"):
        stage_key("mine", {"x": object()})


def test_processes_are_counted_by_cores_when_the_cpu_is_asked_for(recipe: str, monkeypatch: pytest.MonkeyPatch) -> None:
    import trainer_lib.launch.config as launch

    monkeypatch.setattr(launch, "num_devices", lambda _: 1)
    monkeypatch.setattr(launch, "num_cores", lambda: 2)
    config = TrainConfig(args={"use_cpu": True}, launch=LaunchSettings(processes=2))
    assert _keys.train_key(config, at(recipe), DATA).fields["args"]["global_batch_size"] == 16
    with pytest.raises(ConfigError, match="device"):
        _keys.train_key(config.model_copy(update={"args": {}}), at(recipe), DATA)


def test_a_result_of_another_schema_is_explained_by_that_alone(tmp_path: Path) -> None:
    older = stage_key("evaluate", {"recipe": {"recipe.py": "a"}, "args": {"seed": 1}})
    folder = tmp_path / "stages" / "evaluate" / older.folder
    folder.mkdir(parents=True)
    (folder / "key.json").write_bytes(older.to_json())
    newer = stage_key("evaluate", {"recipe": {"recipe.py": "a"}, "args": {"seed": 1, "deepspeed": None}}, schema=99)
    found = explain_miss(str(tmp_path), newer)
    assert found.reason == "a newer trainflow keys or writes this stage in another form"
    assert [each.field for each in found.differences] == ["schema"]


def test_a_pipeline_with_mostly_other_code_is_another_one_and_explains_nothing(tmp_path: Path) -> None:
    def key(own: str, count: int) -> _keys.StageKey:
        shared = {"recipe.py:prepare": own, "recipe.py:collate": "c"}
        return stage_key("evaluate", {"recipe": shared | {f"recipe.py:{own}{each}": "d" for each in range(count)}})

    theirs = key("a", 100)
    folder = tmp_path / "stages" / "evaluate" / theirs.folder
    folder.mkdir(parents=True)
    (folder / "key.json").write_bytes(theirs.to_json())
    assert explain_miss(str(tmp_path), key("b", 100)).reason == "never run before"
    assert explain_miss(str(tmp_path), key("a", 70)).nearest == theirs.folder
