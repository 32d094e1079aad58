"""Early stopping: training ends when evaluations no longer improve."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

from typing_extensions import override

from trainer_lib.arguments.enums import IntervalStrategy
from trainer_lib.callbacks.base import TrainerCallback
from trainer_lib.errors import ConfigError
from trainer_lib.state import ExportableState

if TYPE_CHECKING:
    from trainer_lib.arguments import TrainingArguments
    from trainer_lib.state import TrainerControl, TrainerState

logger = logging.getLogger(__name__)


class EarlyStoppingCallback(TrainerCallback, ExportableState):
    """Stops training after a number of evaluations in a row without improvement.

    An evaluation is an improvement when `metric_for_best_model` is better than the best value so far by more than the
    threshold. NaN never is. The counter and the best value are saved with checkpoints.

    Args:
        early_stopping_patience: number of evaluations without improvement that stop training.
        early_stopping_threshold: least improvement that counts, in the metric's unit.

    Raises:
        ConfigError: the patience is below 1 or the threshold is negative. At the start of training: no metric is
            named, or nothing is evaluated.
    """

    def __init__(self, early_stopping_patience: int = 1, early_stopping_threshold: float | None = 0.0) -> None:
        if early_stopping_patience < 1:
            raise ConfigError(
                "The patience must be at least 1.",
                field="early_stopping_patience",
                value=early_stopping_patience,
                remedy="Give a number of evaluations.",
            )
        # "not >=" and not "<", so that NaN is refused.
        if early_stopping_threshold is not None and not early_stopping_threshold >= 0:
            raise ConfigError(
                "The threshold must be at least 0.",
                field="early_stopping_threshold",
                value=early_stopping_threshold,
                remedy="Give a distance in the metric's unit.",
            )
        self.early_stopping_patience = early_stopping_patience
        self.early_stopping_threshold = early_stopping_threshold or 0.0
        self.early_stopping_patience_counter = 0
        self.best_metric: float | None = None

    def check_metric_value(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, metric_value: float
    ) -> None:
        """Reset the counter when `metric_value` is an improvement; otherwise add 1 to it."""
        best = self.best_metric
        gain = 0.0 if best is None else metric_value - best if args.greater_is_better else best - metric_value
        # `metric_value == metric_value` is false for NaN.
        if metric_value == metric_value and (best is None or gain > self.early_stopping_threshold):
            self.early_stopping_patience_counter = 0
        else:
            self.early_stopping_patience_counter += 1
        # A gain below the threshold still moves the best value, as in the reference.
        if metric_value == metric_value and (best is None or gain > 0):
            self.best_metric = float(metric_value)

    @override
    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        if not args.load_best_model_at_end:
            logger.warning(
                "EarlyStoppingCallback: without load_best_model_at_end, the last model is kept, not the best."
            )
        if args.metric_for_best_model is None:
            raise ConfigError(
                "EarlyStoppingCallback needs a metric to watch.",
                field="metric_for_best_model",
                value="none",
                remedy='Give a metric\'s name, such as "loss".',
            )
        if args.eval_strategy == IntervalStrategy.NO:
            raise ConfigError(
                "EarlyStoppingCallback needs evaluations during training.",
                field="eval_strategy",
                value="no",
                remedy='Give "steps" or "epoch".',
            )
        # A new training: the counter of an earlier `train()` of this Trainer does not count.
        if state.global_step == 0:
            self.early_stopping_patience_counter = 0
            self.best_metric = None
        # The checkpoint has no state of this callback, which may be new; it has the best metric.
        elif self.best_metric is None:
            self.best_metric = state.best_metric
        if self.early_stopping_patience_counter >= self.early_stopping_patience:
            control.should_training_stop = True  # a run that had stopped early does not train on when it resumes

    @override
    def on_evaluate(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        name = str(args.metric_for_best_model)
        name = name if name.startswith("eval_") else f"eval_{name}"
        value = (kwargs.get("metrics") or {}).get(name)
        if value is None:
            logger.warning("EarlyStoppingCallback: this evaluation has no metric %s and is not counted.", name)
            return
        self.check_metric_value(args, state, control, value)
        if self.early_stopping_patience_counter >= self.early_stopping_patience:
            control.should_training_stop = True

    @override
    def state(self) -> dict[str, Any]:
        return {
            "args": {
                "early_stopping_patience": self.early_stopping_patience,
                "early_stopping_threshold": self.early_stopping_threshold,
            },
            "attributes": {
                "early_stopping_patience_counter": self.early_stopping_patience_counter,
                "best_metric": self.best_metric,
            },
        }
