"""Labels of one class, several, an order or a number: losses exact over micro-batches, metrics, and refusals."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from tests.support.named_recipes import TINY, Prepared, RecipeCase, refusal, trainer_of
from trainer_lib.base.outputs import EvalPrediction
from trainer_lib.evaluation.outcomes import find_collapse, summarize_outcomes
from trainer_lib.recipes.shared import targets
from trainer_lib.recipes.tables.table_files import TableForm
from trainer_lib.worker.evaluate import warn_of_collapse
from trainflow.tasks.model.outcome_tables import Outcome

TABLE = RecipeCase("tabular-classification", options={"label": "answer", "split": {"test": 0.25, "seed": 0}})
TEXTS = RecipeCase("text-classification", options={"text": "words", "label": "answer", "split": {"test": 0.25}})
INFO: dict[str, Any] = {"classes": ["no", "yes"], "class_rows": [30, 10]}
ROWS = "size,words,answer\n" + "".join(
    f"{row % 7},word {row % 5} and {row},{'no' if row % 4 else 'yes'}\n" for row in range(48)
)
STILL = dict.fromkeys(("hidden_dropout_prob", "attention_probs_dropout_prob"), 0.0)
PLAIN: dict[str, dict[str, Any]] = {"table": {"hidden": [4], "dropout": 0.0}, "texts": {"config": {**TINY, **STILL}}}
LOSSES = [{"class_weights": "balanced"}, {"class_weights": {"yes": 5}, "focal_gamma": 2.0}]


TARGETS: dict[str, dict[str, Any]] = {
    "several": {"label": "tags", "target": "several", "label_separator": ";"},
    "order": {"label": "stars", "target": "order"},
    "number": {"label": "price", "target": "number"},
}
KINDS = "size,words,tags,stars,price\n" + "".join(
    f"{row % 7},{' and '.join(['word', *tags])} {row % 5},{';'.join(tags)},{row % 5 + 1},{100 + 10 * (row % 7) + 0.5}\n"
    for row in range(120)
    for tags in [[name for name, every in (("blue", 2), ("red, dark", 3), ("gold", 5)) if row % every == 0]]
).replace("red, dark", "red")
BEST = {"several": "average_precision_over_chance", "order": "rank_mae_below_median", "number": "rmse_below_mean"}


def made(kind: str, folder: Path) -> Prepared:
    return (TABLE if kind == "table" else TEXTS).prepare(folder, ROWS)


def targeted(kind: str, folder: Path, target: str, **more: Any) -> Prepared:
    """The rows of `KINDS` with a kind of label: a table, texts, or images of one grey each, by their size."""
    if kind == "images":
        for size in range(7):
            Image.new("L", (8, 8), 30 * size).save(folder / f"{size}.png")
        content = re.sub(r"(?m)^(\d),", r"\1.png,", KINDS.replace("size,", "image,", 1))
        options: dict[str, Any] = {"image": "image", "size": 8, "colours": "grey", **TARGETS[target], **more}
        return RecipeCase("image-classification", options=options).prepare(folder, content)
    of_table = {"ignore": [name for name in ("tags", "stars", "price") if name != TARGETS[target]["label"]]}
    options = {"hashed": {"words": 8}, **of_table} if kind == "table" else {"text": "words"}
    name = "tabular-classification" if kind == "table" else "text-classification"
    return RecipeCase(name, options={**options, **TARGETS[target], **more}).prepare(folder, KINDS)


@pytest.mark.parametrize(
    ("kind", "loss"),
    [*((kind, loss) for kind in PLAIN for loss in LOSSES), *(("several", loss) for loss in LOSSES[:1]), ("order", {})],
    ids=str,
)
def test_the_loss_of_a_step_is_that_of_its_rows_however_they_are_divided(
    tmp_path: Path, kind: str, loss: dict[str, Any]
) -> None:
    recipe, splits, data = made(kind, tmp_path) if kind in PLAIN else targeted("table", tmp_path, kind)
    losses, weights = [], []
    for size, steps in ((12, 1), (3, 4), (2, 6)):
        torch.manual_seed(0)
        model = recipe.build_model({**PLAIN.get(kind, PLAIN["table"]), **loss}, data).eval()
        args: dict[str, Any] = {"per_device_train_batch_size": size, "gradient_accumulation_steps": steps}
        args |= {"logging_steps": 1, "learning_rate": 1e-2, "optim": "sgd", "max_grad_norm": 1e9}
        trainer = trainer_of(recipe, data, model, tmp_path, splits["train"][:12], 1, **args)
        trainer.train()
        losses.append(next(entry["loss"] for entry in trainer.state.log_history if "loss" in entry))
        weights.append(torch.cat([each.detach().flatten() for each in model.parameters()]))
    assert losses[1:] == pytest.approx([losses[0]] * 2, rel=1e-5)
    for other in weights[1:]:
        torch.testing.assert_close(other, weights[0], rtol=1e-4, atol=1e-6)


def test_the_loss_is_the_weighted_sum_over_the_rows_and_that_of_torch_without_weights() -> None:
    logits, labels = torch.randn(6, 3), torch.tensor([0, 1, 2, 2, 1, 2])
    assert targets.class_loss(logits, labels, torch.ones(3), 0.0) == pytest.approx(
        torch.nn.functional.cross_entropy(logits, labels).item()
    )
    logs = torch.log_softmax(logits, dim=1)[range(6), labels]
    by_hand = (torch.tensor([1.0, 2.0, 3.0])[labels] * (1 - logs.exp()) ** 2 * -logs).sum() / 6
    torch.testing.assert_close(targets.class_loss(logits, labels, torch.tensor([1.0, 2.0, 3.0]), 2.0), by_hand)


def test_losses_of_several_and_of_ordered_classes_are_those_of_their_definitions() -> None:
    logits, weights = torch.randn(6, 3), torch.tensor([1.0, 2.0, 3.0])
    several, labels = torch.tensor([[0, 1, 1], [0, 0, 0]] * 3), torch.tensor([0, 1, 2, 2, 1, 2])
    wanted = torch.nn.functional.binary_cross_entropy_with_logits(logits, several.float(), pos_weight=weights)
    torch.testing.assert_close(targets.several_loss(logits, several, weights, 0.0), wanted)
    sure = torch.sigmoid(logits)
    truth = torch.where(several > 0, sure, 1 - sure)
    by_hand = ((1 - truth) ** 2 * -truth.log() * torch.where(several > 0, weights, torch.ones(3))).mean()
    torch.testing.assert_close(targets.several_loss(logits, several, weights, 2.0), by_hand)
    up_to = torch.softmax(logits, dim=1).cumsum(dim=1)[:, :2]
    answers = torch.where(labels[:, None] > torch.arange(2), 1 - up_to, up_to)
    torch.testing.assert_close(targets.order_loss(logits, labels, torch.ones(3)), -answers.log().mean())


def test_metrics_of_several_and_of_ordered_classes_are_those_of_scikit_learn() -> None:
    from sklearn import metrics

    draw = np.random.default_rng(0)
    labels, scores = (draw.random((80, 3)) < (0.5, 0.2, 0.1)).astype(np.float32), draw.normal(size=(80, 3)).round(1)
    found = targets.measure_several(scores, labels, threshold=0.4)
    chosen = 1 / (1 + np.exp(-scores)) >= 0.4
    for average in ("micro", "macro"):
        assert found[f"{average}_f1"] == pytest.approx(metrics.f1_score(labels, chosen, average=average))
    assert found["subset_accuracy"] == pytest.approx(metrics.accuracy_score(labels, chosen))
    assert found["average_precision"] == pytest.approx(metrics.average_precision_score(labels, scores, average="macro"))
    alone = metrics.average_precision_score(labels[:, 2], scores[:, 2])
    by_name = targets.measure_labels(scores, labels, classes=["a", "b", "c/d"], threshold=0.4)
    assert by_name["average_precision/label/c_d"] == pytest.approx(alone)
    assert by_name["recall/label/a"] == pytest.approx(metrics.recall_score(labels[:, 0], chosen[:, 0]))
    ranks, guesses = draw.integers(0, 3, 80), scores.argmax(axis=1)
    measured = targets.measure_ranks(scores, ranks)
    assert measured["quadratic_kappa"] == pytest.approx(metrics.cohen_kappa_score(ranks, guesses, weights="quadratic"))
    assert measured["rank_mae"] == pytest.approx(metrics.mean_absolute_error(ranks, guesses))
    assert targets.measure_ranks(np.eye(3)[[1, 1]], np.array([1, 1]))["quadratic_kappa"] == 0.0


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("kind", ["table", "texts", "images"])
def test_a_model_of_each_kind_learns_what_its_rows_show(tmp_path: Path, kind: str, target: str) -> None:
    wanted = {"table": "number", "texts": "several", "images": "number"}[kind]  # the others cannot be told by its input
    recipe, splits, data = targeted(kind, tmp_path, target)
    model = {"table": PLAIN["table"] | {"hidden": [32]}, "texts": PLAIN["texts"], "images": {"channels": [8, 16]}}[kind]
    torch.manual_seed(0)
    built = recipe.build_model(model, data)
    steps, rate = (120, 1e-2) if target == wanted else (2, 1e-3)
    given: dict[str, Any] = {"per_device_train_batch_size": 32, "learning_rate": rate}
    trainer = trainer_of(recipe, data, built, tmp_path, splits["train"], steps, **given)
    trainer.train()
    outputs = trainer.predict(splits["test"])
    measure = recipe.compute_metrics_with(data)
    assert measure is not None
    measured = measure(EvalPrediction(outputs.predictions, outputs.label_ids))
    assert np.isfinite(measured[BEST[target]])
    if target == wanted:
        assert measured[BEST[target]] > (0.2 if target == "several" else 10)
    columns = recipe.prediction_columns(outputs.predictions, data)
    assert {len(column) for column in columns.values()} == {len(splits["test"])}
    first = columns["prediction"][0]
    assert {"several": isinstance(first, list), "order": first in "12345" if target == "order" else None}.get(
        target, 60 < float(first) < 200 if target == "number" else None
    )


@pytest.mark.parametrize("label", ["labels", ["red", "blue"]], ids=["lists", "columns-of-0-and-1"])
def test_rows_of_several_classes_may_have_none(tmp_path: Path, label: str | list[str]) -> None:
    names: list[list[str]] = [[], ["Red", "blue"], [], ["red"]]
    marks: list[dict[str, Any]] = [
        {"red": 0, "blue": "0"},
        {"red": True, "blue": 1.0},
        {"red": 0.0, "blue": False},
        {"red": "1", "blue": 0},
    ]
    forms: list[dict[str, Any]] = [{"labels": names[row]} if label == "labels" else marks[row] for row in range(4)]
    rows = "".join(json.dumps({"text": f"row {row}"} | forms[row % 4]) + "\n" for row in range(40))
    case = RecipeCase("text-classification", "data.jsonl", {"text": "text", "label": label, "target": "several"})
    _, splits, data = case.prepare(tmp_path, rows, **({"merge": ["labels"]} if label == "labels" else {}))
    assert data.info["classes"] == ["blue", "red"]
    by_row = {row["row_id"]: row["labels"].tolist() for split in splits.values() for row in split}
    assert [by_row[row] for row in range(4)] == [[0, 0], [1, 1], [0, 0], [0, 1]]
    form = TableForm.of(data.info)
    assert form is not None
    assert form.read_answer(forms[3], data.info["label"], "a row", kind=None) == ["red"]


def test_outcomes_of_rows_of_several_classes_are_lists_of_these() -> None:
    labels, scores = (
        np.array([[1, 0, 1], [0, 0, 0], [0, 1, 0]], np.float32),
        np.array([[3, -3, 3], [-2] * 3, [1, -1, 0]]),
    )
    found = summarize_outcomes(scores, labels, classes=3, threshold=0.6)
    assert found is not None
    assert found["samples"][:3] == [[0, [0, 2], [0, 2]], [1, [], []], [2, [1], [0]]]
    assert [row[0] for row in found["hardest"]] == [2, 1, 0]
    shown = Outcome("test", found, ["a", "b", "c"])
    assert [row[:3] for row in shown.hardest()[1]] == [[2, "b", "a"], [1, "none", "none"], [0, "a, c", "a, c"]]
    assert (shown.hardest()[0][-1], shown.drawings(), shown.describe_residuals()) == ("nats", {}, "")


@pytest.mark.parametrize(
    ("target", "options", "words"),
    [
        ("several", {"label_separator": None}, "label_separator splits a text"),
        ("several", {"threshold": 1.0}, "options.threshold"),
        ("several", {"split": {"by": "stratified"}}, "no class to cut by"),
        ("order", {"order": [1, 2, 3, 4]}, "The class '5' has no place"),
        ("order", {"order": [1, 1, 2, 3, 4, 5]}, "is there twice"),
        ("number", {"label": "words", "text": "size"}, "holds texts"),
    ],
)
def test_labels_that_are_not_of_the_kind_are_refused(
    tmp_path: Path, target: str, options: dict[str, Any], words: str
) -> None:
    assert words in str(refusal(lambda: targeted("texts", tmp_path, target, **options)))


@pytest.mark.parametrize(
    ("kind", "target", "options"),
    [
        ("table", "order", {"focal_gamma": 2.0}),
        ("texts", "number", {"class_weights": "balanced"}),
        ("table", "number", {"class_weights": "balanced"}),
    ],
)
def test_settings_of_a_loss_of_another_kind_are_refused(
    tmp_path: Path, kind: str, target: str, options: dict[str, Any]
) -> None:
    recipe, _, data = targeted(kind, tmp_path, target)
    model = {} if kind == "table" else PLAIN["texts"]
    error = refusal(lambda: recipe.build_model({**model, **options}, data))
    assert error.field == f"train.model.{next(iter(options))}"


def test_balanced_weights_are_those_of_scikit_learn() -> None:
    from sklearn.utils.class_weight import compute_class_weight

    labels = np.repeat([0, 1], INFO["class_rows"])
    assert targets.find_weights("balanced", INFO) == pytest.approx(
        compute_class_weight("balanced", classes=np.array([0, 1]), y=labels)
    )


@pytest.mark.parametrize(
    ("settings", "field", "words"),
    [
        ({"class_weights": {"yse": 2}}, "train.model.class_weights.yse", "yes"),
        ({"class_weights": {"yes": -1}}, "train.model.class_weights.yes", "above 0"),
        ({"class_weights": "balance"}, "train.model.class_weights", "balanced"),
        ({"focal_gamma": -1.0}, "train.model.focal_gamma", "Give 0"),
    ],
)
def test_settings_of_the_loss_that_cannot_be_are_refused(
    tmp_path: Path, settings: dict[str, Any], field: str, words: str
) -> None:
    recipe, _, data = made("table", tmp_path)
    error = refusal(lambda: recipe.build_model(settings, data))
    assert (error.field, words in str(error)) == (field, True)


@pytest.mark.parametrize(
    ("scores", "labels", "name"),
    [
        ([[2, 1], [3, 1], [4, 0]], [0, 1, 0], "no"),
        ([[2, 1], [0, 1], [4, 0]], [0, 1, 0], None),
        ([[2, 1], [3, 1], [4, 0]], [0, 0, 0], None),  # the rows have no other class
    ],
)
def test_a_model_that_predicts_one_class_only_is_pointed_at(scores: Any, labels: Any, name: str | None) -> None:
    outcomes = summarize_outcomes(np.array(scores, float), np.array(labels))
    assert outcomes is not None and find_collapse(outcomes, ["no", "yes"]) == name
    warnings = warn_of_collapse("test", outcomes, ["no", "yes"])
    assert [f"predicts '{name}' for each row of test" in text for text in warnings] == [True] * (name is not None)
