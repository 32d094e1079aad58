"""From what a launch left behind to the one failure that explains it."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest

from trainer_lib.errors import (
    CodeError,
    DataError,
    HangError,
    InfrastructureError,
    Interrupted,
    OutOfMemoryError,
    Preempted,
    TrainflowError,
)
from trainer_lib.launch.failures import find_failure
from trainer_lib.launch.kernel_oom import OomWatch
from trainer_lib.launch.run_dir import RunDir
from trainer_lib.launch.supervise import Ending


@pytest.fixture
def run_dir(tmp_path: Path) -> RunDir:
    return RunDir(tmp_path)


def ending(**changes: Any) -> Ending:
    plain: dict[str, Any] = {
        "code": 1,
        "cancelled": False,
        "hung_s": None,
        "out_of_memory": False,
        "step": 120,
        "tail": "last words",
    }
    return Ending(**{**plain, **changes})


def fail(run_dir: RunDir, how: Ending) -> TrainflowError:
    """The failure of a launch under torchrun; the guard saw its command end with code 1."""
    if not (run_dir.path / "guard.json").exists():
        run_dir.write_json("guard.json", {"code": 1})
    return find_failure(run_dir, how, direct=False)


def record(run_dir: RunDir, rank: int, error: TrainflowError, at: float, *, secondary: bool = False) -> None:
    error.rank = rank
    run_dir.write_json(f"error-rank{rank}.json", {**error.to_record(), "time": at, "secondary": secondary})


def ranks_ended(run_dir: RunDir, *ends: tuple[int, int]) -> None:
    failures = [{"rank": rank, "exitcode": code, "pid": 1, "time": 5} for rank, code in ends]
    run_dir.write_json("agent.json", {"failures": failures})


def test_the_first_rank_that_failed_is_reported_whole(run_dir: RunDir) -> None:
    record(run_dir, 0, InfrastructureError("rank 0 lost contact with the others."), 1.0, secondary=True)
    record(run_dir, 2, CodeError("later"), 3.0)
    record(run_dir, 1, DataError("row 7 is bad", field="x", value=3, remedy="repair it"), 2.0)
    error = fail(run_dir, ending())
    assert isinstance(error, DataError)
    assert (error.rank, error.field, error.value, error.remedy) == (1, "x", "3", "repair it")


def test_a_killed_rank_comes_before_those_that_only_noticed(run_dir: RunDir) -> None:
    record(run_dir, 0, InfrastructureError("rank 0 lost contact with the others."), 1.0, secondary=True)
    ranks_ended(run_dir, (1, -9), (0, 18))
    error = fail(run_dir, ending())
    assert isinstance(error, InfrastructureError)
    assert error.message == "Rank 1 was killed by SIGKILL (9) at step 120."
    assert (error.rank, error.step, error.details) == (1, 120, "last words")


def test_a_rank_that_the_launcher_ended_is_not_the_cause(run_dir: RunDir) -> None:
    """It was asked to stop while it was still starting, so it left no record, and may well have gone first."""
    ranks_ended(run_dir, (0, -15), (1, -11))
    assert fail(run_dir, ending()).message == "Rank 1 was killed by SIGSEGV (11) at step 120."


def test_a_kill_by_the_kernel_for_memory(run_dir: RunDir) -> None:
    ranks_ended(run_dir, (1, -9))
    error = fail(run_dir, ending(out_of_memory=True))
    assert isinstance(error, OutOfMemoryError)
    assert "per_device_train_batch_size" in (error.remedy or "")


def test_a_crash_of_native_code(run_dir: RunDir) -> None:
    ranks_ended(run_dir, (0, -11))
    error = fail(run_dir, ending(step=None))
    assert error.message == "Rank 0 was killed by SIGSEGV (11)."
    assert "native library" in (error.remedy or "")


def test_an_exit_code_without_a_word(run_dir: RunDir) -> None:
    run_dir.write_json("guard.json", {"code": 3})
    assert (
        find_failure(run_dir, ending(), direct=True).message
        == "Rank 0 ended with exit code 3 at step 120 and recorded no reason."
    )


def test_an_agreed_stop_of_all_ranks(run_dir: RunDir) -> None:
    for rank in (0, 1):
        record(run_dir, rank, Preempted("Asked to stop.", step=130), float(rank))
    ranks_ended(run_dir, (0, 19))
    error = fail(run_dir, ending())
    assert isinstance(error, Preempted)
    assert error.step == 130


def test_a_killed_rank_comes_before_the_stop_it_caused(run_dir: RunDir) -> None:
    record(run_dir, 0, Preempted("Asked to stop."), 9.0)
    ranks_ended(run_dir, (1, -9))
    assert isinstance(fail(run_dir, ending()), InfrastructureError)


def test_a_cancel_names_the_step_that_was_saved(run_dir: RunDir) -> None:
    record(run_dir, 0, Preempted("Asked to stop.", step=130), 1.0)
    error = fail(run_dir, ending(cancelled=True))
    assert isinstance(error, Interrupted)
    assert error.message == "Cancelled; saved at step 130."
    assert not error.retryable


def test_a_cancel_before_anything_was_saved(run_dir: RunDir) -> None:
    assert fail(run_dir, ending(cancelled=True)).message == "Cancelled."


def test_a_hang_shows_where_every_rank_stood(run_dir: RunDir) -> None:
    for rank in (0, 1):
        (run_dir.path / f"stack-{rank}.txt").write_text(f"stack of {rank}")
    error = fail(run_dir, ending(hung_s=31.0))
    assert isinstance(error, InfrastructureError)
    assert "no progress for 31 s" in error.message
    assert error.details == "--- rank 0\nstack of 0\n--- rank 1\nstack of 1"
    assert str(run_dir.path) in (error.remedy or "")


def test_a_hang_names_the_rank_that_did_not_enter_a_collective(run_dir: RunDir) -> None:
    for rank, entered in ((0, 12), (1, 11), (2, 12)):
        entries = [{"pg_id": 0, "collective_seq_id": entered, "profiling_name": "gloo:all_reduce"}]
        recorder = {"entries": entries, "pg_status": {"0": {"last_enqueued_collective": str(entered)}}}
        run_dir.write_trace(str(rank), json.dumps({"rank": rank, "recorders": {"gloo": recorder}}))
    error = fail(run_dir, ending(hung_s=31.0))
    assert error.message.endswith("Rank 1 did not enter collective 12 (gloo:all_reduce), where ranks 0 and 2 waited.")


@pytest.mark.parametrize("text", ["", "[", "[]", '{"recorders": []}', '{"recorders": {"gloo": {"pg_status": 3}}}'])
def test_a_damaged_trace_does_not_hide_the_hang(run_dir: RunDir, text: str) -> None:
    for rank in (0, 1):
        run_dir.write_trace(str(rank), text)
    assert fail(run_dir, ending(hung_s=31.0, step=None)).message == (
        "There was no progress for 31 s, so all workers were ended."
    )


def test_of_a_folder_kept_after_a_hang_only_stacks_and_traces_stay(run_dir: RunDir) -> None:
    run_dir.write_json("request.json", {})
    run_dir.write_stack("0", "here")
    run_dir.write_trace("0", "{}")
    (run_dir.path / "torchelastic").mkdir()
    fail(run_dir, ending(hung_s=31.0))
    run_dir.close()
    assert sorted(path.name for path in run_dir.path.iterdir()) == ["keep", "stack-0.txt", "trace-0.json"]


STACK = """Thread 0x00007f20c6cef6c0 (most recent call first):
  File "/usr/lib/python3.11/threading.py", line 982 in run

