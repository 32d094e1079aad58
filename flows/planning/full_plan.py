"""A whole plan: the stages, what the training takes, and what cannot work."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from trainer_lib.base.durations import describe_bytes
from trainer_lib.base.json_text import parse_json
from trainer_lib.errors import TrainflowError
from trainer_lib.hub.base import SCHEME, parse_target
from trainer_lib.secrets import mask
from trainer_lib.storage import Store
from trainflow.flows.planning.forecast import Forecast, forecast
from trainflow.flows.planning.plan import Plan
from trainflow.flows.spec.checks import check_splits
from trainflow.tasks.stage.facts import PrepareFacts
from trainflow.tasks.stage.manifest import StageManifest

_CONVERSATIONS = "assets/conversations.json"
_CONVERSATIONS_BYTES = 4 << 20
ANSWER_S = 5.0
"""Seconds that a server has to answer."""


@dataclass(frozen=True)
class Obstacle:
    """Something that will not work, in the words of an error."""

    field: str | None
    value: str | None
    what: str
    remedy: str | None

    @classmethod
    def of(cls, error: TrainflowError) -> Obstacle:
        """Convert an error."""
        return cls(error.field, None if error.value is None else str(error.value), error.message, error.remedy)


@dataclass(frozen=True)
class FullPlan:
    """The stages of a run and why they run, what its training takes, and what cannot work."""

    plan: Plan
    forecast: Forecast
    obstacles: tuple[Obstacle, ...]

    @property
    def warnings(self) -> list[str]:
        """Likely mistakes that stop nothing."""
        return [warning for several in self.plan.warnings.values() for warning in several]

    @property
    def can_work(self) -> bool:
        """Whether nothing is known that would make the run fail."""
        return not self.obstacles

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
    """Work out what a run would do and take. Raises TrainflowError.

    Args:
        probe: prepare the data if it is not, train a few real steps, and measure time and memory.
        during: entered with the name of a long step while it lasts.
    """
    if probe:
        from trainflow.tasks.stage.rehearsal import announce_probe

        announce_probe(plan.stages["train"].config, plan.context)
    if probe and plan.reasons["prepare-data"].manifest is None:
        with during("preparing the data"):
            stage = plan.stages["prepare-data"]
            # The stage itself, without an engine: it is committed as by a run.
            stage.stage.load_task().fn(stage.config, plan.context)
            plan = Plan.of(plan.spec, debug=plan.context.debug)
    with during("building the model without values" + (", then training a few steps" if probe else "")):
        found = forecast(plan, ask=lambda data, found: _ask(plan, data, found, probe=probe))
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


def _ask(plan: Plan, data: StageManifest[PrepareFacts], found: Forecast, *, probe: bool) -> None:
    """Measure in workers; a failure of the recipe's code becomes an obstacle."""
    from trainflow.tasks.stage.rehearsal import estimate_training, needs_rehearsal, probe_training, rehearse_evaluation

    config = plan.stages["train"].config
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


# -- what cannot work -------------------------------------------------------------------------------------------------


def find_obstacles(plan: Plan, found: Forecast) -> list[Obstacle]:
    """Look for everything that will not work; asks servers, and writes and removes a tiny file where the run would."""
    failed = [] if found.error is None else [Obstacle.of(found.error)]
    places = [
        *_refusals(lambda: Store.open(plan.spec.storage).ensure_writable()),
        *_room(plan, found),
        *_publication(plan),
        *_repositories(plan),
    ]
    prepared = plan.reasons["prepare-data"].manifest
    facts = None if prepared is None else prepared.facts
    splits = facts.splits if isinstance(facts, PrepareFacts) else None
    unprepared = [] if splits is None else _refusals(lambda: check_splits(plan.spec, splits))
    return [*unprepared, *failed, *places]


def _refusals(check: Callable[[], object]) -> Iterator[Obstacle]:
    """The error that a check raises, if it does."""
    try:
        check()
    except TrainflowError as error:
        yield Obstacle.of(error)


def _room(plan: Plan, found: Forecast) -> Iterator[Obstacle]:
    room = found.room
    if room is None or room.needed_bytes is None or room.free_bytes is None or plan.reasons["train"].hit:
        return
    if room.needed_bytes > room.free_bytes:
        yield Obstacle(
            "storage",
            plan.spec.storage,
            f"The training needs {describe_bytes(room.needed_bytes)} there ({room.kept} checkpoints of "
            f"{describe_bytes(room.checkpoint_bytes or 0)}, and the model), and {describe_bytes(room.free_bytes)} are "
            "free.",
            "Set train.args.save_total_limit, free space, or choose another storage.",
        )


def _publication(plan: Plan) -> Iterator[Obstacle]:
    """The place to publish to: may this user write there?"""
    publish = plan.spec.publish
    # Unset, it lies below the storage, which is asked already.
    if not publish.enabled or not publish.to or plan.reasons["push-to-hub"].hit:
        return
    if publish.to.startswith(SCHEME):
        yield from _ask_hub(publish.to, "publish.to", writes=True, revision=publish.revision)
        return
    try:
        _nearest_folder(publish.to).ensure_writable(field="publish.to")
    except TrainflowError as error:
        yield replace(Obstacle.of(error), field="publish.to", value=publish.to)


def _nearest_folder(target: str) -> Store:
    """A folder, or where it is not there yet the one in which it would be made: a plan leaves no empty folder."""
    store = Store.open(target, field="publish.to")
    if not store.is_local:
        return store
    folder = store.local_path()
    while not folder.exists() and folder != folder.parent:
        folder = folder.parent
    # Where a file stands in the way, the target itself has the words for it.
    return Store.open(folder) if folder.is_dir() else store


def _repositories(plan: Plan) -> Iterator[Obstacle]:
    """The repositories on a hub that settings name: is there an answer, and may this user read?"""
    spec = plan.spec
    settings = {
        "train.model": spec.train.model,
        "train.options": spec.train.options,
        "prepare.options": spec.prepare.options,
    }
    for section, values in settings.items():
        for name, value in values.items():
            if isinstance(value, str) and value.startswith(SCHEME):
                yield from _ask_hub(value, f"{section}.{name}", writes=False)


def _ask_hub(address: str, field: str, *, writes: bool, revision: str | None = None) -> Iterator[Obstacle]:
    from trainer_lib.hub.huggingface import check_access

    def ask() -> None:
        target = parse_target(address, revision=revision, field=field)
        if target.repo is not None:
            check_access(target.repo, field=field, writes=writes, timeout_s=ANSWER_S)

    yield from _refusals(ask)
