"""What it takes to go on with a recorded run: its own spec, its own choices, and nothing that is missing here."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from trainer_lib.errors import ConfigError
from trainflow.flows.planning.plan import Plan
from trainflow.flows.records.past_runs import PastRun, describe_changes
from trainflow.flows.records.recorded_spec import read_recorded_spec
from trainflow.flows.runs.forced_on_resume import find_still_forced
from trainflow.flows.runs.run_status import RunStatus
from trainflow.flows.spec.spec import PipelineSpec
from trainflow.tasks.stage.manifest import summary


@dataclass(frozen=True)
class Resumption:
    """A recorded run that can go on.

    Attributes:
        spec: as it was recorded, with paths of this machine.
        choice: which stages, as `trainflow.flows.pipeline.run_pipeline` takes them.
    """

    spec: PipelineSpec
    choice: dict[str, Any]


def prepare_resumption(storage: str, past: PastRun, say: Callable[[str], object]) -> Resumption:
    """Read the spec of a run below `storage`, and check that the run can go on on this machine.

    Args:
        say: called with a line for what is not as it was then.

    Raises:
        ConfigError: its spec or recipe is gone, or something that it needs is not here.
        StorageError: the storage cannot be read.
    """
    spec = read_recorded_spec(storage, past, say)
    plan = Plan.of(spec, only=past.only, start=past.start, from_run=past.from_run, as_of=past.first_started)
    plan.require_committed()
    require_sources(plan)
    if changed := describe_changes(plan.spec.storage, past, plan.early_keys):
        say(f"Changed since that run: {summary(changed)}. What these changes do not reach is kept.")
    choice = {"only": past.only, "start": past.start, "from_run": past.from_run}
    return Resumption(spec, {**choice, "force": find_still_forced(past, plan)})


def require_unfinished(past: PastRun, status: RunStatus | None, *, named: str) -> None:
    """Refuse a run that has finished, or that a process works on.

    Args:
        status: how it is now, if it is at work.
        named: the word that meant it, for the message of an error.

    Raises:
        ConfigError: there is nothing to go on with.
    """
    if status is not None:
        raise ConfigError(
            f"This run is at work: {status.where}.",
            field="RUN",
            value=named,
            remedy="Wait for it, or stop it; trainflow status shows its process.",
        )
    if past.is_finished:
        raise ConfigError(
            "This run has finished: nothing of it is left to do.",
            field="RUN",
            value=named,
            remedy="To begin in its middle: trainflow run SPEC --from-run ID --from STAGE.",
        )


def require_sources(plan: Plan) -> None:
    """Refuse to prepare data from sources that are not on this machine.

    Raises:
        ConfigError: prepare-data has to run, and a source is missing.
    """
    assumed = plan.context.resolver.assumed_sources
    reason = plan.reasons["prepare-data"]
    if assumed and not reason.hit and plan.is_wanted("prepare-data"):
        raise ConfigError(
            f"prepare-data has to run ({reason.reason}), and its sources are not on this machine.",
            field="prepare.sources",
            value=", ".join(assumed),
            remedy="Copy them to the same place on this machine, or resume where they are.",
        )
