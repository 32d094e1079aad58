"""A run that registers its model shows in its report what became of the champion."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from flows.results import PipelineResult
from tests.support.mlflow_store import client, fresh_store
from tests.support.runs import run
from tests.support.toy import project


@pytest.fixture
def folder(tmp_path: Path, prefect_server: str) -> Path:
    project(tmp_path / "project")
    return tmp_path / "project"


def report_of(result: PipelineResult) -> str:
    result.raise_for_error()
    assert result.report_url is not None
    return " ".join(Path(result.report_url).read_text().split())


def test_the_report_has_the_comparison_with_the_champion(folder: Path, tmp_path: Path) -> None:
    uri = fresh_store(tmp_path / "mlflow")
    tracked: tuple[str, ...] = ("tracking.enabled=true", f"tracking.uri={uri}", "register.name=toy-line")
    tracked += ("register.metric=test_error", "register.greater_is_better=false", "publish.enabled=false")
    first = report_of(run(folder, *tracked, "train.args.max_steps=2"))
    assert "<p>toy-line version 1. It is the first champion.</p>" in first
    better = run(folder, *tracked, "train.args.max_steps=60")
    text = report_of(better)
    assert "toy-line version 2. test_error is better than that of version 1" in text
    assert "<td>1</td><td>test_error</td>" in text
    assert "<td>replaced</td>" in text
    assert int(client(uri).get_model_version_by_alias("toy-line", "champion").version) == 2
    # The copy in MLflow is that of the run's folder.
    [kept] = [each.path for each in client(uri).list_artifacts(better.mlflow_run_id) if each.path == "report.html"]
    logged: Any = client(uri).get_run(better.mlflow_run_id).info.artifact_uri
    assert "<td>replaced</td>" in (Path(logged.removeprefix("file://")) / kept).read_text()
    worse = report_of(run(folder, *tracked, "train.args.max_steps=3"))
    assert "<td>2</td><td>test_error</td>" in worse
    assert "<td>kept</td>" in worse


def test_a_server_that_is_away_holds_up_no_report(folder: Path) -> None:
    away = ("tracking.enabled=true", "tracking.uri=http://127.0.0.1:9", "register.name=toy-line")
    text = report_of(run(folder, *away, "publish.enabled=false"))
    assert "toy-line: MLflow had not answered when this was written." in text
