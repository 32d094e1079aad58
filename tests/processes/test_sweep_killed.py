"""A sweep that is killed again and again: every trial ends once, and none is trained twice."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest

from flows.results import flat_metrics
from tests.support.command import engine, running, trainflow
from tests.support.sweeps import SLOW_RECIPE, attempts, checkpoints, sweep_project

KILLS = 2


@pytest.mark.timeout(600)
def test_a_killed_sweep_goes_on_and_trains_nothing_twice(tmp_path: Path) -> None:
    spec = sweep_project(tmp_path / "project", recipe=SLOW_RECIPE)
    storage = tmp_path / "project" / "store"
    with engine(tmp_path / "prefect") as env:
        for kill in range(KILLS):
            there = checkpoints(storage)
            with running("sweep", spec, "sweep.parallel=2", log=tmp_path / f"{kill}.log", env=env) as command:
                deadline = time.monotonic() + 120
                while checkpoints(storage) == there:
                    assert command.process.poll() is None, command.output
                    assert time.monotonic() < deadline, command.output
                    time.sleep(0.05)
                command.process.kill()
        done = trainflow("sweep", spec, "sweep.parallel=2", "--json", env=env)
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
