"""The stages of one run: called one after the other, or submitted together where they have their own GPUs."""

from __future__ import annotations

import contextlib
import sys
import threading
from collections.abc import Mapping, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

from trainer_lib.errors import ConfigError, StorageError, TrainflowError
from trainer_lib.storage.commit import COMMIT
from trainer_lib.trackers.names import GATE_TAG
from trainflow.flows.planning.plan import Plan, StagePlan
from trainflow.flows.records.past_runs import read_record, run_folder
from trainflow.flows.records.results import RUN_ID_CHARS, PipelineResult, StageOutcome, Status
from trainflow.flows.reports.run_record import RunRecord, has_nothing_to_do
from trainflow.flows.runs.run_status import beating, read_signs
from trainflow.flows.spec.checks import check_splits
from trainflow.flows.spec.spec import PipelineSpec
from trainflow.flows.stages import stage_names
from trainflow.tasks.stage import progress
from trainflow.tasks.stage.facts import PrepareFacts, TrainFacts
from trainflow.tasks.stage.gates import judge
from trainflow.tasks.stage.manifest import StageManifest, look_up
from trainflow.tasks.stage.rehearsal import needs_rehearsal, rehearse_evaluation
from trainflow.tasks.stage.track import track_stage

if TYPE_CHECKING:
    from prefect.client.schemas.objects import State
    from prefect.futures import PrefectFuture

_WITH_TORCH = ("train", "evaluate", "predict")  # a worker of prepare-data is quick to start without it


def run_stages(plan: Plan, record: RunRecord, stop: threading.Event) -> None:
    """Run every stage that the plan wants, and add the outcome of every stage to the record's result.

    Once `stop` is set, running stages save and end. Raises the failure of the first stage that failed; those that ran
    alongside it have ended, and are committed.
    """
    _warn(plan)
    expect_launches(plan)
    try:
        _run_groups(plan, _StageRun(plan, record, stop))
    finally:
        if (warm := sys.modules.get("trainer_lib.launch.warm")) is not None:
            warm.close()  # of a worker that still waits for its launch


def _run_groups(plan: Plan, run: _StageRun) -> None:
    for group in plan.groups():
        if any(plan.is_wanted(name) and plan.stages[name].stage.gated for name in group):
            run.enforce_gates()
        for name in group:
            # First: what a stage that runs here takes may be the committed result of one that does not.
            if not plan.is_wanted(name):
                run.leave_out(name)
        wanted = [plan.stages[name] for name in group if plan.is_wanted(name)]
        if any(planned.stage.name == "train" for planned in wanted):
            run.rehearse_evaluation()
        if len(wanted) > 1:
            run.run_together(wanted)
        elif wanted:
            run.run_alone(wanted[0])
    if plan.is_wanted("evaluate"):
        run.enforce_gates()  # also where nothing is published: a missed requirement fails the run


def keep_stages(plan: Plan, record: RunRecord) -> None:
    """Add the outcome of every stage to the record's result, in a run for which nothing is left to do."""
    _warn(plan)
    run = _StageRun(plan, record, threading.Event())  # nothing starts that could be stopped
    for group in plan.groups():
        for name in group:
            run.leave_out(name)
            if plan.is_wanted(name):
                reason = plan.reasons[name]
                shown = {"status": "cached", "reason": reason.reason, "key": reason.key}
                progress.publish({"event": "stage", "stage": name, **shown})
    if plan.is_wanted("evaluate"):
        run.enforce_gates()


def _warn(plan: Plan) -> None:
    for name, sentences in plan.warnings.items():
        for sentence in sentences:
            progress.publish({"event": "warning", "stage": name, "message": sentence})


def expect_launches(plan: Plan) -> None:
    """Have workers of the stages that will run import torch before their turn."""
    hits = {name for name, reason in plan.reasons.items() if reason.hit} - {*plan.context.force}
    launches = [
        (name, stage.launch)
        for name, stage in plan.stages.items()
        if name in _WITH_TORCH and name not in hits and plan.is_wanted(name) and stage.launch is not None
    ]
    if launches:
        from trainer_lib.launch import warm  # an unchanged run launches nothing

        warm.expect(launches)


