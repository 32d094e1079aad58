"""Which stages a run that goes on still has to force: one that had started goes on from its checkpoints."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from datetime import datetime

from trainflow.flows.planning.plan import Plan
from trainflow.flows.records.past_runs import PastRun, list_runs


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
    """Plan one try of a flow run: a retry goes on from what the tries before it have forced.

    Args:
        choose: makes a plan from `force` and `as_of`.
        began: when the first try began; None: this is the first.
    """
    if began is not None and force:
        force = _left_to_force(force, choose(as_of=began), began)
    return choose(force=force, as_of=began)


def _left_to_force(force: Sequence[str], plan: Plan, began: datetime) -> Sequence[str]:
    """What a retry of a flow run that began then still has to force; `plan` is that of the run without its force."""
    # Found by its name and time: the recipe may have been mended meanwhile, which makes it another run.
    earliest = began.replace(microsecond=0)
    tries = (run for run in list_runs(plan.spec.storage) if run.name == plan.spec.name and set(run.force) <= set(force))
    past = next((run for run in tries if run.first_started is not None and run.first_started >= earliest), None)
    # Without one, the try before this one died before it recorded anything.
    return force if past is None else find_still_forced(replace(past, force=tuple(force)), plan)
