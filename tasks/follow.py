"""Evaluates the committed checkpoints of a training, oldest first, each by one process and once.

::

    list the checkpoints                      those without an evaluation are due
    take the lease of one                     another process evaluates it: the next one
    protect it, and look for its commit       the training has removed it: say so, and go on
    evaluate, in processes of their own       as an evaluation inside the training does
    record it, exclusively                    from here on it is evaluated
    keep the best                             while the checkpoint is still protected
    log it to the run                         once; what a killed process left out is logged by the next one

The result of a checkpoint is one small file, created once and never changed::

    <folder of the train stage>/follow/
        checkpoint-20.<digest>.json        the metrics; the digest is that of the checkpoint's files
        checkpoint-20.<digest>.logged      the metrics are on their way to MLflow
        claims/checkpoint-20.<digest>/     the lease of the process that evaluates it now

Neither prefect nor torch is imported here.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

from trainer_lib.arguments import TrainingArguments
from trainer_lib.base.json_text import parse_sealed, render_sealed
from trainer_lib.base.records import from_record
from trainer_lib.checkpoint.catalogue import CheckpointInfo, list_checkpoints, read_checkpoint_info
from trainer_lib.checkpoint.layout import parse_step
from trainer_lib.errors import ConfigError, DamagedError, OutOfMemoryError, TrainflowError
from trainer_lib.launch.base import launch
from trainer_lib.locks.lease import Lease, acquire_lease
from trainer_lib.locks.removal import end_keeping, is_kept, keep_checkpoint, protect_from_removal
from trainer_lib.protocol.requests import CheckpointMetrics, EvaluateCheckpointRequest, PreparedData
from trainer_lib.storage import Store
from trainer_lib.storage.commit import COMMIT
from trainer_lib.trackers.names import clean_key, group_log
from trainer_lib.trackers.spool import Session, now_ms
from trainflow.tasks.configs import LaunchSettings, TrainConfig
from trainflow.tasks.keys.spec_words import in_words_of_spec
from trainflow.tasks.stage.context import StageContext
from trainflow.tasks.stage.facts import PrepareFacts
from trainflow.tasks.stage.manifest import StageManifest
from trainflow.tasks.stage.retry import count_sharers, halve_evaluation_batch, max_halvings
from trainflow.tasks.stage.runner import StageFolder
from trainflow.tasks.stage.worker import common_fields
from trainflow.tasks.tracking.mlflow_run import Background, RunHandle

FOLDER = "follow"
_DIGITS = 16
_LIMIT = 1 << 20
_LOSS = "eval_loss"


@dataclass(frozen=True)
class Evaluation:
    """The metrics of one checkpoint, by the names that the Trainer logs (`eval_loss`).

    `content` is the SHA-256 of the checkpoint's files, `measured_ms` counts since 1970, and `seconds` is how long it
    took.
    """

    checkpoint: str
    step: int
    content: str
    metrics: dict[str, float]
    measured_ms: int
    seconds: float

    @property
    def id(self) -> str:
        """Names the checkpoint with its content: a training that goes back writes another one under the same name."""
        return f"{self.checkpoint}.{self.content[:_DIGITS]}"

    def to_dict(self) -> dict[str, Any]:
        """As strict JSON: infinities and NaN as text."""
        metrics = {name: value if math.isfinite(value) else str(value) for name, value in self.metrics.items()}
        return {**asdict(self), "metrics": metrics}


class Evaluations:
    """The evaluations of one training, given the folder of its train stage."""

    def __init__(self, stage: Store) -> None:
        self._folder = stage.child(FOLDER)
        # By file name; a file never changes.
        self._read: dict[str, Evaluation] = {}

    def read(self) -> list[Evaluation]:
        """Every evaluation, in the order of the steps. Raises DamagedError or StorageError."""
        names = [name for name in self._folder.children() if name.endswith(".json")]
        self._read = {name: self._read.get(name) or self._parse(name) for name in names}
        return sorted(self._read.values(), key=lambda evaluation: (evaluation.step, evaluation.measured_ms))

    def has(self, info: CheckpointInfo) -> bool:
        """Whether a checkpoint is measured."""
        name = f"{_id_of(info)}.json"
        return name in self._read or self._folder.exists(name)

    def add(self, evaluation: Evaluation) -> bool:
        """Record an evaluation; False when another process has recorded one of the same checkpoint."""
        return self._folder.create(f"{evaluation.id}.json", render_sealed({"format": 1, **evaluation.to_dict()}))

    def workplace(self, info: CheckpointInfo) -> Store:
        """The folder of a checkpoint's evaluation, while there is one: its lease, and what its workers spool."""
        return self._folder.child("claims", _id_of(info))

    def log_once(self, evaluation: Evaluation, points: RunPoints) -> None:
        """Log its metrics to a run, and record that, unless they are on their way to MLflow already."""
        mark = f"{evaluation.id}.logged"
        if not self._folder.exists(mark) and points.log(evaluation):
            self._folder.create(mark, f"{points.handle.token}\n".encode())

    def _parse(self, name: str) -> Evaluation:
        data = self._folder.read_if_exists(name, limit=_LIMIT)
        try:
            record = parse_sealed(data or b"")
            record["metrics"] = {key: float(value) for key, value in record["metrics"].items()}
            found = from_record(Evaluation, record, ignore_unknown=True)
            if f"{found.id}.json" == name and parse_step(found.checkpoint) is not None:
                return found
            problem = "it is of another checkpoint"
        except ValueError as error:
            problem = str(error)
        except (KeyError, TypeError, AttributeError, ConfigError):
            problem = "a field is missing, or of another type"
        what = f"The record of an evaluation is damaged: {problem}."
        remedy = "Delete the file: its checkpoint is then evaluated again."
        raise DamagedError(what, field=f"{self._folder.url}/{name}", remedy=remedy)


