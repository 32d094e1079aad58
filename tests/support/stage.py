"""A stage without dependencies, whose work counts its attempts and fails on demand."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from tasks.stage.runner import (
    StageAttempt,
    StageContext,
    StageFacts,
    StageManifest,
    StageOutput,
    run_stage,
    stage_key,
)

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
