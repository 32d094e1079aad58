"""What an evaluation cannot measure is refused before the training, as the data and the recipe show it by then."""

from __future__ import annotations

from pathlib import Path

import pytest

from flows.full_plan import plan_in_full
from flows.plan import Plan
from flows.results import PipelineResult
from tasks.stage import progress
from tests.support.runs import ran, run, spec_of
from tests.support.toy import RECIPE, project
from trainer_lib.errors import ConfigError, StorageGoneError

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


@pytest.fixture
def fresh(tmp_path: Path, prefect_server: str) -> Path:
    project(tmp_path / "project", recipe=GROUPED)
    return tmp_path / "project"


def refused(folder: Path, *overrides: str, field: str) -> ConfigError:
    """The refusal of a run whose training never began, which a plan of the prepared data finds as well."""
    result = run(folder, *overrides)
    assert isinstance(result.error, ConfigError), result.error
    assert ran(result) == {"prepare-data"}
    assert not (folder / "store" / "stages" / "train").exists(), "no attempt, let alone a commit"
    assert result.error.field == field
    assert result.error.remedy
    planned = plan_in_full(Plan.of(spec_of(folder, *overrides)))
    assert [(each.field, each.is_fatal) for each in planned.obstacles] == [(field, True)]
    assert planned.obstacles[0].what == result.error.message
    return result.error


def test_a_column_of_too_many_values_is_no_slice(fresh: Path) -> None:
    splits = "evaluate.splits=[test, train]"  # of 16 rows and of 64
    error = refused(fresh, "evaluate.slices=[sign, group]", splits, field="evaluate.slices")
    assert error.value == "group"
    assert "'train'" in error.message


def test_a_gate_on_a_metric_that_does_not_exist(fresh: Path) -> None:
    error = refused(fresh, "evaluate.require={test_eror: < 9}", field="evaluate.require.test_eror")
    assert error.remedy == 'Did you mean "test_error"?'


def test_a_metric_of_the_other_kind(fresh: Path) -> None:
    error = refused(fresh, "evaluate.metrics=[rmse, f1_macro]", field="evaluate.metrics")
    assert error.value == "f1_macro"
    assert "median_absolute_error" in str(error.remedy)


def test_a_metric_of_a_package_that_cannot_be_called(fresh: Path) -> None:
    written = "{name: sklearn.metrics:mean_pinball_loss, alhpa: 0.9}"
    error = refused(fresh, f"evaluate.metrics=[mae, {written}]", field="evaluate.metrics")
    assert (error.value, error.remedy) == ("alhpa", 'Did you mean "alpha"?')


@pytest.mark.parametrize("setting", ["metrics=[mae]", "confidence=0.9"])
def test_what_needs_all_rows_beside_a_metric_object(fresh: Path, setting: str) -> None:
    (fresh / "recipe.py").write_text(OBJECT)
    name, _, value = setting.partition("=")
    error = refused(fresh, f"evaluate.{setting}", field=f"evaluate.{name}")
    assert "batch by batch" in error.message
    assert value.strip("[]") in str(error.value)


def test_what_needs_all_rows_beside_metrics_by_batch(fresh: Path) -> None:
    refused(fresh, "evaluate.confidence=0.9", "evaluate.args.batch_eval_metrics=true", field="evaluate.confidence")


def test_a_recipe_of_evaluate_alone_counts(fresh: Path) -> None:
    own = fresh / "measured.py"
    own.write_text("import torchmetrics\n\ncompute_metrics = torchmetrics.MeanSquaredError()\n")
    refused(fresh, f"evaluate.recipe={own}", "evaluate.slices=[sign]", field="evaluate.slices")


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
    assert {"mae", "r2", "most", "most/sign/0", "rows/sign/1"} <= set(metrics_of(first)["test"])
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


def metrics_of(result: PipelineResult) -> dict[str, dict[str, float]]:
    outcome = result.outcome("evaluate")
    assert outcome is not None
    assert outcome.manifest is not None
    found: dict[str, dict[str, float]] = outcome.manifest["metrics"]
    return found


def test_a_storage_that_is_renamed_while_the_training_runs_ends_it_and_is_not_made_again(fresh: Path) -> None:
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
