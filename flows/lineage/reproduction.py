"""Results made twice: a recorded run once more, and a training that is stopped and resumed.

`trainflow reproduce`: a recorded run, once more from its spec, sources and versions, and what came out compared.

The second run has a storage of its own; MLflow, the registry and hubs are left alone. On a CPU the weights and the
predictions must have the same bytes. A device that adds up in another order at every run gives other bytes; there the
metrics are compared, with a tolerance that the outcome states.

`trainflow prove-resume`: a spec's training, once uninterrupted and once stopped and resumed, compared bit by bit.

Both run through the launcher and the recipe that the pipeline uses, on separate storages; the pipeline's storage
is only read (prepared data that is committed there), MLflow and hubs are left alone. Nothing heavy runs in this
process. The outcome is JSON under a seal: the SHA-256 of everything else in it.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import math
import os
import platform
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeVar

from rich.text import Text

from trainer_lib.arguments import TrainingArguments
from trainer_lib.base.json_text import parse_json, render_sealed, seal_of
from trainer_lib.base.records import to_record
from trainer_lib.base.suggestions import counted
from trainer_lib.errors import ConfigError, InfrastructureError, NotReproducibleError, Preempted
from trainer_lib.protocol.requests import CompareRequest, CompareResult, Proof, Request, TrainRequest, TrainResult
from trainer_lib.storage import Store
from trainflow.flows.lineage.lineage_chain import Chain
from trainflow.flows.planning.plan import Plan
from trainflow.flows.records.past_runs import PastRun, find_run
from trainflow.flows.records.recorded_spec import read_kept_spec
from trainflow.flows.records.results import RUN_ID_CHARS, PipelineResult, flat_metrics
from trainflow.flows.runs.run_details import RunComparison, compare_runs, read_details
from trainflow.flows.spec.checks import check_splits
from trainflow.flows.spec.spec import PipelineSpec
from trainflow.tasks.configs import RegisterConfig
from trainflow.tasks.keys import keys as _keys
from trainflow.tasks.model.model_lineage import find_processor, find_versions
from trainflow.tasks.stage import manifest as _manifests
from trainflow.tasks.stage.facts import TrainFacts
from trainflow.tasks.stage.manifest import StageManifest, look_up_under

if TYPE_CHECKING:
    from trainflow.tasks.stage.runner import StageAttempt

TOLERANCE = 1e-3
"""The largest relative difference of metrics from a device that is not a CPU, unless another is given."""
_COMPARED = ("train", "evaluate", "predict")
_FOLDERS = {"train": "model/", "predict": "predictions/"}
"""Stage -> its folder of files that are compared."""
_FILES = (".safetensors", ".parquet")
_CPU = "CPU"
_MARK = "reproduces"  # a file of the second run's storage: the id of the first run

Verdict = Literal["same bytes", "same metrics", "different"]
RunPipeline = Callable[..., PipelineResult]


@dataclass
class Outcome:
    """The outcome of a reproduction."""

    run: str
    to: str
    comparison: RunComparison
    tolerance: float | None  # the largest relative difference of metrics; None: bytes are compared
    files: list[dict[str, Any]]  # paths with the digests of both runs
    differences: list[str]  # sentences about results that differ
    has_equal_metrics: bool = True  # they are equal, not only within the tolerance

    @property
    def verdict(self) -> Verdict:
        """The verdict on the second run."""
        if self.differences:
            return "different"
        are_equal = self.has_equal_metrics and all(file["then"] == file["now"] for file in self.files)
        return "same bytes" if are_equal else "same metrics"

    def to_dict(self) -> dict[str, Any]:
        """As plain JSON."""
        return {**vars(self), "verdict": self.verdict, "comparison": self.comparison.to_dict()}

    def failure(self) -> NotReproducibleError | None:
        """The failure that names the first difference; None: there is none."""
        if not self.differences:
            return None
        more = f" {len(self.differences) - 1} more differ." if len(self.differences) > 1 else ""
        what = f"The second run differs from the recorded one: {self.differences[0]}.{more}"
        remedy = "Use the versions and the kind of processor of the run; --tolerance compares metrics instead."
        return NotReproducibleError(what, field=self.run, value=self.to, remedy=remedy)


class Reproduction:
    """One run, reproduced. Raises ConfigError if it cannot be repeated from here.

    Args:
        to: storage of the second run, empty.
        tolerance: compare metrics with this relative difference; None: bytes on a CPU, `TOLERANCE` elsewhere.
    """

    def __init__(self, chain: Chain, to: str, tolerance: float | None, say: Callable[[str], object]) -> None:
        if chain.run is None or chain.storage is None:
            what = "The run is not known here: its spec and its recipe are on its storage."
            raise ConfigError(what, field="X", value=chain.address, remedy="Name the storage: --storage URL.")
        self.run: PastRun = chain.run
        self._to, self._given = to, tolerance
        self._storage = chain.storage.url
        if "train" not in self.run.stages:
            what = "This run has trained no model that could be compared."
            raise ConfigError(what, field="X", value=self.run.id, remedy="Name a run that has finished.")
        if self.run.from_run is not None:
            what = f"This run took results from the run {self.run.from_run}, whose recipe may have been another."
            remedy = f"Reproduce that run: trainflow reproduce {self.run.from_run}."
            raise ConfigError(what, field="X", value=self.run.id, remedy=remedy)
        self._then = {stage: self._recorded(stage) for stage in _COMPARED if stage in self.run.stages}
        self._prepared = chain.lineage.stage("prepare-data")
        spec = read_kept_spec(self._storage, self.run, say)
        self.spec = _quiet(mixed_alike(spec, chain.lineage.arguments.get("mixture", ())), to)
        self.spec.check()

    def carry_out(self, run_pipeline: RunPipeline) -> Outcome:
        """Run it again, as `trainflow.flows.pipeline.run_pipeline` does, and compare. Raises TrainflowError."""
        prepared = run_pipeline(self.spec, only="prepare-data")
        prepared.raise_for_error()
        then, now = self._prepared, prepared.manifests()["prepare-data"].content_digest
        if then is not None and now != then.content_digest:
            digests = f"{now[:12]}…, that of the run {str(then.content_digest)[:12]}…"
            what = f"The data differs: the prepared data has the digest {digests}."
            raise NotReproducibleError(what, field="data", remedy="Restore the data.")
        result = run_pipeline(self.spec)
        result.raise_for_error()
        again = find_run(self._to, result.pipeline_key[:RUN_ID_CHARS], field="--to")
        comparison = compare_runs(read_details(self._storage, self.run), read_details(self._to, again))
        # The spec is the recorded one, but for what others would see.
        return self._judge(result.manifests(), replace(comparison, spec=[]))

    def _recorded(self, stage: str) -> StageManifest:
        manifest, damage = look_up_under(self._storage, stage, self.run.stages[stage])
        if manifest is None:
            what = f"The result of {stage} in the run {f'is damaged: {damage}' if damage else 'is gone'}."
            remedy = "trainflow verify shows what of the run is left."
            raise ConfigError(what, field="X", value=self.run.id, remedy=remedy)
        return manifest

    def _judge(self, now: Mapping[str, StageManifest], comparison: RunComparison) -> Outcome:
        then, tolerance = {stage: old for stage, old in self._then.items() if stage in now}, self._given
        trained = [side["train"].facts for side in (then, now)]
        devices = {facts.device or _CPU for facts in trained if isinstance(facts, TrainFacts)}
        if tolerance is None and devices - {_CPU}:
            tolerance = TOLERANCE
        files = [file for stage in _FOLDERS if stage in then for file in _compare_files(then[stage], now[stage])]
        differences = []
        for file in files:
            if not (file["then"] and file["now"]):
                differences.append(f"{file['path']} is in one of them only")
            elif file["then"] != file["now"] and (tolerance is None or "evaluate" not in then):
                differences.append(f"{file['path']} has other bytes")
        old, new = (flat_metrics(side["evaluate"].metrics) if "evaluate" in side else {} for side in (then, now))
        pairs = {name: (old[name], new[name]) for name in sorted(old.keys() & new.keys())}
        unequal = {name: pair for name, pair in pairs.items() if pair[0] != pair[1] and not all(map(math.isnan, pair))}
        for name, pair in unequal.items():
            if not math.isclose(*pair, rel_tol=tolerance or 0.0):
                differences.append(f"{name}: {old[name]:.6g} in the run, {new[name]:.6g} here")
        return Outcome(self.run.id, self._to, comparison, tolerance, files, differences, not unequal)


@contextlib.contextmanager
def open_scratch(to: str | None, run: str) -> Iterator[str]:
    """The storage of a second run: a temporary folder, or `to`. Raises ConfigError if that holds anything else."""
    if to is None:
        with tempfile.TemporaryDirectory(prefix="trainflow-reproduction-", ignore_cleanup_errors=True) as folder:
            yield folder
        return
    store = Store.open(to, field="--to")
    left = store.read_if_exists(_MARK, limit=100)
    if store.children() and left != run.encode():
        raise ConfigError("The folder is not empty.", field="--to", value=to, remedy="Name a new folder.")
    store.ensure_writable(field="--to")
    store.write_bytes(_MARK, run.encode())
    yield store.url


def mixed_alike(spec: PipelineSpec, changes: Sequence[Mapping[str, Any]]) -> PipelineSpec:
    """The spec whose schedule has the weights that were changed while the run trained."""
    mixture = spec.prepare.mixture
    if mixture is None or not changes:
        return spec
    schedule = {**mixture.schedule, **{int(change["step"]): dict(change["weights"]) for change in changes}}
    mixed = mixture.model_copy(update={"schedule": schedule})
    return spec.model_copy(update={"prepare": spec.prepare.model_copy(update={"mixture": mixed})})


def _quiet(spec: PipelineSpec, to: str) -> PipelineSpec:
    """The spec on a storage of its own, and without anything that others would see."""
    args = {**spec.train.args, "report_to": "none", "push_to_hub": False}
    changed = {
        "storage": to,
        "refresh": {},
        "train": spec.train.model_copy(update={"args": args}),
        "evaluate": spec.evaluate.model_copy(update={"require": {}}),
        "publish": spec.publish.model_copy(update={"enabled": False}),
        "register": RegisterConfig(resamples=spec.register.resamples, metric=spec.register.metric),
        "tracking": spec.tracking.model_copy(update={"enabled": False}),
    }
    return spec.model_copy(update=changed).with_resolver(spec.resolver)


def _compare_files(old: StageManifest, new: StageManifest) -> Iterator[dict[str, Any]]:
    below = _FOLDERS[old.stage]
    sides = [
        {file.path: file for file in side.files if file.path.startswith(below) and file.path.endswith(_FILES)}
        for side in (old, new)
    ]
    for path in sorted(sides[0].keys() | sides[1].keys()):
        then, now = (side[path].sha256 if path in side else None for side in sides)
        yield {"stage": old.stage, "path": path, "then": then, "now": now, "folders": [old.url, new.url]}


# -- prove-resume ------------------------------------------------------------------------------------------------------

R = TypeVar("R")
FORMAT = 1
_QUIETLY: dict[str, Any] = {
    "logging_strategy": "steps",
    "logging_steps": 1,
    "logging_first_step": False,
    "report_to": "none",
    "push_to_hub": False,
    "enable_jit_checkpoint": True,
    "include_tokens_per_second": False,
}
"""Arguments of a proof: every step is recorded, nothing leaves the machine. No weight depends on them."""


@dataclass(frozen=True)
class Question:
    """Settings of a proof."""

    # Optimizer step after which training is stopped; None: the middle of the first save interval, of the second one
    # when it is killed.
    at: int | None = None
    steps: int | None = None  # train this many steps instead of the spec's; None: all of them
    kill: bool = False  # end it by SIGKILL, so that it resumes from its last save; otherwise SIGTERM, which saves
    keep: str | None = None  # folder or URL for the runs' files, which then stay; None: a temporary folder

    def check_spec(self, spec: PipelineSpec) -> None:
        """Raise ConfigError unless the spec's training can be proved, before anything is started."""
        args = TrainingArguments.from_dict(spec.train.args, prefix="train.args")
        if args.save_only_model:
            remedy = "Set train.args.save_only_model=false."
            what = "Checkpoints that hold only the model cannot be resumed."
            raise ConfigError(what, field="train.args.save_only_model", value=True, remedy=remedy)
        steps = self.steps or (args.max_steps if args.max_steps > 0 else None)
        if self.at is not None and steps is not None and self.at >= steps:
            raise _beyond(self.at, steps)
        if self.keep is not None and Store.open(self.keep, field="--keep").children():
            raise ConfigError("The folder is not empty.", field="--keep", value=self.keep, remedy="Name a new folder.")


