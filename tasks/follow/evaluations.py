"""Results of evaluations during a training: one small file per checkpoint, created once and never changed.

::

    <folder of the train stage>/follow/
        checkpoint-20.<digest>.json        the metrics; the digest is that of the checkpoint's files
        checkpoint-20.<digest>.logged      the metrics are on their way to MLflow
        claims/checkpoint-20.<digest>/     the lease of the process that evaluates it now

Several processes share the work: a checkpoint is evaluated by the one that has its lease, and its file is created
exclusively. What a killed process was evaluating is evaluated again by the next one.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from trainer_lib.arguments import TrainingArguments
from trainer_lib.base.json_text import parse_sealed, render_sealed
from trainer_lib.checkpoint.catalogue import CheckpointInfo, list_checkpoints
from trainer_lib.checkpoint.layout import parse_step
from trainer_lib.errors import ConfigError, DamagedError
from trainer_lib.locks.lease import Lease, acquire_lease
from trainer_lib.locks.readers import end_keeping, is_kept, keep_checkpoint
from trainer_lib.storage import Store

FOLDER = "follow"
_DIGITS = 16
_LIMIT = 1 << 20


@dataclass(frozen=True)
class Evaluation:
    """The metrics of one checkpoint.

    Attributes:
        checkpoint: the name of its folder.
        step: optimizer steps that it has.
        content: SHA-256 of its files, as its commit has it.
        metrics: by the names that the Trainer logs (`eval_loss`).
        measured_ms: when, in milliseconds since 1970.
        seconds: how long it took.
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
        return _id_of(self.checkpoint, self.content)

    def is_of(self, info: CheckpointInfo) -> bool:
        """Whether this very checkpoint was measured."""
        return self.id == _id_of(info.name, info.commit.content_digest)

    def to_dict(self) -> dict[str, Any]:
        """As strict JSON: infinities and NaN as text."""
        metrics = {name: value if math.isfinite(value) else str(value) for name, value in self.metrics.items()}
        return {**asdict(self), "metrics": metrics}


class Evaluations:
    """The evaluations of one training.

    Args:
        stage: the folder of its train stage.
    """

    def __init__(self, stage: Store) -> None:
        self._folder = stage.child(FOLDER)
        # By file name; a file never changes.
        self._read: dict[str, Evaluation] = {}

    def read(self) -> list[Evaluation]:
        """Every evaluation, in the order of the steps.

        Raises:
            DamagedError: one of the files is damaged.
            StorageError: the storage cannot be read.
        """
        names = [name for name in self._folder.children() if name.endswith(".json")]
        self._read = {name: self._read.get(name) or self._parse(name) for name in names}
        return sorted(self._read.values(), key=lambda evaluation: (evaluation.step, evaluation.measured_ms))

    def has(self, info: CheckpointInfo) -> bool:
        """Whether a checkpoint is measured."""
        name = f"{_id_of(info.name, info.commit.content_digest)}.json"
        return name in self._read or self._folder.exists(name)

    def add(self, evaluation: Evaluation) -> bool:
        """Record an evaluation; False when another process has recorded one of the same checkpoint."""
        return self._folder.create(f"{evaluation.id}.json", render_sealed({"format": 1, **evaluation.to_dict()}))

    def acquire(self, info: CheckpointInfo, *, give_up: Callable[[], bool], poll_s: float) -> Lease | None:
        """Take the lease of a checkpoint's evaluation; None when another process has it and `give_up` returns True."""
        return acquire_lease(self.workplace(info), wait=give_up, poll_s=poll_s)

    def workplace(self, info: CheckpointInfo) -> Store:
        """The folder of a checkpoint's evaluation, while there is one: its lease, and what its workers spool."""
        return self._folder.child("claims", _id_of(info.name, info.commit.content_digest))

    def is_logged(self, evaluation: Evaluation) -> bool:
        """Whether its metrics are on their way to MLflow."""
        return self._folder.exists(f"{evaluation.id}.logged")

    def note_logged(self, evaluation: Evaluation, run: str) -> None:
        """Record that its metrics are on their way to the MLflow run that `run` names."""
        self._folder.create(f"{evaluation.id}.logged", f"{run}\n".encode())

    def _parse(self, name: str) -> Evaluation:
        data = self._folder.read_if_exists(name, limit=_LIMIT)
        try:
            record = parse_sealed(data or b"")
            metrics = {str(key): float(value) for key, value in record["metrics"].items()}
            found = Evaluation(
                checkpoint=str(record["checkpoint"]),
                step=int(record["step"]),
                content=str(record["content"]),
                metrics=metrics,
                measured_ms=int(record["measured_ms"]),
                seconds=float(record["seconds"]),
            )
            if f"{found.id}.json" == name and parse_step(found.checkpoint) is not None:
                return found
            problem = "it is of another checkpoint"
        except (ValueError, KeyError, TypeError, AttributeError, OverflowError) as error:
            problem = str(error) if isinstance(error, ValueError) else "a field is missing, or of another type"
        raise DamagedError(
            f"The record of an evaluation is damaged: {problem}.",
            field=f"{self._folder.url}/{name}",
            remedy="Delete the file: its checkpoint is then evaluated again.",
        )


def _id_of(checkpoint: str, content: str) -> str:
    return f"{checkpoint}.{content[:_DIGITS]}"


_LOSS = "eval_loss"


@dataclass(frozen=True)
class Standard:
    """The rule that selects the best checkpoint.

    Attributes:
        metric: the name that the Trainer logs.
        is_greater_better: whether a greater value is better.
        is_chosen: whether the spec says so (`metric_for_best_model`); else it is the loss, where there is one.
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
            raise ConfigError(
                f"The evaluation gave only {', '.join(names)}.",
                field="train.args.metric_for_best_model",
                value=self.metric,
                remedy="Name one of them.",
            )

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
    """Mark the best checkpoint that is still there, and take the marks of worse ones away.

    Several processes may do this at once. A mark is taken away only from a checkpoint that is among `evaluations`,
    which were read before: a better one that another process has just measured and marked is not touched.

    Args:
        root: the folder of checkpoints.
        evaluations: all that are recorded.

    Returns:
        The best; None when there is none.

    Raises:
        StorageError: the storage cannot be read or written.
    """
    candidates = dict(_still_there(list_checkpoints(root), evaluations))
    best = standard.choose(candidates.values())
    while best is not None and not keep_checkpoint(root.child(best.checkpoint), _why(standard, best)):
        del candidates[best.checkpoint]  # removed just now
        best = standard.choose(candidates.values())
    for name in candidates:
        if best is not None and name != best.checkpoint and is_kept(root.child(name)):
            end_keeping(root.child(name))
    return best


def _still_there(
    infos: Sequence[CheckpointInfo], evaluations: Sequence[Evaluation]
) -> Iterable[tuple[str, Evaluation]]:
    for info in infos:
        for evaluation in evaluations:
            if evaluation.is_of(info):
                yield info.name, evaluation


def _why(standard: Standard, best: Evaluation) -> str:
    value = best.metrics[standard.metric]
    return f"trainflow follow: the best checkpoint so far ({standard.metric} = {value:.6g})."