class _StageRun:
    """The manifests and the outcomes of one run, as the stages end."""

    def __init__(self, plan: Plan, record: RunRecord, stop: threading.Event) -> None:
        self._plan = plan
        self._record = record
        self._result = record.result
        self._tracked = record.tracked
        handle = None if record.tracked is None else record.tracked.handle
        self._context = replace(plan.context, tracking=handle, run_name=record.result.run_name, stop=stop)
        self._manifests: dict[str, StageManifest] = {}

    def run_alone(self, plan: StagePlan) -> None:
        """Call one stage's task."""
        started = datetime.now(UTC)
        self._note_begin(plan)
        try:
            inputs = plan.stage.choose_inputs(self._manifests)
            state = plan.stage.load_task()(plan.config, self._context, **inputs, return_state=True)
        except BaseException as error:  # Ctrl-C or SIGTERM: what a stage raises by itself comes in its state
            if (manifest := self._committed_last(plan)) is not None:  # the signal came too late to stop anything
                seconds = (datetime.now(UTC) - started).total_seconds()
                self._keep(plan.stage.name, "ran", manifest.reason, seconds, manifest)
                return
            self._note_failure(plan, error, started)
            self._skip_rest(f"{plan.stage.name} failed")
            raise
        self._note_ends([plan], [state], started)

    def _committed_last(self, plan: StagePlan) -> StageManifest | None:
        """Return the committed result of a stage after which this command runs no other; None if there is not one."""
        names = [name for group in self._plan.groups() for name in group if self._plan.is_wanted(name)]
        if names[-1] != plan.stage.name:
            return None
        with contextlib.suppress(TrainflowError, KeyError, TypeError):
            return look_up(self._context.storage, self._plan.key_of(plan.stage.name, self._manifests))[0]
        return None

    def run_together(self, plans: Sequence[StagePlan]) -> None:
        """Submit independent stages, and wait for all of them, also when one fails."""
        started = datetime.now(UTC)
        futures: list[PrefectFuture[Any]] = []
        try:
            for plan in plans:
                self._note_begin(plan)
                inputs = plan.stage.choose_inputs(self._manifests)
                futures.append(plan.stage.load_task().submit(plan.config, self._context, **inputs))
            for future in futures:
                future.wait()
        except BaseException as interrupt:
            # A signal reaches this thread alone. The launchers wait in the stages' threads: they see the flag, ask
            # their workers to save, and end; leaving before that would orphan the workers.
            self._context.stop.set()
            for future in futures:
                future.wait()
            try:
                self._note_ends(plans, [future.state for future in futures], started)
            except TrainflowError as stopped:
                raise interrupt from stopped
            raise
        self._note_ends(plans, [future.state for future in futures], started)

    def leave_out(self, name: str) -> None:
        """Note a stage that this command does not run; its committed result, if there is one, feeds the others."""
        reason = self._plan.reasons.get(name)
        if reason is None:
            self._note(name, "skipped", "switched off in the spec")
        elif reason.manifest is None:
            chosen = f"only {self._plan.only}" if self._plan.only else f"starts with {self._plan.start}"
            self._note(name, "skipped", chosen)
        elif not reason.manifest.store().exists(COMMIT):
            # The record names it by now, so it goes no more; before that nothing kept it.
            what = f"The result of {name} was removed while this command began."
            raise StorageError(what, field=reason.manifest.url, remedy="Run the same command again.")
        else:
            self._keep(name, "cached", reason.reason, 0.0, reason.manifest)

    def enforce_gates(self) -> None:
        """Show the verdict on what the spec requires of the evaluation; raises GateError, which holds back the rest."""
        verdict = judge(self._plan.spec.evaluate, self._manifests.get("evaluate"))
        if not verdict.checks or self._result.gates:
            return
        self._result.gates = verdict.to_dicts()
        if self._tracked is not None:
            self._tracked.set_tags({GATE_TAG: str(verdict)})
        if not verdict.passed:
            self._skip_rest("held back by the gate")
            verdict.enforce("published")

    def rehearse_evaluation(self) -> None:
        """Raise ConfigError now, not after the training, for what evaluate cannot measure; nothing if that is over."""
        plan, measured = self._plan, self._plan.stages.get("evaluate")
        data = self._manifests.get("prepare-data")
        named = plan.spec.counted_on
        if measured is None or data is None or not needs_rehearsal(measured.config, self._context, named):
            return
        is_forced = "train" in self._context.force
        if not is_forced and look_up(self._context.storage, plan.key_of("train", self._manifests))[0] is not None:
            return
        train = plan.stages["train"].config

        def pass_warning(event: Mapping[str, Any]) -> None:
            if event.get("event") == "warning":
                progress.publish({"event": "warning", "stage": "evaluate", "message": event.get("message")})

        try:
            rehearse_evaluation(measured.config, train, self._context, data, named=named, on_event=pass_warning)
        except ConfigError:
            self._skip_rest("evaluate could not measure what the spec asks for")
            raise

    def _note_begin(self, plan: StagePlan) -> None:
        """Record which folder the stage looks into before it does: what a run's record names is not cleaned up."""
        try:
            key = self._plan.key_of(plan.stage.name, self._manifests)
        except (TrainflowError, KeyError, TypeError):  # its input is missing, or cannot be read: the stage says so
            return
        self._record.note_begin(plan.stage.name, key.digest)

    def _note_ends(self, plans: Sequence[StagePlan], states: Sequence[State[Any]], started: datetime) -> None:
        """Note how the stages ended; then raise the first failure."""
        failures: list[tuple[str, BaseException]] = []
        # Not strict: a signal may come before every stage was submitted.
        for plan, state in zip(plans, states, strict=False):
            ended = state.result(raise_on_failure=False)
            if isinstance(ended, StageManifest):
                # The state's own time: of stages that run together the shorter one waited for the other.
                seconds = max((state.timestamp - started).total_seconds(), 0.0)
                cached = state.name == "Cached"
                reason = f"committed {ended.created}" if cached else ended.reason
                self._keep(plan.stage.name, "cached" if cached else "ran", reason, seconds, ended)
                continue
            self._note_failure(plan, ended, started)
            failures.append((plan.stage.name, ended))
        if failures:
            self._skip_rest(f"{failures[0][0]} failed")
            raise failures[0][1]

    def _note_failure(self, plan: StagePlan, error: BaseException, started: datetime) -> None:
        why = error.message if isinstance(error, TrainflowError) else str(error) or type(error).__name__
        self._note(plan.stage.name, "failed", why, (datetime.now(UTC) - started).total_seconds())

    def _keep(self, name: str, status: Status, reason: str, seconds: float, manifest: StageManifest) -> None:
        """Hand a manifest to the stages that follow, log it to the MLflow run, and note the stage's outcome."""
        self._manifests[manifest.stage] = manifest
        # Before it is noted: a run whose stages are all noted has nothing left to log.
        if self._tracked is not None:
            facts = (committed.facts for committed in self._manifests.values())
            # Evaluation and publication belong to the step at which training ended.
            step = next((kept.global_step for kept in facts if isinstance(kept, TrainFacts)), None)
            track_stage(self._tracked, manifest, step=step or 0)
            self._plan.stages[manifest.stage].stage.track(self._tracked, manifest, status == "ran")
        self._note(name, status, reason, seconds, manifest)
        self._record.note_stage(manifest)
        if isinstance(manifest.facts, PrepareFacts):
            try:  # now, not after the training that comes before a split's use
                check_splits(self._plan.spec, manifest.facts.splits)
            except ConfigError:
                self._skip_rest("the spec names a split that was not prepared")
                raise

    def _skip_rest(self, why: str) -> None:
        for name in stage_names():
            if self._result.outcome(name) is None:  # also of stages that no group has reached
                self._note(name, "skipped", why)

    def _note(
        self, name: str, status: Status, reason: str, seconds: float = 0.0, manifest: StageManifest | None = None
    ) -> None:
        record, places = None, {}
        if manifest is not None:
            record, places = manifest.to_dict(), dict(self._plan.stages[name].stage.places(manifest))
        self._result.stages.append(StageOutcome(name, status, reason, round(seconds, 3), record, places))
        if status == "skipped":
            progress.publish({"event": "stage", "stage": name, "status": status, "reason": reason})


def result_if_unchanged(
    spec: PipelineSpec, *, force: object = (), debug: bool = False, **choice: Any
) -> PipelineResult | None:
    """Return the result of a run that is complete already; None if anything is left to do, or may be.

    Prefect is not imported: with its server, that is most of what such a command would take. What waits for MLflow is
    delivered. Where workers will be needed, the process that loads torch for them is started.

    Args:
        force: stages to run again; with any, something is left to do.
        choice: which stages, as `trainflow.flows.pipeline.run_pipeline` takes them.
    """
    if force:
        return None
    plan = Plan.of(spec, debug=debug, **choice)
    if any(stage.launch is not None and stage.launch.several_nodes for stage in plan.stages.values()):
        return None  # other machines wait for the training, whose task lets them go
    folder = run_folder(spec.storage, plan.pipeline_key[:RUN_ID_CHARS])
    # A sign belongs to a running process of the run, or to one that died: Prefect may not know yet that it ended.
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
