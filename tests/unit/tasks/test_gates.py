"""What a spec requires of an evaluation: how it is written, and the verdict on a manifest."""

from __future__ import annotations

import math
from typing import Any

import pytest

from flows.spec.spec import PipelineSpec
from tasks.configs import EvaluateConfig
from tasks.requirements import parse_requirement
from tasks.stage.gates import judge
from tasks.stage.manifest import StageManifest
from trainer_lib.errors import GateError, from_record


def verdict(require: dict[str, Any], **metrics: Any) -> Any:
    manifest = StageManifest("evaluate", "", "", "", metrics={"test": metrics, "overall": {"bleu": 20.0}})
    return judge(EvaluateConfig(require=require), manifest)


@pytest.mark.parametrize(
    ("written", "value", "passed"),
    [
        (">= 0.9", 0.9, True),
        (">=0.9", 0.89, False),
        ("> 0.9", 0.9, False),
        ("<= 1e-1", 0.1, True),
        ("< .5", 0.5, False),
        ("== 3", 3.0, True),
        (">= 0.5, < 2", 2.0, False),
        (">= -1, < 2", 0.0, True),
        ({"min": 0.5}, 0.4, False),
        ({"min": 0.5, "max": 2}, 2.0, True),
        (">= 0", math.nan, False),
        ("<= 0", math.nan, False),
        (">= 0", "NaN", False),
        ("<= 5", math.inf, False),
        (">= 5", "Infinity", True),
    ],
)
def test_a_requirement_is_met_or_not_and_nan_meets_none(written: Any, value: Any, passed: bool) -> None:
    found = verdict({"test_accuracy": written}, accuracy=value)
    assert found.passed is passed
    assert ("failed" in str(found)) is not passed


def test_a_requirement_has_one_form_that_is_read_again() -> None:
    config = EvaluateConfig.model_validate({"require": {"test_x": {"max": 2, "min": 0.5}, "test_y": ">=0.90"}})
    assert config.require == {"test_x": "<= 2, >= 0.5", "test_y": ">= 0.9"}
    assert EvaluateConfig(**config.model_dump(mode="json")) == config
    assert parse_requirement(str(parse_requirement("> 123456789.5"))).conditions == ((">", 123456789.5),)
    third = parse_requirement(f">= {1 / 3}")
    assert parse_requirement(str(third)).conditions == third.conditions


@pytest.mark.parametrize(
    "written", ["0.9", 0.9, "=> 0.9", ">= ninety", ">= nan", "> inf", "", ">= 1,", {}, {"mni": 1}, [], None, "!= 1"]
)
def test_what_is_no_requirement_is_refused_with_the_spec(written: Any, tmp_path: Any) -> None:
    from flows.spec.spec import parse_spec
    from trainer_lib.errors import ConfigError

    raw = {"name": "toy", "recipe": "recipe.py", "evaluate": {"require": {"test_accuracy": written}}}
    with pytest.raises(ConfigError) as caught:
        parse_spec(raw)
    assert caught.value.field is not None
    assert caught.value.field.startswith("evaluate.require.test_accuracy")
    assert '">= 0.9"' in str(caught.value.remedy)


def test_an_unknown_metric_names_the_nearest_and_a_model_that_was_not_evaluated_passes_nothing() -> None:
    with pytest.raises(GateError) as caught:
        verdict({"test_acuracy": ">= 0.9"}, accuracy=0.95).enforce("published")
    assert caught.value.field == "evaluate.require.test_acuracy"
    assert "'test_accuracy'" in str(caught.value.remedy)
    with pytest.raises(GateError, match="nothing was evaluated"):
        judge(EvaluateConfig(require={"test_accuracy": ">= 0"}), None).enforce("published")


def test_the_failure_names_every_missed_requirement_and_survives_a_process_boundary() -> None:
    found = verdict({"test_accuracy": ">= 0.9", "test_loss": "< 1", "overall_bleu": "> 10"}, accuracy=0.5, loss=3.0)
    with pytest.raises(GateError) as caught:
        found.enforce("published")
    error = from_record(caught.value.to_record())
    assert type(error) is GateError
    assert (error.exit_code, error.retryable) == (21, False)
    assert "test_accuracy is 0.5" in error.message
    assert "test_loss" in error.message
    assert [check["passed"] for check in found.to_dicts()] == [False, False, True]


def test_no_requirement_lets_everything_through() -> None:
    judge(EvaluateConfig(), None).enforce("published")


def test_a_threshold_is_in_no_key() -> None:
    assert EvaluateConfig.affects()["require"] == "nothing"
    assert PipelineSpec(name="toy", recipe="recipe.py").evaluate.require == {}
