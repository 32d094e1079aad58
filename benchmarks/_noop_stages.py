"""Five stages that do nothing, as a flow: what the stages themselves cost. A part of `startup`.

python -m benchmarks._noop_stages STORAGE
python -m benchmarks._noop_stages            the same as five tasks of Prefect, without our stages
"""

from __future__ import annotations

import sys
from collections.abc import Callable

from trainflow.flows.server.api import prefect_api, quiet_environment

STAGES = 5


def main(storage: str | None = None) -> None:
    """Run the flow. Each stage looks, takes its lease, works and commits; without a storage it is a plain task."""
    quiet_environment()
    with prefect_api():
        from prefect import flow

        nothing = _plain() if storage is None else _stage(storage)

        @flow(name="noop")
        def stages() -> int:
            return sum(nothing(number) for number in range(STAGES))

        print(stages())


def _plain() -> Callable[[int], int]:
    from prefect import task

    @task
    def nothing(number: int) -> int:
        return number

    return nothing


def _stage(storage: str) -> Callable[[int], int]:
    from trainflow.tasks.keys.keys import stage_key
    from trainflow.tasks.stage.context import StageContext
    from trainflow.tasks.stage.manifest import StageManifest
    from trainflow.tasks.stage.runner import StageAttempt, StageOutput, run_stage
    from trainflow.tasks.stage.task import stage_task

    context = StageContext(name="noop", recipe="", storage=storage)

    @stage_task("nothing")
    def nothing(number: int) -> StageManifest:
        def work(attempt: StageAttempt) -> StageOutput:
            return StageOutput([], metrics={"number": number})

        return run_stage(stage_key("nothing", {"number": number}), context, work)

    return lambda number: int(nothing(number).metrics["number"])


if __name__ == "__main__":
    main(*sys.argv[1:])
