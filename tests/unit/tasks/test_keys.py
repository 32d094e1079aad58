"""Content keys: what changes them, what does not, how a difference is told; declared sources; removals of results."""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.support.recipe_edits import ENTRIES, FACTS, SPEC
from tests.support.recorded import commit_stage
from tests.support.toy import project
from trainer_lib.errors import ConfigError, StorageError
from trainer_lib.locks.lease import Holder
from trainer_lib.locks.removal import REMOVING, announce_removal, withdraw_removal
from trainer_lib.storage import Store
from trainflow.flows.planning.plan import Plan
from trainflow.flows.spec.spec import load_spec
from trainflow.tasks import configs
from trainflow.tasks.keys import keys as _keys
from trainflow.tasks.keys.keys import Difference, differences, stage_key
from trainflow.tasks.keys.sources import check, fingerprints
from trainflow.tasks.settings import KeyedSettings, RunnerSettings
from trainflow.tasks.stage.context import StageContext
from trainflow.tasks.stage.facts import TrainFacts
from trainflow.tasks.stage.manifest import StageManifest, explain_miss, look_up_under, summary
from trainflow.tasks.stage.runner import StageAttempt, StageOutput, run_stage

DATA, MODEL = (StageManifest(stage, "", "", letter * 64) for stage, letter in (("prepare-data", "d"), ("train", "m")))


def at(recipe: str) -> StageContext:
    return StageContext(name="toy", recipe=recipe, storage=".trainflow")


@pytest.fixture
def recipe(tmp_path: Path) -> str:
    return str(project(tmp_path / "project").with_name("recipe.py"))


def train_digest(recipe: str, processes: int = 1, data: StageManifest = DATA, **changes: Any) -> str:
    args = {"per_device_train_batch_size": 8, **changes.pop("args", {})}
    launch = configs.LaunchSettings(kind="auto", processes=processes)
    return _keys.train_key(configs.TrainConfig(args=args, launch=launch, **changes), at(recipe), data).digest


def test_a_key_is_the_same_wherever_the_project_and_the_storage_are(tmp_path: Path) -> None:
    recipes = [str(project(tmp_path / name).with_name("recipe.py")) for name in ("one", "two")]
    assert train_digest(recipes[0]) == train_digest(recipes[1])
    keys = [_keys.prepare_key(configs.PrepareConfig(sources=[recipe]), at(recipe)) for recipe in recipes]
    assert keys[0].digest == keys[1].digest
    assert str(tmp_path) not in json.dumps(keys[0].fields)


OWN: dict[str, Any] = {"recipe": "OTHER", "options": {"x": 1}, "retries": 0}
THREADS: dict[str, Any] = {"launch": configs.LaunchSettings(threads=1)}
INFERENCE = {**OWN, **THREADS, "enabled": False, "args": {"eval_use_gather_object": True}}
MEASURED = {"require": {"test_error": "< 1"}, "resamples": 5, "confidence": 0.9, "metrics": ["f1_macro"]}
COMPARED = {"only_if": "better", "metric": "test_error", "greater_is_better": False}
CARD = {"title": "Digits", "description": "What it is for.", "license": "mit", "tags": ["a"], "base_model": "org/base"}
PLACE = {"to": "hf://org/model", "private": False, "revision": "v2"}
CHANGED: dict[type[KeyedSettings], dict[str, Any]] = {
    configs.PrepareConfig: {
        **OWN,
        **THREADS,
        "sources": ["RECIPE"],
        "mixture": [{"source": "package:pytest"}],
        "shard_rows": 7,
        "allow_nan": True,
        "runner": RunnerSettings(kind="dask", workers=2),
    },
    configs.TrainConfig: {
        **OWN,
        "model": {"width": 3},
        "args": {"seed": 7},
        "train_split": "other",
        "eval_split": "test",
        "launch": configs.LaunchSettings(threads=1, max_restarts=2),
        "preemption": configs.PreemptionSettings(file="notice"),
        "stop_early": configs.StopEarlySettings(),
    },
    configs.EvaluateConfig: {
        **INFERENCE,
        **MEASURED,
        "splits": ["train"],
        "slices": ["sex"],
        "benchmarks": ["piqa"],
        "show_inputs": False,
        "importance_seconds": 0,
    },
    configs.PredictConfig: {**INFERENCE, "split": "train", "rows_per_file": 7, "sort_by": "x"},
    configs.PublishConfig: {
        **OWN,
        **PLACE,
        **COMPARED,
        **CARD,
        "enabled": False,
        "args": {"bf16_full_eval": True},
        "code": False,
        "merge_adapters": True,
        "merged_type": "float16",
        "merge_tolerance": 0.5,
        "hardest_rows": True,
    },
}
"""A changed value of every setting of every stage. OTHER and RECIPE stand for files of the test's project."""
KEY_OF: dict[type[KeyedSettings], tuple[Callable[..., _keys.StageKey], tuple[StageManifest, ...]]] = {
    configs.PrepareConfig: (_keys.prepare_key, ()),
    configs.TrainConfig: (_keys.train_key, (DATA,)),
    configs.EvaluateConfig: (_keys.evaluate_key, (DATA, MODEL)),
    configs.PredictConfig: (_keys.predict_key, (DATA, MODEL)),
    configs.PublishConfig: (_keys.publish_key, (DATA, MODEL)),
}


