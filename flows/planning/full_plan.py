"""A whole plan: the stages, what the training takes (steps, samples, memory, time, room), and what cannot work.

What is not known, because the data is not prepared or the model cannot be built, is a sentence in `missing`. Nothing
here imports torch: the model is built in a worker.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

from trainer_lib.arguments import TrainingArguments, total_batch_size
from trainer_lib.arguments.configs.accelerator_config import describe_step, rows_at_a_time
from trainer_lib.arguments.configs.parallelism_config import data_size, read_layout
from trainer_lib.base.durations import describe_bytes
from trainer_lib.base.json_text import parse_json
from trainer_lib.base.records import to_record
from trainer_lib.data.rows.mixture import INFO, Mixture
from trainer_lib.errors import ConfigError, TrainflowError
from trainer_lib.hub.base import SCHEME, parse_target
from trainer_lib.protocol.footprint import Estimate, Footprint, Probe, footprints
from trainer_lib.secrets import mask
from trainer_lib.storage import Store
from trainflow.flows.planning.plan import Plan
from trainflow.flows.spec.checks import check_splits
from trainflow.tasks.stage.facts import PrepareFacts
from trainflow.tasks.stage.manifest import StageManifest

if TYPE_CHECKING:
    from trainer_lib.launch.settings.config import LaunchConfig
    from trainflow.tasks.configs import TrainConfig

_CONVERSATIONS = "assets/conversations.json"
_CONVERSATIONS_BYTES = 4 << 20
ANSWER_S = 5.0
"""Seconds that a server has to answer."""
_LOADING_BYTES = 20_000
"""Bytes of a checkpoint without weights and optimizer: counters, generators, the schedule."""


@dataclass(frozen=True)
class Length:
    """The length of a training."""

    steps: int  # optimizer steps
    samples: int  # training samples, those that come again counted again
    batch: int  # samples of a step
    epochs: float  # passes over the data
    # evaluations, saves: how often it evaluates and saves.
    evaluations: int
    saves: int
    evaluated_rows: int  # rows of one evaluation
    step: str  # how processes share them, in words

    @classmethod
    def of(
        cls,
        args: TrainingArguments,
        facts: PrepareFacts,
        config: TrainConfig,
        processes: int,
        mixture: Mapping[str, Any] | None = None,
    ) -> Length:
        """The length that follows from the arguments and the number of rows, or from their mixture."""
        processes = data_size(args, processes)
        rows, batch = facts.splits[config.train_split].rows, total_batch_size(args, data_parallel_size=processes)
        if mixture is not None:
            rows = Mixture.of({**facts.info.get(INFO, {}), **mixture}, config.train_split).epoch_rows
        per_epoch = max(1, rows // batch if args.dataloader_drop_last else math.ceil(rows / batch))
        steps = args.max_steps if args.max_steps > 0 else math.ceil(args.num_train_epochs * per_epoch)
        whole, rest = divmod(steps, per_epoch)
        samples = whole * (per_epoch * batch if args.dataloader_drop_last else rows) + rest * batch
        evaluated = 0 if config.eval_split is None else facts.splits[config.eval_split].rows
        evaluate_every = args.eval_steps or args.logging_steps
        return cls(
            steps=steps,
            samples=samples,
            batch=batch,
            epochs=round(steps / per_epoch, 3),
            evaluations=_count(str(args.eval_strategy), evaluate_every, steps, per_epoch) + bool(args.eval_on_start),
            saves=_count(str(args.save_strategy), args.save_steps, steps, per_epoch),
            evaluated_rows=evaluated,
            step=describe_step(args, data_parallel_size=processes),
        )


def _count(strategy: str, every: float, steps: int, per_epoch: int) -> int:
    """Count how often something happens; "best" may happen at every evaluation, and counts once."""
    if strategy == "no":
        return 0
    if strategy == "best":
        return 1
    interval = per_epoch if strategy == "epoch" else every if every >= 1 else steps * every
    # The last step counts as one of them, whatever the interval.
    return math.ceil(steps / max(1, math.ceil(interval)))


@dataclass(frozen=True)
class Room:
    """Space that the training needs on the storage."""

    checkpoint_bytes: int | None  # of one checkpoint; None: not known
    kept: int  # checkpoints that are there at one time, the one that is being written included
    model_bytes: int  # of the exported model
    free_bytes: int | None  # what is free there now; None: the store does not say

    @property
    def needed_bytes(self) -> int | None:
        """The most that is there at one time; None: not known."""
        if self.checkpoint_bytes is None:
            return None
        return self.checkpoint_bytes * self.kept + self.model_bytes


@dataclass
class Forecast:
    """The forecast of a plan's training."""

    strategy: str  # name of the spec's own strategy, as in `trainer_lib.protocol.footprint`
    processes: int  # number of ranks
    length: Length | None = None  # None: the data is not prepared
    estimate: Estimate | None = None  # None: it could not be made
    probe: Probe | None = None  # None: none was asked for
    room: Room | None = None
    seconds: float | None = None  # of the stage train, by the probe; None: none was asked for
    alone: int | None = None  # samples of the micro-batch of one process alone
    writers: int | None = None  # ranks that write a part of FSDP's checkpoint; None: all
    only_model: bool = False  # checkpoints have no optimizer state
    # Copies, shards, and ranks of a tensor group; None: the arguments have none.
    layout: tuple[int, int, int] | None = None
    missing: list[str] = field(default_factory=list)  # sentences about what could not be found out, and what to do
    error: TrainflowError | None = None  # what failed in the workers

    @property
    def tokens(self) -> int | None:
        """Tokens that the model is fed; None: not known, or its input holds none."""
        if self.length is None or self.estimate is None or self.estimate.tokens_per_sample is None:
            return None
        return round(self.length.samples * self.estimate.tokens_per_sample)

    def footprints(self) -> list[Footprint]:
        """The bytes of a rank under every strategy, on as many processes as the spec has, or on two."""
        return self._footprints(max(2, self.processes), alone=self.alone)

    @property
    def own(self) -> Footprint | None:
        """The bytes of a rank as the spec says it."""
        return next(
            (footprint for footprint in self._footprints(self.processes) if footprint.strategy == self.strategy), None
        )

    def _footprints(self, processes: int, *, alone: int | None = None) -> list[Footprint]:
        if self.estimate is None:
            return []
        size, writers = self.estimate.size, self.writers
        return footprints(size, processes, alone=alone, writers=writers, only_model=self.only_model, layout=self.layout)

    @property
    def peak_bytes(self) -> int | None:
        """The largest memory of a process: as the probe measured it, else as it was worked out.

        On a CPU that is the resident set, with the interpreter and its libraries; on a GPU what torch allocates.
        """
        if self.probe is not None:
            return self.probe.peak_bytes
        if self.estimate is None or self.own is None or self.own.total is None:
            return None
        return self.own.total + (self.estimate.process_bytes if self.estimate.device == "cpu" else 0)

    def to_dict(self) -> dict[str, Any]:
        """This as plain JSON."""
        parts: Mapping[str, Any] = {"length": self.length, "estimate": self.estimate, "probe": self.probe}
        return {
            "strategy": self.strategy,
            "processes": self.processes,
            **{name: None if part is None else to_record(part) for name, part in parts.items()},
            "tokens": self.tokens,
            "ranks": [{**to_record(rank), "total": rank.total} for rank in self.footprints()],
            "peak_bytes": self.peak_bytes,
            "room": None if self.room is None else {**to_record(self.room), "needed_bytes": self.room.needed_bytes},
            "seconds": self.seconds,
            "missing": self.missing,
        }


