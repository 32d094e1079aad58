"""Stop when evaluations have not improved for a while."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

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

    An evaluation improves when `metric_for_best_model` is better than the best so far by more than the threshold. A
    non-finite metric never improves. The counter and the best value are saved with checkpoints.

    Args:
        early_stopping_patience: evaluations without improvement that stop the run.
        early_stopping_threshold: by how much (in the metric's unit) it must improve to count.

    Raises:
        ConfigError: the patience is below 1 or the threshold negative; when training begins, there is no metric to
            watch or no evaluation.
    """

    def __init__(self, early_stopping_patience: int = 1, early_stopping_threshold: float | None = 0.0) -> None:
        if early_stopping_patience < 1:
            raise ConfigError(
                "must be at least 1.",
                field="early_stopping_patience",
                value=early_stopping_patience,
                remedy="Give a number of evaluations.",
            )
        if early_stopping_threshold is not None and not early_stopping_threshold >= 0:
            raise ConfigError(
                "must be at least 0.",
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
        """Count one evaluation: back to 0 on improvement, else one up."""
        best = self.best_metric
        gain = 0.0 if best is None else metric_value - best if args.greater_is_better else best - metric_value
        if metric_value == metric_value and (best is None or gain > self.early_stopping_threshold):
            self.early_stopping_patience_counter = 0
        else:
            self.early_stopping_patience_counter += 1
        if metric_value == metric_value and (best is None or gain > 0):
            self.best_metric = float(metric_value)

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Check that there is something to watch; start anew with a new run, go on with a resumed one."""
        if not args.load_best_model_at_end:
            logger.warning(
                "EarlyStoppingCallback: without load_best_model_at_end the last model is kept, not the best."
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
        if state.global_step == 0:
            self.early_stopping_patience_counter = 0
            self.best_metric = None
        elif self.best_metric is None:
            self.best_metric = state.best_metric
        if self.early_stopping_patience_counter >= self.early_stopping_patience:
            control.should_training_stop = True  # resumed after it had stopped: it stays stopped

    def on_evaluate(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Count, and stop when patience is out."""
        name = str(args.metric_for_best_model)
        name = name if name.startswith("eval_") else f"eval_{name}"
        value = (kwargs.get("metrics") or {}).get(name)
        if value is None:
            logger.warning("EarlyStoppingCallback: this evaluation has no %s; it does not count.", name)
            return
        self.check_metric_value(args, state, control, value)
        if self.early_stopping_patience_counter >= self.early_stopping_patience:
            control.should_training_stop = True

    def state(self) -> dict[str, Any]:
        """Patience and threshold; the counter and the best value so far."""
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
