"""Five stages that do nothing, as a flow: what the stages themselves cost. A part of `startup`.

python -m benchmarks._noop_stages STORAGE
"""

from __future__ import annotations

import sys

from flows.server.api import prefect_api, quiet_environment

STAGES = 5


def main(storage: str) -> None:
    """Run the flow: each stage looks, takes its lease, works and commits."""
    quiet_environment()
    with prefect_api():
        from prefect import flow

        from tasks.stage.context import StageContext
        from tasks.stage.keys import stage_key
        from tasks.stage.manifest import StageManifest
        from tasks.stage.runner import StageAttempt, StageOutput, run_stage
        from tasks.stage.task import stage_task

        context = StageContext(name="noop", recipe="", storage=storage)

        @stage_task("nothing")
        def nothing(number: int) -> StageManifest:
            def work(attempt: StageAttempt) -> StageOutput:
                return StageOutput([], metrics={"number": number})

            return run_stage(stage_key("nothing", {"number": number}), context, work)

        @flow(name="noop")
        def stages() -> int:
            return sum(nothing(number).metrics["number"] for number in range(STAGES))

        print(stages())


if __name__ == "__main__":
    main(sys.argv[1])
