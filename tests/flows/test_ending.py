"""How a run ends when a signal, or the loss of Prefect's server, comes after its last stage."""

from __future__ import annotations

import json
import logging
import os
import shutil
import signal
import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import pytest

from flows import pipeline as _pipeline
from flows.cli.signals import stoppable
from flows.ending import Ending, expect_ending
from flows.results import PipelineResult
from flows.run_record import RunRecord
from tasks.stage.manifest import StageManifest
from tests.support.runs import newest_state, run
from trainer_lib.errors import Interrupted


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_after_the_last_commit_does_not_undo_the_run(
    folder: Path, number: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    write = RunRecord._write_report

    def signalled(record: RunRecord) -> None:
        os.kill(os.getpid(), number)
        write(record)

    monkeypatch.setattr(RunRecord, "_write_report", signalled)
    before = signal.getsignal(number)
    with stoppable(lambda _: None, remedy="") as stop:
        result = run(folder)
        assert signal.getsignal(number) is not before
        stop.too_late = True
        os.kill(os.getpid(), number)  # while the summary is shown
    assert result.ok
    assert signal.getsignal(number) is before
    assert newest_state() == "Completed"


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGHUP])
@pytest.mark.parametrize("moment", ["as the last lease ends", "as the last task ends", "as the flow has ended"])
def test_a_signal_at_the_very_end_does_not_undo_the_run(
    folder: Path, number: int, moment: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.rmtree(folder / "store" / "stages" / "push-to-hub")

    def signal_once(owner: type, name: str, is_last: Callable[[Any], bool]) -> None:
        method = getattr(owner, name)
        sent: list[int] = []

        def signalled(self: Any, *args: Any, **options: Any) -> Any:
            if not sent and is_last(self):
                sent.append(number)
                os.kill(os.getpid(), number)
            return method(self, *args, **options)

        monkeypatch.setattr(owner, name, signalled)

    if moment == "as the last lease ends":
        committed = partial(folder.glob, "store/stages/push-to-hub/*/COMMIT.json")
        signal_once(threading.Thread, "join", lambda each: "-lease-" in each.name and any(committed()))
    elif moment == "as the last task ends":
        signal_once(StageManifest, "store", lambda manifest: manifest.stage == "push-to-hub")
    else:
        monkeypatch.setattr(Ending, "restore", lambda ending: os.kill(os.getpid(), number))
    with stoppable(lambda _: None, remedy="") as stop:
        result = run(folder, on_closing=stop.come_too_late)
    assert result.ok
    assert [outcome.status for outcome in result.stages][-1] == "ran"
    assert newest_state() == "Completed"
    assert [*folder.glob("store/stages/push-to-hub/*/lease/*.released")]
    [record] = folder.glob("store/runs/*/run.json")
    assert json.loads(record.read_text())["status"] == "FINISHED"


def test_a_signal_before_the_last_commit_stops_the_run() -> None:
    with pytest.raises(Interrupted), stoppable(lambda _: None, remedy=""), expect_ending():
        os.kill(os.getpid(), signal.SIGINT)


def test_a_server_that_is_gone_at_the_end_does_not_undo_the_run(
    folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    flow = _pipeline.pipeline

    def unreported(*args: Any, **options: Any) -> None:
        flow(*args, **options)
        raise httpx.ConnectError("connection refused")

    monkeypatch.setattr(_pipeline, "pipeline", unreported)
    with caplog.at_level(logging.WARNING):
        result = run(folder)
    assert isinstance(result, PipelineResult)
    assert result.ok
    assert "did not learn how the run ended" in caplog.text


def test_a_report_that_cannot_be_made_changes_nothing_about_the_run(
    folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def broken(record: RunRecord) -> None:
        raise ValueError("no such template")

    monkeypatch.setattr(RunRecord, "_write_report", broken)
    shutil.rmtree(folder / "store" / "stages" / "predict")
    with caplog.at_level(logging.WARNING):
        assert run(folder, "tracking.enabled=true").ok
    assert "The run's report could not be written: no such template" in caplog.text
    [record] = folder.glob("store/runs/*/run.json")
    assert json.loads(record.read_bytes())["status"] == "FINISHED"


def test_secrets_are_masked_before_prefects_api_receives_a_log(prefect_server: str) -> None:
    from prefect import flow, get_run_logger, task

    from tasks.stage.progress import masked_api_logs

    @task
    def leaks() -> None:
        get_run_logger().warning("from %s", "https://user:hunter22x@host/data")
        raise ValueError("Authorization: Bearer abcdef0123456789abcdef")

    @flow(name="leaking")
    def leaking() -> None:
        leaks(return_state=True)

    with masked_api_logs():
        leaking(return_state=True)
    text = _logs("leaking")
    assert "https://***@host/data" in text
    assert "ValueError: Authorization: Bearer ***" in text
    assert "hunter22x" not in text


def _logs(flow: str) -> str:
    from prefect.client.orchestration import get_client
    from prefect.client.schemas.filters import FlowFilter, LogFilter

    from tasks.prefect_internals import send_queued

    send_queued(10)
    with get_client(sync_client=True) as client:
        [run] = client.read_flow_runs(flow_filter=FlowFilter.model_validate({"name": {"any_": [flow]}}))
        logs = client.read_logs(LogFilter.model_validate({"flow_run_id": {"any_": [run.id]}}))
    return "\n".join(log.message for log in logs)
