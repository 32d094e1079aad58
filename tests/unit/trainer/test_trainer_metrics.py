"""What evaluation hands to metrics: streams, objects, inputs and losses, one set among several."""

from __future__ import annotations

import weakref
from collections import UserDict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.support.toys import Classifier, classification_rows
from tests.support.training import trainer
from trainer_lib import TrainerCallback
from trainer_lib.data.collators import default_data_collator
from trainer_lib.errors import ConfigError, DataError

ROWS = classification_rows(22)


def accuracy(p: Any) -> dict[str, Any]:
    return {"accuracy": float((p.predictions.argmax(-1) == p.label_ids).mean())}


# ----------------------------------------------------------------------------------------------------------- streaming
@pytest.mark.parametrize("flag", [True, False])
def test_torchmetrics_objects_are_streamed_and_start_anew_each_time(flag: bool, tmp_path: Path) -> None:
    from torchmetrics.classification import MulticlassAccuracy  # seconds: not for every worker that collects this file

    metric = MulticlassAccuracy(3, average="micro")
    one = trainer(tmp_path, None, eval_dataset=ROWS, compute_metrics=metric, batch_eval_metrics=flag)
    whole = trainer(tmp_path, None, eval_dataset=ROWS, compute_metrics=accuracy).evaluate()
    for _ in range(2):
        assert one.evaluate()["eval_MulticlassAccuracy"] == pytest.approx(whole["eval_accuracy"])
    assert len(one.predict(ROWS).predictions) == len(ROWS)  # kept, as what predict is for


def test_a_collection_of_torchmetrics_gives_its_own_names(tmp_path: Path) -> None:
    from torchmetrics import MetricCollection
    from torchmetrics.classification import MulticlassAccuracy, MulticlassF1Score

    metrics = MetricCollection({"acc": MulticlassAccuracy(3, average="micro"), "f1": MulticlassF1Score(3)})
    one = trainer(tmp_path, None, eval_dataset=ROWS, compute_metrics=metrics, batch_eval_metrics=True)
    assert {"eval_acc", "eval_f1"} <= one.evaluate().keys()


def test_a_callable_gets_each_batch_and_answers_with_the_last(tmp_path: Path) -> None:
    seen: list[tuple[int, bool]] = []

    def count(p: Any, compute_result: bool) -> dict[str, float]:
        assert isinstance(p.predictions, torch.Tensor)
        seen.append((len(p.label_ids), compute_result))
        return {"rows": sum(rows for rows, _ in seen)} if compute_result else {}

    one = trainer(tmp_path, None, eval_dataset=ROWS, compute_metrics=count, batch_eval_metrics=True)
    assert one.evaluate()["eval_rows"] == 22
    assert seen == [(8, False), (8, False), (6, True)]


# --------------------------------------------------------------------------------------------- what is given, and kept
@pytest.mark.parametrize("batch_class", [dict, UserDict])  # transformers' BatchEncoding is a UserDict
def test_include_for_metrics_adds_inputs_and_losses(batch_class: Any, tmp_path: Path) -> None:
    given: list[Any] = []

    def note(p: Any) -> dict[str, float]:
        given.append(p)
        return {"n": len(p)}

    settings: dict[str, Any] = {"eval_dataset": ROWS, "compute_metrics": note}
    settings["data_collator"] = lambda rows: batch_class(default_data_collator(rows))
    one = trainer(tmp_path, None, include_for_metrics=["inputs", "loss"], **settings)
    assert one.evaluate()["eval_n"] == 4
    assert np.allclose(given[0].inputs, np.stack([row["x"] for row in ROWS]))
    assert given[0].losses.shape == (22,)
    assert trainer(tmp_path, None, **settings).evaluate()["eval_n"] == 2


def test_prediction_loss_only_keeps_no_predictions_and_calls_no_metric(tmp_path: Path) -> None:
    def never(p: Any) -> dict[str, float]:
        raise AssertionError("called")

    one = trainer(tmp_path, None, eval_dataset=ROWS, compute_metrics=never, prediction_loss_only=True)
    assert {name for name in one.evaluate() if "loss" in name} == {"eval_loss"}
    output = one.predict(ROWS)
    assert output.predictions is None and output.metrics is not None and "test_loss" in output.metrics


class TwoOutputs(Classifier):
    def forward(
        self, x: torch.Tensor, labels: torch.Tensor | None = None, target: Any = None
    ) -> dict[str, torch.Tensor]:
        outputs = super().forward(x, labels if target is None else target)
        return {**outputs, "hidden": x * 2}


