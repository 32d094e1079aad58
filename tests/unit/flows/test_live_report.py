"""The report while a run is at work, and what Prefect is given at its end."""

from __future__ import annotations

import json
import math
import socket
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from flows import live_report as _live
from flows import prefect_artifacts as _artifacts
from flows.charts import draw_images
from flows.plan import Plan
from flows.report import REPORT
from flows.results import PipelineResult, StageOutcome
from flows.spec.spec import load_spec
from tasks.prefect_internals import settings_for_every_thread
from tasks.stage.progress import publish
from tests.support.toy import project
from trainer_lib.errors import GateError
from trainer_lib.storage import Store

HISTORY = [{"step": step, "loss": 1 / step} for step in range(1, 9)]


def result(**more: Any) -> PipelineResult:
    manifest = {"metrics": {"test": {"accuracy": 0.5, "loss": math.nan}}, "facts": {}}
    stages = [
        StageOutcome("train", "ran", "args|seed: 1 -> 2", 12.0, None, {"model": "/data/model"}),
        StageOutcome("evaluate", "ran", "never run before", 2.0, manifest),
    ]
    return PipelineResult("toy", "k" * 64, "/data", stages, report_url="/data/runs/k/report.html", **more)


def wait_for_page(path: Path, word: str) -> str:
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        text = path.read_text() if path.exists() else ""
        if word in text:
            assert text.endswith("</html>"), "a reader never sees a part of it"
            return text
        time.sleep(0.02)
    raise AssertionError(f"{word} did not appear")


def test_the_report_follows_the_run_and_reloads_itself(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_live, "EVERY_S", 0.05)
    plan = Plan.of(load_spec(project(tmp_path / "project"), ["train.args.learning_rate=0.125"]))
    folder = Store.open(tmp_path / "run")
    page = tmp_path / "run" / REPORT
    with _live.live_report(plan, PipelineResult("toy", "k" * 64, plan.spec.storage), folder):
        publish({"event": "stage", "stage": "prepare-data", "status": "cached", "reason": "committed"})
        time.sleep(0.2)
        assert not page.exists(), "a run that changes nothing leaves the report alone"
        publish({"event": "stage", "stage": "train", "status": "started", "reason": "never run before"})
        publish({"event": "log", "stage": "train", "step": 2, "max_steps": 8, "logs": {"loss": 0.5}})
        publish({"event": "log", "stage": "train", "step": 4, "max_steps": 8, "logs": {"loss": 0.25}})
        text = wait_for_page(page, "step 4/8")
        for part in ('http-equiv="refresh"', "At work", "<svg", "train.args.learning_rate", "0.125", "cores"):
            assert part in text
        assert "learning_rate: 0.125" in text, "the spec"
    before = page.read_bytes()
    time.sleep(0.2)
    assert page.read_bytes() == before
    assert [each.name for each in page.parent.iterdir()] == [REPORT]


def test_prefect_gets_a_summary_tables_and_the_curve() -> None:
    gates = [{"metric": "test_accuracy", "requirement": ">= 0.9", "value": 0.5, "passed": False}]
    error = GateError("The model is not published.")
    found = {
        each["key"]: each for each in _artifacts.make_artifacts(result(gates=gates, error=error), draw_images(HISTORY))
    }
    assert set(found) == {"summary", "metrics", "gates", "loss"}
    text = found["summary"]["data"]
    assert "args\\|seed" in text, "a reason does not end its cell"
    assert "`/data/model`" in text
    assert "`/data/runs/k/report.html`" in text
    assert "GateError" in text
    rows = json.loads(found["metrics"]["data"])
    assert {"split": "test", "metric": "loss", "value": "nan"} in rows
    assert json.loads(found["gates"]["data"])[0]["passed"] is False
    assert found["loss"]["data"].startswith("data:image/png;base64,iVBOR")


def test_links_are_made_to_web_addresses_alone() -> None:
    text = _artifacts.make_artifacts(result(run_url="https://mlflow/x", mlflow_run_id="f"), {})[0]["data"]
    assert "[https://mlflow/x](https://mlflow/x)" in text
    assert draw_images([]) == {}


def test_a_server_that_hangs_costs_a_moment_and_no_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_artifacts, "LIMIT_S", 0.5)
    monkeypatch.setattr(_artifacts, "_flow_run_id", lambda: "00000000-0000-0000-0000-000000000001")

    with socket.create_server(("127.0.0.1", 0)) as silent:
        address = f"http://127.0.0.1:{silent.getsockname()[1]}/api"
        from prefect.settings import PREFECT_API_URL

        with settings_for_every_thread({PREFECT_API_URL: address}):
            began = time.monotonic()
            with _artifacts.run_artifacts(result(), SimpleNamespace(pictures={})):
                pass
            assert time.monotonic() - began < 10
    for thread in threading.enumerate():
        if thread.name == "trainflow-artifacts":
            thread.join(30)  # its connection is gone with the server