@pytest.mark.parametrize("cls", CHANGED, ids=lambda cls: cls.__name__)
def test_each_setting_is_part_of_the_key_as_it_declares(cls: type[KeyedSettings], recipe: str) -> None:
    other = Path(recipe).with_name("other.py")
    other.write_text("def prepare(options, out): return {}\ndef build_model(options, data): return None\n")
    key, inputs = KEY_OF[cls]
    before = key(cls(), at(recipe), *inputs).digest
    assert cls.affects().keys() == cls.model_fields.keys() == CHANGED[cls].keys()
    assert {cls.affects().get(name, "nothing") for name in ("runner", "require", "retries")} == {"nothing"}
    for name, affects in cls.affects().items():
        value = CHANGED[cls][name]
        value = str(other) if value == "OTHER" else [recipe] if value == ["RECIPE"] else value
        assert (key(cls(**{name: value}), at(recipe), *inputs).digest != before) == (affects == "result"), name


def test_weights_of_a_mixture_are_in_the_key_of_train_and_its_sources_in_that_of_prepare(recipe: str) -> None:
    def mixing(**source: Any) -> configs.PrepareConfig:
        return configs.PrepareConfig.model_validate({"mixture": [{"source": "package:pytest", **source}]})

    one, other, renamed = mixing(weight=1), mixing(weight=2), mixing(name="mine")
    assert _keys.prepare_key(one, at(recipe)).digest == _keys.prepare_key(other, at(recipe)).digest
    assert _keys.prepare_key(one, at(recipe)).digest != _keys.prepare_key(renamed, at(recipe)).digest
    mixed = [replace(at(recipe), mixture=each.mixture_info) for each in (one, other)]
    keys = [_keys.train_key(configs.TrainConfig(), context, DATA).digest for context in (at(recipe), *mixed)]
    assert len(set(keys)) == 3


@pytest.mark.parametrize(
    ("changes", "counts"),
    [
        ({"args": {"learning_rate": 1e-3}}, True),
        ({"data": StageManifest("prepare-data", "", "", "e" * 64)}, True),
        ({"args": {"learning_rate": "5e-5"}}, False),  # the default, spelt as text
        ({"args": {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 2}}, False),
        ({"args": {"per_device_train_batch_size": 2, "global_batch_size": 8}}, False),
        ({"processes": 2, "args": {"per_device_train_batch_size": 4}}, False),
    ],
)
def test_what_changes_the_model_changes_the_train_key(recipe: str, changes: dict[str, Any], counts: bool) -> None:
    assert (train_digest(recipe, **changes) != train_digest(recipe)) == counts


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
    chosen = {"load_best_model_at_end": True, "eval_strategy": "steps", "eval_steps": 500}
    assert len({train_digest(recipe, args=chosen, eval_split=split) for split in ("a", "b")}) == 2
    file.write_text(f"{file.read_text()}\n\n{code}")
    splits = {train_digest(recipe, eval_split=split) for split in ("a", "b")}
    steps = {train_digest(recipe, args={"eval_strategy": "steps", "eval_steps": each}) for each in (5, 50)}
    assert (len(splits), len(steps)) == (2, 2)


