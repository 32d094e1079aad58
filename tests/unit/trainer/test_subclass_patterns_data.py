"""Loaders, samplers, columns, evaluation and logs as user code overrides them: on transformers' Trainer and on ours."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset, Sampler, SequentialSampler, WeightedRandomSampler

import trainer_lib
from tests.support.patterns import EVALUATES, ROWS, SAVES, Either, Make, Table, assert_same, compare, outcome
from trainer_lib.errors import ConfigError

PATTERNS = Table()


# ---------------------------------------------------------------------------------------------------- loaders, samplers
@PATTERNS.of(max_steps=6, **EVALUATES)
class PlainLoaders(Either):
    def get_train_dataloader(self) -> Any:
        given: dict[str, Any] = {"collate_fn": self.data_collator, "drop_last": self.args.dataloader_drop_last}
        given |= {"num_workers": self.args.dataloader_num_workers, "batch_size": self.args.train_batch_size}
        return DataLoader(self.train_dataset, sampler=SequentialSampler(self.train_dataset), **given)

    def get_eval_dataloader(self, eval_dataset: Any = None) -> Any:
        rows = eval_dataset if eval_dataset is not None else self.eval_dataset
        return DataLoader(rows, batch_size=3, collate_fn=self.data_collator)


class Backwards(Sampler[int]):
    def __init__(self, rows: Any) -> None:
        self.rows = rows

    def __iter__(self) -> Iterator[int]:
        return iter(range(len(self.rows) - 1, -1, -1))

    def __len__(self) -> int:
        return len(self.rows)


class Ordered(Either):
    def _get_train_sampler(self, train_dataset: Any = None) -> Any:
        weights = [1.0 + index % 3 for index in range(16)]
        return WeightedRandomSampler(weights, 16, generator=torch.Generator().manual_seed(7))

    def _get_eval_sampler(self, eval_dataset: Any) -> Any:
        return Backwards(eval_dataset)


@PATTERNS.add
def samplers_of_ones_own(make: Make) -> Any:
    one = make(Ordered, max_steps=4, **EVALUATES)
    one.train()
    one.seen = one.predict(ROWS[:6]).label_ids.tolist()
    return one


class Alternating:
    """No DataLoader, but what a loop asks of one."""

    def __init__(self, loaders: list[Any]) -> None:
        self.loaders = loaders
        self.dataset = [None] * sum(len(loader.dataset) for loader in loaders)

    def __len__(self) -> int:
        return sum(len(loader) for loader in self.loaders)

    def __iter__(self) -> Any:
        for pair in zip(*self.loaders, strict=True):
            yield from pair


@PATTERNS.of(train_dataset={"a": ROWS[:8], "b": ROWS[8:]}, max_steps=5)
class SeveralTasksWithSeveralLoaders(Either):
    def get_single(self, rows: Any) -> Any:
        return DataLoader(rows, batch_size=4, collate_fn=self.data_collator)

    def get_train_dataloader(self) -> Any:
        return Alternating([self.get_single(rows) for rows in self.train_dataset.values()])


@PATTERNS.of(max_steps=4, **EVALUATES)
class ThePrivateLoader(Either):
    def get_train_dataloader(self) -> Any:
        return self._get_dataloader(
            dataset=self.train_dataset,
            description="Training",
            batch_size=self._train_batch_size * 2,
            sampler_fn=self._get_train_sampler,
            is_training=True,
        )

    def _get_dataloader(
        self,
        dataset: Any,
        description: str,
        batch_size: int,
        sampler_fn: Any = None,
        is_training: bool = False,
        dataloader_key: str | None = None,
    ) -> Any:
        self.seen = [*self.seen, (description.lower(), batch_size, is_training)]
        return super()._get_dataloader(dataset, description, batch_size, sampler_fn, is_training, dataloader_key)


@PATTERNS.of(**EVALUATES)
class ACollatorSwappedForTraining(Either):
    def get_train_dataloader(self) -> Any:
        collate = self.data_collator
        self.data_collator = lambda rows: {**collate(rows), "x": 2 * collate(rows)["x"]}
        loader = super().get_train_dataloader()
        self.data_collator = collate
        return loader


def _columns(**more: Any) -> Any:
    from datasets import Dataset as Columns

    x, labels = [row["x"].tolist() for row in ROWS], [row["labels"] for row in ROWS]
    return Columns.from_dict({"x": x, "labels": labels, **more}).with_format("torch")


class Weighted(Either):
    _signature_columns: Any = None

    def _set_signature_columns_if_needed(self) -> None:
        if self._signature_columns is None:
            self._signature_columns = ["x", "labels", "w"]

    def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, **_: Any) -> Any:
        weights = inputs.pop("w")
        loss = model(**inputs)["loss"] * weights.mean()
        return (loss, {}) if return_outputs else loss


@PATTERNS.add
def columns_kept_for_the_loss(make: Make) -> Any:
    return make(Weighted, train_dataset=_columns(w=[1.0, 3.0] * 8))


class Growing(Dataset[Any]):
    factor = 1.0

    def __len__(self) -> int:
        return len(ROWS)

    def __getitem__(self, index: int) -> Any:
        return {**ROWS[index], "x": ROWS[index]["x"] * self.factor}


@PATTERNS.add
def a_callback_that_changes_the_data(make: Make) -> Any:
    seen: list[Any] = []

    def grow(args: Any, state: Any, control: Any, train_dataloader: Any = None, **_: Any) -> None:
        train_dataloader.dataset.factor = 1.0 + round(state.epoch or 0)
        seen.append((len(train_dataloader), train_dataloader.dataset is data))

    data = Growing()
    one = make(train_dataset=data, callbacks=[make.callback(on_epoch_begin=grow)], num_train_epochs=2, max_steps=-1)
    one.seen = seen
    return one


class Stream(IterableDataset[Any]):
    def __iter__(self) -> Any:
        return iter(ROWS)


class Looking(Either):
    leaves_out = ("epoch",)  # theirs takes max_steps for the length of a pass, ours the passes that were seen

    def get_train_dataloader(self) -> Any:
        loader = super().get_train_dataloader()
        self.seen = [isinstance(loader.dataset, Stream)]
        return loader


@PATTERNS.add
def a_stream(make: Make) -> Any:
    return make(Looking, train_dataset=Stream(), max_steps=6, eval_dataset=Stream(), eval_strategy="steps")


@PATTERNS.of(gradient_accumulation_steps=3, num_train_epochs=2, max_steps=-1, **EVALUATES)
class BatchesThatAreLookedAtBeforeTheStep(Either):
    def get_batch_samples(self, epoch_iterator: Any, num_batches: int, device: Any) -> Any:
        batches, items = super().get_batch_samples(epoch_iterator, num_batches, device)
        self.seen = [*self.seen, [len(batch["labels"]) for batch in batches]]
        return batches, items


def plain(make: Make) -> Any:
    return make(max_steps=4)


@PATTERNS.of(plain, max_steps=4)
class BatchSamplesWithoutTheDevice(Either):
    def get_batch_samples(self, epoch_iterator: Any, num_batches: int) -> Any:
        return super().get_batch_samples(epoch_iterator, num_batches)


def test_a_collator_that_is_set_on_the_loader_is_used(tmp_path: Path) -> None:
    """The loader that accelerate prepares for the reference ignores it."""

    class Mine(trainer_lib.Trainer):
        def get_train_dataloader(self) -> Any:
            loader = super().get_train_dataloader()
            collate = loader.collate_fn
            loader.collate_fn = lambda rows: {**collate(rows), "x": -collate(rows)["x"]}
            return loader

    make = Make(trainer_lib, tmp_path)
    one, other = make(Mine), make(train_dataset=[{**row, "x": -row["x"]} for row in ROWS])
    one.train()
    other.train()
    assert torch.equal(one.model.head.weight, other.model.head.weight)


# ---------------------------------------------------------------------------------------------- evaluation, prediction
def accuracy(given: Any) -> dict[str, float]:
    """The share of right answers."""
    logits = given.predictions[0] if isinstance(given.predictions, tuple) else given.predictions
    return {"accuracy": float((np.argmax(logits, -1) == given.label_ids).mean())}


class Probable(Either):
    def prediction_step(self, model: Any, inputs: Any, prediction_loss_only: bool, ignore_keys: Any = None) -> Any:
        inputs = self._prepare_inputs(inputs)
        with torch.no_grad(), self.compute_loss_context_manager():
            loss, outputs = self.compute_loss(model, inputs, return_outputs=True)
        if prediction_loss_only:
            return loss.detach() + 1, None, None
        return loss.detach() + 1, outputs["logits"].softmax(-1), inputs["labels"]

    def predict(self, test_dataset: Any, ignore_keys: Any = None, metric_key_prefix: str = "test") -> Any:
        output = super().predict(test_dataset, ignore_keys, metric_key_prefix)
        return output._replace(metrics={**output.metrics, f"{metric_key_prefix}_mine": 1.0})


@PATTERNS.add
def a_prediction_step_of_probabilities(make: Make) -> Any:
    one = make(Probable, compute_metrics=accuracy, **EVALUATES)
    one.train()
    output = one.predict(ROWS[:4], metric_key_prefix="last")
    names = sorted(name for name in output.metrics if "preparation" not in name)
    one.seen = [output.predictions.sum(-1).round(4).tolist(), names]
    return one


@PATTERNS.of(
    compute_metrics=accuracy, metric_for_best_model="perplexity", greater_is_better=False, **EVALUATES, **SAVES
)
class MoreMetricsAndAnotherSetAfterTheEvaluation(Either):
    def evaluate(self, eval_dataset: Any = None, ignore_keys: Any = None, metric_key_prefix: str = "eval") -> Any:
        metrics = super().evaluate(eval_dataset, ignore_keys, metric_key_prefix)
        metrics[f"{metric_key_prefix}_perplexity"] = np.exp(metrics[f"{metric_key_prefix}_loss"])
        self.log({f"{metric_key_prefix}_perplexity": metrics[f"{metric_key_prefix}_perplexity"]})
        return {**metrics, **super().evaluate(eval_dataset=ROWS[12:], metric_key_prefix="eval_rest")}


class Questions(Either):
    """The Trainer of the question answering examples."""

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
        only = True if compute_metrics is None else None
        try:
            output = self.evaluation_loop(
                loader, "Evaluation", only, ignore_keys=ignore_keys, metric_key_prefix=metric_key_prefix
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


@PATTERNS.add
def questions_with_their_examples(make: Make) -> Any:
    def post(examples: Any, rows: Any, predictions: Any) -> Any:
        return make.lib.EvalPrediction(predictions=predictions, label_ids=np.array([row["labels"] for row in examples]))

    given: dict[str, Any] = {"eval_examples": ROWS[:12], "post_process_function": post, "compute_metrics": accuracy}
    return make(Questions, **given, **EVALUATES)


class WholeLoop(Either):
    """`evaluation_loop` written out, as overrides copy it."""

    def evaluation_loop(
        self,
        dataloader: Any,
        description: str,
        prediction_loss_only: Any = None,
        ignore_keys: Any = None,
        metric_key_prefix: str = "eval",
    ) -> Any:
        from transformers import trainer_pt_utils, trainer_utils

        pt, utils, args = vars(trainer_pt_utils), vars(trainer_utils), self.args
        model = self._wrap_model(self.model, training=False)
        if len(self.accelerator._models) == 0 and model is self.model:
            model = self.accelerator.prepare_model(model, evaluation_mode=True)
        model.eval()
        self.callback_handler.eval_dataloader = dataloader
        losses, predictions, labels = (pt["EvalLoopContainer"](args.eval_do_concat_batches, -100) for _ in range(3))
        observed = 0
        for inputs in dataloader:
            size = pt["find_batch_size"](inputs)
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


@PATTERNS.add
def an_evaluation_loop_written_out(make: Make) -> Any:
    one = make(WholeLoop, compute_metrics=accuracy, **EVALUATES)
    one.train()
    one.seen = one.predict(ROWS[:6]).label_ids.tolist()
    return one


@PATTERNS.of(compute_metrics=accuracy, eval_on_start=True, **EVALUATES)
class ALoopWithSomethingAroundIt(Either):
    def evaluation_loop(self, dataloader: Any, description: str, *args: Any, **kwargs: Any) -> Any:
        output = super().evaluation_loop(dataloader, description, *args, **kwargs)
        output.metrics["eval_rows"] = output.num_samples
        self.seen = [*self.seen, description, self.model.training]
        return output

    def _evaluate(self, trial: Any, ignore_keys_for_eval: Any, skip_scheduler: bool = False) -> Any:
        self.seen = [*self.seen, self.state.global_step, skip_scheduler]
        return super()._evaluate(trial, ignore_keys_for_eval, skip_scheduler)


class Best(Either):
    def _determine_best_metric(self, metrics: Any, trial: Any) -> bool:
        metrics = {**metrics, "eval_both": metrics["eval_loss"] - metrics["eval_accuracy"]}
        return bool(super()._determine_best_metric(metrics, trial))


@PATTERNS.add
def the_best_by_two_metrics(make: Make) -> Any:
    best: dict[str, Any] = {"metric_for_best_model": "both", "greater_is_better": False, "load_best_model_at_end": True}
    one = make(Best, compute_metrics=accuracy, max_steps=4, **SAVES, **best, **EVALUATES)
    one.train()
    one.seen = [float(one.state.best_metric), float(one.state.best_global_step)]
    return one


class Modes(Either):
    def compute_loss(self, model: Any, *args: Any, **kwargs: Any) -> Any:
        self.seen = [*self.seen, model.training, self.model.dropout.training]
        return super().compute_loss(model, *args, **kwargs)


@PATTERNS.add
def a_callback_that_leaves_the_model_in_evaluation_mode(make: Make) -> Any:
    def leave(args: Any, state: Any, control: Any, model: Any = None, **_: Any) -> None:
        model.eval()

    return make(Modes, callbacks=[make.callback(on_step_end=leave)], **EVALUATES)


def test_a_gather_function_that_the_loop_would_not_call_is_refused(tmp_path: Path) -> None:
    one = Make(trainer_lib, tmp_path)(eval_dataset=ROWS)
    for served in (one.accelerator.gather, one.accelerator.gather_for_metrics):
        one.gather_function = served
        assert one.evaluate()["eval_loss"] > 0
    one.gather_function = lambda tensors: tensors
    with pytest.raises(ConfigError, match="gather_function"):
        one.evaluate()


# ---------------------------------------------------------------------------------------------------------------- logs
class Reporting(Either):
    """`_maybe_log_save_evaluate` written out, as overrides copy it."""

    def _report(self, tr_loss: Any, grad_norm: Any, model: Any, trial: Any, ignore: Any, rate: Any = None) -> None:
        if self.control.should_log and self.state.global_step > self._globalstep_last_logged:
            logs: dict[str, float] = {}
            scalar = tr_loss.mean().item()
            tr_loss -= tr_loss
            logs["loss"] = round(scalar / (self.state.global_step - self._globalstep_last_logged), 4)
            if grad_norm is not None:
                logs["grad_norm"] = grad_norm.item() if isinstance(grad_norm, torch.Tensor) else grad_norm
            logs["learning_rate"] = self._get_learning_rate() if rate is None else rate
            logs["mine"] = 1.0
            self._total_loss_scalar += scalar
            self._globalstep_last_logged = self.state.global_step
            self.store_flos()
            self.log(logs)
        metrics = None
        if self.control.should_evaluate:
            metrics = self._evaluate(trial, ignore)
            is_new_best = self._determine_best_metric(metrics=metrics, trial=trial)
            if str(self.args.save_strategy) == "best":
                self.control.should_save = is_new_best
        if self.control.should_save:
            self._save_checkpoint(model, trial)
            self.control = self.callback_handler.on_save(self.args, self.state, self.control)


class Newest(Reporting):
    def _maybe_log_save_evaluate(
        self, tr_loss: Any, norm: Any, model: Any, trial: Any, epoch: Any, i: Any, start: Any, learning_rate: Any = None
    ) -> None:
        self._report(tr_loss, norm, model, trial, i, learning_rate)


@PATTERNS.add
def a_report_written_out_for_two_trainings(make: Make) -> Any:
    one = make(Newest, logging_steps=2, max_steps=5, optim="sgd", **EVALUATES)
    one.train()
    one.train()
    return one


@PATTERNS.of(**EVALUATES)
class LogsWithNamesOfOnesOwn(Either):
    def log(self, logs: dict[str, float], *args: Any) -> None:
        logs = {name if name.startswith("eval_") else f"train/{name}": value for name, value in logs.items()}
        super().log({**logs, "step_again": self.state.global_step}, *args)


class Five(Reporting):
    def _maybe_log_save_evaluate(self, tr_loss: Any, model: Any, trial: Any, epoch: Any, ignore: Any) -> None:
        self._report(tr_loss, None, model, trial, ignore)


class Six(Reporting):
    def _maybe_log_save_evaluate(self, tr_loss: Any, norm: Any, model: Any, trial: Any, epoch: Any, i: Any) -> None:
        self._report(tr_loss, norm, model, trial, i)


class Seven(Reporting):
    def _maybe_log_save_evaluate(
        self, tr_loss: Any, norm: Any, model: Any, trial: Any, epoch: Any, i: Any, start: float
    ) -> None:
        assert start > 0
        self._report(tr_loss, norm, model, trial, i)


@pytest.mark.parametrize(("cls", "count"), [(Five, 5), (Six, 6), (Seven, 7)])
def test_a_report_of_every_age_logs_as_the_newest_and_calls_the_original(cls: Any, count: int, tmp_path: Path) -> None:
    class Calling(Either):
        def _maybe_log_save_evaluate(self, *args: Any, **_: Any) -> None:
            super()._maybe_log_save_evaluate(*(args[:1] + args[2:6] if count == 5 else args[:count]))

    def ended(cls: Any) -> dict[str, Any]:
        def pattern(make: Make) -> Any:
            return make(cls, lr_scheduler_type="constant", logging_steps=2, max_steps=7)

        return outcome(pattern, trainer_lib, tmp_path / str(cls))

    newest = ended(Newest)
    if count == 5:
        newest["logs"] = [{name: v for name, v in each.items() if name != "grad_norm"} for each in newest["logs"]]
    compare(ended(cls), newest)
    compare(ended(Calling), ended(None))


@pytest.mark.parametrize("name", sorted(PATTERNS))
def test_a_pattern_ends_where_it_or_its_newest_form_ends_on_transformers_trainer(name: str, tmp_path: Path) -> None:
    assert_same(PATTERNS[name], tmp_path)
