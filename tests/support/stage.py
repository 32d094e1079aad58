"""A stage that needs nothing: its work counts itself and fails as told."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tasks.stage.runner import StageContext, StageOutput, run_stage, stage_key

Work = Callable[[StageContext], StageOutput]


class Toy:
    """Work that counts itself, writes two files, and fails as told."""

    def __init__(self, *failures: BaseException) -> None:
        self.failures = list(failures)
        self.contexts: list[StageContext] = []

    def __call__(self, context: StageContext) -> StageOutput:
        self.contexts.append(context)
        half = context.store.write_bytes("out/a.txt", b"alpha")
        if self.failures:
            raise self.failures.pop(0)
        files = [half, context.store.write_bytes("b.txt", b"beta")]
        return StageOutput(files, metrics={"rows": 2}, meta={"note": "x"})

    @property
    def runs(self) -> int:
        return len(self.contexts)


KEY = stage_key("toy", {"x": 1})


def run(storage: str, work: Work, key: Any = KEY, **more: Any) -> dict[str, Any]:
    return run_stage(key, storage, work, **more)