def test_versions_that_change_numerics_count(recipe: str, monkeypatch: pytest.MonkeyPatch) -> None:
    before = train_digest(recipe)
    monkeypatch.setattr(_keys, "NUMERICS", _keys.NUMERICS + 1)
    assert train_digest(recipe) != before
    fields = _keys.train_key(configs.TrainConfig(), at(recipe), DATA).fields
    assert set(fields["versions"]) == {"python", "torch", "numpy", "trainer_lib"}
    assert "versions" not in _keys.prepare_key(configs.PrepareConfig(), at(recipe)).fields
    # Without after_evaluate no curve is drawn.
    assert "history" not in _keys.evaluate_key(configs.EvaluateConfig(), at(recipe), DATA, MODEL).fields


def test_evaluate_and_predict_ignore_how_the_work_is_cut_up(recipe: str) -> None:
    def key(**args: Any) -> tuple[str, str]:
        one = _keys.evaluate_key(configs.EvaluateConfig(args=args), at(recipe), DATA, MODEL)
        other = _keys.predict_key(configs.PredictConfig(args=args), at(recipe), DATA, MODEL)
        return one.digest, other.digest

    assert key(per_device_eval_batch_size=3, learning_rate=1.0, num_train_epochs=9) == key()
    assert all(a != b for a, b in zip(key(bf16_full_eval=True), key(), strict=True))


def test_a_stage_with_a_recipe_of_its_own_does_not_follow_the_pipelines(recipe: str) -> None:
    own = Path(recipe).with_name("metrics.py")
    own.write_text("def compute_metrics(p): return {}\n")
    config = configs.EvaluateConfig(recipe=str(own))
    before = _keys.evaluate_key(config, at(recipe), DATA, MODEL).digest
    Path(recipe).write_text(Path(recipe).read_text() + "\nx = 1\n")
    assert _keys.evaluate_key(config, at(recipe), DATA, MODEL).digest == before


@pytest.mark.parametrize("value", [object(), {1}])
def test_a_key_holds_plain_data_only(value: Any) -> None:
    with pytest.raises(ConfigError, match=r"A key holds plain data only: .* is not plain data") as refused:
        stage_key("train", {"x": [value]})
    assert refused.value.field == "train"


def test_differences_are_told_by_field() -> None:
    old = {"args": {"lr": 1e-3, "seed": 1}, "recipe": {"recipe.py": "a" * 64, "old.py": "b" * 64}, "gone": 1}
    new = {"args": {"lr": 1e-4, "seed": 1}, "recipe": {"recipe.py": "c" * 64, "new.py": "b" * 64}, "splits": ["a"]}
    assert {str(difference) for difference in differences(old, new)} == {
        "args.lr: 0.001 -> 0.0001",
        "recipe.recipe.py changed",
        "recipe.new.py added",
        "recipe.old.py removed",
        "gone: 1 -> unset",
        'splits: unset -> ["a"]',
    }
    three = [Difference(name, 1, 2) for name in "abc"]
    assert summary(three) == "a: 1 -> 2; b: 1 -> 2; c: 1 -> 2"
    assert summary([*three, *three]) == "a: 1 -> 2; b: 1 -> 2; c: 1 -> 2; and 3 more"
    sources = [{"sources": [{"source": "a.csv", "digest": letter * 64}]} for letter in "ab"]
    assert differences(*sources) == [Difference("sources[0].digest", "a" * 64, "b" * 64)]


def test_equal_keys_have_no_differences_and_order_does_not_matter() -> None:
    assert differences({"a": 1, "b": [1, 2]}, {"b": [1, 2], "a": 1}) == []
    assert stage_key("x", {"a": 1, "b": 2}).digest == stage_key("x", {"b": 2, "a": 1}).digest
    assert stage_key("x", {"a": 1}).digest != stage_key("y", {"a": 1}).digest
    assert stage_key("x", {"a": 1}).digest != stage_key("x", {"a": True}).digest


