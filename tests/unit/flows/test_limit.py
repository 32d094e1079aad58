"""The spec of a check on a few rows: what `limit` changes, and that keys with and without it differ."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from flows.plan import Plan
from flows.spec.spec import PipelineSpec, load_spec
from tests.support.toy import project
from trainer_lib.errors import ConfigError

EXAMPLES = Path(__file__).resolve().parents[3] / "examples"


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return project(tmp_path / "project")


def limited(path: Path, *overrides: str) -> PipelineSpec:
    return load_spec(path, ("limit=5", *overrides))


def test_a_check_has_a_storage_an_experiment_and_a_hub_of_its_own(path: Path) -> None:
    spec = limited(path, "publish.to=hf://acme/model", "publish.revision=dev", "tracking.tags.team=a")
    assert spec.storage == f"{load_spec(path).storage}/limited"
    assert (spec.publish.to, spec.publish.revision, spec.publish.enabled) == (None, None, True)
    assert spec.tracking.experiment == "toy-limited"
    assert limited(path, 'evaluate.require={"test_error": "< 0.1"}').evaluate.require == {}
    assert spec.tracking.tags == {"team": "a", "trainflow.limit": "5"}


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


def test_the_spec_that_a_check_recorded_names_its_storage_once(path: Path, tmp_path: Path) -> None:
    recorded = limited(path)
    again = load_spec(path, ("limit=5", f"storage={recorded.storage}"))
    assert again.storage == recorded.storage


@pytest.mark.parametrize(("value", "words"), [("0", "at least 1"), ("many", "whole number"), ("2.5", "whole number")])
def test_a_limit_that_is_no_number_of_rows_is_refused(path: Path, value: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words) as refused:
        load_spec(path, (f"limit={value}",))
    assert refused.value.field == "limit"
