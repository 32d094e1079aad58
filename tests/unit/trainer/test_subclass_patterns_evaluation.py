"""Evaluation and prediction as user code overrides them: the same code on transformers' Trainer and on ours."""

from __future__ import annotations

import math
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import trainer_lib
from tests.support.patterns import ROWS, Make, Table, assert_same
from trainer_lib.errors import ConfigError

PATTERNS = Table()
EVALUATES: dict[str, Any] = {"eval_dataset": ROWS[:12], "eval_strategy": "steps", "eval_steps": 2}


def accuracy(given: Any) -> dict[str, float]:
    """The share of right answers."""
    logits = given.predictions[0] if isinstance(given.predictions, tuple) else given.predictions
    return {"accuracy": float((np.argmax(logits, -1) == given.label_ids).mean())}


@PATTERNS.add
def metrics_of_reduced_logits(make: Make) -> Any:
    def shares(given: Any) -> dict[str, float]:
        return {"right": float((given.predictions == given.label_ids).mean()), "rows": float(len(given.label_ids))}

    return make(
        make.lib.Trainer,
        compute_metrics=shares,
        preprocess_logits_for_metrics=lambda logits, labels: logits.argmax(-1),
        **EVALUATES,
    )


@PATTERNS.add
def a_prediction_step_of_probabilities(make: Make) -> Any:
    class Probable(make.lib.Trainer):  # type: ignore[name-defined,misc]
        def prediction_step(self, model: Any, inputs: Any, prediction_loss_only: bool, ignore_keys: Any = None) -> Any:
            inputs = self._prepare_inputs(inputs)
            labels = inputs["labels"]
            with torch.no_grad(), self.compute_loss_context_manager():
                loss, outputs = self.compute_loss(model, inputs, return_outputs=True)
            if prediction_loss_only:
                return loss.detach(), None, None
            return loss.detach(), outputs["logits"].softmax(-1), labels

    one = make(Probable, compute_metrics=accuracy, **EVALUATES)
    one.train()
    one.seen = one.predict(ROWS[:4]).predictions.sum(-1).round(4).tolist()
    return one


@PATTERNS.add
def a_prediction_step_that_adds_to_the_loss(make: Make) -> Any:
    class Added(make.lib.Trainer):  # type: ignore[name-defined,misc]
        def prediction_step(self, *args: Any, **kwargs: Any) -> Any:
            loss, logits, labels = super().prediction_step(*args, **kwargs)
            return loss + 1, logits, labels

    return make(Added, **EVALUATES)


@PATTERNS.add
def more_metrics_after_the_evaluation(make: Make) -> Any:
    class More(make.lib.Trainer):  # type: ignore[name-defined,misc]
        def evaluate(
            self, eval_dataset: Any = None, ignore_keys: Any = None, metric_key_prefix: str = "eval"
        ) -> dict[str, float]:
            metrics: dict[str, float] = super().evaluate(eval_dataset, ignore_keys, metric_key_prefix)
            metrics[f"{metric_key_prefix}_perplexity"] = math.exp(metrics[f"{metric_key_prefix}_loss"])
            self.log({f"{metric_key_prefix}_perplexity": metrics[f"{metric_key_prefix}_perplexity"]})
            return metrics

    return make(More, metric_for_best_model="perplexity", greater_is_better=False, **EVALUATES)


@PATTERNS.add
def two_sets_in_one_evaluation(make: Make) -> Any:
    class Twice(make.lib.Trainer):  # type: ignore[name-defined,misc]
        def evaluate(self, *args: Any, **kwargs: Any) -> dict[str, float]:
            first: dict[str, float] = super().evaluate(*args, **kwargs)
            first.update(super().evaluate(eval_dataset=ROWS[12:], metric_key_prefix="eval_rest"))
            return first

    return make(Twice, compute_metrics=accuracy, **EVALUATES)