def test_processes_are_counted_by_cores_when_the_cpu_is_asked_for(recipe: str, monkeypatch: pytest.MonkeyPatch) -> None:
    import trainer_lib.launch.settings.config as launch

    monkeypatch.setattr(launch, "num_devices", lambda _: 1)
    monkeypatch.setattr(launch, "num_cores", lambda: 2)
    config = configs.TrainConfig(args={"use_cpu": True}, launch=configs.LaunchSettings(processes=2))
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


def digest(source: str | Path, memory: Path | None = None, root: Path | None = None) -> str:
    [found] = fingerprints([str(source)], memory=memory, root=root)
    return found["digest"]


def test_a_file_counts_by_its_bytes(tmp_path: Path) -> None:
    for name in ("a.csv", "a[1].csv"):  # a name that looks like a pattern means itself
        path = tmp_path / name
        path.write_text("1,2\n")
        before = digest(path)
        path.touch()
        (tmp_path / "a1.csv").write_text(name)
        assert digest(path) == before
        path.write_text("1,3\n")
        assert digest(path) != before


def test_a_folder_counts_by_names_and_bytes_and_a_pattern_by_the_files_that_match(tmp_path: Path) -> None:
    folder, pattern = tmp_path / "days", tmp_path / "days" / "**" / "*.csv"
    (folder / "one").mkdir(parents=True)
    (folder / "one" / "a.csv").write_text("x")
    (folder / "notes.txt").write_text("1")

    def both() -> tuple[str, str]:
        return digest(folder), digest(pattern)

    found = [both()]
    for name, text in (("notes.txt", "2"), ("b.csv", "y"), ("one/a.csv", "z")):
        (folder / name).write_text(text)
        found.append(both())
    (folder / "one" / "a.csv").rename(folder / "one" / "c.csv")
    found.append(both())
    assert len({each for each, _ in found}) == 5
    assert found[0][1] == found[1][1], "notes are no tables"
    assert len({matching for _, matching in found}) == 4
    # Labels hold no absolute path.
    path = folder / "b.csv"
    labels = [fingerprints([str(path)], root=root)[0]["source"] for root in (tmp_path, tmp_path / "elsewhere")]
    assert labels == ["days/b.csv", "b.csv"]


def test_a_store_without_tags_counts_by_its_bytes() -> None:
    store = Store.open("memory://sources/folder")
    store.write_bytes("a.csv", b"one")
    file, folder = digest("memory://sources/folder/a.csv"), digest("memory://sources/folder")
    store.write_bytes("b.csv", b"two")
    assert digest("memory://sources/folder/a.csv") == file
    assert digest("memory://sources/folder") != folder
    assert digest("memory://sources/folder/*a.csv") != digest("memory://sources/folder/*.csv")
    store.write_bytes("a.csv", b"ONE")
    assert digest("memory://sources/folder/a.csv") != file
    store.delete_tree()


def test_digests_are_remembered_until_the_file_changes(tmp_path: Path) -> None:
    path, memory = tmp_path / "a.csv", tmp_path / "memory.json"
    path.write_text("one")
    before = digest(path, memory)
    assert not memory.exists(), "it changed just now"
    os.utime(path, (1, 1))
    assert digest(path, memory) == before
    entries = json.loads(memory.read_text())
    entries[str(path)][3] = "remembered"
    memory.write_text(json.dumps(entries))
    assert digest(path, memory) != before  # not read again: what is remembered is used
    path.write_text("two")
    os.utime(path, (2, 2))
    fresh = digest(path, memory)
    assert fresh == digest(path)
    memory.write_text("{torn")
    assert digest(path, memory) == fresh