def test_ignore_keys_and_label_names_decide_what_is_handed_over(tmp_path: Path) -> None:
    one = trainer(tmp_path, None, model=TwoOutputs())
    both, alone = one.predict(ROWS).predictions, one.predict(ROWS, ignore_keys=["hidden"]).predictions
    assert isinstance(both, tuple) and both[1].shape == (22, 6) and alone.shape == (22, 3)
    rows = [{"x": row["x"], "target": row["labels"]} for row in ROWS]
    named = trainer(tmp_path, None, model=TwoOutputs(), label_names=["target"])
    assert named.predict(rows, ignore_keys=["hidden"]).label_ids.tolist() == [row["target"] for row in rows]


def test_ignore_keys_reach_the_evaluations_of_a_training(tmp_path: Path) -> None:
    shapes: list[Any] = []

    def note(p: Any) -> dict[str, float]:
        shapes.append(type(p.predictions))
        return {"n": 1}

    one = trainer(
        tmp_path, ROWS, model=TwoOutputs(), eval_dataset=ROWS, compute_metrics=note, eval_strategy="epoch", max_steps=1
    )
    one.train(ignore_keys_for_eval=["hidden"])
    assert not issubclass(shapes[0], tuple)


@pytest.mark.parametrize(("rounds", "held"), [(1, [0, 0, 0]), (2, [0, 1, 0]), (99, [0, 1, 2])])
def test_eval_accumulation_steps_says_how_many_outputs_stay_on_the_device(
    rounds: int, held: list[int], tmp_path: Path
) -> None:
    made: list[weakref.ref[torch.Tensor]] = []
    alive: list[int] = []

    class Noting(Classifier):
        def forward(self, x: torch.Tensor, labels: torch.Tensor | None = None) -> dict[str, torch.Tensor]:
            alive.append(sum(each() is not None for each in made))
            return super().forward(x, labels)

    def note(logits: torch.Tensor, labels: Any) -> torch.Tensor:
        made.append(weakref.ref(logits))
        return logits

    given: dict[str, Any] = {"eval_dataset": ROWS, "compute_metrics": accuracy}
    more: dict[str, Any] = {"preprocess_logits_for_metrics": note, "eval_accumulation_steps": rounds}
    torch.manual_seed(0)
    one = trainer(tmp_path, None, model=Noting(), **more, **given)
    assert one.evaluate()["eval_accuracy"] == trainer(tmp_path, None, **given).evaluate()["eval_accuracy"]
    assert alive == held


def test_eval_do_concat_batches_false_hands_over_a_list_of_batches(tmp_path: Path) -> None:
    given: list[Any] = []

    def note(p: Any) -> dict[str, float]:
        given.append(p)
        return {"n": 1}

    trainer(tmp_path, None, eval_dataset=ROWS, compute_metrics=note, eval_do_concat_batches=False).evaluate()
    assert [len(batch) for batch in given[0].predictions] == [len(batch) for batch in given[0].label_ids] == [8, 8, 6]


# -------------------------------------------------------------------------------------------- eval_use_gather_object
class Detector(Classifier):
    """Finds a different number of boxes in each sample, and says what it saw in words."""

    def forward(self, x: torch.Tensor, labels: torch.Tensor | None = None) -> dict[str, Any]:
        outputs: dict[str, Any] = super().forward(x, labels)
        boxes = [{"boxes": row[: 1 + i % 3].reshape(-1, 1), "says": f"{1 + i % 3} boxes"} for i, row in enumerate(x)]
        return {**outputs, "found": boxes}


@pytest.mark.parametrize("concatenated", [True, False])
def test_outputs_that_are_no_tensors_are_gathered(concatenated: bool, tmp_path: Path) -> None:
    given: list[Any] = []

    def note(p: Any) -> dict[str, float]:
        given.append(p.predictions)
        return {"n": 1}

    settings: dict[str, Any] = {"eval_dataset": ROWS, "compute_metrics": note}
    settings |= {"eval_use_gather_object": True, "eval_do_concat_batches": concatenated}
    trainer(tmp_path, None, model=Detector(), **settings).evaluate()
    if concatenated:
        logits, found = given[0]
        assert logits.shape == (22, 3)
    else:
        assert [len(batch[0]) for batch in given[0]] == [8, 8, 6]
        found = [each for batch in given[0] for each in batch[1]]
    assert len(found) == 22
    assert found[2]["says"] == "3 boxes" and found[2]["boxes"].shape == (3, 1)
    assert np.allclose(found[0]["boxes"][0, 0], ROWS[0]["x"][0])


