"""A sweep that is stopped again and again, by Ctrl-C or a kill: every trial ends once, and none is trained twice."""

from __future__ import annotations

import json
import signal
from pathlib import Path

import pytest

from flows.results import flat_metrics
from tests.support.command import engine, running, trainflow
from tests.support.launched import wait_until
from tests.support.sweeps import SLOW_RECIPE, attempts, checkpoints, sweep_project
from trainer_lib.errors import Interrupted


@pytest.mark.timeout(900)
def test_a_killed_sweep_goes_on_and_trains_nothing_twice(tmp_path: Path) -> None:
    slots = ("sweep.parallel=2", "sweep.runner=processes")
    spec = sweep_project(tmp_path / "project", recipe=SLOW_RECIPE)
    storage = tmp_path / "project" / "store"
    with engine(tmp_path / "prefect") as env:
        for stop in (signal.SIGINT, signal.SIGKILL):
            there = checkpoints(storage)
            with running("sweep", spec, *slots, log=tmp_path / f"{stop}.log", env=env) as command:
                wait_until(lambda there=there: checkpoints(storage) > there, 120)  # type: ignore[misc]
                if stop == signal.SIGKILL:
                    command.process.kill()
                    continue
                assert command.stop(timeout=90) == Interrupted.exit_code, command.output
                assert "running work is saved first" in command.output
                assert "The same command continues: trainflow sweep" in command.output
                assert not any("" in ends for ends in attempts(storage).values()), "every attempt came to an end"
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
            *["cached"] * 3,
            "ran",
        ]
        reached = flat_metrics(stages["evaluate"]["manifest"]["metrics"])["test_error"]
        assert [reached] == result["trials"][best]["objective"]
        unchanged = trainflow("sweep", spec, "--json", env=env)
        assert json.loads(unchanged.out)["trials"] == result["trials"], "nothing is left to do"
