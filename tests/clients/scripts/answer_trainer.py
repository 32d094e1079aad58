"""A Trainer whose metrics need the texts as well: written for the Trainer of transformers."""

from __future__ import annotations

import math
import time
from typing import Any

from transformers import Trainer, is_torch_xla_available
from transformers.trainer_utils import PredictionOutput, speed_metrics

if is_torch_xla_available():
    import torch_xla.debug.metrics as met


class QuestionAnsweringTrainer(Trainer):
    """Turns logits into answers before it measures them."""

    def __init__(self, *args: Any, eval_examples: Any = None, post_process_function: Any = None, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.eval_examples = eval_examples
        self.post_process_function = post_process_function

    def _run(self, loader: Any, description: str, ignore_keys: Any, prefix: str) -> Any:
        compute_metrics = self.compute_metrics
        self.compute_metrics = None
        started = time.time()
        try:
            output = self.evaluation_loop(
                loader,
                description=description,
                prediction_loss_only=True if compute_metrics is None else None,
                ignore_keys=ignore_keys,
                metric_key_prefix=prefix,
            )
        finally:
            self.compute_metrics = compute_metrics
        total_batch_size = self.args.eval_batch_size * self.args.world_size
        output.metrics.update(
            speed_metrics(
                prefix,
                started,
                num_samples=output.num_samples,
                num_steps=math.ceil(output.num_samples / total_batch_size),
            )
        )
        return output

    def _measured(self, predictions: Any, output: Any, prefix: str) -> dict[str, float]:
        metrics = self.compute_metrics(predictions)
        for key in list(metrics):
            if not key.startswith(f"{prefix}_"):
                metrics[f"{prefix}_{key}"] = metrics.pop(key)
        metrics.update(output.metrics)
        return metrics

    def evaluate(
        self,
        eval_dataset: Any = None,
        eval_examples: Any = None,
        ignore_keys: Any = None,
        metric_key_prefix: str = "eval",
    ) -> dict[str, float]:
        eval_dataset = self.eval_dataset if eval_dataset is None else eval_dataset
        eval_examples = self.eval_examples if eval_examples is None else eval_examples
        output = self._run(self.get_eval_dataloader(eval_dataset), "Evaluation", ignore_keys, metric_key_prefix)
        if self.post_process_function is not None and self.compute_metrics is not None and self.args.should_save:
            found = self.post_process_function(eval_examples, eval_dataset, output.predictions)
            metrics = self._measured(found, output, metric_key_prefix)
        else:
            metrics = output.metrics
        if self.args.should_log:
            self.log(metrics)
        if self.args.debug:
            print(met.metrics_report())
        self.control = self.callback_handler.on_evaluate(self.args, self.state, self.control, metrics)
        return metrics

    def predict(
        self, predict_dataset: Any, predict_examples: Any, ignore_keys: Any = None, metric_key_prefix: str = "test"
    ) -> Any:
        output = self._run(self.get_test_dataloader(predict_dataset), "Prediction", ignore_keys, metric_key_prefix)
        if self.post_process_function is None or self.compute_metrics is None:
            return output
        found = self.post_process_function(predict_examples, predict_dataset, output.predictions)
        metrics = self._measured(found, output, metric_key_prefix)
        return PredictionOutput(predictions=found.predictions, label_ids=found.label_ids, metrics=metrics)