class BoxDetector(Classifier):
    """Takes labels as detectors of transformers do: one dictionary for each image."""

    def forward(self, x: torch.Tensor, labels: Any = None) -> dict[str, torch.Tensor]:
        return super().forward(x, torch.stack([label["class_labels"][0] for label in labels]))


def test_labels_of_a_detector_are_handed_over_batch_by_batch_though_the_last_one_is_smaller(tmp_path: Path) -> None:
    given: list[Any] = []
    rows = [
        {
            "x": row["x"],
            "labels": {"class_labels": torch.full((1 + i % 3,), row["labels"]), "boxes": torch.ones(1 + i % 3, 4)},
        }
        for i, row in enumerate(classification_rows(22))
    ]

    def collate(batch: list[Any]) -> dict[str, Any]:
        return {"x": torch.stack([row["x"] for row in batch]), "labels": [row["labels"] for row in batch]}

    def note(p: Any) -> dict[str, float]:
        given.append(p)
        return {"n": len(p.label_ids)}

    settings: dict[str, Any] = {"eval_dataset": rows, "compute_metrics": note, "data_collator": collate}
    one = trainer(tmp_path, None, model=BoxDetector(), eval_do_concat_batches=False, **settings)
    assert one.evaluate()["eval_n"] == 3
    assert [len(batch) for batch in given[0].label_ids] == [len(batch) for batch in given[0].predictions] == [8, 8, 6]
    assert [label["boxes"].shape for label in given[0].label_ids[2]] == [(1 + i % 3, 4) for i in range(16, 22)]


def test_without_it_outputs_of_changing_form_are_refused(tmp_path: Path) -> None:
    one = trainer(tmp_path, None, model=Detector(), eval_dataset=ROWS, compute_metrics=accuracy)
    with pytest.raises(DataError, match=r"Batches differ.*set eval_use_gather_object=True"):
        one.evaluate()


# ------------------------------------------------------------------------------------------- when, and on which sets
class Evaluations(TrainerCallback):
    def __init__(self) -> None:
        self.steps: list[int] = []

    def on_evaluate(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.steps.append(state.global_step)


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
    note = Evaluations()
    trainer(tmp_path, ROWS, eval_dataset=ROWS[:4], callbacks=[note], **{"max_steps": 5, **given}).train()
    assert note.steps == steps


def test_several_sets_are_each_named_and_one_of_them_decides(tmp_path: Path) -> None:
    values = {"dev": iter([0.9, 0.1]), "held": iter([0.1, 0.8])}

    class Named(list[Any]):
        name = ""

    sets = {name: Named(ROWS[:4]) for name in values}
    which = iter(["dev", "held"] * 2)
    one = trainer(
        tmp_path,
        ROWS,
        eval_dataset=sets,
        compute_metrics=lambda p: {"accuracy": next(values[next(which)])},
        eval_strategy="epoch",
        save_strategy="epoch",
        num_train_epochs=2,
        load_best_model_at_end=True,
        metric_for_best_model="held_accuracy",
    )
    one.train()
    assert one.state.best_metric == 0.8 and one.state.best_global_step == 12
    assert {"eval_dev_accuracy", "eval_held_accuracy"} <= {name for entry in one.state.log_history for name in entry}


# ------------------------------------------------------------------------------------------------------------- numbers
@pytest.mark.parametrize("value", [np.array(0.5), np.float32(0.5), torch.tensor(0.5), 0.5])
def test_numbers_of_every_kind_are_metrics(value: Any, tmp_path: Path) -> None:
    metrics = trainer(tmp_path, None, eval_dataset=ROWS, compute_metrics=lambda p: {"half": value}).evaluate()
    assert metrics["eval_half"] == 0.5 and type(metrics["eval_half"]) is float


@pytest.mark.parametrize("value", [np.zeros(2), torch.zeros(3), [0.5], {"a": 1.0}, None, "good"])
def test_anything_else_is_refused_by_name(value: Any, tmp_path: Path) -> None:
    one = trainer(tmp_path, None, eval_dataset=ROWS, compute_metrics=lambda p: {"odd": value})
    with pytest.raises(
        ConfigError, match=r"compute_metrics = .*: The function did not return a number for 'odd'.*Return one number"
    ):
        one.evaluate()
