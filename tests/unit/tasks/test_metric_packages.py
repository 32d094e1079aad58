"""Metrics of packages in a spec: how they are written, what refuses them, and what of them counts for a key."""

from __future__ import annotations

from importlib import metadata
from pathlib import Path
from typing import Any

import pytest

from flows.spec.checks import find_measured
from flows.spec.spec import PipelineSpec, load_spec
from tasks.configs import EvaluateConfig
from tasks.stage import keys as _keys
from tasks.stage.context import StageContext
from tasks.stage.manifest import StageManifest
from tasks.stage.metric_packages import metric_packages
from tests.support.toy import project
from trainer_lib.errors import ConfigError
from trainer_lib.metric_names import read_metrics

KAPPA = "sklearn.metrics:cohen_kappa_score"
DATA = StageManifest("prepare-data", "", "", "d" * 64)
MODEL = StageManifest("train", "", "", "m" * 64)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return project(tmp_path / "project")


def spec_of(path: Path, metrics: str, *more: str) -> PipelineSpec:
    return load_spec(path, (f"evaluate.metrics={metrics}", *more))


def fields(path: Path, metrics: list[Any]) -> dict[str, Any]:
    context = StageContext(name="toy", recipe=str(path.with_name("recipe.py")), storage="store")
    return _keys.evaluate_key(EvaluateConfig(metrics=metrics), context, DATA, MODEL).fields


def test_they_are_written_as_names_or_with_what_they_are_called_with(path: Path) -> None:
    entry = "{name: sklearn.metrics:fbeta_score, as: f2, beta: 2, average: macro}"
    found = spec_of(path, f"[accuracy, {KAPPA}, {entry}, {{name: rmse}}]").evaluate.metrics
    written = {"name": "sklearn.metrics:fbeta_score", "as": "f2", "beta": 2, "average": "macro"}
    assert found == ["accuracy", KAPPA, written, "rmse"]
    assert spec_of(path, "[accuracy]").to_record()["evaluate"]["metrics"] == ["accuracy"]


@pytest.mark.parametrize(
    ("metrics", "value", "says"),
    [
        ("[mae, f1_marco]", "f1_marco", "f1_macro"),
        ("[sklearn.metrics.f1_score]", "sklearn.metrics.f1_score", "No metric has this name"),
        ("[{name: mae, beta: 2}]", "beta", "takes no arguments"),
        ("[{beta: 2}]", "beta", "a mapping with a name"),
        ("[3]", "3", "a mapping with a name"),
        (f"[{KAPPA}, '{KAPPA}']", "cohen_kappa_score", "as: …"),
    ],
)
def test_entries_that_are_none_are_refused_as_the_spec_is_read(path: Path, metrics: str, value: str, says: str) -> None:
    with pytest.raises(ConfigError) as caught:
        spec_of(path, metrics)
    assert str(caught.value.field).startswith("evaluate.metrics")
    assert value in str(caught.value)
    assert says in str(caught.value)


@pytest.mark.parametrize("where", ["scores.py", "src/scores.py", "scores/__init__.py"])
def test_code_of_the_project_belongs_into_the_recipe(path: Path, where: str) -> None:
    file = path.parent / where
    file.parent.mkdir(exist_ok=True)
    file.write_text("def kappa(y_true, y_pred): return 0.0\n")
    with pytest.raises(ConfigError, match="belongs to the project") as caught:
        spec_of(path, "[scores:kappa]")
    assert caught.value.value == "scores:kappa"
    assert "compute_metrics" in str(caught.value.remedy)


def test_the_version_of_the_package_counts_for_the_key(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = fields(path, ["mae", KAPPA, "mlflow.metrics:genai", "nowhere_at_all:f"])["metric_packages"]
    assert found["scikit-learn"] == metadata.version("scikit-learn")
    assert found["mlflow"] == metadata.version("mlflow")
    assert found["nowhere_at_all"] == "not installed"
    assert "metric_packages" not in fields(path, ["mae"]), "the keys of before stay"
    monkeypatch.setattr("tasks.stage.metric_packages.metadata.version", lambda name: "0.0.1")
    assert metric_packages(read_metrics([KAPPA])) == {"scikit-learn": "0.0.1"}


def test_arguments_count_for_the_key(path: Path) -> None:
    name = "sklearn.metrics:fbeta_score"
    keys = [fields(path, [{"name": name, "beta": beta}]) for beta in (1, 2)]
    assert keys[0]["metrics"] != keys[1]["metrics"]


def test_which_metrics_there_will_be_is_known_only_where_none_is_of_a_package(path: Path) -> None:
    spec = spec_of(path, "[{name: mae, as: off}]")
    assert find_measured(spec, spec.resolver) == ["error", "off"]
    spec = spec_of(path, f"[{KAPPA}]")
    assert find_measured(spec, spec.resolver) is None
