"""`trainflow prove-resume`: a spec's training, once uninterrupted and once stopped and resumed, compared bit by bit.

Both run through the launcher and the recipe that the pipeline uses, on a storage of their own; the pipeline's storage
is only read (prepared data that is committed there), MLflow and hubs are left alone. Nothing heavy runs in this
process. The outcome is JSON under a seal: the SHA-256 of everything else in it.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import platform
import tempfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from rich.text import Text

from trainer_lib.arguments import TrainingArguments
from trainer_lib.base.json_text import parse_json, render_sealed, seal_of
from trainer_lib.base.records import to_record
from trainer_lib.base.suggestions import counted
from trainer_lib.errors import ConfigError, InfrastructureError, NotReproducibleError, Preempted
from trainer_lib.protocol.requests import CompareRequest, CompareResult, Proof, Request, TrainRequest, TrainResult
from trainer_lib.storage import Store
from trainflow.flows.planning.plan import Plan
from trainflow.flows.spec.checks import check_splits
from trainflow.flows.spec.spec import PipelineSpec
from trainflow.tasks.keys import keys as _keys
from trainflow.tasks.model.model_lineage import find_processor, find_versions
from trainflow.tasks.stage import manifest as _manifests
from trainflow.tasks.stage.manifest import StageManifest

if TYPE_CHECKING:
    from trainflow.tasks.stage.runner import StageAttempt

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


@contextlib.contextmanager
def _place(keep: str | None) -> Iterator[str]:
    if keep is not None:
        yield Store.open(keep, field="--keep").url
        return
    with tempfile.TemporaryDirectory(prefix="trainflow-proof-", ignore_cleanup_errors=True) as folder:
        yield folder


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
