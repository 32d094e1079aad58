"""Evaluating and predicting: every row once, in order, whatever the model returns; what metrics are handed."""

from __future__ import annotations

import weakref
from collections import UserDict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from tests.support.toys import Classifier, TokenModel, classification_rows, token_rows
from tests.support.training import Note, trained, trainer
from trainer_lib import Trainer
from trainer_lib.data.loading.collators import default_data_collator
from trainer_lib.errors import ConfigError, DataError
from trainer_lib.evaluation.evaluation_loop import stream_predictions

ROWS = classification_rows(11)
LABELS = [row["labels"] for row in ROWS]
MANY = classification_rows(22)


def accuracy(p: Any) -> dict[str, Any]:
    predictions, labels = p
    return {"accuracy": (predictions.argmax(-1) == labels).mean()}


def test_predictions_are_the_models_own_in_dataset_order(tmp_path: Path) -> None:
    one = trainer(tmp_path, None, per_device_eval_batch_size=4, compute_metrics=accuracy)
    found, unlabelled = one.predict(ROWS), one.predict([{"x": row["x"]} for row in ROWS])
    model = one.model.eval()
    with torch.no_grad():
        expected = model(torch.stack([row["x"] for row in ROWS]), torch.tensor(LABELS))
    for output in (found, unlabelled):
        assert np.allclose(output.predictions, expected["logits"].numpy(), atol=1e-6)
    assert found.label_ids.tolist() == LABELS and unlabelled.label_ids is None
    assert found.metrics is not None and "test_loss" not in (unlabelled.metrics or {})
    assert found.metrics["test_loss"] == pytest.approx(float(expected["loss"]), rel=1e-5)
    assert found.metrics["test_accuracy"] == (expected["logits"].argmax(-1).numpy() == LABELS).mean()
    assert found.metrics.keys() > {"test_runtime", "test_samples_per_second", "test_steps_per_second"}
    streamed = list(stream_predictions(one, ROWS, start=2, stop=99))
    assert [rows.tolist() for rows, _ in streamed] == [[2, 3, 4, 5], [6, 7, 8, 9], [10]]
    assert np.allclose(np.concatenate([logits for _, logits in streamed]), found.predictions[2:], atol=1e-6)


def test_evaluation_is_logged_and_restores_the_mode_of_the_model(tmp_path: Path) -> None:
    one = trainer(tmp_path, None, eval_dataset=ROWS, compute_metrics=accuracy)
    one.model.train()
    metrics = one.evaluate(metric_key_prefix="dev")
    assert one.model.training and set(one.state.log_history[0]) - {"step", "epoch"} == metrics.keys() - {"epoch"}
    assert {"dev_loss", "dev_accuracy"} <= metrics.keys()
    assert isinstance(metrics["dev_accuracy"], float)


def test_the_loss_is_the_mean_over_all_targets_for_any_batch_size(tmp_path: Path) -> None:
    given: dict[str, Any] = {"model": TokenModel(), "eval_dataset": token_rows(9)}
    sizes = (1, 4, 9)
    losses = [trainer(tmp_path, None, per_device_eval_batch_size=n, **given).evaluate()["eval_loss"] for n in sizes]
    assert losses == pytest.approx([losses[-1]] * 3, rel=1e-6)


