"""Which spec a command takes when none is named; the spec of a check on a few rows."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.support.toy import project
from trainer_lib.errors import ConfigError
from trainflow.flows.cli.run_choice import choose_place
from trainflow.flows.cli.spec_choice import choose_spec_file, choose_spec_or_storage
from trainflow.flows.planning.plan import Plan
from trainflow.flows.spec.spec import PipelineSpec, load_spec

SPEC = "name: toy\nrecipe: recipe.py\n"


@pytest.fixture(autouse=True)
def _folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("conda.yaml").write_text("name: toy\ndependencies: []\n")
    Path("data.json").write_text("[1, 2]")


def test_what_is_named_is_taken() -> None:
    Path("pipeline.yaml").write_text(SPEC)
    assert choose_spec_file(Path("other.yaml"), ["a=1"]) == (Path("other.yaml"), ["a=1"])
    assert choose_spec_file(Path("absent"), None) == (Path("absent"), [])


def test_the_only_spec_of_the_folder_is_taken() -> None:
    with pytest.raises(ConfigError, match=r"(?s)has none.*trainflow init NAME"):
        choose_spec_file(None, ["a=1"])
    # Data of many bytes is not read as a spec.
    Path("rows.json").write_text('{"name": "rows", "recipe": "x", "rows": "' + "x" * 1_000_000 + '"}')
    Path("digits.yml").write_text(SPEC)
    assert choose_spec_file(None, None) == (Path("digits.yml"), [])
    Path("other.yaml").write_text(SPEC)
    with pytest.raises(ConfigError, match=r"several: digits\.yml, other\.yaml"):
        choose_spec_file(None, None)
    Path("pipeline.yaml").write_text(SPEC)
    assert choose_spec_file(None, None) == (Path("pipeline.yaml"), [])


def test_the_first_word_may_be_an_override() -> None:
    Path("pipeline.yaml").write_text(SPEC)
    assert choose_spec_file(Path("train.args.seed=1"), ["a=2"]) == (Path("pipeline.yaml"), ["train.args.seed=1", "a=2"])
    Path("lr=1.yaml").write_text(SPEC)
    assert choose_spec_file(Path("lr=1.yaml"), None) == (Path("lr=1.yaml"), [])


def test_commands_that_read_runs_mean_the_same_spec_as_those_that_make_them() -> None:
    assert choose_spec_or_storage(None, None, None) == (None, [], None)
    Path(".trainflow").mkdir()
    assert choose_spec_or_storage(None, None, None) == (None, [], ".trainflow")
    Path("digits.yml").write_text(SPEC)
    assert choose_spec_or_storage(None, None, None) == (Path("digits.yml"), [], None)
    assert choose_spec_or_storage(Path("storage=s"), ["a=1"], None) == (Path("digits.yml"), ["storage=s", "a=1"], None)
    assert choose_spec_or_storage(None, None, "store") == (None, [], "store")
    for spec, overrides in ((Path("digits.yml"), None), (Path("a=1"), None), (None, ["a=1"])):
        with pytest.raises(ConfigError, match="not both"):
            choose_spec_or_storage(spec, overrides, "store")
    Path("digits.yml").unlink()
    with pytest.raises(ConfigError, match="has none"):
        choose_spec_or_storage(Path("a=1"), None, None)


def test_a_storage_that_is_named_has_to_be_there(path: Path) -> None:
    Path("store").mkdir()
    assert choose_place(None, "store", command="runs").storage == str(Path("store").absolute())
    with pytest.raises(ConfigError, match="no such folder") as caught:
        choose_place(None, "stroe", command="runs")
    assert (caught.value.field, caught.value.value) == ("--storage", "stroe")
    assert caught.value.remedy == 'Did you mean "store"?'
    with pytest.raises(ConfigError, match=r"no such folder.*that a run used"):
        choose_place(None, "elsewhere/far", command="runs")
    with pytest.raises(ConfigError, match="a file, not a folder"):
        choose_place(None, "data.json", command="gc")
    # That of a spec may be one of runs to come.
    assert choose_place([str(path)], None, command="runs").storage == str(path.parent / "store")
    assert not (path.parent / "store").exists()


EXAMPLES = Path(__file__).resolve().parents[3] / "examples"


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return project(tmp_path / "project")


def limited(path: Path, *overrides: str) -> PipelineSpec:
    return load_spec(path, ("limit=5", *overrides))


def test_a_check_has_a_storage_an_experiment_and_a_hub_of_its_own(path: Path) -> None:
    spec = limited(path, "publish.to=hf://acme/model", "publish.revision=dev", "tracking.tags.team=a")
    assert spec.storage == f"{load_spec(path).storage}/limited"
    assert limited(path, f"storage={spec.storage}").storage == spec.storage, "it is named once"
    assert (spec.publish.to, spec.publish.revision, spec.publish.enabled) == (None, None, True)
    assert spec.tracking.experiment == "toy-limited"
    assert limited(path, 'evaluate.require={"test_error": "< 0.1"}').evaluate.require == {}
    assert spec.tracking.tags == {"team": "a", "trainflow.limit": "5"}
    for value, words in (("0", "at least 1"), ("many", "whole number"), ("2.5", "whole number")):
        with pytest.raises(ConfigError, match=rf"^limit.*{words}"):
            load_spec(path, (f"limit={value}",))


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({"eval_strategy": "epoch", "save_strategy": "epoch"}, {"eval_strategy": "steps", "eval_steps": 2}),
        ({"save_strategy": "no"}, {"save_strategy": "no"}),
        ({"max_steps": 3}, {"max_steps": 3}),
        ({"max_steps": 500, "warmup_steps": 40}, {"max_steps": 4, "warmup_steps": 1}),
        ({"max_steps": -1, "num_train_epochs": 3, "warmup_steps": 0.1}, {"max_steps": 4, "warmup_steps": 0.1}),
        ({"dataloader_drop_last": True}, {"dataloader_drop_last": False}),
        ({"eval_strategy": "steps", "eval_delay": 100}, {"eval_delay": 0, "eval_steps": 2}),
        ({"logging_strategy": "epoch"}, {"logging_strategy": "steps", "logging_steps": 1}),
    ],
)
def test_a_check_trains_a_few_steps_and_evaluates_and_saves_in_them(
    path: Path, given: dict[str, Any], expected: dict[str, Any]
) -> None:
    spec = limited(path, "train.eval_split=test", *(f"train.args.{name}={value}" for name, value in given.items()))
    assert {name: spec.train.args.get(name) for name in expected} == expected


@pytest.mark.parametrize("example", ["digits/pipeline.yaml", "stdlib_lm/pipeline.yaml", "stdlib_lm/quick.yaml"])
def test_the_examples_can_be_checked(example: str) -> None:
    spec = load_spec(EXAMPLES / example, ("limit=20",))
    assert spec.resolver.arguments(spec.train.args).max_steps == 4


def test_the_keys_of_a_check_are_never_those_of_a_run(path: Path) -> None:
    # The same settings and the same folder: what is left is the limit itself.
    real = load_spec(path, ("train.args.max_steps=4", "train.args.save_steps=2", "train.args.logging_steps=1"))
    check = load_spec(path, ("limit=1000",)).model_copy(update={"storage": real.storage, "tracking": real.tracking})
    assert check.train == real.train
    keys, others = Plan.of(real).early_keys, Plan.of(check).early_keys
    assert all("limit" not in key.fields for key in keys.values())
    for name, key in others.items():
        assert key.fields == {**keys[name].fields, "limit": 1000}
    assert Plan.of(real).pipeline_key != Plan.of(check).pipeline_key