def _id_of(info: CheckpointInfo) -> str:
    """The `Evaluation.id` of a checkpoint with these bytes."""
    return f"{info.name}.{info.commit.content_digest[:_DIGITS]}"


@dataclass(frozen=True)
class Standard:
    """The rule that selects the best checkpoint, by a metric that the Trainer logs.

    `is_chosen`: the spec names the metric (`metric_for_best_model`); else it is the loss, where there is one.
    """

    metric: str
    is_greater_better: bool
    is_chosen: bool

    @classmethod
    def of(cls, args: TrainingArguments) -> Standard:
        """The standard of a training's arguments."""
        chosen = args.metric_for_best_model
        if chosen is None:
            return cls(_LOSS, is_greater_better=False, is_chosen=False)
        metric = chosen if chosen.startswith("eval_") else f"eval_{chosen}"
        return cls(metric, is_greater_better=bool(args.greater_is_better), is_chosen=True)

    def require(self, metrics: Iterable[str]) -> None:
        """Raise ConfigError when the spec chooses by a metric that an evaluation did not give."""
        names = [name for name in metrics if name.startswith("eval_")]
        if self.is_chosen and self.metric not in names:
            what = f"The evaluation gave only {', '.join(names)}."
            remedy = "Name one of them."
            raise ConfigError(what, field="train.args.metric_for_best_model", value=self.metric, remedy=remedy)

    def choose(self, evaluations: Iterable[Evaluation]) -> Evaluation | None:
        """The best; of equal ones the earliest. None when none has a finite value."""
        sign = -1.0 if self.is_greater_better else 1.0
        known = [
            evaluation for evaluation in evaluations if math.isfinite(evaluation.metrics.get(self.metric, math.nan))
        ]
        return min(
            known, key=lambda evaluation: (sign * evaluation.metrics[self.metric], evaluation.step), default=None
        )


