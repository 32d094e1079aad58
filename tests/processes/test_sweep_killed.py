"""A sweep that is stopped again and again, by Ctrl-C or a kill: every trial ends once, and none is trained twice."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from flows.results import flat_metrics
from tests.support.command import Running, engine, running, trainflow
from tests.support.sweeps import SLOW_RECIPE, attempts, checkpoints, sweep_project
from trainer_lib.errors import Interrupted


@pytest.mark.timeout(900)
@pytest.mark.parametrize(("runner", "stops"), [("processes", 2), ("prefect", 1)])
def test_a_killed_sweep_goes_on_and_trains_nothing_twice(tmp_path: Path, runner: str, stops: int) -> None:
    slots = ("sweep.parallel=2", f"sweep.runner={runner}")
    spec = sweep_project(tmp_path / "project", recipe=SLOW_RECIPE)
    storage = tmp_path / "project" / "store"
    with engine(tmp_path / "prefect") as env:
        for kill in range(stops):
            there = checkpoints(storage)
            with running("sweep", spec, *slots, log=tmp_path / f"{kill}.log", env=env) as command:
                deadline = time.monotonic() + 120
                while checkpoints(storage) == there:
                    assert command.process.poll() is None, command.output
                    assert time.monotonic() < deadline, command.output
                    time.sleep(0.05)
                if runner == "processes" and kill == 0:
                    _interrupt(command, storage)
                else:
                    command.process.kill()
        done = trainflow("sweep", spec, *slots, "--json", env=env)
        assert done.code == 0, done.out + done.err
        result = json.loads(done.out)
        assert [trial["state"] for trial in result["trials"]] == ["complete"] * 4
        assert result["wanted"] == 4

        by_training = attempts(storage)
        assert len(by_training) == 4, "a killed trial goes on with its own values"
        assert all(ends.count("committed") == 1 and ends[-1] == "committed" for ends in by_training.values())
        interrupted = [ends for ends in by_training.values() if len(ends) > 1]
        assert interrupted, "a kill met a training"
        assert len(list((storage / "stages" / "prepare-data").iterdir())) == 1

        [best] = result["best"]
        assert min(trial["objective"] for trial in result["trials"]) == result["trials"][best]["objective"]
        again = trainflow("run", storage / "sweeps" / "toy-sweep" / "best.yaml", "--json", env=env)
        assert again.code == 0, again.err
        stages = {stage["stage"]: stage for stage in json.loads(again.out)["stages"]}
        assert [stages[name]["status"] for name in ("prepare-data", "train", "evaluate", "predict")] == [
            "cached",
            "cached",
            "cached",
            "ran",
        ]
        reached = flat_metrics(stages["evaluate"]["manifest"]["metrics"])["test_error"]
        assert [reached] == result["trials"][best]["objective"]
        unchanged = trainflow("sweep", spec, "--json", env=env)
        assert json.loads(unchanged.out)["trials"] == result["trials"], "nothing is left to do"
        if runner == "prefect":
            # What a killed command's workers still save may have the next one killed before it is in Prefect.
            *killed, last = _ends_in_prefect(env)
            assert (set(killed), last) == ({"Crashed"}, "Completed")


def _interrupt(command: Running, storage: Path) -> None:
    assert command.stop(timeout=90) == Interrupted.exit_code, command.output
    assert "running work is saved first" in command.output
    assert "The same command continues: trainflow sweep" in command.output
    assert not any("" in ends for ends in attempts(storage).values()), "every attempt came to an end"


def _ends_in_prefect(env: dict[str, str]) -> list[str]:
    """The states of the sweep's flow runs, by their age."""
    program = (
        "from flows.server.api import prefect_api, quiet_environment\n"
        "quiet_environment()\n"
        "with prefect_api():\n"
        "    from prefect.client.orchestration import get_client\n"
        "    from prefect.client.schemas.filters import FlowFilter\n"
        "    flow = FlowFilter.model_validate({'name': {'any_': ['sweep']}})\n"
        "    with get_client(sync_client=True) as client:\n"
        "        runs = client.read_flow_runs(flow_filter=flow)\n"
        "    print(*(run.state.name for run in sorted(runs, key=lambda run: run.start_time)))\n"
    )
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, **env}, check=True)
    return done.stdout.split()