Current thread 0x00007f20c7a51b80 (most recent call first):
  File "/venv/site-packages/torch/{inner}", line 7 in wait
{users}  File "/venv/site-packages/torch/loader.py", line 9 in __next__
"""


def test_a_hang_names_where_the_ranks_stand_the_users_code_first(run_dir: RunDir) -> None:
    stuck = STACK.format(inner="a.py", users='  File "/home/me/recipe.py", line 12 in collate\n')
    for rank in (0, 1, 2):
        text = stuck if rank == 2 else STACK.format(inner="gloo.py", users="")
        (run_dir.path / f"stack-{rank}.txt").write_text(text)
    error = fail(run_dir, ending(hung_s=31.0))
    assert type(error) is HangError
    assert "They stood still: rank 2 in collate (recipe.py:12), ranks 0, 1 in wait (gloo.py:7)." in error.message


@pytest.mark.parametrize(
    ("guard", "message"),
    [
        ({"code": -9}, "The launcher was killed by SIGKILL (9)."),
        (None, "The guard process was killed by SIGKILL (9)."),
    ],
)
def test_a_launcher_that_was_killed_comes_before_the_stop_it_caused(
    run_dir: RunDir, guard: dict[str, int] | None, message: str
) -> None:
    record(run_dir, 0, Preempted("Asked to stop."), 9.0)
    if guard is not None:
        run_dir.write_json("guard.json", guard)
    error = find_failure(run_dir, ending(code=-9), direct=False)
    assert isinstance(error, InfrastructureError)
    assert error.message == message


def test_a_launcher_that_ended_by_itself(run_dir: RunDir) -> None:
    run_dir.write_json("guard.json", {"code": 7})
    assert fail(run_dir, ending()).message == "The launcher ended with exit code 7 and without a result."


COUNTERS = {
    "v2": ("0::/job/step\n", "sys/fs/cgroup/job/memory.events", "low 0\noom 1\noom_kill {}\n"),
    "v2 beside v1": ("0::/\n", "sys/fs/cgroup/unified/memory.events", "oom_kill {}\n"),
    "v1": ("9:cpu:/x\n4:memory:/job\n", "sys/fs/cgroup/memory/job/memory.oom_control", "under_oom 0\noom_kill {}\n"),
    "no groups": ("", "proc/vmstat", "nr_free 7\noom_kill {}\n"),
}


@pytest.mark.parametrize("kind", COUNTERS)
def test_a_rise_of_the_kernels_counter_is_seen(tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    groups, path, text = COUNTERS[kind]
    (tmp_path / "proc/self").mkdir(parents=True)
    (tmp_path / "proc/self/cgroup").write_text(groups)
    counter = tmp_path / path
    counter.parent.mkdir(parents=True, exist_ok=True)
    counter.write_text(text.format(4))
    now = time.monotonic()
    monkeypatch.setattr(time, "monotonic", lambda: now)
    watch = OomWatch(tmp_path)
    others = tmp_path / "proc/vmstat"
    if others != counter:  # the kernel killed a process of another group
        others.write_text("oom_kill 9\n")
    assert not watch.has_risen()
    counter.write_text(text.format(5))
    assert watch.has_risen()
    for _ in range(2):  # two samples later it is history: somebody else's, or survived
        now += 3
        watch.sample_counters()
    assert not watch.has_risen()
