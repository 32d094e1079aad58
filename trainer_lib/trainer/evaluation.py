"""`evaluate` and `predict`. Every method may be overridden."""

from __future__ import annotations

from typing import Any

from trainer_lib.outputs import EvalLoopOutput, PredictionOutput
from trainer_lib.trainer.base import TrainerBase


class EvaluationMethods(TrainerBase):
    """Evaluation, prediction, and what training asks of them."""

    def evaluate(
        self, eval_dataset: Any = None, ignore_keys: list[str] | None = None, metric_key_prefix: str = "eval"
    ) -> dict[str, float]:
        """Evaluate on a dataset, the set of that name, or the Trainer's own; log and return the metrics. Collective.

        A dict of sets (given, or the Trainer's own) is evaluated set by set; the name of each becomes part of its
        metrics' names. Every rank gets the same metrics; `compute_metrics` runs on rank 0.

        Args:
            eval_dataset: a dataset, a dict of them by name, or a name in the Trainer's dict.
            ignore_keys: outputs of the model that are left out of predictions.
            metric_key_prefix: prefix of the metrics' names.
        """
        return self._trainflow.evaluator.evaluate(eval_dataset, ignore_keys, metric_key_prefix)

    def predict(
        self, test_dataset: Any, ignore_keys: list[str] | None = None, metric_key_prefix: str = "test"
    ) -> PredictionOutput:
        """Predict a dataset, and measure the predictions when it has labels. Collective.

        Returns:
            On rank 0, predictions and labels as memory-mapped arrays ``[samples, ...]``, padded on the right with -100
            where batches differ in width; None on the other ranks. The metrics, equal on every rank.
        """
        return self._trainflow.evaluator.predict(test_dataset, ignore_keys, metric_key_prefix)

    def evaluation_loop(
        self,
        dataloader: Any,
        description: str,
        prediction_loss_only: bool | None = None,
        ignore_keys: list[str] | None = None,
        metric_key_prefix: str = "eval",
    ) -> EvalLoopOutput:
        """One pass over a loader: predictions and labels ``[samples, ...]``, metrics, number of samples."""
        return self._trainflow.evaluator.loop(
            *(dataloader, prediction_loss_only, ignore_keys, metric_key_prefix),
            keeps_predictions=description == "Prediction",
        )

    def prediction_loop(
        self,
        dataloader: Any,
        description: str,
        prediction_loss_only: bool | None = None,
        ignore_keys: list[str] | None = None,
        metric_key_prefix: str = "eval",
    ) -> EvalLoopOutput:
        """Old name of `evaluation_loop`, called when `use_legacy_prediction_loop` is set."""
        return self.evaluation_loop(dataloader, description, prediction_loss_only, ignore_keys, metric_key_prefix)

    def _evaluate(
        self, trial: Any, ignore_keys_for_eval: list[str] | None, skip_scheduler: bool = False
    ) -> dict[str, float]:
        """Evaluate in the middle of training; the training's random numbers stay as they are."""
        evaluator = self._trainflow.evaluator
        return evaluator.evaluate_in_training(trial, ignore_keys_for_eval, skip_scheduler=skip_scheduler)

    def _report_to_hp_search(self, trial: Any, step: int, metrics: dict[str, float]) -> None:
        """In a search, report an evaluation of the trial.

        Raises:
            TrialPruned: the search stops this trial; on every rank.
        """
        self._trainflow.trials.report(step, metrics)

    def _determine_best_metric(self, metrics: dict[str, float], trial: Any = None) -> bool:
        """Whether these metrics are the best so far, which is then noted in the state; a non-finite value never is.

        Raises:
            ConfigError: `metric_for_best_model` is not among them.
        """
        return self._trainflow.evaluator.note_best(metrics)