def keep_best(root: Store, standard: Standard, evaluations: Sequence[Evaluation]) -> Evaluation | None:
    """Mark the best checkpoint that is still there, and take the marks of worse ones away; None: there is none.

    Several processes may do this at once. A mark is taken away only from a checkpoint that is among `evaluations`, all
    that were recorded before: a better one that another process has just measured and marked is not touched.
    """
    there = list_checkpoints(root)
    candidates = {info.name: found for info in there for found in evaluations if found.id == _id_of(info)}
    best = standard.choose(candidates.values())
    while best is not None:
        value = f"{standard.metric} = {best.metrics[standard.metric]:.6g}"
        if keep_checkpoint(root.child(best.checkpoint), f"trainflow follow: the best checkpoint so far ({value})."):
            break
        del candidates[best.checkpoint]  # removed just now
        best = standard.choose(candidates.values())
    for name in candidates:
        if best is not None and name != best.checkpoint and is_kept(root.child(name)):
            end_keeping(root.child(name))
    return best


# Where the training was: its own points have that.
_POSITION = {"epoch", "num_input_tokens_seen"}
_log = logging.getLogger(__name__)


class RunPoints:
    """The MLflow run of a training, as an evaluation alongside it writes it. Only `close` waits for the server."""

    def __init__(self, handle: RunHandle) -> None:
        self.handle = handle
        self._session: Session | None = None
        self._background: Background | None = None

    def log(self, evaluation: Evaluation) -> bool:
        """Log the metrics at the checkpoint's step; False when the spool cannot be written (logged)."""
        measured = {name: value for name, value in evaluation.metrics.items() if name not in _POSITION}
        named = {clean_key(name): value for name, value in group_log(measured).items()}
        try:
            # With the time of the measurement: logged again, these are the very same points.
            self._open().write({"t": evaluation.measured_ms, "s": evaluation.step, "m": named, "once": "step"})
        except OSError as error:
            what = f"the evaluation of step {evaluation.step}"
            _log.warning("MLflow misses %s; the spool cannot be written: %s", what, error)
            return False
        return True

    def close(self) -> None:
        """Wait for the rest, as long as a stage does; what does not arrive stays in the spool."""
        if self._session is not None:
            self._session.close()
        if self._background is not None:
            self._background.close(stages=1)

    def _open(self) -> Session:
        # Only now: a command that logs nothing need not load MLflow's client.
        if self._session is None:
            handle, root = self.handle, Path(self.handle.spool_dir)
            # No "run_name": the run belongs to the process that trains.
            head = {"tracking_uri": handle.server, "token": handle.token, "experiment": handle.experiment}
            self._session = Session.create(root, head)
            self._background = Background(root, handle.tracking_uri)
        return self._session


CHECKPOINTS = "checkpoints"
TRIES = 3  # times that a checkpoint is tried when something around the evaluation fails
_PAUSE_S = 2.0
# An evaluation inside training takes the weights as they are, and nothing but MLflow's run gets the metrics.
_AS_IN_TRAINING = {"bf16_full_eval": False, "fp16_full_eval": False, "report_to": "none", "push_to_hub": False}


@dataclass(frozen=True, kw_only=True)
class Job:
    """Settings of the evaluations: those of train, the launch of the processes, and seconds between looks at others.

    `use_cpu`: evaluate on the CPU, whatever the training uses. `stage` is the folder of the train stage.
    """

    config: TrainConfig
    launch: LaunchSettings
    use_cpu: bool
    context: StageContext
    stage: Store
    data: StageManifest[PrepareFacts]
    poll_s: float


@dataclass
class Listener:
    """Functions that receive a follower's sentences, lines of workers, and evaluations."""

    say: Callable[[str], object]
    line: Callable[[str], None] = lambda _: None
    evaluated: Callable[[Evaluation, bool], object] = lambda *_: None
    """Called with an evaluation of this process, and whether it is the best so far."""