@PATTERNS.add
def questions_with_their_examples(make: Make) -> Any:
    class Questions(make.lib.Trainer):  # type: ignore[name-defined,misc]
        compute_metrics: Any
        control: Any
        takes = ("eval_examples", "post_process_function")

        def __init__(self, *args: Any, eval_examples: Any = None, post_process_function: Any = None, **kw: Any) -> None:
            super().__init__(*args, **kw)
            self.eval_examples = eval_examples
            self.post_process_function = post_process_function

        def evaluate(
            self,
            eval_dataset: Any = None,
            eval_examples: Any = None,
            ignore_keys: Any = None,
            metric_key_prefix: str = "eval",
        ) -> dict[str, float]:
            eval_dataset = self.eval_dataset if eval_dataset is None else eval_dataset
            loader = self.get_eval_dataloader(eval_dataset)
            examples = self.eval_examples if eval_examples is None else eval_examples
            compute_metrics = self.compute_metrics
            self.compute_metrics = None
            started = time.time()
            try:
                output = self.evaluation_loop(
                    loader,
                    description="Evaluation",
                    prediction_loss_only=True if compute_metrics is None else None,
                    ignore_keys=ignore_keys,
                    metric_key_prefix=metric_key_prefix,
                )
            finally:
                self.compute_metrics = compute_metrics
            output.metrics[f"{metric_key_prefix}_runtime"] = time.time() - started
            metrics = {}
            if self.post_process_function is not None and self.compute_metrics is not None and self.args.should_save:
                given = self.post_process_function(examples, eval_dataset, output.predictions)
                metrics = {f"{metric_key_prefix}_{name}": value for name, value in self.compute_metrics(given).items()}
            metrics.update(output.metrics)
            self.log(metrics)
            self.control = self.callback_handler.on_evaluate(self.args, self.state, self.control, metrics)
            return metrics

    def post(examples: Any, rows: Any, predictions: Any) -> Any:
        return make.lib.EvalPrediction(predictions=predictions, label_ids=np.array([row["labels"] for row in examples]))

    own: dict[str, Any] = {"eval_examples": ROWS[:12], "post_process_function": post, "compute_metrics": accuracy}
    return make(Questions, **own, **EVALUATES)


@PATTERNS.add
def questions_of_several_sets(make: Make) -> Any:
    class Several(make.lib.Trainer):  # type: ignore[name-defined,misc]
        def evaluate(
            self,
            eval_dataset: Any = None,
            eval_examples: Any = None,
            ignore_keys: Any = None,
            metric_key_prefix: str = "eval",
        ) -> dict[str, float]:
            assert eval_examples is None
            metrics: dict[str, float] = super().evaluate(eval_dataset, ignore_keys, metric_key_prefix)
            return metrics

    sets = {"a": ROWS[:8], "b": ROWS[8:]}
    return make(Several, **{**EVALUATES, "eval_dataset": sets}, compute_metrics=accuracy)


@PATTERNS.add
def a_loop_written_out(make: Make) -> Any:
    from transformers import trainer_pt_utils, trainer_utils

    pt, utils = vars(trainer_pt_utils), vars(trainer_utils)
    container, find_batch_size = pt["EvalLoopContainer"], pt["find_batch_size"]

    class Whole(make.lib.Trainer):  # type: ignore[name-defined,misc]
        control: Any
        gather_function: Any

        def evaluation_loop(
            self,
            dataloader: Any,
            description: str,
            prediction_loss_only: Any = None,
            ignore_keys: Any = None,
            metric_key_prefix: str = "eval",
        ) -> Any:
            args = self.args
            model = self._wrap_model(self.model, training=False)
            if len(self.accelerator._models) == 0 and model is self.model:
                model = self.accelerator.prepare_model(model, evaluation_mode=True)
            model.eval()
            self.callback_handler.eval_dataloader = dataloader
            losses, predictions, labels = (container(args.eval_do_concat_batches, -100) for _ in range(3))
            observed = 0
            for inputs in dataloader:
                size = find_batch_size(inputs)
                observed += size
                loss, logits, targets = self.prediction_step(model, inputs, bool(prediction_loss_only), ignore_keys)
                losses.add(self.gather_function(loss.repeat(size)))
                if logits is not None:
                    logits = self.accelerator.pad_across_processes(logits, dim=1, pad_index=-100)
                    predictions.add(self.gather_function(logits))
                    labels.add(self.gather_function(targets))
                self.control = self.callback_handler.on_prediction_step(args, self.state, self.control)
            self.gather_function = self.accelerator.gather_for_metrics
            arrays = [each.get_arrays() for each in (losses, predictions, labels)]
            metrics = self.compute_metrics(utils["EvalPrediction"](predictions=arrays[1], label_ids=arrays[2]))
            metrics = utils["denumpify_detensorize"](metrics)
            metrics[f"{metric_key_prefix}_loss"] = arrays[0].mean().item()
            for name in [name for name in metrics if not name.startswith(f"{metric_key_prefix}_")]:
                metrics[f"{metric_key_prefix}_{name}"] = metrics.pop(name)
            assert observed == len(dataloader.dataset)
            return utils["EvalLoopOutput"](arrays[1], arrays[2], metrics, observed)

    one = make(Whole, compute_metrics=accuracy, **EVALUATES)
    one.train()
    one.seen = one.predict(ROWS[:6]).label_ids.tolist()
    return one


@PATTERNS.add
def a_loop_with_something_after_it(make: Make) -> Any:
    class After(make.lib.Trainer):  # type: ignore[name-defined,misc]
        def evaluation_loop(self, dataloader: Any, description: str, *args: Any, **kwargs: Any) -> Any:
            output = super().evaluation_loop(dataloader, description, *args, **kwargs)
            output.metrics["eval_rows"] = output.num_samples
            self.seen = [*getattr(self, "seen", []), description, self.model.training]
            return output

    return make(After, compute_metrics=accuracy, **EVALUATES)


