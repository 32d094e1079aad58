"""How a recorded run is, from its record and the signs of life beside it; whether a followed training goes on."""

from __future__ import annotations

import json
import os
import signal
import subprocess
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from tests.support.launched import wait_until
from tests.support.recorded import leave_sign
from tests.support.toy import project
from trainer_lib.guard import start_time
from trainer_lib.locks.lease import Holder
from trainer_lib.storage import Store
from trainer_lib.storage.commit import write_commit
from trainflow.flows import following as module
from trainflow.flows.cli import options
from trainflow.flows.cli.main import main
from trainflow.flows.following import Training, Watch
from trainflow.flows.records.past_runs import read_run
from trainflow.flows.runs import run_status
from trainflow.flows.runs.run_status import PAUSE_S, RunStatus, State, find_statuses, look
from trainflow.tasks.keys.keys import stage_key
from trainflow.tasks.stage.manifest import StageManifest

HERE = Holder.this_process(30.0)
GONE = replace(HERE, started="1")
ELSEWHERE = replace(HERE, machine="elsewhere/boot/pids")
KEY = stage_key("train", {"x": 1})


def record(storage: Path, run_id: str, status: str, **more: Any) -> None:
    folder = storage / "runs" / run_id
    folder.mkdir(parents=True)
    plain = {"name": "toy", "status": status, "started": "2026-11-22T10:00:00Z", **more}
    (folder / "run.json").write_text(json.dumps(plain))


def sign(storage: Path, run_id: str, holder: Holder, *, seconds_ago: float = 1.0, name: str = "one") -> Path:
    folder, at = storage / "runs" / run_id, (datetime.now(UTC) - timedelta(seconds=seconds_ago)).isoformat()
    leave_sign(Store.open(folder), holder, name=name, at=at, stage="train", progress="step 3/8")
    return folder / "alive" / f"{name}.beat"


def only(storage: Path) -> RunStatus:
    [found] = find_statuses(str(storage))
    return found


def test_a_run_that_has_ended_is_as_it_was_recorded_also_for_a_follower(tmp_path: Path) -> None:
    for number, (status, state) in enumerate((("FINISHED", "finished"), ("FAILED", "failed"), ("KILLED", "stopped"))):
        storage = tmp_path / str(number)
        record(storage, "a", status, failed="train")
        assert (only(storage).state, only(storage).is_swept) == (state, True)
        assert ending_of(storage) == state


def test_a_run_of_a_living_process_runs_wherever_it_is(tmp_path: Path) -> None:
    record(tmp_path, "a", "RUNNING")
    sign(tmp_path, "a", GONE, name="before")
    sign(tmp_path, "a", HERE)
    found = only(tmp_path)
    assert (found.state, found.where) == ("running", f"train: step 3/8, {HERE}")
    assert [dead.id for dead in found.unswept] == ["before"]
    assert found.to_dict()["progress"] == "step 3/8"
    with subprocess.Popen(["sleep", "60"]) as process:  # a suspended process is not a dead one
        os.kill(process.pid, signal.SIGSTOP)
        os.waitid(os.P_PID, process.pid, os.WSTOPPED)
        sign(tmp_path, "a", replace(HERE, pid=process.pid, started=start_time(process.pid) or ""))
        assert only(tmp_path).state == "suspended"
        process.kill()


def test_a_run_that_is_watched_is_at_work_until_its_process_has_ended(tmp_path: Path) -> None:
    record(tmp_path, "a", "FINISHED")
    sign(tmp_path, "a", HERE)
    assert [each.state for each in look(str(tmp_path))] == ["finished"]
    assert [each.state for each in look(str(tmp_path), closely={"a"})] == [only(tmp_path).state] == ["running"]
    for holder, seconds_ago in ((GONE, 1.0), (ELSEWHERE, 3600)):
        sign(tmp_path, "a", holder, seconds_ago=seconds_ago)
        assert [each.state for each in look(str(tmp_path), closely={"a"})] == ["finished"]


def test_a_run_whose_process_is_gone_or_never_gave_a_sign_has_died(tmp_path: Path) -> None:
    record(tmp_path, "a", "RUNNING")
    assert (only(tmp_path).state, only(tmp_path).is_swept) == ("died", False)
    sign(tmp_path, "a", GONE)
    assert only(tmp_path).state == "died"
    assert only(tmp_path).where.startswith("train: step 3/8, process ")
    record(tmp_path, "b", "KILLED", died="train: step 3/8, process 1 on vm")
    assert {each.run.id: each.state for each in find_statuses(str(tmp_path))} == {"a": "died", "b": "died"}


def test_a_process_of_another_machine_is_watched_by_our_clock_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    record(tmp_path, "a", "RUNNING")
    beat = sign(tmp_path, "a", ELSEWHERE)
    waits: list[float] = []
    monkeypatch.setattr("trainflow.flows.runs.run_status.time.sleep", waits.append)
    assert only(tmp_path).state == "running"
    assert waits == [], "its beat is young"
    for seconds_ago in (300.0, -300.0):  # its clock may be wrong either way
        sign(tmp_path, "a", ELSEWHERE, seconds_ago=seconds_ago)
        assert only(tmp_path).state == "died"
        monkeypatch.setattr(
            "trainflow.flows.runs.run_status.time.sleep", lambda _: beat.write_text('{"beat": "2", "stage": "train"}')
        )
        assert only(tmp_path).state == "running"
        monkeypatch.setattr("trainflow.flows.runs.run_status.time.sleep", waits.append)
    assert waits == [run_status.SILENT_S] * 2
    sign(tmp_path, "a", ELSEWHERE, seconds_ago=60.0)  # a short silence is not a death
    found = only(tmp_path)
    assert (found.state, found.unswept, found.is_swept) == ("silent", (), True)
    assert found.where.startswith("train: step 3/8, process ")


