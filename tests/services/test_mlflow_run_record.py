"""The record of a run and its MLflow run end together, wherever the process dies."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from flows.plan import Plan
from flows.results import PipelineResult
from flows.run_record import RunRecord
from flows.spec.spec import load_spec
from tests.support.mlflow_store import fresh_store, runs
from tests.support.toy import project


def test_a_run_is_recorded_as_finished_only_once_its_end_waits_for_mlflow(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A finished run is never taken up again: a process that died in between would leave it open in MLflow."""
    spec = load_spec(project(tmp_path / "project"), ("tracking.enabled=true", f"storage={tmp_path / 'store'}"))
    uri = fresh_store(tmp_path / "store")
    save = RunRecord._save

    def dying(record: RunRecord, content: dict[str, Any]) -> None:
        save(record, content)
        if content["status"] == "FINISHED" and record.tracked is not None and record.tracked._session is not None:
            record.tracked._session.close()  # nothing more is written, and every process may deliver it
            record.tracked._session = None

    monkeypatch.setattr(RunRecord, "_save", dying)
    with RunRecord(Plan.of(spec), PipelineResult(spec.name, "", spec.storage)):
        pass
    assert [run.info.status for run in runs(uri)] == ["FINISHED"]
