"""A metric by name that chooses the weights is measured while training, and is the only one that counts for train."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from flows.plan import Plan
from tasks.stage.stage_code import code_of
from tests.support.runs import ran, reason, run, spec_of
from tests.support.toy import RECIPE, project
from trainer_lib.errors import ConfigError

CHOSEN = (
    "evaluate.metrics=[mae, r2]",
    "train.eval_split=test",
    "train.args.eval_strategy=steps",
    "train.args.eval_steps=4",
    "train.args.load_best_model_at_end=true",
    "train.args.metric_for_best_model=mae",
    "train.args.greater_is_better=false",
    "publish.enabled=false",
)
PACKAGES = "sklearn.metrics:median_absolute_error"


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return project(tmp_path / "project")


def train_key(folder: Path, *overrides: str) -> str:
    return Plan.of(spec_of(folder, *overrides)).early_keys["train"].digest


def test_it_is_measured_while_training_and_others_train_nothing_again(path: Path, prefect_server: str) -> None:
    first = run(path.parent, *CHOSEN)
    first.raise_for_error()
    [history] = path.parent.glob("store/stages/train/*/history.json")
    evaluations = [entry for entry in json.loads(history.read_text()) if "eval_loss" in entry]
    assert [entry["step"] for entry in evaluations] == [4, 8]
    assert all({"eval_mae", "eval_error"} <= set(entry) for entry in evaluations)
    assert not any("eval_r2" in entry for entry in evaluations)
    [state] = path.parent.glob("store/stages/train/*/checkpoints/checkpoint-8/trainer_state.json")
    assert json.loads(state.read_text())["best_metric"] == min(entry["eval_mae"] for entry in evaluations)
    again = run(path.parent, *CHOSEN, "evaluate.metrics=[mae, bias]")
    again.raise_for_error()
    assert {"train", "evaluate"} & ran(again) == {"evaluate"}
    assert reason(again, "evaluate").startswith("metrics")


def test_only_the_metric_that_chooses_counts_for_the_key_of_train(path: Path) -> None:
    folder = path.parent
    plain = train_key(folder)
    assert train_key(folder, "evaluate.metrics=[mae]") == plain, "it chooses nothing"
    chosen = train_key(folder, *CHOSEN)
    assert train_key(folder, *CHOSEN, "evaluate.metrics=[bias, mae]") == chosen
    assert train_key(folder, *CHOSEN, f"evaluate.metrics=[{{name: {PACKAGES}, as: mae}}]") != chosen
    own = (*CHOSEN, "train.args.metric_for_best_model=error")
    assert train_key(folder, *own) == train_key(folder, *own, "evaluate.metrics=[]"), "it is the recipe's own"


def test_a_metric_of_a_package_chooses_by_the_name_of_its_result(path: Path) -> None:
    spec = spec_of(path.parent, f"evaluate.metrics=[{PACKAGES}]", *CHOSEN[1:])
    name = "train.args.metric_for_best_model=eval_median_absolute_error"
    found = Plan.of(spec_of(path.parent, f"evaluate.metrics=[{PACKAGES}]", *CHOSEN[1:], name)).context.metrics
    assert [each.name for each in found] == [PACKAGES]
    assert Plan.of(spec).context.metrics == ()  # mae is left to the recipe, which has a compute_metrics


def test_less_is_better_of_some(path: Path) -> None:
    without = [each for each in CHOSEN if "greater_is_better" not in each]
    with pytest.raises(ConfigError, match="Less is better of mae") as caught:
        Plan.of(spec_of(path.parent, *without))
    assert caught.value.field == "train.args.greater_is_better"
    assert Plan.of(spec_of(path.parent, *without, "train.args.metric_for_best_model=r2")).context.metrics


def test_a_metric_that_nothing_gives_is_refused_before_the_training(path: Path) -> None:
    path.with_name("recipe.py").write_text(RECIPE.partition("def compute_metrics")[0])
    wanted = (*CHOSEN, "evaluate.metrics=[r2]", "train.args.metric_for_best_model=eval_r22")
    with pytest.raises(ConfigError, match="gives the loss alone") as caught:
        Plan.of(spec_of(path.parent, *wanted))
    assert (caught.value.field, caught.value.value) == ("train.args.metric_for_best_model", "eval_r22")
    assert caught.value.remedy == 'Did you mean "r2"?'
    with pytest.raises(ConfigError) as caught:
        Plan.of(spec_of(path.parent, *wanted, "train.args.metric_for_best_model=accuracy"))
    assert "evaluate.metrics" in str(caught.value.remedy)
    plan = Plan.of(spec_of(path.parent, *wanted, "train.args.metric_for_best_model=loss"))
    assert not code_of(plan.spec.train, plan.context).defines("compute_metrics")
