"""Stages as Prefect tasks: cached, retried, shown and failing there as an engineer would expect."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tasks.stage import progress as _progress
from tasks.stage import task as _task
from tasks.stage.runner import StageAttempt, StageManifest, StageOutput, run_stage, stage_key
from tasks.stage.task import stage_task
from tests.support.stage import KEY, Toy, ToyFacts, in_storage, run
from trainer_lib.errors import (
    CodeError,
    ConfigError,
    InfrastructureError,
    OutOfMemoryError,
    Preempted,
    StorageError,
    TrainflowError,
)


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Retries without the wait."""
    monkeypatch.setattr(_task, "DELAYS_S", [0.0])


def as_task(local: str, toy: Toy, **more: Any) -> Any:
    @stage_task("toy")
    def toy_stage() -> StageManifest[ToyFacts]:
        return run_stage(KEY, in_storage(local), toy, **more)

    return toy_stage


def in_flow(function: Callable[[], Any]) -> Any:
    from prefect import flow

    return flow(name="test")(function)()


def test_prefect_sees_a_cached_stage_as_cached(prefect_server: str, local: str, quick: None) -> None:
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


def test_failures_worth_it_are_retried_and_come_out_typed(prefect_server: str, local: str, quick: None) -> None:
    toy = Toy(StorageError("a"), Preempted("b"), InfrastructureError("c"))
    stage = as_task(local, toy, retries=2)
    in_flow(lambda: stage())
    assert toy.runs == 4
    assert [attempt.number for attempt in toy.attempts] == [1, 2, 3, 4]


@pytest.mark.parametrize("error", [CodeError("bug", details="their frames"), ConfigError("bad", field="x")])
def test_the_users_own_failures_are_not_retried(
    prefect_server: str, local: str, quick: None, error: TrainflowError
) -> None:
    toy = Toy(error)
    with pytest.raises(type(error)) as caught:
        in_flow(as_task(local, toy))
    assert caught.value is error
    assert toy.runs == 1


def test_a_used_up_budget_ends_the_stage(prefect_server: str, local: str, quick: None) -> None:
    toy = Toy(*(StorageError(str(number)) for number in range(9)))
    with pytest.raises(StorageError):
        in_flow(as_task(local, toy, retries=2))
    assert toy.runs == 3


def test_memory_running_out_halves_the_batch_until_nothing_is_left(
    prefect_server: str, local: str, quick: None
) -> None:
    toy = Toy(OutOfMemoryError("a"), OutOfMemoryError("b"))
    manifest = in_flow(as_task(local, toy, retries=0, max_halvings=2))
    assert [attempt.batch_halvings for attempt in toy.attempts] == [0, 1, 2]
    assert manifest.batch_halvings == 2
    ended = Toy(OutOfMemoryError("a"), OutOfMemoryError("b"))
    with pytest.raises(OutOfMemoryError):
        in_flow(as_task(local + "/other", ended, max_halvings=1))
    in_flow(as_task(local + "/other", ended, max_halvings=1))  # the next command begins with what memory allowed
    assert [attempt.batch_halvings for attempt in ended.attempts] == [0, 1, 1]


def test_force_discards_once_not_at_every_retry(prefect_server: str, local: str, quick: None) -> None:
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


def test_typed_failures_are_logged_in_one_line(
    prefect_server: str, local: str, quick: None, capfd: pytest.CaptureFixture[str]
) -> None:
    with _progress.quiet_failures(), pytest.raises(CodeError):
        in_flow(as_task(local, Toy(CodeError("the recipe raised"))))
    assert "Traceback" not in "".join(capfd.readouterr())


def test_a_stage_runs_alone_without_a_flow(prefect_server: str, local: str) -> None:
    toy = Toy()
    stage = as_task(local, toy)
    assert stage() == stage()
    assert toy.runs == 1
    assert os.getpid() == json.loads(next(Path(local).glob("stages/toy/*/attempts/0001.json")).read_text())["pid"]


def test_progress_and_printed_lines_reach_prefect(prefect_server: str, local: str) -> None:
    import uuid

    from prefect.client.orchestration import get_client
    from prefect.client.schemas.filters import ArtifactFilter, ArtifactFilterKey, LogFilter, LogFilterTaskRunId
    from prefect.runtime import task_run

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
        while drawn() != (50.0, "step 5/10, loss 0.25, 1 min 01 s left"):  # drawn every few seconds
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
