"""A stage runs once: its result is verified and used; as a Prefect task it is cached, retried and shown."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from prefect import flow
from prefect.client.orchestration import get_client
from prefect.client.schemas.filters import ArtifactFilter, ArtifactFilterKey, LogFilter, LogFilterTaskRunId
from prefect.runtime import task_run

from trainer_lib.errors import (
    CodeError,
    ConfigError,
    InfrastructureError,
    LeaseLostError,
    OutOfMemoryError,
    Preempted,
    StorageError,
    TrainflowError,
)
from trainer_lib.locks.lease import _take_epoch
from trainflow.tasks.keys.keys import StageKey
from trainflow.tasks.stage import manifest as _manifests
from trainflow.tasks.stage import progress as _progress
from trainflow.tasks.stage import task as _task
from trainflow.tasks.stage.facts import StageFacts
from trainflow.tasks.stage.manifest import StageManifest, explain_miss, look_up, stage_store
from trainflow.tasks.stage.runner import StageAttempt, StageContext, StageOutput, run_stage, stage_key
from trainflow.tasks.stage.task import stage_task

Work = Callable[[StageAttempt], StageOutput]


@dataclass(frozen=True)
class ToyFacts(StageFacts, stage="toy"):
    """Facts of a stage that the product does not know."""

    note: str = ""


def in_storage(storage: str, *force: str) -> StageContext:
    """The context of stages that need no recipe."""
    return StageContext(name="test", recipe="recipe.py", storage=storage, force=frozenset(force))


class Toy:
    """Work that counts its attempts, writes two files, and fails with the given errors first."""

    def __init__(self, *failures: BaseException) -> None:
        self.failures = list(failures)
        self.attempts: list[StageAttempt] = []

    def __call__(self, attempt: StageAttempt) -> StageOutput:
        self.attempts.append(attempt)
        half = attempt.store.write_bytes("out/a.txt", b"alpha")
        if self.failures:
            raise self.failures.pop(0)
        files = [half, attempt.store.write_bytes("b.txt", b"beta")]
        return StageOutput(files, metrics={"rows": 2}, facts=ToyFacts("x"))

    @property
    def runs(self) -> int:
        return len(self.attempts)


KEY = stage_key("toy", {"x": 1})


def run(storage: str, work: Work, key: Any = KEY, *, force: bool = False, **more: Any) -> StageManifest[ToyFacts]:
    return run_stage(key, in_storage(storage, *(["toy"] if force else [])), work, **more)


@pytest.fixture
def local(tmp_path: Path) -> str:
    return str(tmp_path)


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch, prefect_server: str) -> None:
    """Retries without the wait."""
    monkeypatch.setattr(_task, "DELAYS_S", [0.0])


def as_task(local: str, toy: Toy, **more: Any) -> Any:
    @stage_task("toy")
    def toy_stage() -> StageManifest[ToyFacts]:
        return run_stage(KEY, in_storage(local), toy, **more)

    return toy_stage


def in_flow(function: Callable[[], Any]) -> Any:
    return flow(name="test")(function)()


def test_prefect_sees_a_cached_stage_as_cached(local: str, quick: None) -> None:
    toy = Toy()
    stage = as_task(local, toy)

    def twice() -> Any:
        return [stage(return_state=True), stage(return_state=True), stage()]

    def body() -> None:
        first, second, plain = twice()
        assert stage.with_options(name="other")() == stage.submit().result() == plain
        assert (first.name, second.name) == ("Completed", "Cached")
        assert first.result() == second.result() == plain

    in_flow(body)
    assert toy.runs == 1


def test_failures_worth_it_are_retried_and_come_out_typed(local: str, quick: None) -> None:
    toy = Toy(StorageError("a"), Preempted("b"), InfrastructureError("c"))
    stage = as_task(local, toy, retries=2)
    in_flow(lambda: stage())
    assert toy.runs == 4
    assert [attempt.number for attempt in toy.attempts] == [1, 2, 3, 4]


@pytest.mark.parametrize(
    ("error", "runs"),
    [(CodeError("bug", details="their frames"), 1), (ConfigError("bad", field="x"), 1), (StorageError("again"), 3)],
    ids=["code", "config", "a used-up budget"],
)
def test_a_failure_ends_the_stage_typed_after_the_tries_that_are_worth_it(
    local: str, quick: None, error: TrainflowError, runs: int, capfd: pytest.CaptureFixture[str]
) -> None:
    toy = Toy(*[error] * 9)
    with _progress.quiet_failures(), pytest.raises(type(error)) as caught:
        in_flow(as_task(local, toy, retries=2))
    assert caught.value is error
    assert toy.runs == runs
    assert "Traceback" not in "".join(capfd.readouterr()), "it is logged in one line"


def test_memory_running_out_halves_the_batch_until_nothing_is_left(local: str, quick: None) -> None:
    toy = Toy(OutOfMemoryError("a"), OutOfMemoryError("b"))
    manifest = in_flow(as_task(local, toy, retries=0, max_halvings=2))
    assert [attempt.batch_halvings for attempt in toy.attempts] == [0, 1, 2]
    assert manifest.batch_halvings == 2
    ended = Toy(OutOfMemoryError("a"), OutOfMemoryError("b"))
    with pytest.raises(OutOfMemoryError):
        in_flow(as_task(local + "/other", ended, max_halvings=1))
    in_flow(as_task(local + "/other", ended, max_halvings=1))  # the next command begins with what memory allowed
    assert [attempt.batch_halvings for attempt in ended.attempts] == [0, 1, 1]


def test_force_discards_once_not_at_every_retry(local: str, quick: None) -> None:
    run(local, Toy())
    toy = Toy(StorageError("a"))

    def keep(attempt: StageAttempt) -> StageOutput:
        if attempt.number == 3:
            assert attempt.store.exists("checkpoints/c")
        attempt.store.write_bytes("checkpoints/c", b"x")
        return toy(attempt)

    @stage_task("toy")
    def forced() -> StageManifest[ToyFacts]:
        return run_stage(KEY, in_storage(local, "toy"), keep)

    in_flow(forced)
    assert toy.runs == 2


def test_a_stage_runs_alone_without_a_flow(prefect_server: str, local: str) -> None:
    toy = Toy()
    stage = as_task(local, toy)
    assert stage() == stage()
    assert toy.runs == 1
    assert os.getpid() == json.loads(next(Path(local).glob("stages/toy/*/attempts/0001.json")).read_text())["pid"]


def test_progress_and_printed_lines_reach_prefect(prefect_server: str, local: str) -> None:
    seen: list[str] = []

    named = ArtifactFilter(key=ArtifactFilterKey(any_=["shown-progress"]))

    def drawn() -> tuple[Any, str | None]:
        with get_client(sync_client=True) as client:
            found = client.read_artifacts(artifact_filter=named)
        return (found[0].data, found[0].description) if found else (None, None)

    def work(attempt: StageAttempt) -> StageOutput:
        seen.append(task_run.id or "")
        attempt.progress.line("epoch 1 of 3")
        for step in (1, 5):
            attempt.progress.event({"event": "progress", "step": step, "max_steps": 10, "loss": 0.25, "eta_s": 61})
        deadline = time.monotonic() + 20
        while drawn() != (50.0, "step 5/10, loss 0.25, 1 min 1 s left"):  # drawn every few seconds
            assert time.monotonic() < deadline, drawn()
            time.sleep(0.1)
        return StageOutput([attempt.store.write_bytes("a", b"x")])

    @stage_task("shown")
    def shown() -> StageManifest:
        return run_stage(stage_key("shown", {}), in_storage(local), work)

    in_flow(shown)
    ours = LogFilter(task_run_id=LogFilterTaskRunId(any_=[uuid.UUID(seen[0])]))
    deadline = time.monotonic() + 20
    with get_client(sync_client=True) as client:
        while "epoch 1 of 3" not in [
            log.message for log in client.read_logs(ours)
        ]:  # sent in batches every two seconds
            assert time.monotonic() < deadline
            time.sleep(0.05)
    assert drawn() == (100.0, "committed"), "a stage that has ended is done, wherever its last report was"


# -- the committed result ---------------------------------------------------------------------------------------------
def test_a_committed_result_is_used_on_every_store(any_url: str) -> None:
    toy = Toy()
    first = run(any_url, toy)
    assert run(any_url, toy) == first
    assert toy.runs == 1
    manifest = StageManifest.from_dict(first.to_dict())
    assert manifest == first
    assert [entry.path for entry in manifest.files] == ["b.txt", "out/a.txt"]
    assert manifest.metrics == {"rows": 2}
    assert manifest.reason == "never run before"
    assert manifest.store().read_bytes("b.txt") == b"beta"
    assert json.loads(json.dumps(first.to_dict())) == first.to_dict()


def test_another_key_runs_and_says_what_differs_from_the_nearest_of_its_pipeline(any_url: str) -> None:
    toy = Toy()
    run(any_url, toy)
    assert run(any_url, toy, stage_key("toy", {"x": 2})).reason == "x: 1 -> 2"
    assert toy.runs == 2
    run(any_url, Toy(), stage_key("toy", {"x": 1, "recipe": {"a/recipe.py": "1"}}))
    other = run(any_url, Toy(), stage_key("toy", {"x": 2, "recipe": {"b/recipe.py": "2"}}))
    assert other.reason == "never run before"
    edited = run(any_url, Toy(), stage_key("toy", {"x": 2, "recipe": {"b/recipe.py": "3"}}))
    assert "recipe.b/recipe.py" in edited.reason


@pytest.mark.parametrize(
    ("harm", "words"),
    [
        (lambda folder: (folder / "b.txt").write_bytes(b"bet"), "b.txt: 3 bytes, committed 4"),
        (lambda folder: (folder / "b.txt").write_bytes(b"BETA"), "b.txt: digest"),
        (lambda folder: (folder / "b.txt").unlink(), "b.txt: missing"),
        (lambda folder: (folder / "COMMIT.json").write_bytes(b"{}"), "damaged"),
    ],
)
def test_a_damaged_result_is_reported_withdrawn_and_made_again(
    local: str, harm: Callable[[Path], None], words: str
) -> None:
    toy = Toy()
    first = run(local, toy)
    folder = Path(first.url)
    _manifests._verified.clear()  # as in a new process
    harm(folder)
    (folder / "checkpoints").mkdir()
    (folder / "checkpoints" / "kept").write_text("x")
    again = run(local, toy)
    assert toy.runs == 2
    assert words in again.reason
    assert again.content_digest == first.content_digest
    assert (folder / "checkpoints" / "kept").exists()
    assert run(local, toy) == again
    Path(first.url, "b.txt").write_bytes(b"bet")
    assert "3 bytes" in run(local, Toy()).reason, "it is noticed even right after a look"


OTHER_KEYS = [stage_key("toy", {"x": 2}), stage_key("other", {"x": 1})]


@pytest.mark.parametrize("other", OTHER_KEYS, ids=["another training", "another stage"])
def test_a_result_under_another_key_or_of_another_stage_is_not_this_one(local: str, other: StageKey) -> None:
    """A folder that was moved, or restored from a backup, to the wrong place: all of its files are intact."""
    moved = Path(run(local, Toy(), other).url)
    (moved / "checkpoints").mkdir()
    (moved / "checkpoints" / "of_the_other").write_text("x")
    place = Path(stage_store(local, KEY).url)
    place.parent.mkdir(parents=True, exist_ok=True)
    moved.rename(place)
    toy = Toy()
    made = run(local, toy)
    assert toy.runs == 1
    assert (
        made.reason
        == f"its result is damaged: the folder holds the result of {other.stage} under the key {other.folder}"
    )
    assert (made.key, made.stage, made.attempt) == (KEY.digest, KEY.stage, 1)
    assert not (place / "checkpoints" / "of_the_other").exists()
    assert run(local, toy) == made


def test_an_unfinished_training_of_another_key_is_not_continued(local: str) -> None:
    def stopped(attempt: StageAttempt) -> StageOutput:
        attempt.store.write_bytes("checkpoints/c1", b"x")
        raise InfrastructureError("stopped")

    with pytest.raises(InfrastructureError):
        run(local, stopped, OTHER_KEYS[0])
    Path(stage_store(local, OTHER_KEYS[0]).url).rename(stage_store(local, KEY).url)
    made = run(local, Toy())
    assert made.attempt == 1
    assert not Path(made.url, "checkpoints").exists()


def test_force_discards_the_result_and_what_was_kept_for_continuing(local: str) -> None:
    toy = Toy()
    folder = Path(run(local, toy).url)
    (folder / "checkpoints").mkdir()
    (folder / "checkpoints" / "old").write_text("x")
    again = run(local, toy, force=True)
    assert toy.runs == 2
    assert again.reason == "forced"
    assert not (folder / "checkpoints").exists()
    assert again.attempt == 2


def test_leftovers_of_an_attempt_that_failed_are_not_part_of_the_result(any_url: str) -> None:
    def messy(attempt: StageAttempt) -> StageOutput:
        attempt.store.write_bytes("out/half.txt", b"half")
        attempt.store.write_bytes("checkpoints/c1", b"kept")
        raise InfrastructureError("died")

    with pytest.raises(InfrastructureError):
        run(any_url, messy)
    manifest, problem = look_up(any_url, KEY)
    assert (manifest, problem) == (None, None)
    assert explain_miss(any_url, KEY).reason == "an earlier attempt did not finish"
    first = run(any_url, Toy())
    paths = {info.path for info in first.store().list()}
    assert "out/half.txt" not in paths
    assert "checkpoints/c1" in paths
    assert first.attempt == 2


def test_a_result_that_names_a_missing_file_is_not_committed(local: str) -> None:
    def forgetful(attempt: StageAttempt) -> StageOutput:
        entry = attempt.store.write_bytes("a", b"x")
        attempt.store.delete("a")
        return StageOutput([entry])

    with pytest.raises(TrainflowError):
        run(local, forgetful)
    assert look_up(local, KEY) == (None, None)


def test_events_tell_what_happens_and_a_display_that_breaks_does_not_end_the_work(local: str) -> None:
    def broken(_: dict[str, Any]) -> None:
        raise ValueError("no terminal")

    told: list[dict[str, Any]] = []
    with _progress.subscribe(broken), _progress.subscribe(told.append):
        run(local, Toy())
        run(local, Toy())
        with pytest.raises(CodeError):
            run(local, Toy(CodeError("oops")), stage_key("toy", {"x": 9}))
    assert [event["status"] for event in told] == ["started", "committed", "cached", "started", "failed"]
    assert told[-1]["message"] == "oops"
    with pytest.raises(KeyboardInterrupt):
        run(local, Toy(KeyboardInterrupt()), stage_key("toy", {"x": 8}))
    [record] = [
        path for path in Path(local).glob("stages/toy/*/attempts/*.end.json") if "interrupted" in path.read_text()
    ]
    assert json.loads(record.read_text())["outcome"] == "interrupted"
    run(local, Toy(), stage_key("toy", {"x": 8}))


def test_of_two_processes_one_works_and_the_other_takes_its_result(local: str) -> None:
    working, go_on = threading.Event(), threading.Event()
    told: list[dict[str, Any]] = []

    def slow(attempt: StageAttempt) -> StageOutput:
        working.set()
        assert go_on.wait(20)
        return Toy()(attempt)

    results: list[StageManifest] = []
    first = threading.Thread(target=lambda: results.append(run(local, slow)))
    first.start()
    assert working.wait(20)
    second_toy = Toy()

    def listen(event: dict[str, Any]) -> None:
        told.append(event)
        if event["status"] == "waiting":
            go_on.set()

    with _progress.subscribe(listen):
        second = run(local, second_toy)
    first.join()
    assert second_toy.runs == 0
    assert results == [second]
    assert "waiting" in [event["status"] for event in told]


CRASH = """
import os, signal, sys
from trainflow.tasks.stage.runner import StageContext, StageOutput, run_stage, stage_key

def work(attempt):
    attempt.store.write_bytes("checkpoints/c1", b"kept")
    os.kill(os.getpid(), signal.SIGKILL)

context = StageContext(name="test", recipe="recipe.py", storage=sys.argv[1])
run_stage(stage_key("toy", {"x": 1}), context, work)
"""


def test_after_kill_9_the_next_command_takes_over_at_once(local: str) -> None:
    done = subprocess.run([sys.executable, "-c", CRASH, local], capture_output=True, text=True)
    assert done.returncode == -signal.SIGKILL, done.stderr
    started = time.monotonic()
    first = run(local, Toy())
    assert time.monotonic() - started < 10  # not the lease's time to live
    assert first.attempt == 2
    assert Path(first.url, "checkpoints", "c1").exists()


def test_a_stopped_process_cannot_commit_after_a_takeover(local: str) -> None:
    def overtaken(attempt: StageAttempt) -> StageOutput:
        _take_epoch(attempt.store.child("lease"), 2, 30.0).release()  # type: ignore[union-attr] # as another process
        return Toy()(attempt)

    with pytest.raises(LeaseLostError):
        run(local, overtaken)
    assert look_up(local, KEY) == (None, None)
