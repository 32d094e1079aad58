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

import pytest

from flows.cli.signals import stoppable
from flows.ending import Ending, expect_ending
from flows.run_record import RunRecord
from tasks.stage.manifest import StageManifest
from tests.support.runs import newest_state, run
from trainer_lib.errors import Interrupted, Preempted, TrainflowError


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


@pytest.mark.parametrize("moment", ["as the last lease ends", "as the last task ends", "as the flow has ended"])
def test_a_signal_at_the_very_end_does_not_undo_the_run(
    folder: Path, moment: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.rmtree(folder / "store" / "stages" / "push-to-hub")

    def signal_once(owner: type, name: str, is_last: Callable[[Any], bool]) -> None:
        method = getattr(owner, name)
        sent: list[int] = []

        def signalled(self: Any, *args: Any, **options: Any) -> Any:
            if not sent and is_last(self):
                sent.append(signal.SIGINT)
                os.kill(os.getpid(), signal.SIGINT)
            return method(self, *args, **options)

        monkeypatch.setattr(owner, name, signalled)

    if moment == "as the last lease ends":
        committed = partial(folder.glob, "store/stages/push-to-hub/*/COMMIT.json")
        signal_once(threading.Thread, "join", lambda each: "-lease-" in each.name and any(committed()))
    elif moment == "as the last task ends":
        signal_once(StageManifest, "store", lambda manifest: manifest.stage == "push-to-hub")
    else:
        monkeypatch.setattr(Ending, "restore", lambda ending: os.kill(os.getpid(), signal.SIGINT))
    with stoppable(lambda _: None, remedy="") as stop:
        result = run(folder, on_closing=stop.come_too_late)
    assert result.ok
    assert [outcome.status for outcome in result.stages][-1] == "ran"
    assert newest_state() == "Completed"
    assert [*folder.glob("store/stages/push-to-hub/*/lease/*.released")]
    [record] = folder.glob("store/runs/*/run.json")
    assert json.loads(record.read_text())["status"] == "FINISHED"


@pytest.mark.parametrize(
    ("number", "kind", "code"),
    [(signal.SIGINT, Interrupted, 130), (signal.SIGTERM, Preempted, 19), (signal.SIGUSR2, Preempted, 19)],
)
def test_a_signal_before_the_last_commit_stops_the_run(number: int, kind: type[TrainflowError], code: int) -> None:
    said: list[str] = []
    with pytest.raises(kind) as stopped, stoppable(said.append, remedy="The same command continues."), expect_ending():
        os.kill(os.getpid(), number)
    assert (stopped.value.exit_code, stopped.value.remedy) == (code, "The same command continues.")
    assert ["running work is saved first" in text for text in said] == [True]


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
