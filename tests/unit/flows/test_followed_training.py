"""Whether a training that is followed goes on, and how it has ended."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from flows import followed_training as module
from flows import following
from flows.followed_training import Training, Watch
from flows.heartbeat import PAUSE_S
from flows.past_runs import read_run
from tasks.stage.keys import stage_key
from tasks.stage.manifest import StageManifest
from tests.support.toy import project
from tests.unit.flows.test_run_status import ELSEWHERE, GONE, HERE, record, sign
from trainer_lib.commit import write_commit

KEY = stage_key("train", {"x": 1})


def training(storage: Path) -> Training:
    run = read_run(str(storage), "a")
    assert run is not None
    return Training(run, KEY, StageManifest("prepare-data", "", "", ""), str(storage))


def state(storage: Path) -> str | None:
    ending = Watch(training(storage)).look()
    return None if ending is None else ending.state


@pytest.mark.parametrize(
    ("status", "expected"), [("FAILED", "failed"), ("KILLED", "stopped"), ("FINISHED", "finished")]
)
def test_a_recorded_end_counts(status: str, expected: str, tmp_path: Path) -> None:
    record(tmp_path, "a", status, failed="train")
    assert state(tmp_path) == expected


def test_a_training_goes_on_while_its_process_lives_and_has_died_without_one(tmp_path: Path) -> None:
    record(tmp_path, "a", "RUNNING")
    beat = sign(tmp_path, "a", HERE)
    assert state(tmp_path) is None
    for path in (beat, beat.with_suffix(".json")):
        path.unlink()
    # Its workers may still save the step that they are at.
    sign(tmp_path, "a", GONE, seconds_ago=1)
    watch = Watch(training(tmp_path))
    assert watch.look() is None
    assert watch.is_settling  # `--once` says so, and not that the training goes on
    sign(tmp_path, "a", GONE, seconds_ago=module.SETTLE_S + 1)
    ending = Watch(training(tmp_path)).look()
    assert ending is not None
    assert (ending.state, ending.sentence.startswith("The process of the training died (train: step 3/8")) == (
        "died",
        True,
    )


def test_a_follower_gives_a_training_that_failed_before_the_time_to_be_taken_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    record(tmp_path, "a", "FAILED", failed="train")
    looks: list[str] = []

    def find(plan: Any) -> Training:
        looks.append("again")
        if len(looks) == 2:  # the command that was started beside the follower has come so far
            shutil.rmtree(tmp_path / "runs" / "a")
            record(tmp_path, "a", "RUNNING")
            sign(tmp_path, "a", HERE)
        return training(tmp_path)

    monkeypatch.setattr(following, "find_training", find)
    lines: list[str] = []
    listener: Any = SimpleNamespace(say=lines.append)
    plan: Any = None
    found = following._await_restart(plan, training(tmp_path), listener, every_s=0.001)
    assert Watch(found).look() is None
    assert len(looks) == 2
    assert len(lines) == 1
    assert lines[0].startswith("The training failed")
    # Nobody takes it up: it has ended.
    shutil.rmtree(tmp_path / "runs" / "a")
    record(tmp_path, "a", "FAILED", failed="train")
    monkeypatch.setattr(following, "RESTART_S", 0.01)
    found = following._await_restart(plan, training(tmp_path), listener, every_s=0.001)
    assert state(tmp_path) == "failed"
    assert found.run.id == "a"


def test_a_committed_training_has_ended_although_later_stages_go_on(tmp_path: Path) -> None:
    record(tmp_path, "a", "RUNNING")
    sign(tmp_path, "a", HERE)
    found = training(tmp_path)
    meta: dict[str, Any] = {"stage": "train", "key": KEY.digest, "metrics": {}, "meta": {}}
    write_commit(found.stage, "stage", [], meta)
    assert state(tmp_path) == "committed"


def test_a_process_of_another_machine_counts_while_its_beat_changes(tmp_path: Path) -> None:
    record(tmp_path, "a", "RUNNING")
    beat, now = sign(tmp_path, "a", ELSEWHERE), [0.0]
    watch = Watch(training(tmp_path), clock=lambda: now[0])
    assert watch.look() is None
    now[0] += PAUSE_S - 1
    assert watch.look() is None
    beat.write_text(json.dumps({**json.loads(beat.read_text()), "beat": "2"}))
    now[0] += 2
    assert watch.look() is None
    now[0] += PAUSE_S + 1
    ending = watch.look()
    assert ending is not None
    assert ending.state == "silent"


def test_every_state_of_a_run_that_is_not_at_work_has_a_sentence(tmp_path: Path) -> None:
    from flows.run_status import State

    assert set(State.__args__) - {"running", "suspended", "silent"} <= set(module._ENDS)  # type: ignore[attr-defined]
    record(tmp_path, "a", "RUNNING")
    found = training(tmp_path)
    (tmp_path / "runs" / "a" / "run.json").unlink()
    ending = Watch(replace(found)).look()
    assert ending is not None
    assert ending.state == "finished"


@pytest.fixture
def command(monkeypatch: pytest.MonkeyPatch) -> Callable[..., int]:
    """`trainflow follow` in this process; returns its exit code."""
    from flows.cli import follow
    from flows.cli.main import main

    # It sets variables of the environment for Prefect, which this command does not start.
    monkeypatch.setattr(follow, "quiet_environment", lambda: None)

    def call(*words: str | Path) -> int:
        with pytest.raises(SystemExit) as ended:
            main(["follow", *map(str, words), "--once"])
        return int(ended.value.code or 0)

    return call


@pytest.mark.parametrize(
    ("words", "field"),
    [
        (("train.eval_split=",), "train.eval_split"),
        (("train.evaluation_split=test",), "train.evaluation_split"),
        (("--every", "soon"), "--every"),
    ],
)
def test_bad_input_is_refused_with_exit_code_2(
    words: tuple[str, ...],
    field: str,
    command: Callable[..., int],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert command(project(tmp_path / "project"), *words) == 2
    printed = capsys.readouterr()
    assert field in printed.err
    assert "Traceback" not in printed.err + printed.out


def test_a_spec_that_never_ran_is_shown_as_such(
    command: Callable[..., int], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert command(project(tmp_path / "project"), "train.eval_split=test") == 0
    assert capsys.readouterr().out == "No data is prepared for this spec yet. Nothing is evaluated.\n"