def test_installed_packages_and_the_standard_library_count_by_their_files(tmp_path: Path) -> None:
    sources = ["package:numpy", "package:numpy/numpy/version.py", "stdlib:json", "stdlib:json/decoder.py"]
    found = fingerprints(sources)
    assert len({each["digest"] for each in found}) == 4
    assert found == fingerprints(sources)
    # A check reads nothing.
    check([str(tmp_path), "package:numpy", "stdlib:", "s3://nowhere/x", "https://nowhere.invalid/x"])
    with pytest.raises(StorageError, match="cannot be reached"):
        digest("http://127.0.0.1:9/x")


@pytest.mark.parametrize(
    ("source", "words"),
    [
        ("package:nunpy", "numpy"),
        ("package:numpy/nowhere", "no such files"),
        ("stdlib:nowhere", "no such part"),
        ("hf://datasets/x", "names no repository"),
        ("s4://host/x", "Unknown URL scheme"),
        ("s3://", "names no bucket"),
        ("/nowhere/at/all", "does not exist"),
        ("/nowhere/at/*.csv", "No file matches"),
    ],
)
def test_what_cannot_be_tracked_is_refused(source: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words) as caught:
        fingerprints([source])
    assert caught.value.field == "prepare.sources"
    assert caught.value.remedy


@pytest.fixture
def removed(tmp_path: Path) -> tuple[Store, Callable[[], tuple[StageManifest | None, str | None]]]:
    """A committed stage, and the look of a command for it."""
    storage, key = str(tmp_path), commit_stage(str(tmp_path), "train", "toy 1")
    return Store.open(storage).child("stages", "train", key[:16]), lambda: look_up_under(storage, "train", key)


@pytest.mark.parametrize("goes", [True, False])
def test_a_look_waits_for_a_removal_that_was_announced(goes: bool, removed: Any) -> None:
    stage, look = removed
    announce_removal(stage)

    def finish() -> None:
        if goes:
            stage.delete("COMMIT.json")
        withdraw_removal(stage)

    later = threading.Timer(0.3, finish)
    later.start()
    manifest, problem = look()
    later.join()
    assert ((manifest is None), problem) == (goes, None)


@pytest.mark.parametrize("note", [replace(Holder.this_process(), started="1").to_bytes(), b"", bytes(9000)])
def test_the_note_of_a_dead_process_holds_nothing_back(note: bytes, removed: Any) -> None:
    stage, look = removed
    stage.write_bytes(REMOVING, note)
    assert look()[0] is not None
    assert not stage.exists(REMOVING)


def test_the_note_of_a_process_that_stays_is_named_in_the_end(removed: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    stage, look = removed
    monkeypatch.setattr("trainer_lib.locks.removal._LIVING_S", 0.2)
    announce_removal(stage)
    with pytest.raises(StorageError, match=rf"(?s)under removal .*process {os.getpid()}.*delete this file"):
        look()
    assert stage.exists(REMOVING)


def test_the_curve_of_a_training_that_is_not_made_yet_is_no_difference(tmp_path: Path) -> None:
    (tmp_path / "pyproject.toml").write_text("")
    (tmp_path / "pipeline.yaml").write_text(SPEC)
    recipe = "".join(f"def {name}(*given): ...\n" for name in (*ENTRIES, "after_evaluate"))
    (tmp_path / "recipe.py").write_text(recipe)
    first = Plan.of(load_spec(tmp_path / "pipeline.yaml"))
    manifests: dict[str, StageManifest] = {}
    for name in ("prepare-data", "train", "evaluate"):

        def work(attempt: StageAttempt, name: str = name) -> StageOutput:
            written = attempt.store.write_bytes("output", name.encode())
            facts = TrainFacts(metrics_code="0" * 64) if name == "train" else FACTS[name]
            return StageOutput([written], facts=facts)

        manifests[name] = run_stage(first.key_of(name, manifests), first.context, work)
    assert first.key_of("evaluate", manifests).fields["history"] == "0" * 64
    (tmp_path / "pipeline.yaml").write_text(SPEC.replace("use_cpu: true", "use_cpu: true, learning_rate: 1.0e-4"))
    evaluate = Plan.of(load_spec(tmp_path / "pipeline.yaml")).reasons["evaluate"]
    assert not any(each.field == "history" for each in evaluate.differences), evaluate
    assert not evaluate.certain
