"""A run that is killed: `trainflow status` says so, ends it in Prefect, and the same command goes on with it."""

from __future__ import annotations

import contextlib
import json
import sqlite3
from pathlib import Path
from typing import Any

import pytest

from tests.support import toy
from tests.support.command import engine, running, trainflow
from tests.support.prefect_home import make_home

SLOW_RECIPE = toy.RECIPE.replace("y = self.linear(", "import time; time.sleep(0.05); y = self.linear(")
SHORT = (
    "evaluate.enabled=false",
    "predict.enabled=false",
    "publish.enabled=false",
    "train.args.max_steps=80",
    "train.args.save_steps=4",
)


@pytest.mark.timeout(240)
def test_a_killed_run_is_seen_marked_and_continued(tmp_path: Path, prefect_database: Path) -> None:
    spec = toy.project(tmp_path / "project", recipe=SLOW_RECIPE)
    storage = tmp_path / "project" / "store"
    with engine(make_home(tmp_path / "prefect", prefect_database)) as env:
        with running("run", spec, *SHORT, log=tmp_path / "log", env=env) as command:
            command.wait_for("train         step ")
            [found] = status(storage, env)
            assert (found["state"], found["stage"]) == ("running", "train")
            assert found["process"].startswith(f"process {command.process.pid} on ")
            command.process.kill()
            command.process.wait()
        assert states(tmp_path / "prefect") == {"RUNNING"}
        shown = trainflow("status", spec, env=env).out
        assert " died " in shown
        assert "train: step " in shown or "train: started" in shown
        assert states(tmp_path / "prefect") == {"CRASHED"}
        assert json.loads(next(storage.glob("runs/*/run.json")).read_bytes())["status"] == "KILLED"
        [found] = status(storage, env)
        assert (found["state"], found["process"]) == ("died", None)
        assert found["died"].startswith("train: ")

        done = trainflow("run", spec, *SHORT, env=env)
        assert done.code == 0, done.err
        assert [each["state"] for each in status(storage, env)] == ["finished"]
        assert not list(storage.glob("runs/*/alive/*"))


def status(storage: Path, env: dict[str, str]) -> list[dict[str, Any]]:
    done = trainflow("status", "--storage", storage, "--json", env=env)
    assert done.code == 0, done.err
    runs: list[dict[str, Any]] = json.loads(done.out)["runs"]
    return runs


def states(home: Path) -> set[str]:
    """The states of all flow runs, and of the last task run of each."""
    with contextlib.closing(sqlite3.connect(home / "prefect.db")) as database:
        flows = database.execute("select state_type from flow_run")
        tasks = database.execute("select state_type from task_run where name like 'train%'")
        return {state for rows in (flows, tasks) for (state,) in rows}
