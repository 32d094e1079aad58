"""From what a launch left behind to the one failure that explains it."""

from __future__ import annotations

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
from trainer_lib.launch.run_dir import RunDir
from trainer_lib.launch.supervise import Ending, OomWatch

LOST, STOP = InfrastructureError("rank 0 lost contact with the others."), Preempted("Asked to stop.", step=130)


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
    record(run_dir, 0, LOST, 1.0, secondary=True)
    record(run_dir, 2, CodeError("later"), 3.0)
    record(run_dir, 1, DataError("row 7 is bad", field="x", value=3, remedy="repair it"), 2.0)
    error = fail(run_dir, ending())
    assert isinstance(error, DataError)
    assert (error.rank, error.field, error.value, error.remedy) == (1, "x", "3", "repair it")


@pytest.mark.parametrize(
    ("recorded", "ends", "how", "cls", "message", "remedy"),
    [
        # A killed rank comes before those that only noticed, and before the stop that it caused.
        (LOST, [(1, -9), (0, 18)], {}, InfrastructureError, "Rank 1 was killed by SIGKILL (9) at step 120.", ""),
        (STOP, [(1, -9)], {}, InfrastructureError, "Rank 1 was killed by SIGKILL (9) at step 120.", ""),
        # A rank that the launcher ended is not the cause: it was asked to stop, and may well have gone first.
        (None, [(0, -15), (1, -11)], {}, InfrastructureError, "Rank 1 was killed by SIGSEGV (11) at step 120.", ""),
        (None, [(0, 1), (1, -11)], {}, InfrastructureError, "Rank 1 was killed by SIGSEGV (11) at step 120.", ""),
        (None, [(1, -9)], {"out_of_memory": True}, OutOfMemoryError, "", "per_device_train_batch_size"),
        (None, [(0, -11)], {"step": None}, InfrastructureError, "Rank 0 was killed by SIGSEGV (11).", "native library"),
        (STOP, [], {"cancelled": True}, Interrupted, "Cancelled; saved at step 130.", ""),
        (None, [], {"cancelled": True}, Interrupted, "Cancelled.", ""),
    ],
)
def test_one_failure_explains_what_is_left(
    run_dir: RunDir, recorded: Any, ends: list[Any], how: dict[str, Any], cls: type, message: str, remedy: str
) -> None:
    if recorded is not None:
        record(run_dir, 0, recorded, 1.0, secondary=recorded is LOST)
    if ends:
        ranks_ended(run_dir, *ends)
    error = fail(run_dir, ending(**how))
    assert type(error) is cls
    assert error.message == message or not message
    assert remedy in (error.remedy or "")
    if "SIGKILL" in message:
        assert (error.rank, error.step, error.details) == (1, 120, "last words")
    assert not (cls is Interrupted and error.retryable)


@pytest.mark.parametrize(
    ("code", "direct", "message"),
    [
        (3, True, "Rank 0 ended with exit code 3 at step 120 and recorded no reason."),
        (7, False, "The launcher ended with exit code 7 and without a result."),
    ],
)
def test_an_exit_code_without_a_word_is_told(run_dir: RunDir, code: int, direct: bool, message: str) -> None:
    run_dir.write_json("guard.json", {"code": code})
    assert find_failure(run_dir, ending(), direct=direct).message == message


def test_an_agreed_stop_of_all_ranks(run_dir: RunDir) -> None:
    for rank in (0, 1):
        record(run_dir, rank, Preempted("Asked to stop.", step=130), float(rank))
    ranks_ended(run_dir, (0, 19))
    error = fail(run_dir, ending())
    assert isinstance(error, Preempted)
    assert error.step == 130


def test_of_a_folder_kept_after_a_hang_only_stacks_and_traces_stay(run_dir: RunDir) -> None:
    run_dir.write_json("request.json", {})
    run_dir.write("stack-0.txt", "here")
    run_dir.write("trace-0.json", "{}")
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
    waiting = STACK.format(inner="gloo.py", users="")
    texts = {0: waiting, 1: waiting, 2: stuck}
    for rank, text in texts.items():
        (run_dir.path / f"stack-{rank}.txt").write_text(text)
    error = fail(run_dir, ending(hung_s=31.0))
    assert type(error) is HangError
    assert "no progress for 31 s" in error.message
    assert "They stood still: rank 2 in collate (recipe.py:12), ranks 0, 1 in wait (gloo.py:7)." in error.message
    assert error.details == "\n".join(f"--- rank {rank}\n{text}" for rank, text in texts.items())
    assert str(run_dir.path) in (error.remedy or "")


def test_ranks_of_a_layout_are_named_by_their_coordinates(run_dir: RunDir) -> None:
    run_dir.write_json("request.json", {"args": {"parallelism": {"tensor": 2, "shard": 2}}})
    (run_dir.path / "stack-3.txt").write_text(STACK.format(inner="gloo.py", users=""))
    (run_dir.path / "stack-1.txt").write_text(STACK.format(inner="a.py", users=""))
    message = fail(run_dir, ending(hung_s=31.0)).message
    assert message.endswith("Rank 1 is tensor=1, shard=0; rank 3 is tensor=1, shard=1.")
    record(run_dir, 2, DataError("A row is empty."), 1.0)
    assert fail(run_dir, ending()).message == "A row is empty. Rank 2 is tensor=0, shard=1."
    run_dir.write_json("request.json", {"args": {}})
    assert fail(run_dir, ending()).message == "A row is empty."


@pytest.mark.parametrize(
    ("guard", "message"),
    [({"code": -9}, "The launcher was killed by SIGKILL (9)."), (None, "The guard process was killed by SIGKILL (9).")],
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


COUNTERS = {
    "v2": ("0::/job/step\n", "sys/fs/cgroup/job/step/memory.events", "low 0\noom 1\noom_kill {}\n"),
    "v1": ("4:memory:/job\n0::/\n", "proc/vmstat", "nr_free 7\noom_kill {}\n"),
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
