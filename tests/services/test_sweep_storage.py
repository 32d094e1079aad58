"""A sweep whose storage or ledger is lost while it is at work: one sentence; then the same command goes on."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.support.command import Running, engine, running, trainflow
from tests.support.s3 import S3Server
from tests.support.sweeps import SLOW_RECIPE, attempts, sweep_project

TRIALS = 3  # one that has ended, one at work, one to come
QUICK = ("predict.enabled=false", "publish.enabled=false", "sweep.sampler=random", f"sweep.trials={TRIALS}")


def wait_until(what: Callable[[], bool], command: Running) -> None:
    deadline = time.monotonic() + 120
    while not what():
        assert command.process.poll() is None, command.output
        assert time.monotonic() < deadline, command.output
        time.sleep(0.05)


def ended(command: Running) -> bool:
    return "complete" in command.output


def require_whole(spec: Path, words: tuple[str, ...], storage: str, env: dict[str, str]) -> None:
    """The same command ends with all results, and no training was committed twice."""
    done = trainflow("sweep", spec, *words, "--json", env=env)
    assert done.code == 0, done.err
    assert [trial["state"] for trial in json.loads(done.out)["trials"]] == ["complete"] * TRIALS
    by_training = attempts(storage)
    assert len(by_training) == TRIALS
    assert all(ends.count("committed") == 1 for ends in by_training.values()), by_training


@pytest.mark.timeout(600)
def test_a_server_of_s3_that_is_gone_ends_the_sweep_and_it_goes_on(
    tmp_path: Path, s3_url: str, s3_faults: S3Server
) -> None:
    spec = sweep_project(tmp_path / "project", recipe=SLOW_RECIPE)
    words = (*QUICK, f"storage={s3_url}", "train.retries=0")
    with engine(tmp_path / "prefect") as env:
        with running("sweep", spec, *words, log=tmp_path / "log", env=env) as command:
            wait_until(lambda: ended(command), command)
            s3_faults.plan(1, "outage", seconds=3600)
            code = command.process.wait(300)
        s3_faults.plan()
        assert code not in (0, 1), command.output
        assert "Traceback" not in command.output
        assert command.output.count("✗") == 1, command.output
        assert s3_url in command.output[command.output.index("✗") :]
        require_whole(spec, words, s3_url, env)


@pytest.mark.timeout(600)
@pytest.mark.parametrize("comes_back", [True, False])
def test_a_ledger_that_is_gone_ends_the_sweep_and_nothing_is_trained_twice(tmp_path: Path, comes_back: bool) -> None:
    spec = sweep_project(tmp_path / "project", recipe=SLOW_RECIPE)
    folder = tmp_path / "project" / "store" / "sweeps" / "toy-sweep"
    with engine(tmp_path / "prefect") as env:
        with running("sweep", spec, *QUICK, log=tmp_path / "log", env=env) as command:
            wait_until(lambda: ended(command), command)
            folder.rename(tmp_path / "lost")
            code = command.process.wait(300)
        assert code == 14, command.output
        assert "Traceback" not in command.output
        assert command.output.count("✗") == 1, command.output
        assert "The sweep's ledger cannot be read or written: " in command.output
        if comes_back:
            if folder.exists():
                folder.rename(tmp_path / "other")
            (tmp_path / "lost").rename(folder)
        require_whole(spec, QUICK, str(tmp_path / "project" / "store"), env)