def test_a_run_that_ends_while_it_is_watched_has_not_died(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    record(tmp_path, "a", "RUNNING")
    beat = sign(tmp_path, "a", ELSEWHERE, seconds_ago=600.0)

    def end(_: float) -> None:
        plain = {"name": "toy", "status": "FINISHED", "started": "2026-11-22T10:00:00Z"}
        (tmp_path / "runs" / "a" / "run.json").write_text(json.dumps(plain))
        beat.with_suffix(".json").unlink()
        beat.unlink()

    monkeypatch.setattr("trainflow.flows.runs.run_status.time.sleep", end)
    assert (only(tmp_path).state, only(tmp_path).is_swept) == ("finished", True)


def test_a_sign_that_another_machine_removed_is_written_again(tmp_path: Path) -> None:
    folder = Store.open(str(tmp_path / "runs" / "a"))
    heart = run_status._Heart(folder.child("alive"))
    heart.write()
    [before] = run_status.read_signs(folder)
    run_status.remove_sign(folder, before)
    heart.write()
    [after] = run_status.read_signs(folder)
    assert (after.id, after.holder) == (before.id, before.holder)


def test_a_stage_that_waits_for_a_device_says_so_at_once(tmp_path: Path) -> None:
    here = Store.open(str(tmp_path))
    heart = run_status._Heart(here.child("alive"))
    heart.write()
    heart.thread.start()
    try:
        heart.listen({"event": "stage", "stage": "train", "status": "started"})
        heart.listen({"event": "progress", "stage": "train", "step": 5, "max_steps": 10})
        heart.listen({"event": "wait", "stage": "train", "message": "waits for GPU 0"})
        # Far sooner than the next beat.
        wait_until(lambda: [sign.progress for sign in run_status.read_signs(here)] == ["waits for GPU 0"], 5)
    finally:
        heart.stop()


def test_drafts_that_killed_processes_left_go_with_the_sign_of_one(tmp_path: Path) -> None:
    record(tmp_path, "a", "RUNNING")
    beat = sign(tmp_path, "a", GONE)
    for draft in (".one.beat.0123456789abcdef.tmp", ".another.json.0123456789abcdef.tmp"):
        (beat.parent / draft).write_bytes(b"half")
    folder = Store.open(tmp_path / "runs" / "a")
    [dead] = run_status.read_signs(folder)
    run_status.remove_sign(folder, dead)
    assert [*beat.parent.iterdir()] == []


def training(storage: Path) -> Training:
    run = read_run(str(storage), "a")
    assert run is not None
    return Training(run, KEY, StageManifest("prepare-data", "", "", ""), str(storage))


def ending_of(storage: Path) -> str | None:
    ending = Watch(training(storage)).look()
    return None if ending is None else ending.state


def test_a_training_goes_on_while_its_process_lives_and_has_died_without_one(tmp_path: Path) -> None:
    record(tmp_path, "a", "RUNNING")
    beat = sign(tmp_path, "a", HERE)
    assert ending_of(tmp_path) is None
    for path in (beat, beat.with_suffix(".json")):
        path.unlink()
    # Its workers may still save the step that they are at.
    sign(tmp_path, "a", GONE, seconds_ago=1)
    watch = Watch(training(tmp_path))
    assert watch.look() is None
    assert watch.is_settling  # `--once` says so, and not that the training goes on
    sign(tmp_path, "a", GONE, seconds_ago=module.SETTLE_S + 1)
    ending = Watch(training(tmp_path)).look()
    assert ending is not None and ending.state == "died"
    assert ending.sentence.startswith("The process of the training died (train: step 3/8")
    # Every state of a run that is not at work has a sentence.
    assert set(State.__args__) - {"running", "suspended", "silent"} <= set(module._ENDS)  # type: ignore[attr-defined]
    found = training(tmp_path)
    (tmp_path / "runs" / "a" / "run.json").unlink()
    gone = Watch(found).look()
    assert gone is not None and gone.state == "finished"


def test_a_committed_training_has_ended_although_later_stages_go_on(tmp_path: Path) -> None:
    record(tmp_path, "a", "RUNNING")
    sign(tmp_path, "a", HERE)
    meta: dict[str, Any] = {"stage": "train", "key": KEY.digest, "metrics": {}, "meta": {}}
    write_commit(training(tmp_path).stage, "stage", [], meta)
    assert ending_of(tmp_path) == "committed"


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
    assert ending is not None and ending.state == "silent"


@pytest.mark.parametrize(
    ("words", "code", "printed"),
    [
        ("train.eval_split=", 2, "train.eval_split"),
        ("train.evaluation_split=test", 2, "train.evaluation_split"),
        ("--every soon", 2, "--every"),
        ("train.eval_split=test", 0, "No data is prepared for this spec yet. Nothing is evaluated.\n"),
    ],
)
def test_follow_refuses_bad_input_and_shows_a_spec_that_never_ran(
    words: str,
    code: int,
    printed: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # It sets variables of the environment for Prefect, which this command does not start.
    monkeypatch.setattr(options, "quiet_environment", lambda: None)
    with pytest.raises(SystemExit) as ended:
        main(["follow", str(project(tmp_path / "project")), *words.split(), "--once"])
    assert int(ended.value.code or 0) == code
    out, err = capsys.readouterr()
    assert printed in err if code else out == printed
    assert "Traceback" not in out + err
