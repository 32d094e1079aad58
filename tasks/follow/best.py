"""Which of the evaluated checkpoints is the best, and the mark that keeps it from the training's rotation."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from trainer_lib.arguments import TrainingArguments
from trainer_lib.checkpoint.catalogue import CheckpointInfo, list_checkpoints
from trainer_lib.errors import ConfigError
from trainer_lib.locks.keeping import end_keeping, is_kept, keep_checkpoint
from trainer_lib.storage import Store
from trainflow.tasks.follow.evaluations import Evaluation

_LOSS = "eval_loss"


@dataclass(frozen=True)
class Standard:
    """What makes a checkpoint the best.

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
        known = [each for each in evaluations if math.isfinite(each.metrics.get(self.metric, math.nan))]
        return min(known, key=lambda each: (sign * each.metrics[self.metric], each.step), default=None)


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
        for each in evaluations:
            if each.is_of(info):
                yield info.name, each


def _why(standard: Standard, best: Evaluation) -> str:
    value = best.metrics[standard.metric]
    return f"trainflow follow: the best checkpoint so far ({standard.metric} = {value:.6g})."