@PATTERNS.add
def the_private_evaluation_wrapped(make: Make) -> Any:
    class Wrapped(make.lib.Trainer):  # type: ignore[name-defined,misc]
        def _evaluate(self, trial: Any, ignore_keys_for_eval: Any, skip_scheduler: bool = False) -> Any:
            self.seen = [*getattr(self, "seen", []), self.state.global_step, skip_scheduler]
            return super()._evaluate(trial, ignore_keys_for_eval, skip_scheduler)

    return make(Wrapped, eval_on_start=True, **EVALUATES)


@PATTERNS.add
def the_best_by_two_metrics(make: Make) -> Any:
    class Best(make.lib.Trainer):  # type: ignore[name-defined,misc]
        def _determine_best_metric(self, metrics: Any, trial: Any) -> bool:
            metrics = {**metrics, "eval_both": metrics["eval_loss"] - metrics["eval_accuracy"]}
            return bool(super()._determine_best_metric(metrics, trial))

    saves: dict[str, Any] = {"save_strategy": "steps", "save_steps": 2, "load_best_model_at_end": True, "max_steps": 4}
    best: dict[str, Any] = {"metric_for_best_model": "both", "greater_is_better": False}
    one = make(Best, compute_metrics=accuracy, **saves, **best, **EVALUATES)
    one.train()
    one.seen = [float(one.state.best_metric), float(one.state.best_global_step)]
    return one


@PATTERNS.add
def a_callback_that_leaves_the_model_in_evaluation_mode(make: Make) -> Any:
    class Look(make.lib.TrainerCallback):  # type: ignore[name-defined,misc]
        def on_step_end(self, args: Any, state: Any, control: Any, model: Any = None, **_: Any) -> None:
            model.eval()

    class Modes(make.lib.Trainer):  # type: ignore[name-defined,misc]
        def compute_loss(self, model: Any, *args: Any, **kwargs: Any) -> Any:
            self.seen = [*getattr(self, "seen", []), model.training, self.model.dropout.training]
            return super().compute_loss(model, *args, **kwargs)

    return make(Modes, callbacks=[Look()], **EVALUATES)


@PATTERNS.add
def predictions_with_streamed_metrics(make: Make) -> Any:
    class Streamed:
        def __init__(self) -> None:
            self.right: list[float] = []

        def __call__(self, given: Any, compute_result: bool) -> Any:
            right = torch.as_tensor(given.predictions).argmax(-1) == torch.as_tensor(given.label_ids)
            self.right += right.float().tolist()
            if not compute_result:
                return {}
            share, self.right = sum(self.right) / len(self.right), []
            return {"accuracy": share}

    one = make(make.lib.Trainer, compute_metrics=Streamed(), batch_eval_metrics=True, **EVALUATES)
    one.train()
    output = one.predict(ROWS[:6])
    one.seen = [*output.label_ids.tolist(), *output.predictions.argmax(-1).tolist(), output.metrics["test_accuracy"]]
    return one


@PATTERNS.add
def predict_with_a_prefix_and_a_file(make: Make) -> Any:
    class Written(make.lib.Trainer):  # type: ignore[name-defined,misc]
        def predict(self, test_dataset: Any, ignore_keys: Any = None, metric_key_prefix: str = "test") -> Any:
            output = super().predict(test_dataset, ignore_keys, metric_key_prefix)
            return output._replace(metrics={**output.metrics, f"{metric_key_prefix}_mine": 1.0})

    one = make(Written, compute_metrics=accuracy)
    one.train()
    metrics = one.predict(ROWS[:4], metric_key_prefix="last").metrics
    one.seen = sorted(name for name in metrics if "preparation" not in name)
    return one


@PATTERNS.add
def losses_that_differ_in_training_and_evaluation(make: Make) -> Any:
    class Mode(make.lib.Trainer):  # type: ignore[name-defined,misc]
        def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, **kwargs: Any) -> Any:
            loss, outputs = super().compute_loss(model, inputs, return_outputs=True, **kwargs)
            factor = 2.0 if self.model.training else 0.5
            name = "train" if self.is_in_train else "test"
            self.seen = sorted({*getattr(self, "seen", []), name})
            return (loss * factor, outputs) if return_outputs else loss * factor

    return make(Mode, **EVALUATES)


@pytest.mark.parametrize("name", sorted(PATTERNS))
def test_the_pattern_ends_where_it_ends_on_transformers_trainer(name: str, tmp_path: Path) -> None:
    assert_same(PATTERNS[name], tmp_path)


def test_a_gather_function_that_the_loop_would_not_call_is_refused(tmp_path: Path) -> None:
    one = Make(trainer_lib, tmp_path)(trainer_lib.Trainer, eval_dataset=ROWS)
    for served in (one.accelerator.gather, one.accelerator.gather_for_metrics):
        one.gather_function = served
        assert one.evaluate()["eval_loss"] > 0
    one.gather_function = lambda tensors: tensors
    with pytest.raises(ConfigError, match="gather_function"):
        one.evaluate()