def prove(spec: PipelineSpec, question: Question, say: Callable[[str], None]) -> dict[str, Any]:
    """Train twice, compare, and return the sealed record of the outcome; `say` is called with a line at every step."""
    question.check_spec(spec)
    with _place(question.keep) as place:
        return _Proof(spec, question, place, say).make_record()


class _Proof:
    def __init__(self, spec: PipelineSpec, question: Question, place: str, say: Callable[[str], None]) -> None:
        self._spec = spec
        self._question = question
        self._place = place
        self._say = say
        plan = Plan.of(spec.model_copy(update={"storage": place}).with_resolver(spec.resolver))
        self._context = replace(plan.context, flavor=None)  # nothing is registered
        self._data = self._prepared()
        check_splits(spec, self._data.facts.splits)

    def make_record(self) -> dict[str, Any]:
        """Train without and with an interruption, compare, and seal what was found."""
        self._say("training without an interruption")
        # First, because its number of steps decides where the other one is stopped.
        whole = self._train("whole")
        steps = whole.global_step or 0
        at = self._stop_at(steps)
        self._say(f"training again: {'SIGKILL' if self._question.kill else 'SIGTERM'} after step {at} of {steps}")
        self._stop(at)
        self._say("resuming")
        resumed = self._train("resumed")
        # After a SIGKILL before the first save there is none: training then begins again, which is a proof as well.
        if resumed.resumed_from is None and not self._question.kill:
            raise InfrastructureError("The stopped training left no checkpoint to resume from.", field="resumed")
        self._say("comparing")
        found = self._compare()
        differences = [*found.differences, *_exports(whole, resumed)]
        record = {
            "verdict": "different" if differences else "equal",
            "steps": steps,
            "stopped": {"after_step": at, "by": "SIGKILL" if self._question.kill else "SIGTERM"},
            "resumed_from": resumed.resumed_from or 0,
            "processes": resumed.world_size,
            "compared": found.compared,
            "first_difference": differences[0] if differences else None,
            "differences": differences,
        }
        head = {"format": FORMAT, "kind": "prove-resume", "created": datetime.now(UTC).isoformat(timespec="seconds")}
        return parse_json(render_sealed({**head, **record, **self._subject()}), dict)

    # -- running ------------------------------------------------------------------------------------------------------

    def _prepared(self) -> StageManifest:
        """The manifest of the prepared data: the pipeline's own if it is committed and intact, else made here."""
        key = _keys.prepare_key(self._spec.prepare, self._context)
        manifest, _ = _manifests.look_up(self._spec.storage, key)
        if manifest is not None:
            return manifest
        from trainflow.tasks.prepare_data import prepare_data

        self._say("preparing the data")
        # `.fn` runs it without Prefect: a proof needs neither a server nor retries.
        return prepare_data.fn(self._spec.prepare, self._context)

    def _train(self, name: str, proof: Proof | None = None) -> TrainResult:
        from trainflow.tasks.stage.worker import model_fields, sent_arguments

        train, attempt = self._spec.train, self._attempt(name)
        request = TrainRequest(
            **model_fields(train, self._context, attempt, self._data),
            args=sent_arguments(self._arguments(), self._context),
            model=train.model,
            train_split=train.train_split,
            eval_split=train.eval_split,
            metrics=self._context.metrics,
            proof=proof or Proof(),
            stop_early=None if train.stop_early is None else train.stop_early.to_request(),
        )
        return self._launched(request, attempt)

    def _stop(self, at: int) -> None:
        try:
            self._train("resumed", Proof(stop_at=at, kill=self._question.kill))
        # A killed worker is a lost one; that is what was asked for.
        except InfrastructureError:
            if not self._question.kill:
                raise
        except Preempted:
            pass
        else:
            raise InfrastructureError(f"The training could not be stopped after step {at}.", field="--at", value=at)

    def _compare(self) -> CompareResult:
        from trainflow.tasks.stage.worker import common_fields

        whole, resumed = (Store.open(self._place).child(name, "checkpoints").url for name in ("whole", "resumed"))
        attempt = self._attempt("comparison")
        common = common_fields(self._spec.train, self._context, attempt)
        return self._launched(
            CompareRequest(**common, whole=whole, resumed=resumed), attempt, processes=1, kind="process"
        )

    def _attempt(self, name: str) -> StageAttempt:
        from trainflow.tasks.stage.progress import StageProgress
        from trainflow.tasks.stage.runner import StageAttempt

        store = Store.open(self._place).child(name)
        return StageAttempt(name, store, 1, 0, StageProgress(name), is_lost=lambda: False)

    def _launched(self, request: Request[R], attempt: StageAttempt, **launch: Any) -> R:
        from trainflow.tasks.stage.worker import launch_request

        # No restarts: the launcher would finish the training that the proof has stopped.
        settings = dataclasses.replace(self._spec.train.launch, max_restarts=0, **launch)
        return launch_request(request, settings, self._context, attempt)

    def _arguments(self) -> dict[str, Any]:
        shorter = {} if self._question.steps is None else {"max_steps": self._question.steps}
        return {**self._spec.train.args, **shorter, **_QUIETLY}

    def _stop_at(self, steps: int) -> int:
        if self._question.at is not None:
            if self._question.at >= steps:
                raise _beyond(self._question.at, steps)
            return self._question.at
        if steps < 2:
            raise ConfigError(
                "The training has no step before its last one.", field="--steps", value=steps, remedy="Train more."
            )
        interval = TrainingArguments.from_dict(self._arguments()).save_steps
        # As in TrainingArguments, a number below 1 is a share of all steps.
        interval = int(interval) if interval >= 1 else max(1, int(steps * interval))
        middle = max(1, min(interval, steps) // 2)
        # A training killed in the first save interval has no checkpoint; in the second one it resumes from the first.
        return middle + interval if self._question.kill and middle + interval < steps else middle

    # -- what it is about ---------------------------------------------------------------------------------------------

    def _subject(self) -> dict[str, Any]:
        spec = self._spec
        args = {"args": self._arguments()}
        key = _keys.train_key(spec.train.model_copy(update=args), self._context, self._data)
        plain = spec.model_dump(mode="json", include={"name", "prepare", "train"})
        return {
            "spec": spec.name,
            "spec_digest": seal_of(plain),
            "source_digest": seal_of(key.fields["recipe"]),
            "source": key.fields["recipe"],
            "data_digest": self._data.content_digest,
            "train_key": key.digest,
            "arguments": key.fields["args"],
            "launch": {name: value for name, value in to_record(spec.train.launch).items() if name != "env"},
            "versions": find_versions(),
            "machine": {"system": platform.platform(), "processor": find_processor(), "cores": os.cpu_count()},
        }


def _place(keep: str | None) -> contextlib.AbstractContextManager[str]:
    if keep is not None:
        return contextlib.nullcontext(Store.open(keep, field="--keep").url)
    return tempfile.TemporaryDirectory(prefix="trainflow-proof-", ignore_cleanup_errors=True)


def _exports(whole: TrainResult, resumed: TrainResult) -> list[dict[str, Any]]:
    """Differences between the files of the exported models."""
    one, other = ({file.path: file.sha256 for file in result.files} for result in (whole, resumed))
    return [
        {"step": whole.global_step, "what": name}
        | {"whole": one.get(name, "absent")[:16], "resumed": other.get(name, "absent")[:16]}
        for name in sorted(one.keys() | other.keys())
        if one.get(name) != other.get(name)
    ]


def _beyond(at: int, steps: int) -> ConfigError:
    what = f"The training has {counted(steps, 'step')}, so nothing is left to resume after that one."
    remedy = f"Name a step from 1 to {steps - 1}." if steps > 1 else "Train more than one step."
    return ConfigError(what, field="--at", value=at, remedy=remedy)


# -- the record --------------------------------------------------------------------------------------------------------


def write_record(verdict: Mapping[str, Any], path: Path) -> None:
    """Write a record to a file. Raises ConfigError."""
    try:
        path.write_text(json.dumps(verdict, indent=1) + "\n", encoding="utf-8")
    except OSError as error:
        what = f"The file cannot be written: {error.strerror}."
        raise ConfigError(what, field="--output", value=str(path), remedy="Name another file.") from error


def describe_record(verdict: Mapping[str, Any]) -> list[Text]:
    """Lines for a terminal about what was compared and is equal."""
    compared = verdict["compared"]
    return [
        Text(f"equal  {verdict['spec']}: {verdict['steps']} steps, {_describe_stop(verdict)}", "green"),
        Text(
            f"       {compared['steps']} losses, {compared['grad_norms']} gradient norms, "
            f"{compared['learning_rates']} learning rates, {compared['evaluations']} evaluations; "
            f"{compared.get('tensors', 0)} tensors, {compared.get('bytes', 0):,} bytes of "
            f"{len(compared['checkpoints'])} checkpoints; processes: {verdict['processes']}"
        ),
        Text(f"       seal {verdict['seal']}", "dim"),
    ]


def find_failure(verdict: Mapping[str, Any]) -> NotReproducibleError | None:
    """The failure of a proof: the first difference; None: there is none."""
    if (difference := verdict["first_difference"]) is None:
        return None
    where = f"step {difference['step']}, " if difference["step"] is not None else ""
    return NotReproducibleError(
        f"{where}{difference['what']}: {difference['whole']} without an interruption, {difference['resumed']} with "
        f"one ({_describe_stop(verdict)}).",
        field=verdict["spec"],
        remedy="Look for state that no checkpoint holds: in callbacks (ExportableState), the data (state_dict), "
        "globals; or for what differs in every run: time, threads, unseeded generators "
        "(train.args.full_determinism=true).",
        details=json.dumps(verdict["differences"], indent=1),
    )


def _describe_stop(verdict: Mapping[str, Any]) -> str:
    stopped = verdict["stopped"]
    return f"stopped by {stopped['by']} after step {stopped['after_step']}, resumed from {verdict['resumed_from']}"
