"""Weights of classes and the focal loss: exact over micro-batches, and refused by name where they cannot be."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.support.named_recipes import TINY, Prepared, RecipeCase, refusal, trainer_of
from trainer_lib.evaluation.outcomes import find_collapse, summarize_outcomes
from trainer_lib.recipes.class_losses import class_loss, find_weights
from trainer_lib.worker.evaluate import warn_of_collapse

TABLE = RecipeCase("tabular-classification", options={"label": "answer", "split": {"test": 0.25, "seed": 0}})
TEXTS = RecipeCase("text-classification", options={"text": "words", "label": "answer", "split": {"test": 0.25}})
INFO: dict[str, Any] = {"classes": ["no", "yes"], "class_rows": [30, 10]}
ROWS = "size,words,answer\n" + "".join(
    f"{row % 7},word {row % 5} and {row},{'no' if row % 4 else 'yes'}\n" for row in range(48)
)
STILL = dict.fromkeys(("hidden_dropout_prob", "attention_probs_dropout_prob"), 0.0)
PLAIN: dict[str, dict[str, Any]] = {"table": {"hidden": [4], "dropout": 0.0}, "texts": {"config": {**TINY, **STILL}}}
LOSSES = [{"class_weights": "balanced"}, {"class_weights": {"yes": 5}, "focal_gamma": 2.0}]


def made(kind: str, folder: Path) -> Prepared:
    return (TABLE if kind == "table" else TEXTS).prepare(folder, ROWS)


@pytest.mark.parametrize("kind", PLAIN)
@pytest.mark.parametrize("loss", LOSSES, ids=str)
def test_the_loss_of_a_step_is_that_of_its_rows_however_they_are_divided(
    tmp_path: Path, kind: str, loss: dict[str, Any]
) -> None:
    recipe, splits, data = made(kind, tmp_path)
    losses, weights = [], []
    for size, steps in ((12, 1), (3, 4), (2, 6)):
        torch.manual_seed(0)
        model = recipe.build_model({**PLAIN[kind], **loss}, data).eval()
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
    assert class_loss(logits, labels, torch.ones(3), 0.0) == pytest.approx(
        torch.nn.functional.cross_entropy(logits, labels).item()
    )
    logs = torch.log_softmax(logits, dim=1)[range(6), labels]
    by_hand = (torch.tensor([1.0, 2.0, 3.0])[labels] * (1 - logs.exp()) ** 2 * -logs).sum() / 6
    torch.testing.assert_close(class_loss(logits, labels, torch.tensor([1.0, 2.0, 3.0]), 2.0), by_hand)


def test_balanced_weights_are_those_of_scikit_learn() -> None:
    from sklearn.utils.class_weight import compute_class_weight

    labels = np.repeat([0, 1], INFO["class_rows"])
    assert find_weights("balanced", INFO) == pytest.approx(
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