class Ragged(nn.Module):
    """Logits as wide as the batch's longest row, and a nested second output."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(()))

    def forward(self, ids: torch.Tensor, labels: torch.Tensor | None = None) -> Any:
        logits = ids.float() * self.weight
        return {"loss": logits.sum(), "logits": logits, "hidden": (logits[:, :1], [logits[:, 0]]), "cache": None}


def padded(rows: list[Any]) -> dict[str, torch.Tensor]:
    ids = torch.nn.utils.rnn.pad_sequence([torch.tensor(row) for row in rows], batch_first=True)
    return {"ids": ids, "labels": ids}


def test_ragged_and_nested_outputs_are_padded_with_minus_100(tmp_path: Path) -> None:
    seen: list[Any] = []

    def metrics(p: Any) -> dict[str, float]:
        seen.append(p)
        p.label_ids[p.label_ids == -100] = 0  # what many people's metrics do
        return {"n": 1}

    one = trainer(
        tmp_path, None, model=Ragged(), data_collator=padded, compute_metrics=metrics, per_device_eval_batch_size=2
    )
    logits, (first, (second,)) = one.predict([[1], [1, 2], [1, 2, 3]]).predictions
    assert logits.tolist() == [[1, 0, -100], [1, 2, -100], [1, 2, 3]]
    assert first.shape == (3, 1)
    assert second.tolist() == [1, 1, 1]
    assert seen[0].label_ids.tolist() == [[1, 0, 0], [1, 2, 0], [1, 2, 3]]
    assert one.predict([[1], [1, 2]], ignore_keys=["hidden"]).predictions.shape == (2, 2)


def test_logits_may_be_reduced_before_they_are_kept(tmp_path: Path) -> None:
    def argmax(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        assert labels is not None
        return logits.argmax(-1)

    one = trainer(tmp_path, None, preprocess_logits_for_metrics=argmax, compute_metrics=lambda p: {})
    assert one.predict(ROWS).predictions.shape == (11,)


class Looking(Classifier):
    """Keeps a table for later; notes whether autograd looks at its operations; may differentiate in its forward."""

    def __init__(self, differentiates: bool) -> None:
        super().__init__()
        self.differentiates, self.looked = differentiates, list[bool]()
        self.table: torch.Tensor | None = None

    def forward(self, x: torch.Tensor, labels: Any = None) -> Any:
        with torch.enable_grad():
            self.looked.append(next(self.parameters()).sum().requires_grad)
        self.table = torch.linspace(1, 2, 6) if self.table is None else self.table
        if self.differentiates:
            with torch.enable_grad():
                inputs = x.clone().requires_grad_()
                x = torch.autograd.grad((inputs**2).sum(), inputs)[0].detach()
        return super().forward(x * self.table, labels)


@pytest.mark.parametrize(("differentiates", "looked"), [(False, [False, False, True]), (True, [False, *[True] * 3])])
def test_evaluation_passes_autograd_if_it_can(differentiates: bool, looked: list[bool], tmp_path: Path) -> None:
    one = trainer(tmp_path, ROWS, model=Looking(differentiates), eval_dataset=ROWS[:2], max_steps=1)
    model: Any = one.model
    with torch.no_grad():
        expected = model.eval()(torch.stack([row["x"] for row in ROWS[:2]]), torch.tensor(LABELS[:2]))["loss"]
    model.looked.clear()
    model.table = None
    assert [one.evaluate()["eval_loss"] for _ in range(2)] == [float(expected)] * 2
    assert not model.table.is_inference()
    one.train()
    assert model.looked == looked


def test_several_sets_are_evaluated_by_name(tmp_path: Path) -> None:
    one = trainer(tmp_path, None, eval_dataset={"easy": ROWS[:5], "hard": ROWS[5:]}, compute_metrics=accuracy)
    assert {"eval_easy_loss", "eval_hard_accuracy"} <= one.evaluate().keys()
    assert one.evaluate("hard")["eval_loss"] == pytest.approx(one.evaluate(ROWS[5:])["eval_loss"])
    assert {"eval_other_loss"} <= one.evaluate({"other": ROWS}).keys()


def test_a_loader_without_batches_leaves_the_measuring_to_the_subclass(tmp_path: Path) -> None:
    class Measuring(Trainer):
        def get_eval_dataloader(self, eval_dataset: Any = None) -> Any:
            nothing: Any = []
            return torch.utils.data.DataLoader(nothing)

        def evaluation_loop(self, *args: Any, **kwargs: Any) -> Any:
            output = super().evaluation_loop(*args, **kwargs)
            assert (output.num_samples, output.predictions) == (0, None)
            return output._replace(metrics={**(output.metrics or {}), "eval_own": 1.0})

    one = trainer(tmp_path, ROWS, eval_dataset="nothing", cls=Measuring, eval_strategy="steps", eval_steps=1)
    assert one.evaluate()["eval_own"] == 1.0
    one.train()
    assert all("eval_loss" not in entry for entry in one.state.log_history)


def test_evaluating_leaves_no_trace_in_the_training(tmp_path: Path) -> None:
    """Not even in its random numbers: metrics that draw (a bootstrap) are common."""

    def bootstrap(p: Any) -> dict[str, float]:
        return {"x": float(np.random.rand() + torch.rand(()).item())}

    weights = []
    settings: dict[str, dict[str, Any]] = {"never": {}, "before": {}, "at steps": {"eval_strategy": "steps"}}
    given: dict[str, Any] = {"eval_dataset": ROWS, "compute_metrics": bootstrap, "num_train_epochs": 2, "eval_steps": 1}
    for when, more in settings.items():
        one = trainer(tmp_path / when, ROWS, **given, **more)
        if when == "before":
            one.compute_metrics = None  # it draws from the generators of this process, which no training protects yet
            assert one.evaluate()["eval_loss"] > 0
        one.train()
        weights.append(one.model.state_dict()["head.weight"])
    assert torch.equal(weights[0], weights[1]) and torch.equal(weights[0], weights[2])


def test_outputs_of_every_form_are_understood(tmp_path: Path) -> None:
    class Tensor(Classifier):
        def forward(self, x: torch.Tensor) -> Any:  # type: ignore[override]
            return super().forward(x)["logits"]

    def loss(outputs: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return nn.functional.cross_entropy(outputs, labels)

    found = trainer(tmp_path, None, model=Tensor(), compute_loss_func=loss).predict(ROWS)
    assert found.predictions.shape == (11, 3)
    assert found.metrics is not None and found.metrics["test_loss"] > 0

    class Tuple(Classifier):
        def forward(self, x: torch.Tensor, labels: torch.Tensor | None = None) -> Any:
            return tuple(super().forward(x, labels).values())

    assert trainer(tmp_path, None, model=Tuple()).predict(ROWS).predictions.shape == (11, 3)


class Kept:
    """A metric function that keeps what it is given."""

    def __init__(self) -> None:
        self.given: list[Any] = []

    def __call__(self, p: Any) -> dict[str, float]:
        self.given.append(p)
        return {"n": len(p.label_ids)}


# ----------------------------------------------------------------------------------------------------------- streaming
@pytest.mark.parametrize("flag", [True, False])
def test_torchmetrics_objects_are_streamed_and_start_anew_each_time(flag: bool, tmp_path: Path) -> None:
    from torchmetrics import MetricCollection  # seconds: not for every worker that collects this file
    from torchmetrics.classification import MulticlassAccuracy, MulticlassF1Score

    metric: Any = MulticlassAccuracy(3, average="micro")
    one = trainer(tmp_path, None, eval_dataset=MANY, compute_metrics=metric, batch_eval_metrics=flag)
    whole = trainer(tmp_path, None, eval_dataset=MANY, compute_metrics=accuracy).evaluate()
    for _ in range(2):
        assert one.evaluate()["eval_MulticlassAccuracy"] == pytest.approx(whole["eval_accuracy"])
    assert len(one.predict(MANY).predictions) == len(MANY)  # kept, as what predict is for
    one.compute_metrics = MetricCollection({"acc": metric, "f1": MulticlassF1Score(3)})
    assert {"eval_acc", "eval_f1"} <= one.evaluate().keys()


def test_a_callable_gets_each_batch_and_answers_with_the_last(tmp_path: Path) -> None:
    seen: list[tuple[int, bool]] = []

    def count(p: Any, compute_result: bool) -> dict[str, float]:
        assert isinstance(p.predictions, torch.Tensor)
        seen.append((len(p.label_ids), compute_result))
        return {"rows": sum(rows for rows, _ in seen)} if compute_result else {}

    one = trainer(tmp_path, None, eval_dataset=MANY, compute_metrics=count, batch_eval_metrics=True)
    assert one.evaluate()["eval_rows"] == 22
    assert seen == [(8, False), (8, False), (6, True)]


# --------------------------------------------------------------------------------------------- what is given, and kept
@pytest.mark.parametrize("batch_class", [dict, UserDict])  # transformers' BatchEncoding is a UserDict
def test_include_for_metrics_adds_inputs_and_losses(batch_class: Any, tmp_path: Path) -> None:
    note = Kept()
    settings: dict[str, Any] = {"eval_dataset": MANY, "compute_metrics": note}
    settings["data_collator"] = lambda rows: batch_class(default_data_collator(rows))
    trainer(tmp_path, None, include_for_metrics=["inputs", "loss"], **settings).evaluate()
    assert len(note.given[0]) == 4 and np.allclose(note.given[0].inputs, np.stack([row["x"] for row in MANY]))
    assert note.given[0].losses.shape == (22,)
    trainer(tmp_path, None, **settings).evaluate()
    assert len(note.given[1]) == 2


def test_prediction_loss_only_keeps_no_predictions_and_calls_no_metric(tmp_path: Path) -> None:
    def never(p: Any) -> dict[str, float]:
        raise AssertionError("called")

    one = trainer(tmp_path, None, eval_dataset=MANY, compute_metrics=never, prediction_loss_only=True)
    assert {name for name in one.evaluate() if "loss" in name} == {"eval_loss"}
    output = one.predict(MANY)
    assert output.predictions is None and output.metrics is not None and "test_loss" in output.metrics


class TwoOutputs(Classifier):
    def forward(self, x: torch.Tensor, labels: Any = None, target: Any = None) -> dict[str, torch.Tensor]:
        return {**super().forward(x, labels if target is None else target), "hidden": x * 2}


def test_ignore_keys_and_label_names_decide_what_is_handed_over(tmp_path: Path) -> None:
    note = Kept()
    given: dict[str, Any] = {"eval_dataset": MANY, "compute_metrics": note, "eval_strategy": "epoch", "max_steps": 1}
    one = trainer(tmp_path, MANY, model=TwoOutputs(), **given)
    one.train(ignore_keys_for_eval=["hidden"])
    assert not isinstance(note.given[0].predictions, tuple)
    both, alone = one.predict(MANY).predictions, one.predict(MANY, ignore_keys=["hidden"]).predictions
    assert isinstance(both, tuple) and both[1].shape == (22, 6) and alone.shape == (22, 3)
    rows = [{"x": row["x"], "target": row["labels"]} for row in MANY]
    named = trainer(tmp_path, None, model=TwoOutputs(), label_names=["target"])
    assert named.predict(rows, ignore_keys=["hidden"]).label_ids.tolist() == [row["target"] for row in rows]


@pytest.mark.parametrize(("rounds", "held"), [(1, [0, 0, 0]), (2, [0, 1, 0]), (99, [0, 1, 2])])
def test_eval_accumulation_steps_bounds_the_outputs_on_the_device(rounds: int, held: list[int], tmp_path: Path) -> None:
    made: list[weakref.ref[torch.Tensor]] = []
    alive: list[int] = []

    class Noting(Classifier):
        def forward(self, x: torch.Tensor, labels: torch.Tensor | None = None) -> dict[str, torch.Tensor]:
            alive.append(sum(each() is not None for each in made))
            return super().forward(x, labels)

    def note(logits: torch.Tensor, labels: Any) -> torch.Tensor:
        made.append(weakref.ref(logits))
        return logits

    given: dict[str, Any] = {"eval_dataset": MANY, "compute_metrics": accuracy}
    more: dict[str, Any] = {"preprocess_logits_for_metrics": note, "eval_accumulation_steps": rounds}
    torch.manual_seed(0)
    one = trainer(tmp_path, None, model=Noting(), **more, **given)
    assert one.evaluate()["eval_accuracy"] == trainer(tmp_path, None, **given).evaluate()["eval_accuracy"]
    assert alive == held


# -------------------------------------------------------------------------------------------- eval_use_gather_object
class Detector(Classifier):
    """Finds a different number of boxes in each sample, and says what it saw in words."""

    def forward(self, x: torch.Tensor, labels: torch.Tensor | None = None) -> dict[str, Any]:
        outputs: dict[str, Any] = super().forward(x, labels)
        boxes = [{"boxes": row[: 1 + i % 3].reshape(-1, 1), "says": f"{1 + i % 3} boxes"} for i, row in enumerate(x)]
        return {**outputs, "found": boxes}


@pytest.mark.parametrize("concatenated", [True, False])
def test_outputs_that_are_no_tensors_are_gathered(concatenated: bool, tmp_path: Path) -> None:
    note = Kept()
    one = trainer(tmp_path, None, model=Detector(), eval_dataset=MANY, compute_metrics=note)
    with pytest.raises(DataError, match=r"Batches differ.*set eval_use_gather_object=True"):
        one.evaluate()
    settings: dict[str, Any] = {"eval_use_gather_object": True, "eval_do_concat_batches": concatenated}
    trainer(tmp_path, None, model=Detector(), eval_dataset=MANY, compute_metrics=note, **settings).evaluate()
    if concatenated:
        logits, found = note.given[0].predictions
        assert logits.shape == (22, 3)
    else:
        assert [len(batch[0]) for batch in note.given[0].predictions] == [8, 8, 6]
        found = [each for batch in note.given[0].predictions for each in batch[1]]
    assert len(found) == 22
    assert found[2]["says"] == "3 boxes" and found[2]["boxes"].shape == (3, 1)
    assert np.allclose(found[0]["boxes"][0, 0], MANY[0]["x"][0])


class BoxDetector(Classifier):
    """Takes labels as detectors of transformers do: one dictionary for each image."""

    def forward(self, x: torch.Tensor, labels: Any = None) -> dict[str, torch.Tensor]:
        return super().forward(x, torch.stack([label["class_labels"][0] for label in labels]))


def test_labels_of_a_detector_are_handed_over_batch_by_batch_though_the_last_one_is_smaller(tmp_path: Path) -> None:
    note = Kept()
    boxes = [torch.ones(1 + i % 3, 4) for i in range(22)]
    rows = [
        {"x": row["x"], "labels": {"class_labels": torch.full((len(box),), row["labels"]), "boxes": box}}
        for row, box in zip(MANY, boxes, strict=True)
    ]

    def collate(batch: list[Any]) -> dict[str, Any]:
        return {"x": torch.stack([row["x"] for row in batch]), "labels": [row["labels"] for row in batch]}

    settings: dict[str, Any] = {"eval_dataset": rows, "compute_metrics": note, "data_collator": collate}
    one = trainer(tmp_path, None, model=BoxDetector(), eval_do_concat_batches=False, **settings)
    assert one.evaluate()["eval_n"] == 3
    for kept in (note.given[0].label_ids, note.given[0].predictions):
        assert [len(batch) for batch in kept] == [8, 8, 6]
    assert [label["boxes"].shape for label in note.given[0].label_ids[2]] == [(1 + i % 3, 4) for i in range(16, 22)]


# ------------------------------------------------------------------------------------------- when, and on which sets
@pytest.mark.parametrize(
    ("given", "steps"),
    [
        ({"eval_strategy": "steps", "eval_steps": 1, "eval_delay": 3}, [3, 4, 5]),
        ({"eval_strategy": "epoch", "eval_delay": 2, "max_steps": 18}, [12, 18]),
        ({"eval_strategy": "steps", "eval_steps": 4, "eval_on_start": True}, [0, 4, 5]),
        ({"eval_strategy": "steps", "eval_steps": 0.4}, [2, 4, 5]),
    ],
)
def test_when_training_evaluates(given: dict[str, Any], steps: list[int], tmp_path: Path) -> None:
    note = Note("on_evaluate", lambda state, **_: state.global_step)
    trainer(tmp_path, MANY, eval_dataset=MANY[:4], callbacks=[note], **{"max_steps": 5, **given}).train()
    assert note.kept == steps


def test_several_sets_are_each_named_and_one_of_them_decides(tmp_path: Path) -> None:
    values = iter([0.9, 0.1, 0.1, 0.8])  # dev and held in turn
    given: dict[str, Any] = {"eval_strategy": "epoch", "save_strategy": "epoch", "num_train_epochs": 2}
    given |= {"load_best_model_at_end": True, "metric_for_best_model": "held_accuracy"}
    given |= {"eval_dataset": dict.fromkeys(("dev", "held"), MANY[:4])}
    one = trained(tmp_path, MANY, compute_metrics=lambda p: {"accuracy": next(values)}, **given)
    assert one.state.best_metric == 0.8 and one.state.best_global_step == 12
    assert {"eval_dev_accuracy", "eval_held_accuracy"} <= {name for entry in one.state.log_history for name in entry}


# ------------------------------------------------------------------------------------------------------------- numbers
@pytest.mark.parametrize("value", [np.array(0.5), np.float32(0.5), torch.tensor(0.5), 0.5])
def test_numbers_of_every_kind_are_metrics(value: Any, tmp_path: Path) -> None:
    metrics = trainer(tmp_path, None, eval_dataset=MANY, compute_metrics=lambda p: {"half": value}).evaluate()
    assert metrics["eval_half"] == 0.5 and type(metrics["eval_half"]) is float


@pytest.mark.parametrize("value", [np.zeros(2), torch.zeros(3), [0.5], {"a": 1.0}, None, "good"])
def test_anything_else_is_refused_by_name(value: Any, tmp_path: Path) -> None:
    one = trainer(tmp_path, None, eval_dataset=MANY, compute_metrics=lambda p: {"odd": value})
    refused = r"compute_metrics = .*: The function did not return a number for 'odd'.*Return one number"
    with pytest.raises(ConfigError, match=refused):
        one.evaluate()
    one.compute_metrics = lambda p: [1.0]  # type: ignore[assignment]
    with pytest.raises(ConfigError, match="compute_metrics = list: The function did not return a mapping"):
        one.evaluate()
