"""`evaluate` and `predict`. Every public method may be overridden."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from trainer_lib.data.generators import keep_generators
from trainer_lib.errors import ConfigError
from trainer_lib.evaluation.evaluation_loop import EvaluationLoop
from trainer_lib.outputs import EvalLoopOutput, PredictionOutput, speed_metrics
from trainer_lib.precision import back_up_weights, full_eval_dtype
from trainer_lib.storage import Store
from trainer_lib.trainer.data import DataMixin
from trainer_lib.trainer.optimization import OptimizationMixin
from trainer_lib.trainer.reporting import ReportingMixin
from trainer_lib.trainer.steps import StepMixin


class EvaluationMixin(DataMixin, StepMixin, OptimizationMixin, ReportingMixin):
    """Evaluation and prediction."""

    def evaluate(
        self, eval_dataset: Any = None, ignore_keys: list[str] | None = None, metric_key_prefix: str = "eval"
    ) -> dict[str, float]:
        """Evaluate on a dataset, the set of that name, or the Trainer's own; metrics are logged and returned.

        A dict of sets (given, or the Trainer's own) is evaluated one by one, each set's name put into its metrics'.
        Every rank gets the same metrics; `compute_metrics` runs on rank 0.
        """
        metrics: dict[str, float] = {}
        override = eval_dataset is not None
        sets = eval_dataset if override else self.eval_dataset
        if isinstance(sets, Mapping):
            for name, one in sets.items():
                given = one if override else name
                metrics.update(self.evaluate(given, ignore_keys, metric_key_prefix=f"{metric_key_prefix}_{name}"))
            return metrics
        with self._memory_tracker.stage("eval", metrics):
            loader = self.get_eval_dataloader(eval_dataset)
            output = self._measured(loader, "Evaluation", ignore_keys, metric_key_prefix)
            metrics.update(output.metrics or {})
            self._log(metrics)
            self.control = self.callback_handler.on_evaluate(self.args, self.state, self.control, metrics)
        return metrics

    def predict(
        self, test_dataset: Any, ignore_keys: list[str] | None = None, metric_key_prefix: str = "test"
    ) -> PredictionOutput:
        """Predict a dataset; with labels, measure as well.

        Predictions and labels are memory-mapped arrays on rank 0, padded on the right with -100 where batches differ;
        on other ranks they are None. Metrics are the same on every rank.
        """
        metrics: dict[str, float] = {}
        with self._memory_tracker.stage("test", metrics):
            loader = self.get_test_dataloader(test_dataset)
            output = self._measured(loader, "Prediction", ignore_keys, metric_key_prefix, keep_predictions=True)
            metrics.update(output.metrics or {})
            self.control = self.callback_handler.on_predict(self.args, self.state, self.control, metrics)
        return PredictionOutput(output.predictions, output.label_ids, metrics)

    def _measured(
        self, loader: Any, what: str, ignore_keys: list[str] | None, prefix: str, *, keep_predictions: bool = False
    ) -> EvalLoopOutput:
        # Without metrics to compute there is no point in keeping predictions.
        loss_only = None if keep_predictions or self.compute_metrics is not None else True
        loop = self.prediction_loop if self.args.use_legacy_prediction_loop else self.evaluation_loop
        started = time.time()
        output = loop(loader, what, prediction_loss_only=loss_only, ignore_keys=ignore_keys, metric_key_prefix=prefix)
        batches = -(-(output.num_samples or 0) // max(1, self._eval_batch_size * self.comm.data_parallel.size))
        metrics = dict(output.metrics or {})
        metrics.update(speed_metrics(prefix, started, num_samples=output.num_samples, num_steps=batches))
        return output._replace(metrics=metrics)

    def evaluation_loop(
        self,
        dataloader: Any,
        description: str,
        prediction_loss_only: bool | None = None,
        ignore_keys: list[str] | None = None,
        metric_key_prefix: str = "eval",
    ) -> EvalLoopOutput:
        """One pass over a loader: predictions, labels, metrics, number of samples. Works with or without labels."""
        loss_only = self.args.prediction_loss_only if prediction_loss_only is None else prediction_loss_only
        was_training = self.model.training
        self._past = None
        casts = full_eval_dtype(self.args) is not None and not self.is_in_train
        restore = back_up_weights(self.model) if casts else None
        try:
            with torch.no_grad():
                return EvaluationLoop(self, loss_only=loss_only, ignore_keys=ignore_keys).run(
                    dataloader, metric_key_prefix
                )
        finally:
            if restore is not None:
                restore()
            self.strategy.after_inference(self.model_wrapped)
            self._past = None
            self.model.train(was_training)
            self._optimizer_mode("train" if was_training else "eval")

    def prediction_loop(
        self,
        dataloader: Any,
        description: str,
        prediction_loss_only: bool | None = None,
        ignore_keys: list[str] | None = None,
        metric_key_prefix: str = "eval",
    ) -> EvalLoopOutput:
        """Old name of `evaluation_loop`, used when `use_legacy_prediction_loop` asks for it."""
        return self.evaluation_loop(dataloader, description, prediction_loss_only, ignore_keys, metric_key_prefix)

    # -- what the evaluation package asks for -------------------------------------------------------------------------

    def evaluation_model(self, *, alone: bool = False) -> nn.Module:
        """The model in evaluation mode; outside training cast as a whole when the arguments ask for it.

        `alone`: its forward must not wait for other ranks; ConfigError when it has to.
        """
        model = self.strategy.inference_model(self.model_wrapped, alone=alone)
        dtype = full_eval_dtype(self.args)
        if dtype is not None and not self.is_in_train:
            model = model.to(dtype=dtype)
        if self.place_model_on_device:
            self._move_model_to_device(self.model, self.device)
        self._optimizer_mode("eval")
        return model.eval()

    def spool_folder(self) -> Path | None:
        """Predictions pile up beside the run's own files when those are on a local disk."""
        if self.args.output_dir is None:
            return None
        store = Store.open(self.args.output_dir, field="output_dir")
        if not store.is_local:
            return None
        folder = store.local_path()
        return folder if folder.is_dir() else None

    def check_stop(self) -> None:
        """Inside training: raise when all ranks have agreed to stop."""
        if self._stop is not None:
            self._stop.check_in_evaluation()

    # -- in training --------------------------------------------------------------------------------------------------

    def _evaluate(
        self, trial: Any, ignore_keys_for_eval: list[str] | None, skip_scheduler: bool = False
    ) -> dict[str, float]:
        """Evaluate in the middle of training, leaving no trace in the training's random numbers."""
        with self._random_numbers_kept():
            metrics = self.evaluate(ignore_keys=ignore_keys_for_eval)
        self._report_to_hp_search(trial, self.state.global_step, metrics)
        if not skip_scheduler:
            self._step_metric_schedule(metrics)
        return metrics

    def _report_to_hp_search(self, trial: Any, step: int, metrics: dict[str, float]) -> None:
        """In a search: report an evaluation of the trial. Raises TrialPruned, on every rank, to stop the trial."""
        self._trainflow_trials.report(step, metrics)

    @contextlib.contextmanager
    def _random_numbers_kept(self) -> Iterator[None]:
        devices = [self.device] if self.device.type == "cuda" else []
        with keep_generators(), torch.random.fork_rng(devices=devices, enabled=bool(devices)):
            yield

    def _determine_best_metric(self, metrics: dict[str, float], trial: Any = None) -> bool:
        """Whether these metrics are the best so far (and note it if so). A non-finite one never is.

        Raises ConfigError when the metric to watch is not among them.
        """
        if self.args.metric_for_best_model is None:
            return False
        name = self.args.metric_for_best_model
        name = name if name.startswith("eval_") else f"eval_{name}"
        if name not in metrics:
            raise ConfigError(
                f"The evaluation gave only {', '.join(metrics)}.",
                field="metric_for_best_model",
                value=self.args.metric_for_best_model,
                remedy="Name one of them.",
            )
        value, best = metrics[name], self.state.best_metric
        if value != value or abs(value) == float("inf") or (self._run is not None and self._run.history.in_trouble):
            return False
        if best is not None and not (value > best if self.args.greater_is_better else value < best):
            return False
        self.state.best_metric = value
        self.state.best_global_step = self.state.global_step
        return True
