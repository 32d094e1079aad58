"""A whole plan: the stages, what the training takes, and what cannot work."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from trainer_lib.base.json_text import parse_json
from trainer_lib.errors import TrainflowError
from trainer_lib.secrets import mask
from trainflow.flows.planning.forecast import Forecast, Found, forecast
from trainflow.flows.planning.obstacles import Obstacle, find_obstacles
from trainflow.flows.planning.plan import Plan
from trainflow.tasks.stage.facts import PrepareFacts
from trainflow.tasks.stage.manifest import StageManifest

_CONVERSATIONS = "assets/conversations.json"
_CONVERSATIONS_BYTES = 4 << 20


@dataclass(frozen=True)
class FullPlan:
    """The actions and costs of a run.

    Attributes:
        plan: the stages, with the reasons why they run or do not.
        forecast: steps, memory, time and room of the training.
        obstacles: what cannot work, and what may not.
    """

    plan: Plan
    forecast: Forecast
    obstacles: tuple[Obstacle, ...]

    @property
    def warnings(self) -> list[str]:
        """Likely mistakes that stop nothing."""
        return [warning for several in self.plan.warnings.values() for warning in several]

    @property
    def can_work(self) -> bool:
        """Whether no obstacle is fatal."""
        return not any(obstacle.is_fatal for obstacle in self.obstacles)

    @property
    def summary(self) -> Sequence[str]:
        """Sentences of the recipe about the prepared data; empty before it is prepared."""
        prepared = self.plan.reasons["prepare-data"].manifest
        return () if prepared is None else getattr(prepared.facts, "info", {}).get("summary", ())

    @cached_property
    def conversations(self) -> list[dict[str, Any]]:
        """As `read_conversations`."""
        return read_conversations(self.plan.reasons["prepare-data"].manifest)

    def to_dict(self) -> dict[str, Any]:
        """As plain JSON: what `trainflow plan --json` prints."""
        return {
            "ok": self.can_work,
            "exit_code": 0 if self.can_work else 2,
            "name": self.plan.spec.name,
            "limit": self.plan.spec.limit,
            "stages": [reason.to_dict() for reason in self.plan.reasons.values()],
            "arguments": effective_arguments(self.plan),
            **self.forecast.to_dict(),
            "obstacles": [vars(obstacle) for obstacle in self.obstacles],
            "warnings": self.warnings,
            "data": list(self.summary),
            "conversations": self.conversations,
        }


def read_conversations(prepared: StageManifest | None) -> list[dict[str, Any]]:
    """The first conversations of prepared data: `place`, and `parts`, texts with whether they are trained.

    Empty before the data is prepared, and of another recipe's.
    """
    if prepared is None or not any(entry.path == _CONVERSATIONS for entry in prepared.files):
        return []
    try:
        content = prepared.store().read_bytes(_CONVERSATIONS, limit=_CONVERSATIONS_BYTES)
        shown = parse_json(content, list)
        return [
            {
                "place": mask(str(conversation["place"])),
                "parts": [[mask(str(text)), bool(is_trained)] for text, is_trained in conversation["parts"]],
            }
            for conversation in shown
        ]
    except (TrainflowError, LookupError, TypeError, ValueError):
        return []  # the file is damaged, or another recipe's


def plan_in_full(
    plan: Plan,
    *,
    probe: bool = False,
    during: Callable[[str], AbstractContextManager[object]] = lambda _: contextlib.nullcontext(),
) -> FullPlan:
    """Work out what a run would do and take.

    Args:
        probe: prepare the data if it is not, train a few real steps, and measure time and memory.
        during: entered with the name of a long step while it lasts.

    Raises:
        TrainflowError: the data could not be prepared, or the storage cannot be read.
    """
    if probe:
        from trainflow.tasks.stage.rehearsal import announce_probe

        announce_probe(plan.stages["train"].config, plan.context)
    if probe and plan.reasons["prepare-data"].manifest is None:
        with during("preparing the data"):
            plan = _prepared(plan)
    with during("building the model without values" + (", then training a few steps" if probe else "")):
        found = forecast(plan, ask=lambda data: _ask(plan, data, probe=probe))
    return FullPlan(plan, found, tuple(find_obstacles(plan, found)))


def effective_arguments(plan: Plan) -> dict[str, Any]:
    """The training arguments as plain values: those that differ from the defaults first."""
    from trainer_lib.arguments import TrainingArguments

    args = plan.stages["train"].arguments
    if args is None:
        return {}
    values, defaults = args.to_dict(), TrainingArguments().to_dict()
    differ = {name: value for name, value in values.items() if value != defaults.get(name)}
    return {**differ, **values}


def _prepared(plan: Plan) -> Plan:
    """The plan after its data was prepared, which a run would do first."""
    stage = plan.stages["prepare-data"]
    # The stage itself, without an engine: it is committed as by a run.
    stage.stage.load_task().fn(stage.config, plan.context)
    return Plan.of(plan.spec, debug=plan.context.debug)


def _ask(plan: Plan, data: StageManifest[PrepareFacts], *, probe: bool) -> Found:
    """Measure in workers; a failure of the recipe's code becomes an obstacle."""
    from trainflow.tasks.stage.rehearsal import estimate_training, needs_rehearsal, probe_training, rehearse_evaluation

    config, found = plan.stages["train"].config, Found()
    try:
        found.estimate = estimate_training(config, plan.context, data)
        measured = None if plan.reasons["train"].hit else plan.stages.get("evaluate")
        named = plan.spec.counted_on
        if measured is not None and needs_rehearsal(measured.config, plan.context, named):
            silent: Any = lambda event: None  # noqa: E731 - the run says it
            rehearse_evaluation(measured.config, config, plan.context, data, named=named, on_event=silent)
        if probe:
            found.probe = probe_training(config, plan.context, data, on_line=lambda line: None)
    except TrainflowError as error:
        found.error = error
    return found
