"""Resuming a recorded run: its own spec, its own choices, and nothing that is missing here."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from datetime import datetime
from typing import Any

from trainer_lib.errors import ConfigError
from trainflow.flows.planning.plan import Plan
from trainflow.flows.records.past_runs import PastRun, describe_changes, list_runs
from trainflow.flows.records.recorded_spec import read_recorded_spec
from trainflow.flows.runs.run_status import RunStatus
from trainflow.flows.spec.spec import PipelineSpec
from trainflow.tasks.stage.manifest import summary


def prepare_resumption(
    storage: str, past: PastRun, say: Callable[[str], object]
) -> tuple[PipelineSpec, dict[str, Any]]:
    """Read the spec of a run below `storage`, and check that the run can resume here. Raises ConfigError.

    Returns the spec as it was recorded, with paths of this machine, and which stages, as
    `trainflow.flows.pipeline.run_pipeline` takes them; `say` gets a line for what is not as it was then.
    """
    spec = read_recorded_spec(storage, past, say)
    plan = Plan.of(spec, only=past.only, start=past.start, from_run=past.from_run, as_of=past.first_started)
    plan.require_committed()
    require_sources(plan)
    if changed := describe_changes(plan.spec.storage, past, plan.early_keys):
        say(f"Changed since that run: {summary(changed)}. What these changes do not reach is kept.")
    choice = {"only": past.only, "start": past.start, "from_run": past.from_run}
    return spec, {**choice, "force": find_still_forced(past, plan)}


def require_unfinished(past: PastRun, status: RunStatus | None, *, named: str) -> None:
    """Raise ConfigError, about the word `named`, for a run that has finished or, with a `status`, is running."""
    if status is not None:
        remedy = "Wait for it, or stop it; trainflow status shows its process."
        raise ConfigError(f"This run is still running: {status.where}.", field="RUN", value=named, remedy=remedy)
    if past.is_finished:
        what = "This run has finished: nothing of it is left to do."
        remedy = "To begin in its middle: trainflow run SPEC --from-run ID --from STAGE."
        raise ConfigError(what, field="RUN", value=named, remedy=remedy)


def require_sources(plan: Plan) -> None:
    """Raise ConfigError if prepare-data has to run, and its sources are not on this machine."""
    assumed = plan.context.resolver.assumed_sources
    reason = plan.reasons["prepare-data"]
    if assumed and not reason.hit and plan.is_wanted("prepare-data"):
        what = f"prepare-data has to run ({reason.reason}), and its sources are not on this machine."
        remedy = "Copy them to the same place on this machine, or resume where they are."
        raise ConfigError(what, field="prepare.sources", value=", ".join(assumed), remedy=remedy)


def find_still_forced(past: PastRun, plan: Plan) -> list[str]:
    """The forced stages that had not started when the run ended; `plan` is that of the run without its force."""
    forced = []
    is_next = True
    for name, reason in plan.reasons.items():
        # Its first act is to discard its result, so with a result it had not started.
        has_begun = name in past.stages or (is_next and not reason.hit)
        if name in past.force and plan.is_wanted(name) and not has_begun:
            forced.append(name)
        is_next = is_next and (name in past.stages or not plan.is_wanted(name))
    return forced


def plan_of_try(choose: Callable[..., Plan], force: Sequence[str], began: datetime | None) -> Plan:
    """Plan one try of a flow run, whose first try `began` then: a retry continues from what earlier tries forced."""
    if began is not None and force:
        force = _left_to_force(force, choose(as_of=began), began)
    return choose(force=force, as_of=began)


def _left_to_force(force: Sequence[str], plan: Plan, began: datetime) -> Sequence[str]:
    """Stages that a retry of a flow run still has to force; `plan` is that of the run without its force."""
    # Found by its name and time: the recipe may have been mended meanwhile, which makes it another run.
    earliest = began.replace(microsecond=0)
    tries = (run for run in list_runs(plan.spec.storage) if run.name == plan.spec.name and set(run.force) <= set(force))
    past = next((run for run in tries if run.first_started is not None and run.first_started >= earliest), None)
    # Without one, the try before this one died before it recorded anything.
    return force if past is None else find_still_forced(replace(past, force=tuple(force)), plan)
