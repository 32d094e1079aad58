"""The plan of one command: what the stages would do, and why. Nothing is run or written, and no torch is imported.

    plan = Plan.of(spec)
    plan.reasons["train"].reason        "args.learning_rate: 0.001 -> 0.0001"

Training arguments, launches and source closures are worked out once, by the plan's resolver, and used by the check of
the spec, the keys and the tasks. The key of a stage depends on what the stages before it made: it is known as far as
their results are committed, and the flow finds the others as they come.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from functools import cached_property
from typing import TYPE_CHECKING, Any

from trainer_lib.base.paths import is_path
from trainer_lib.base.yaml_text import dump_yaml
from trainer_lib.errors import ConfigError
from trainflow.flows.records.past_runs import PastRun, find_first_missing, find_run, take_result
from trainflow.flows.spec import checks
from trainflow.flows.spec.spec import PipelineSpec
from trainflow.flows.stages import Stage, all_stages, require_stage, stage_names
from trainflow.tasks.code.closure import find_root
from trainflow.tasks.configs import StageSettings
from trainflow.tasks.keys.declared_paths import warn_of_unread
from trainflow.tasks.keys.keys import REFRESH, Difference, StageKey, differences, stage_key
from trainflow.tasks.keys.stage_code import code_of
from trainflow.tasks.stage import manifest as _manifests
from trainflow.tasks.stage.context import StageContext, choosing_metrics
from trainflow.tasks.stage.facts import StageFacts, TrainFacts
from trainflow.tasks.stage.gates import judge
from trainflow.tasks.stage.manifest import StageManifest
from trainflow.tasks.stage.rerun import current_key

if TYPE_CHECKING:
    from trainer_lib.arguments import TrainingArguments
    from trainer_lib.launch.settings.config import LaunchConfig


@dataclass(frozen=True)
class StageReason:
    """The decision about a stage, and its reason."""

    stage: str
    hit: bool  # whether its result is committed and intact
    reason: str
    key: str | None = None  # its content key; None: not known before its inputs are
    nearest: str | None = None  # folder of the earlier run that differs least
    differences: tuple[Difference, ...] = ()  # the fields of the key in which that run differs
    manifest: StageManifest | None = None  # the committed result, for a hit
    certain: bool = True  # False while it depends on the result of a stage that runs first
    held_back: bool = False  # whether the committed evaluation fails a gate, so that the stage is refused
    follows: str | None = None  # the time of the result that this one follows because of its age; None: it is the first

    def to_dict(self) -> dict[str, Any]:
        """Return this as plain JSON, without the manifest."""
        changed = [vars(difference) for difference in self.differences]
        plain = {
            name: getattr(self, name) for name in ("stage", "hit", "certain", "reason", "key", "nearest", "held_back")
        }
        return {**plain, "differences": changed}


@dataclass(frozen=True)
class StagePlan:
    """One stage that the spec has switched on, with what its settings take over from train filled in.

    It takes no arguments where these are None, and starts no separate workers where it has no launch.
    """

    stage: Stage
    config: Any
    arguments: TrainingArguments | None
    launch: LaunchConfig | None

    def has_devices_apart_from(self, other: StagePlan) -> bool:
        """Whether both stages name GPUs of their own, so that they can run at the same time.

        A stage that names no devices uses all of them, and every stage on a CPU shares the cores: such stages run one
        after the other. So do those of kind in_process, which share the process.
        """
        on_cpu = any(plan.arguments is not None and plan.arguments.use_cpu for plan in (self, other))
        if on_cpu or self.launch is None or other.launch is None:
            return False
        if "in_process" in (self.launch.kind, other.launch.kind):
            return False
        ours, theirs = self.launch.devices or (), other.launch.devices or ()
        # An index and a UUID may name one GPU, and an index means another GPU in another order.
        comparable = len({type(device) for device in (*ours, *theirs)}) == 1
        in_one_order = self.launch.device_order == other.launch.device_order
        # Without a list of GPUs a stage may use all of them.
        return bool(ours and theirs) and comparable and in_one_order and set(ours).isdisjoint(theirs)


@dataclass(frozen=True)
class Plan:
    """A command's options for a spec."""

    spec: PipelineSpec  # the spec, with its root filled in
    context: StageContext  # what its stages share; without the MLflow run, which is opened later
    stages: Mapping[str, StagePlan]  # the stages that are switched on, by name, in their order
    only: str | None = None  # the one stage to run; None: all
    start: str | None = None  # the stage to begin with; None: the first
    # The run whose results are taken for the stages before `only` or `start`; None: they go by their keys.
    past: PastRun | None = None

    @classmethod
    def of(
        cls,
        spec: PipelineSpec,
        *,
        only: str | None = None,
        start: str | None = None,
        force: Sequence[str] = (),
        from_run: str | None = None,
        debug: bool = False,
        as_of: datetime | None = None,
    ) -> Plan:
        """Check a spec and plan it. Reads the recipe, and the storage only to find `from_run`. Raises ConfigError.

        Args:
            as_of: when the continued run began: results count as old as they were then. None: it begins now.
        """
        # Names first: they are checked without reading a file.
        only, start = require_stage(only, "--only"), require_stage(start, "--from")
        forced = {require_stage(name, "--force") for name in force} - {None}
        # A spec made in Python has not passed `parse_spec`, which sets it.
        if spec.root is None:
            spec = spec.model_copy(update={"root": str(find_root(spec.recipe))})
        resolver = spec.resolver  # which has parsed most of this already, where it read the spec
        resolver.as_of = as_of or resolver.as_of
        checks.check_spec(spec, resolver)
        context = StageContext(
            name=spec.name,
            recipe=spec.recipe,
            storage=spec.storage,
            root=spec.root,
            folder=spec.folder,
            sources=tuple(source for source in spec.prepare.sources if is_path(source)),
            flavor=spec.register.flavor if spec.register.name else None,
            limit=spec.limit,
            mixture=spec.prepare.mixture_info,
            refresh=spec.max_ages(),
            force=frozenset(name for name in forced if name),
            debug=debug,
            resolver=resolver,
        )
        context = replace(context, metrics=choosing_metrics(spec.train, spec.evaluate, context))
        stages = {stage.name: _plan_stage(stage, spec, context) for stage in all_stages() if stage.is_enabled(spec)}
        past = None
        if from_run:  # "last" is one that has what comes before `start`
            needs = {None: None, "prepare-data": None, "train": "prepare-data"}.get(start, "train")
            past = find_run(spec.storage, from_run, field="--from-run", pipeline=spec.name, needs=needs)
        if past is not None and only is None and start is None:
            start = find_first_missing(past, list(stages))
        return cls(spec, context, stages, only, start, past)

    @cached_property
    def spec_text(self) -> str:
        """The whole spec as YAML."""
        return dump_yaml(self.spec.to_record())

    @cached_property
    def pipeline_key(self) -> str:
        """The key by which a later command finds this run: all of the spec that is known before any stage has run."""
        fields: dict[str, Any] = {name: key.digest for name, key in self.early_keys.items()}
        # Results of another run that this spec would not give make another run.
        taken = {name: reason.key for name, reason in self.reasons.items() if self.takes(name) and reason.differences}
        if taken:
            fields["taken"] = taken
        # A stage that runs again because of its age makes another run, with a record and an MLflow run of its own.
        if follows := {name: reason.follows for name, reason in self.reasons.items() if reason.follows is not None}:
            fields["follows"] = follows
        return stage_key("pipeline", {"name": self.spec.name, **fields}).digest

    @cached_property
    def early_keys(self) -> Mapping[str, StageKey]:
        """The keys of stages as far as known before any has run: all that the spec and the recipe decide."""
        # Empty manifests stand for results that do not exist yet, so a re-run finds its record before a stage has run.
        unknown = {name: StageManifest(name, "", "", "") for name in self.stages}
        return {name: self.key_of(name, unknown) for name in self.stages}

    @cached_property
    def reasons(self) -> Mapping[str, StageReason]:
        """For stages that are switched on: is the result committed and intact, and if not, what differs?"""
        found: dict[str, StageReason] = {}
        committed: dict[str, StageManifest] = {}
        for name in self.stages:
            found[name] = self._explain(name, committed, found)
            manifest = found[name].manifest
            if manifest is not None:
                committed[name] = manifest
        return found

    @cached_property
    def warnings(self) -> Mapping[str, list[str]]:
        """Likely mistakes that stop nothing, by stage: options never read, results of another run that do not fit."""
        plans = {name: plan for name, plan in self.stages.items() if isinstance(plan.config, StageSettings)}
        found = {
            name: list(warn_of_unread(name, plan.stage.section, plan.config, code_of(plan.config, self.context)))
            for name, plan in plans.items()
        }
        for name in filter(self.takes, found):
            if self.past is not None and (changed := self.reasons[name].differences):
                since = _manifests.summary(list(changed))
                found[name].append(f"The result of {name} is that of run {self.past.id}; since then: {since}.")
        args = self.stages["train"].arguments if "train" in self.stages else None
        elsewhere = [name for name in (args.report_to or () if args else ()) if name not in ("jsonl", "mlflow")]
        if elsewhere and self.is_wanted("train") and self.reasons["train"].hit:
            names = ", ".join(elsewhere)
            what = f"Nothing is logged to {names} (train.args.report_to), because this training is committed."
            found["train"].append(f"{what} To train again: --force train.")
        return found

    def key_of(self, name: str, manifests: Mapping[str, StageManifest]) -> StageKey:
        """The content key of a stage, given the manifests of the stages that it takes."""
        plan = self.stages[name]
        key = plan.stage.key(plan.config, self.context, **plan.stage.choose_inputs(manifests))
        return current_key(key, self.context)

    def is_wanted(self, name: str) -> bool:
        """Whether this command runs the stage, unless its result is committed."""
        if name not in self.stages:
            return False
        if self.only is not None:
            return name == self.only
        names = stage_names()
        return self.start is None or names.index(name) >= names.index(self.start)

    def takes(self, name: str) -> bool:
        """Whether the result of a stage is taken from the past run, whatever its key would be now."""
        first = self.only or self.start
        if self.past is None or first is None:
            return False
        names = stage_names()
        return names.index(name) < names.index(first)

    def require_committed(self) -> None:
        """Raise ConfigError unless all that comes before `only` or `start` is committed."""
        first = self.only or self.start
        wanted = [plan.stage for name, plan in self.stages.items() if first is not None and self.is_wanted(name)]
        for name in dict.fromkeys(source for stage in wanted for source in stage.inputs.values()):
            reason = self.reasons.get(name)
            if reason is None or reason.hit or self.is_wanted(name):
                continue
            if self.past is not None:
                what = f"The stage {name} cannot be taken: {reason.reason}."
                raise ConfigError(what, field="--from-run", value=self.past.id, remedy=f"Begin with it: --from {name}.")
            what = f"{name} comes before it and has no committed result: {reason.reason}."
            remedy = "Run without it once, or begin earlier."
            raise ConfigError(what, field="--only" if self.only else "--from", value=first, remedy=remedy)

    def groups(self) -> list[list[str]]:
        """All stages in their order; those in one list take no result of each other and name their own GPUs."""
        groups: list[list[str]] = []
        for stage in all_stages():
            if groups and all(self._can_run_beside(stage, name) for name in groups[-1]):
                groups[-1].append(stage.name)
            else:
                groups.append([stage.name])
        return groups

    def _can_run_beside(self, stage: Stage, earlier: str) -> bool:
        one, other = self.stages.get(stage.name), self.stages.get(earlier)
        if one is None or other is None or earlier in stage.inputs.values():
            return False
        return one.has_devices_apart_from(other)

    def _explain(
        self, name: str, committed: Mapping[str, StageManifest], found: Mapping[str, StageReason]
    ) -> StageReason:
        plan = self.stages[name]
        if plan.stage.gated and "evaluate" in committed:
            verdict = judge(self.spec.evaluate, committed["evaluate"])
            if not verdict.passed:
                return StageReason(name, False, f"held back by the gate, which {verdict}", held_back=True)
        inputs = plan.stage.inputs.values()
        # Without the content of its inputs the stage's key is not known.
        missing = [source for source in inputs if source in self.stages and source not in committed]
        if self.past is not None and self.takes(name):
            return self._explain_taken(self.past, name, committed, missing)
        if missing:
            return self._explain_early(name, missing, found)
        key = self.key_of(name, committed)
        follows = key.fields.get(REFRESH)
        manifest, damage = _manifests.look_up(self.spec.storage, key)
        if manifest is not None:
            damage = plan.stage.inspect(plan.config, self.context, manifest)
        if manifest is not None and damage is None:
            reason = f"committed {manifest.created}"
            return StageReason(name, True, reason, key.digest, manifest=manifest, follows=follows)
        if damage is not None:
            return StageReason(name, False, f"its result is damaged: {damage}", key.digest, follows=follows)
        miss = _manifests.explain_miss(self.spec.storage, key)
        return StageReason(name, False, miss.reason, key.digest, miss.nearest, miss.differences, follows=follows)

    def _explain_taken(
        self, past: PastRun, name: str, committed: Mapping[str, StageManifest], missing: Sequence[str]
    ) -> StageReason:
        storage = self.spec.storage
        manifest, reason = take_result(storage, past, name)
        if manifest is None:
            return StageReason(name, False, reason)
        changed = [] if missing else _manifests.compare_with(storage, self.key_of(name, committed), manifest.key)
        return StageReason(name, True, reason, manifest.key, manifest.key[:16], tuple(changed), manifest)

    def _explain_early(self, name: str, missing: Sequence[str], found: Mapping[str, StageReason]) -> StageReason:
        """Explain a stage whose inputs are not made yet: it surely runs if more than those differs."""
        known = {stage: reason.manifest for stage, reason in found.items() if reason.manifest is not None}

        def key_with(letter: str) -> StageKey:
            facts = {"train": TrainFacts(metrics_code=letter)}
            made = {}
            for stage in missing:
                known_key = found[stage].key or letter
                made[stage] = StageManifest(stage, known_key, "", letter, facts=facts.get(stage, StageFacts()))
            return self.key_of(name, {**known, **made})

        key = key_with("a")
        unknown = [change.field for change in differences(key.fields, key_with("b").fields)]
        miss = _manifests.explain_certain_miss(self.spec.storage, key, unknown)
        if miss is None:
            reason = f"{missing[0]} runs first; if its result is the same, this is kept"
            return StageReason(name, False, reason, certain=False)
        if all(change.field.startswith("stage_keys.") for change in miss.differences) and miss.differences:
            return StageReason(name, False, f"{missing[0]} runs first", nearest=miss.nearest)
        return StageReason(name, False, miss.reason, nearest=miss.nearest, differences=miss.differences)


def _plan_stage(stage: Stage, spec: PipelineSpec, context: StageContext) -> StagePlan:
    config = stage.config(spec)
    arguments, launch = None, None
    if hasattr(config, "args"):
        arguments = context.resolver.arguments(config.args, prefix=f"{stage.section}.args")
    if hasattr(config, "launch"):
        use_cpu = arguments is not None and arguments.use_cpu
        launch = context.resolver.launch(config.launch, use_cpu=use_cpu, section=stage.section)
    return StagePlan(stage, config, arguments, launch)
