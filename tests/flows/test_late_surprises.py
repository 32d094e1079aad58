"""What an evaluation cannot measure is refused before the training; a metric that chooses the weights is the only one
that counts for train."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path

import pytest

from flows.full_plan import plan_in_full
from flows.plan import Plan
from tasks.stage import progress, runner
from tasks.stage.stage_code import code_of
from tests.support.runs import ran, reason, run, spec_of
from tests.support.toy import RECIPE, project
from trainer_lib.errors import ConfigError, StorageGoneError
from trainer_lib.locks.lease import acquire_lease

GROUPED = RECIPE.replace('yield {"x"', 'yield {"group": f"{x:.9f}", "sign": int(x > 0), "x"')
OBJECT = (
    GROUPED.partition("def compute_metrics")[0]
    + "import torchmetrics\n\ncompute_metrics = torchmetrics.MeanSquaredError()\n"
)
# The model as it begins cannot be evaluated; the trained one can.
UNREADY = GROUPED.replace(
    "            y = self",
    """            if not self.training and self.linear.weight.abs() < 0.5:
                raise ValueError("not trained yet")
            y = self""",
).replace("Linear(1, 1)\n", "Linear(1, 1)\n            torch.nn.init.zeros_(self.linear.weight)\n")


OBJECT_ALONE = "import torchmetrics\n\ncompute_metrics = torchmetrics.MeanSquaredError()\n"
PINBALL = "{name: sklearn.metrics:mean_pinball_loss, alhpa: 0.9}"


@pytest.fixture
def fresh(tmp_path: Path, prefect_server: str) -> Path:
    return project(tmp_path / "project", recipe=GROUPED).parent


@pytest.mark.parametrize(
    ("recipe", "overrides", "field", "value", "words"),
    [
        # Splits of 16 rows and of 64.
        (GROUPED, ("slices=[sign, group]", "splits=[test, train]"), "slices", "group", "'train'"),
        (GROUPED, ("require={test_eror: < 9}",), "require.test_eror", None, 'Did you mean "test_error"?'),
        (GROUPED, ("metrics=[rmse, f1_macro]",), "metrics", "f1_macro", "median_absolute_error"),
        (GROUPED, (f"metrics=[mae, {PINBALL}]",), "metrics", "alhpa", 'Did you mean "alpha"?'),
        (OBJECT, ("metrics=[mae]",), "metrics", "mae", "batch by batch"),
        (OBJECT, ("confidence=0.9",), "confidence", "0.9", "batch by batch"),
        (GROUPED, ("confidence=0.9", "args.batch_eval_metrics=true"), "confidence", "0.9", "batch"),
        (GROUPED, ("recipe={own}", "slices=[sign]"), "slices", None, ""),
    ],
    ids=["slice", "gate", "kind", "argument", "metric object", "object's interval", "by batch", "own recipe"],
)
def test_what_cannot_be_measured_is_refused_by_the_run_before_it_trains_and_by_a_plan(
    fresh: Path, recipe: str, overrides: tuple[str, ...], field: str, value: str | None, words: str
) -> None:
    (fresh / "recipe.py").write_text(recipe)
    (fresh / "measured.py").write_text(OBJECT_ALONE)
    wanted = [f"evaluate.{each}".replace("{own}", str(fresh / "measured.py")) for each in overrides]
    error = run(fresh, *wanted).error
    assert isinstance(error, ConfigError), error
    assert not (fresh / "store" / "stages" / "train").exists(), "no attempt, let alone a commit"
    assert list(fresh.glob("store/stages/prepare-data/*/COMMIT.json"))
    assert error.field == f"evaluate.{field}"
    assert value is None or value in str(error.value)
    assert error.remedy
    assert words in f"{error.message} {error.remedy}"
    [obstacle] = plan_in_full(Plan.of(spec_of(fresh, *wanted))).obstacles
    assert (obstacle.field, obstacle.is_fatal, obstacle.what) == (error.field, True, error.message)


def test_what_can_be_measured_trains_and_is_not_tried_again(fresh: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    good = (
        "evaluate.metrics=[mae, r2, {name: sklearn.metrics:max_error, as: most}]",
        "evaluate.slices=[sign]",
        "publish.enabled=false",
    )
    events: list[object] = []
    with progress.subscribe(lambda event: events.append(event.get("message")) if "warning" in event.values() else None):
        first = run(fresh, *good)
    first.raise_for_error()
    assert events == []
    [metrics] = fresh.glob("store/stages/evaluate/*/metrics.json")
    assert {"mae", "r2", "most", "most/sign/0", "rows/sign/1"} <= set(json.loads(metrics.read_text())["test"])
    # The model is there: another metric is measured, and nothing is tried before.
    monkeypatch.setattr("flows.run_stages.rehearse_evaluation", None)
    again = run(fresh, *good, "evaluate.metrics=[mae, bias]")
    again.raise_for_error()
    assert "evaluate" in ran(again)
    assert "train" not in ran(again)


def test_a_trial_that_fails_by_itself_does_not_stop_the_training(fresh: Path) -> None:
    (fresh / "recipe.py").write_text(UNREADY)
    warned: list[str] = []
    with progress.subscribe(lambda event: warned.append(str(event.get("message")))):
        result = run(fresh, "evaluate.metrics=[mae]", "train.args.max_steps=60", "publish.enabled=false")
    result.raise_for_error()
    assert any("could not be tried before the training" in each and "not trained yet" in each for each in warned)


def test_a_storage_that_is_renamed_while_the_training_runs_ends_it_and_is_not_made_again(
    fresh: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # This process lives on, so the lease that it could not release has to expire.
    monkeypatch.setattr(runner, "acquire_lease", partial(acquire_lease, ttl_s=6.0))
    store, renamed = fresh / "store", fresh / "renamed"

    def rename(event: progress.Event) -> None:
        if event["event"] == "log" and not renamed.exists():
            store.rename(renamed)

    # Without MLflow: one of its calls that is under way may make its folder again. Its other calls are refused
    # (tests/unit/storage/test_storage_local.py).
    with progress.subscribe(rename):
        result = run(fresh)
    assert isinstance(result.error, StorageGoneError)
    assert not store.exists(), sorted(store.rglob("*"))
    renamed.rename(store)
    again = run(fresh)
    assert again.ok
    assert "train" in ran(again)


# -- the metric that chooses -------------------------------------------------------------------------------------------
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
def folder(tmp_path: Path) -> Path:
    return project(tmp_path / "project").parent


def train_key(folder: Path, *overrides: str) -> str:
    return Plan.of(spec_of(folder, *overrides)).early_keys["train"].digest


def test_a_metric_that_chooses_is_measured_while_training_and_others_train_nothing_again(
    folder: Path, prefect_server: str
) -> None:
    first = run(folder, *CHOSEN)
    first.raise_for_error()
    [history] = folder.glob("store/stages/train/*/history.json")
    evaluations = [entry for entry in json.loads(history.read_text()) if "eval_loss" in entry]
    assert [entry["step"] for entry in evaluations] == [4, 8]
    assert all({"eval_mae", "eval_error"} <= set(entry) for entry in evaluations)
    assert not any("eval_r2" in entry for entry in evaluations)
    [state] = folder.glob("store/stages/train/*/checkpoints/checkpoint-8/trainer_state.json")
    assert json.loads(state.read_text())["best_metric"] == min(entry["eval_mae"] for entry in evaluations)
    again = run(folder, *CHOSEN, "evaluate.metrics=[mae, bias]")
    again.raise_for_error()
    assert {"train", "evaluate"} & ran(again) == {"evaluate"}
    assert reason(again, "evaluate").startswith("metrics")


def test_only_the_metric_that_chooses_counts_for_the_key_of_train(folder: Path) -> None:
    plain = train_key(folder)
    assert train_key(folder, "evaluate.metrics=[mae]") == plain, "it chooses nothing"
    chosen = train_key(folder, *CHOSEN)
    assert train_key(folder, *CHOSEN, "evaluate.metrics=[bias, mae]") == chosen
    assert train_key(folder, *CHOSEN, f"evaluate.metrics=[{{name: {PACKAGES}, as: mae}}]") != chosen
    own = (*CHOSEN, "train.args.metric_for_best_model=error")
    assert train_key(folder, *own) == train_key(folder, *own, "evaluate.metrics=[]"), "it is the recipe's own"


def test_a_metric_of_a_package_chooses_by_the_name_of_its_result(folder: Path) -> None:
    spec = spec_of(folder, f"evaluate.metrics=[{PACKAGES}]", *CHOSEN[1:])
    name = "train.args.metric_for_best_model=eval_median_absolute_error"
    found = Plan.of(spec_of(folder, f"evaluate.metrics=[{PACKAGES}]", *CHOSEN[1:], name)).context.metrics
    assert [each.name for each in found] == [PACKAGES]
    assert Plan.of(spec).context.metrics == ()  # mae is left to the recipe, which has a compute_metrics


def test_less_is_better_of_some(folder: Path) -> None:
    without = [each for each in CHOSEN if "greater_is_better" not in each]
    with pytest.raises(ConfigError, match="Less is better of mae") as caught:
        Plan.of(spec_of(folder, *without))
    assert caught.value.field == "train.args.greater_is_better"
    assert Plan.of(spec_of(folder, *without, "train.args.metric_for_best_model=r2")).context.metrics


def test_a_metric_that_nothing_gives_is_refused_before_the_training(folder: Path) -> None:
    (folder / "recipe.py").write_text(RECIPE.partition("def compute_metrics")[0])
    wanted = (*CHOSEN, "evaluate.metrics=[r2]", "train.args.metric_for_best_model=eval_r22")
    with pytest.raises(ConfigError, match="gives the loss alone") as caught:
        Plan.of(spec_of(folder, *wanted))
    assert (caught.value.field, caught.value.value) == ("train.args.metric_for_best_model", "eval_r22")
    assert caught.value.remedy == 'Did you mean "r2"?'
    with pytest.raises(ConfigError) as caught:
        Plan.of(spec_of(folder, *wanted, "train.args.metric_for_best_model=accuracy"))
    assert "evaluate.metrics" in str(caught.value.remedy)
    plan = Plan.of(spec_of(folder, *wanted, "train.args.metric_for_best_model=loss"))
    assert not code_of(plan.spec.train, plan.context).defines("compute_metrics")
