"""Whole pipelines whose MLflow is out of reach, and runs that a signal meets while they close."""

from __future__ import annotations

import contextlib
import json
import shutil
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from flows.run_record import RunRecord
from tests.support.command import Cli, running
from tests.support.mlflow_store import client, points, runs
from tests.support.runs import ALL, ran, run
from tests.support.toy import project


@pytest.fixture
def away(folder: Path) -> Iterator[Any]:
    """A function that takes MLflow's database away, or gives it back."""
    database = folder / "store" / "mlflow.db"

    def switch(gone: bool) -> None:
        if gone:
            database.rename(database.with_suffix(".away"))
            database.mkdir()  # nothing can be opened there
        else:
            database.rmdir()
            database.with_suffix(".away").rename(database)

    yield switch
    with contextlib.suppress(OSError):
        switch(False)


def uri(folder: Path) -> str:
    return f"sqlite:///{folder / 'store' / 'mlflow.db'}"


def test_a_run_without_mlflow_is_delivered_whole_by_the_next_one_which_finds_everything_cached(
    folder: Path, away: Any, caplog: pytest.LogCaptureFixture
) -> None:
    settings = ("tracking.enabled=true", "train.args.learning_rate=1e-2")
    away(True)
    first = run(folder, *settings)
    assert ran(first) == ALL - {"prepare-data"}
    assert first.mlflow_run_id is None
    assert "1 run (" in (first.mlflow_waiting or "")
    assert len([record for record in caplog.records if "MLflow" in record.getMessage()]) == 1
    away(False)
    again = run(folder, *settings)
    assert ran(again) == set()
    assert again.mlflow_waiting is None
    whole, late = runs(uri(folder))
    assert again.mlflow_run_id == late.info.run_id
    assert late.info.status == "FINISHED"
    for key in (name for name in whole.data.metrics if not name.startswith("system/")):  # the machine's load is sampled
        late_steps, steps = ([step for step, _ in points(uri(folder), each.info.run_id, key)] for each in (late, whole))
        assert late_steps == steps, key
    assert "report.html" in {path.name for path in Path(late.info.artifact_uri.removeprefix("file://")).iterdir()}
    connected = client(uri(folder))
    # Models of both runs have the same names.
    models = connected.search_logged_models([late.info.experiment_id])
    late_ones = [each for each in models if each.source_run_id == late.info.run_id]
    assert sorted(each.name for each in late_ones) == ["checkpoint-4", "checkpoint-8", "toy"]
    mine = {each.name: each for each in late_ones}
    assert all(str(each.status) == "READY" for each in mine.values())
    linked = {(each.key, each.step) for each in connected.get_logged_model(mine["toy"].model_id).metrics}
    assert ("test/error", 8) in linked
    assert late.data.tags["trainflow.published_url"]
    assert len(run(folder, *settings).to_dict()["stages"]) == 5
    assert len(runs(uri(folder))) == 2


def test_sync_delivers_by_itself(folder: Path, away: Any, cli: Cli) -> None:
    settings = ("tracking.enabled=true", "predict.rows_per_file=7")
    away(True)
    assert run(folder, *settings).mlflow_waiting
    refused = cli("sync", "pipeline.yaml", cwd=folder)
    assert refused.code == 14
    assert "still waits for MLflow" in refused.err
    assert "Traceback" not in refused.err
    away(False)
    done = cli("sync", "pipeline.yaml", "--json", cwd=folder)
    assert (done.code, json.loads(done.out)["ok"]) == (0, True), done.err
    assert [each.info.status for each in runs(uri(folder))] == ["FINISHED", "FINISHED"]
    assert run(folder, *settings).mlflow_waiting is None


# -- signals while a run closes ---------------------------------------------------------------------------------------


def test_a_signal_while_the_run_closes_neither_stops_it_nor_makes_another_run(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.rmtree(folder / "store" / "stages" / "predict")
    real = RunRecord._write_report
    interrupts = iter([KeyboardInterrupt, KeyboardInterrupt])

    def interrupted(self: RunRecord) -> None:
        real(self)
        for interrupt in interrupts:
            raise interrupt

    monkeypatch.setattr(RunRecord, "_write_report", interrupted)
    result = run(folder, "tracking.enabled=true")
    result.raise_for_error()
    assert ran(result) == {"predict"}
    monkeypatch.undo()
    run(folder, "tracking.enabled=true").raise_for_error()
    assert [each.info.status for each in runs(uri(folder))] == ["FINISHED", "FINISHED"]


def test_sigterm_while_the_run_waits_for_mlflow_ends_it_as_finished(tmp_path: Path) -> None:
    spec = project(tmp_path / "project")
    hang = tmp_path / "hang.py"
    hang.write_text(
        "import sys, time\n"
        "from tasks.tracking import TrackedRun\n"
        "finish = TrackedRun.finish\n"
        "def slow(self, *args, **kwargs):\n"
        "    print('closing now', flush=True)\n"
        "    time.sleep(1)\n"
        "    finish(self, *args, **kwargs)\n"
        "TrackedRun.finish = slow\n"
        "from flows.cli.main import main\n"
        "main(sys.argv[1:])\n"
    )
    arguments = ("run", spec, "--only", "prepare", "tracking.enabled=true", "prepare.launch=in_process")
    with running(*arguments, log=tmp_path / "log", cwd=spec.parent, program=hang) as command:
        command.wait_for("closing now")
        assert command.stop(signal.SIGTERM) == 0, command.output
    [record] = (tmp_path / "project" / "store" / "runs").glob("*/run.json")
    assert json.loads(record.read_text())["status"] == "FINISHED"
    [finished] = runs(f"sqlite:///{tmp_path}/project/store/mlflow.db")
    assert finished.info.status == "FINISHED"
