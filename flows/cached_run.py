"""A run for which nothing is left to do: its record and its results are looked at, and no engine is started.

Prefect's import and its server are most of what such a command would take. Its run was recorded there when it was made.
"""

from __future__ import annotations

from typing import Any

from trainflow.flows.planning.plan import Plan
from trainflow.flows.records.past_runs import read_record, run_folder
from trainflow.flows.records.results import RUN_ID_CHARS, PipelineResult
from trainflow.flows.reports.run_record import RunRecord, has_nothing_to_do
from trainflow.flows.run_stages import expect_launches, keep_stages
from trainflow.flows.runs.heartbeat import beating, read_signs
from trainflow.flows.spec.spec import PipelineSpec
from trainflow.tasks.stage.gates import judge


def result_if_unchanged(
    spec: PipelineSpec, *, force: object = (), debug: bool = False, **choice: Any
) -> PipelineResult | None:
    """Return the result of a run that is complete already; None if anything is left to do, or may be.

    What waits for MLflow is delivered. Where workers will be needed, the process that loads torch for them is started.

    Args:
        force: stages to run again; with any, something is left to do.
        choice: which stages, as `trainflow.flows.pipeline.run_pipeline` takes them.

    Raises:
        TrainflowError: the spec is refused, or the storage cannot be read.
    """
    if force:
        return None
    plan = Plan.of(spec, debug=debug, **choice)
    if any(stage.launch is not None and stage.launch.several_nodes for stage in plan.stages.values()):
        return None  # other machines wait for the training, whose task lets them go
    folder = run_folder(spec.storage, plan.pipeline_key[:RUN_ID_CHARS])
    # A sign belongs to a process at work on the run, or to one that died: Prefect may not know yet that it ended.
    if not has_nothing_to_do(plan, read_record(folder)) or read_signs(folder):
        expect_launches(plan)  # the import of torch takes longer than the start of the engine
        return None
    evaluated = plan.reasons["evaluate"].manifest if "evaluate" in plan.reasons else None
    if evaluated is not None and not judge(spec.evaluate, evaluated).passed:
        return None
    result = PipelineResult(spec.name, "", spec.storage)
    with beating(plan, in_flow=False), RunRecord(plan, result) as record:
        keep_stages(plan, record)
    return result
