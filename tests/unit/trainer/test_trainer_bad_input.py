"""What cannot work is refused with field, value and remedy, before the first step where it can be known."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from tests.support.toys import Classifier, Stream, classification_rows
from tests.support.training import note_heads, trained, trainer
from trainer_lib import Trainer, TrainingArguments
from trainer_lib.errors import ConfigError, DataError, NonFiniteError, TrainflowError

ROWS = classification_rows(8)


class Logits(Classifier):
    """Never computes a loss."""

    def forward(self, x: torch.Tensor, labels: torch.Tensor | None = None) -> dict[str, torch.Tensor]:
        return {"logits": super().forward(x)["logits"]}


class Vector(Classifier):
    """Returns a loss per sample, as `form` of it."""

    def __init__(self, form: Callable[[torch.Tensor], Any] = lambda loss: (loss,)) -> None:
        super().__init__()
        self.form = form

    def forward(self, x: torch.Tensor, labels: torch.Tensor | None = None) -> Any:
        return self.form(super().forward(x)["logits"].sum(1))


ADAM = torch.optim.AdamW(Classifier().parameters())
EVALUATED: dict[str, Any] = {"eval_dataset": ROWS, "eval_strategy": "epoch", "save_strategy": "epoch"}
BEST: dict[str, Any] = {**EVALUATED, "load_best_model_at_end": True}
Row = tuple[dict[str, Any], str]
BUILDING: list[Row] = [
    # data
    ({"train": Stream(ROWS)}, "max_steps = -1: The training data has no length.*Give max_steps"),
    ({"eval_strategy": "epoch"}, "eval_dataset: eval_strategy = epoch needs data.*Give eval_dataset"),
    # the model and its optimizer
    ({"model": nn.Linear(2, 2), "model_init": Classifier}, "model and model_init: Both were given"),
    ({"model": "bert"}, "model = str: The model is not a torch.nn.Module"),
    ({"model_init": Classifier, "optimizers": (ADAM, None)}, "The optimizer holds parameters of another model"),
    (
        {"optimizers": (ADAM, None), "optimizer_cls_and_kwargs": (torch.optim.SGD, {"lr": 0.1})},
        "optimizers and optimizer_cls_and_kwargs: Both",
    ),
    ({"gradient_checkpointing": True}, "gradient_checkpointing = True: The model has no gradient_ch"),
    ({"neftune_noise_alpha": 1.0}, "neftune_noise_alpha = 1.0: .*Remove it, or give the model get_input"),
    ({"use_liger_kernel": True}, "use_liger_kernel = Classifier: Liger kernels replace layers"),
    # settings that contradict one another
    (
        {"batch_eval_metrics": True, "compute_metrics": lambda p: {}},
        "compute_metrics: batch_eval_metrics .*Give it a parameter compute_result",
    ),
    (
        {**BEST, "eval_dataset": {"a": ROWS, "b": ROWS}},
        r'metric_for_best_model = loss: The metric does not .*Name one of a, b: "eval_a_loss"',
    ),
    ({"fsdp": "full_shard"}, "fsdp = 1 process: FSDP needs processes .*torchrun"),
    # without an effect
    ({"fsdp_config": "fsdp.json"}, r"fsdp_config = fsdp\.json"),
    ({"parallelism_config": {"tp_size": 2}}, "parallelism_config = tensor: 2: Its product is 2, and there are 1 proc"),
    ({"debug": "tpu_metrics_debug"}, r"debug = .*torch_xla\.debug\.metrics prints them"),
    (
        {"compute_loss_func": lambda outputs, labels: outputs["loss"], "label_smoothing_factor": 0.1},
        r"label_smoothing_factor = 0\.1: compute_loss_func computes the loss",
    ),
    # another kind of object
    ({"data_collator": 5}, "data_collator = int: This is not a function"),
    ({"compute_metrics": {"accuracy": 1}}, "compute_metrics = dict: This is not a function"),
    ({"compute_loss_func": "mse"}, "compute_loss_func = str: This is not a function"),
    ({"preprocess_logits_for_metrics": 1}, "preprocess_logits_for_metrics = int: This is not a function"),
    ({"model_init": 5}, "model_init = int: This is not a function"),
    ({"callbacks": 5}, r"callbacks = int: This is not a list of callbacks. Put it in a list: \[callback\]"),
    ({"callbacks": "early"}, "callbacks = str: This is not a list of callbacks"),
    ({"optimizers": ADAM}, r"optimizers = AdamW: This is not a pair. Give \(optimizer, schedule\)"),
    ({"optimizer_cls_and_kwargs": torch.optim.SGD}, "optimizer_cls_and_kwargs = type: This is not a pair"),
]


@pytest.mark.parametrize(("given", "match"), BUILDING)
def test_refused_when_the_trainer_is_built(given: dict[str, Any], match: str, tmp_path: Path) -> None:
    settings = {"train": ROWS, **given}
    with pytest.raises(ConfigError, match=match) as refused:
        trainer(tmp_path, settings.pop("train"), **settings)
    assert refused.value.field and refused.value.remedy
    assert list(tmp_path.iterdir()) == []


def test_no_model_and_no_rows_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="model or model_init: Neither was given"):
        Trainer(None, TrainingArguments("out", use_cpu=True))
    with pytest.raises(DataError, match=r"train_dataset: The training data has no samples.*Give data"):
        trainer(tmp_path, [])


TRAINING: list[tuple[dict[str, Any], type[TrainflowError], str]] = [
    ({"train": None}, ConfigError, "train_dataset: Training needs data"),
    ({"model": Logits()}, ConfigError, "model: The model returned no loss but only logits; it was given x, labels"),
    ({"model": Vector()}, ConfigError, r"a tensor of shape \(4,\) first"),
    ({"model": Vector(lambda loss: {"loss": loss})}, ConfigError, r"a tensor of shape \(4,\) first"),
    ({"model": Vector(lambda loss: SimpleNamespace(loss=loss))}, ConfigError, "SimpleNamespace, neither a mapping"),
    ({"train": [{"x": row["x"]} for row in ROWS]}, ConfigError, "only logits; it was given x.*give labels"),
    ({"train": [{"pixels": row["x"]} for row in ROWS]}, ConfigError, "pixels: No column of the training data is a par"),
    ({"train": [{"x": [1.0] * (i % 2 + 1)} for i in range(8)]}, DataError, "x: Samples of one batch cannot be stacked"),
    ({"train": Stream([]), "max_steps": 2}, DataError, "The training data gave no batch"),
    ({"dataloader_drop_last": True, "global_batch_size": 9}, DataError, r"fewer samples \(8\) than a global batch"),
]


@pytest.mark.parametrize(("given", "error", "match"), TRAINING)
def test_refused_before_the_first_step_is_done(given: Any, error: Any, match: str, tmp_path: Path) -> None:
    settings = {"train": ROWS, **given}
    one = trainer(tmp_path, settings.pop("train"), **settings)
    with pytest.raises(error, match=match):
        one.train()
    assert one.state.global_step == 0
    assert list(tmp_path.iterdir()) == []


def test_an_optimizer_that_no_checkpoint_could_hold_is_refused_after_one_step(tmp_path: Path) -> None:
    class Opaque(torch.optim.SGD):
        def step(self, closure: Any = None) -> Any:
            self.state[self.param_groups[0]["params"][0]]["projector"] = object()
            return super().step(closure)

    given: dict[str, Any] = {"optimizer_cls_and_kwargs": (Opaque, {"lr": 0.1}), "max_steps": 100}
    stopped = trainer(tmp_path / "saved", ROWS, save_strategy="steps", save_steps=50, **given)
    with pytest.raises(ConfigError, match=r"projector' holds a object, which cannot be saved"):
        stopped.train()
    assert stopped.state.global_step == 1
    trainer(tmp_path / "unsaved", ROWS, save_strategy="no", **{**given, "max_steps": 2}).train()


def test_evaluation_says_what_it_lacks(tmp_path: Path) -> None:
    one = trainer(tmp_path, ROWS)
    with pytest.raises(ConfigError, match="eval_dataset: Evaluating needs data"):
        one.evaluate()
    with pytest.raises(ConfigError, match="eval_dataset = dev: The evaluation set is unknown"):
        one.evaluate("dev")
    with pytest.raises(DataError, match="nothing to evaluate"):
        one.evaluate([])
    wrong = trainer(tmp_path / "b", ROWS, metric_for_best_model="f1", **BEST)
    with pytest.raises(ConfigError, match="metric_for_best_model = f1: The evaluation gave only eval_loss"):
        wrong.train()


# ---------------------------------------------------------------------------------------------------------- not finite
class Exploding(Classifier):
    """Its loss is infinite for rows whose first value is above 100."""

    def forward(self, x: torch.Tensor, labels: torch.Tensor | None = None) -> dict[str, torch.Tensor]:
        outputs = super().forward(x.clamp(-5, 5), labels)
        return {**outputs, "loss": outputs["loss"] + torch.where((x[:, 0] > 100).any(), torch.inf, 0.0)}


def rows_with_outliers(*numbers: int) -> list[dict[str, Any]]:
    rows = [dict(row) for row in classification_rows(40)]
    for number in numbers:
        rows[number]["x"] = torch.full((6,), 1000.0)
    return rows


@pytest.mark.parametrize("optim", ["adamw_torch_fused", "adamw_torch", "sgd"])
def test_a_step_that_is_not_finite_is_never_taken_but_counted_and_shown(optim: str, tmp_path: Path) -> None:
    given: dict[str, Any] = {"optim": optim, "train_sampling_strategy": "sequential", "logging_strategy": "steps"}
    given |= {"logging_steps": 1, "num_train_epochs": 1, "lr_scheduler_type": "constant"}
    heads = note_heads()
    one = trained(tmp_path, rows_with_outliers(9), model=Exploding(), callbacks=[heads], **given)
    entries = [entry for entry in one.state.log_history if "loss" in entry]
    assert [entry.get("nonfinite_steps", 0) for entry in entries] == [0, 0, 1, 1, 1, 1, 1, 1, 1, 1]
    assert math.isnan(entries[2]["loss"])  # nothing finite to show
    assert [torch.equal(*pair) for pair in itertools.pairwise(heads.kept)] == [False, True] + [False] * 7
    assert one.state.global_step == 10


def test_the_filter_hides_only_what_is_displayed(tmp_path: Path) -> None:
    given: dict[str, Any] = {"train_sampling_strategy": "sequential", "logging_strategy": "epoch"}
    given["num_train_epochs"] = 1
    shown = trained(tmp_path / "a", rows_with_outliers(9), model=Exploding(), logging_nan_inf_filter=False, **given)
    hidden = trained(tmp_path / "b", rows_with_outliers(9), model=Exploding(), **given)
    assert shown.state.log_history[0]["loss"] == float("inf")
    assert 0 < hidden.state.log_history[0]["loss"] < 10
    assert shown.state.log_history[0]["nonfinite_steps"] == hidden.state.log_history[0]["nonfinite_steps"] == 1


@pytest.mark.parametrize("given", [{}, {"fp16": True, "max_nonfinite_steps": 1, "num_train_epochs": 30}])
def test_too_many_in_a_row_end_the_run(given: dict[str, Any], tmp_path: Path) -> None:
    settings: dict[str, Any] = {"max_nonfinite_steps": 3, "logging_strategy": "steps", "logging_steps": 2, **given}
    one = trainer(tmp_path, rows_with_outliers(*range(40)), model=Exploding(), **settings)
    with pytest.raises(NonFiniteError, match=r"for \d+ steps in a row, from step 1 on.*Lower learning_rate"):
        one.train()


def test_a_model_in_trouble_is_never_the_best(tmp_path: Path) -> None:
    given: dict[str, Any] = {"eval_strategy": "steps", "eval_steps": 1, "save_strategy": "best"}
    given |= {"train_sampling_strategy": "sequential", "metric_for_best_model": "loss", "num_train_epochs": 1}
    given |= {"max_nonfinite_steps": 99, "eval_dataset": ROWS}
    one = trained(tmp_path, rows_with_outliers(*range(4, 40)), model=Exploding(), **given)
    assert one.state.best_global_step == 1