def forecast(plan: Plan, *, ask: Callable[[StageManifest[PrepareFacts], Forecast], object]) -> Forecast:
    """Work out what the training of a plan takes.

    Args:
        ask: has workers estimate, and probe, it on prepared data; sets `estimate`, `probe` and `error`.
    """
    train = plan.stages["train"]
    args, launch, config = train.arguments, train.launch, train.config
    if args is None or launch is None:
        raise ConfigError("The stage train has no arguments and no launch.", field="train")
    found = Forecast(strategy_name(args, launch), launch.world_size)
    reason = plan.reasons["prepare-data"]
    if reason.manifest is None or not isinstance(reason.manifest.facts, PrepareFacts):
        found.missing.append(
            f"The data is not prepared ({reason.reason}), so its rows, and with them steps, memory and time, are not "
            "known. Prepare it (trainflow run SPEC --only prepare), or plan with --probe, which prepares it."
        )
        return found
    data: StageManifest[PrepareFacts] = reason.manifest
    if any(split not in data.facts.splits for split in (config.train_split, config.eval_split) if split is not None):
        return found  # what cannot work says which
    found.alone = rows_at_a_time(args, data_parallel_size=1)
    found.writers, found.only_model = _fsdp_writers(args, launch), args.save_only_model
    if found.strategy == "layout" and (layout := read_layout(args)) is not None:
        found.layout = layout.replicate, layout.shards, layout.tensor
    found.length = Length.of(args, data.facts, config, launch.world_size, plan.context.mixture)
    ask(data, found)
    found.room = _room(plan, args, found)
    if (probe := found.probe) is not None:
        evaluated_rows = found.length.evaluations * found.length.evaluated_rows
        found.seconds = probe.overhead_s + probe.warm_up_s + found.length.steps * probe.step_s
        found.seconds += evaluated_rows * (probe.evaluation_row_s or 0.0) + found.length.saves * (probe.save_s or 0.0)
    return found