def check_settings(config: TrainConfig, context: StageContext) -> Standard:
    """The rule that selects the best checkpoint, checked before there is a checkpoint."""
    if config.eval_split is None:
        remedy = "Set train.eval_split=validation (a split that prepare makes), in the spec and for the training."
        raise ConfigError("No split is named to evaluate the checkpoints on.", field="train.eval_split", remedy=remedy)
    args = context.resolver.arguments(config.args, prefix="train.args")
    if str(args.optim).startswith("schedule_free"):
        raise ConfigError(
            "Schedule-free optimizers evaluate other weights than they save, so a checkpoint alone does not have them.",
            field="train.args.optim",
            value=str(args.optim),
            remedy="Evaluate inside the training: train.args.eval_strategy=steps.",
        )
    return Standard.of(args)


class Follower:
    """Evaluates what is due, and logs it to the MLflow run `points`, if there is one."""

    def __init__(self, job: Job, standard: Standard, points: RunPoints | None, listener: Listener) -> None:
        self.best: Evaluation | None = None  # the best checkpoint that is still there, as far as this process knows
        self.damaged: list[DamagedError] = []  # the failures of damaged checkpoints, which cannot be evaluated
        self._job = job
        self._standard = standard
        self._points = points
        self._listener = listener
        self._root = job.stage.child(CHECKPOINTS)
        self._evaluations = Evaluations(job.stage)
        self._given_up: set[str] = set()
        # Those that were due at the last look.
        self._waiting: list[CheckpointInfo] = []

    def begin(self) -> list[Evaluation]:
        """Log and mark what an earlier process left out; returns what has been evaluated."""
        known = self._evaluations.read()
        for evaluation in known:
            self._log(evaluation)
        self.best = keep_best(self._root, self._standard, known) if known else None
        return known

    def work(self, *, wait: bool = False) -> int:
        """Evaluate what is due until nothing is left; returns how many checkpoints this process has evaluated.

        `wait`: also until other processes have evaluated what they are at, or have died. An error would meet every
        evaluation.
        """
        count = 0
        while due := self._due():
            taken = self._take(due, wait=wait)
            if taken is not None:
                count += self._evaluate(*taken)
            elif not wait:
                break
        return count

    # -- one checkpoint -----------------------------------------------------------------------------------------------

    def _due(self) -> list[CheckpointInfo]:
        """The checkpoints without an evaluation, oldest first."""
        infos = reversed(list_checkpoints(self._root))
        due = [info for info in infos if info.url not in self._given_up and not self._evaluations.has(info)]
        for info in self._waiting:
            if info not in due and not self._evaluations.has(info) and info.url not in self._given_up:
                step = f"The checkpoint of step {info.step}"
                self._listener.say(f"{step} was removed by the training before it could be evaluated.")
        self._waiting = due
        return due

    def _take(self, due: Sequence[CheckpointInfo], *, wait: bool) -> tuple[CheckpointInfo, Lease] | None:
        """The first that no other process evaluates, with its lease; None when other processes have all of them."""
        for waits in (False, True) if wait else (False,):
            for info in due:
                if waits:
                    self._listener.say(f"Another process evaluates the checkpoint of step {info.step}.")
                settled = partial(self._is_settled, info) if waits else lambda: True
                place = self._evaluations.workplace(info)
                if (lease := acquire_lease(place, wait=settled, poll_s=self._job.poll_s)) is not None:
                    return info, lease
        return None

    def _is_settled(self, info: CheckpointInfo) -> bool:
        return self._evaluations.has(info) or not self._root.child(info.name).exists(COMMIT)

    def _evaluate(self, info: CheckpointInfo, lease: Lease) -> int:
        added = False
        with lease, protect_from_removal(self._root.child(info.name)):
            # Now that it is protected: until here the training might have removed it, or another process measured it.
            now = self._read(info)
            found = None if now is None or self._evaluations.has(now) else self._measure(now)
            if found is not None:
                # Created exclusively: if another process took this one for dead and was faster, its record counts.
                added = self._evaluations.add(found)
                known = self._evaluations.read()
                self._standard.require(found.metrics)
                self.best = keep_best(self._root, self._standard, known)
            lease.remove()
        if found is None or not added:
            return 0
        self._log(found)
        self._listener.evaluated(found, self.best is not None and self.best.id == found.id)
        return 1

    def _read(self, info: CheckpointInfo) -> CheckpointInfo | None:
        """The checkpoint as it is committed now; None when it is gone or another one has its name."""
        now = read_checkpoint_info(self._root, info.name)
        return now if now is not None and now.commit.content_digest == info.commit.content_digest else None

    def _measure(self, info: CheckpointInfo) -> Evaluation | None:
        """Evaluate a checkpoint; None when it is damaged, or was removed although it was protected."""
        began = time.monotonic()
        try:
            result = self._launch(info)
        except DamagedError as error:
            if self._read(info) is None:  # a forced training removes all that it finds
                self._listener.say(f"The checkpoint of step {info.step} was removed while it was evaluated.")
                return None
            self._given_up.add(info.url)
            self.damaged.append(error)
            self._listener.say(f"The checkpoint of step {info.step} is not evaluated: {error.field}: {error.message}")
            return None
        seconds = round(time.monotonic() - began, 3)
        return Evaluation(info.name, info.step, info.commit.content_digest, result.metrics, now_ms(), seconds)

    def _launch(self, info: CheckpointInfo) -> CheckpointMetrics:
        """Evaluate in processes of its own: with half the batch after memory ran out, again after an outage."""
        config, context, listener = self._job.config, self._job.context, self._listener
        parsed = context.resolver.arguments(config.args, prefix="train.args")
        use_cpu = self._job.use_cpu or parsed.use_cpu
        how = context.resolver.launch(self._job.launch, use_cpu=use_cpu)
        sharers = count_sharers(parsed, lambda: how.world_size)
        most, halvings, tries = max_halvings(parsed.per_device_eval_batch_size, shared_by=sharers), 0, 1
        while True:
            args = halve_evaluation_batch(config.args, halvings, shared_by=sharers)
            request = self._request(info, {**args, **_AS_IN_TRAINING, "use_cpu": use_cpu})
            try:
                with in_words_of_spec("train"):
                    what = f"{context.run_name or context.name}, follow"
                    return launch(request, how, env={}, on_line=listener.line, on_event=self._take_event, what=what)
            except OutOfMemoryError:
                if halvings >= most:
                    raise
                halvings += 1
                listener.say(f"Memory ran out at step {info.step}: trying again with half the evaluation batch.")
            except TrainflowError as error:
                if not error.retryable or tries >= TRIES:
                    raise
                tries += 1
                listener.say(f"The evaluation of step {info.step} failed: {error.message} Trying again.")
                time.sleep(_PAUSE_S)

    def _request(self, info: CheckpointInfo, args: dict[str, Any]) -> EvaluateCheckpointRequest:
        config, context, data = self._job.config, self._job.context, self._job.data
        return EvaluateCheckpointRequest(
            # A separate output: launches with one output do not run at the same time.
            **common_fields(config, context, StageFolder("train", self._evaluations.workplace(info))),
            data=PreparedData(data.url, data.facts.splits, data.facts.info, data.files),
            model=config.model,
            args=args,
            metrics=context.metrics,
            checkpoint=info.url,
            train_split=config.train_split,
            eval_split=str(config.eval_split),
        )

    def _take_event(self, event: dict[str, Any]) -> None:
        if event.get("event") in ("warning", "wait"):
            self._listener.say(str(event.get("message")))

    def _log(self, evaluation: Evaluation) -> None:
        if self._points is not None:
            self._evaluations.log_once(evaluation, self._points)