def strategy_name(args: TrainingArguments, launch: LaunchConfig) -> str:
    """The name that `trainer_lib.protocol.footprint` has for the strategy of these arguments."""
    if args.deepspeed is not None:
        from trainer_lib.arguments.configs.deepspeed_config import plan

        return f"zero-{plan(args).zero.get('stage', 0)}".replace("zero-0", "ddp")
    if (layout := read_layout(args)) is not None and layout.shards * layout.tensor > 1:
        return "layout"
    if args.fsdp:
        return "fsdp"
    return "ddp" if launch.world_size > 1 else "single"


def _fsdp_writers(args: TrainingArguments, launch: LaunchConfig) -> int | None:
    """The number of ranks that write a part of a checkpoint under these FSDP arguments; None: all, the default."""
    from trainer_lib.arguments.configs.fsdp_config import read_settings

    settings = read_settings(args)
    if settings is None:
        return None
    if not settings.sharded_checkpoints or settings.mode == "no_shard":
        return 1
    if "hybrid" not in settings.mode:
        return None
    # One copy is written; unset, a machine's processes share it.
    return settings.hybrid_group or int(launch.processes)


def _room(plan: Plan, args: TrainingArguments, found: Forecast) -> Room:
    length, estimate = found.length, found.estimate
    size = None if found.probe is None else found.probe.checkpoint_bytes
    if size is None and estimate is not None:
        tensors = estimate.size.checkpoint_bytes(only_model=found.only_model)
        size = None if tensors is None else tensors + _LOADING_BYTES
    saves = 0 if length is None else length.saves
    limit = args.save_total_limit
    # The oldest goes after the newest is complete; the best one may stay with those that are kept.
    most = saves if not limit else limit + 1 + bool(args.load_best_model_at_end)
    model = 0 if estimate is None else estimate.size.stored_bytes
    # Published once more, in addition to the export of the stage.
    copies = 2 if plan.spec.publish.enabled and plan.spec.publish.to is None else 1
    return Room(size, min(saves, most), copies * model, Store.open(plan.spec.storage).free_bytes())


# -- the whole ---------------------------------------------------------------------------------------------------------


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
        """Whether no known obstacle would make the run fail."""
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
        *_missing_room(plan, found),
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


def _missing_room(plan: Plan, found: Forecast) -> Iterator[Obstacle]:
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
