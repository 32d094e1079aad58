"""Kinds of labels that recipes for tables, texts and images share, with the losses of models for them.

    target: class                              one of several classes
    target: several, label_separator: ";"      any number of classes: a cell such as red;blue, or a list of a JSON file
    target: several, label: [red, blue]        the same, in columns of 0 and 1
    target: order, order: [low, middle, high]  one of several classes in an order; numbers have one
    target: number                             an amount, which is standardized for the model

The loss of a batch is the mean over its rows. Rows of a class may be weighted: the loss is divided by the rows and not
by their weights, as that of torch is, so micro-batches and processes add up to the loss of the whole batch.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import binary_cross_entropy_with_logits, log_softmax, mse_loss

from trainer_lib.base.outputs import EvalPrediction
from trainer_lib.base.suggestions import require_known
from trainer_lib.errors import ConfigError
from trainer_lib.recipes.shared.recipe_options import CLASS, NUMBER, ORDER, SEVERAL, choose
from trainer_lib.trainer.model.models import innermost

if TYPE_CHECKING:
    from trainer_lib.recipes import DataInfo
    from trainer_lib.recipes.tables.rows import TabularRows

FIELD = "train.model"
LOSS: dict[str, Any] = {
    "class_weights": None,  # balanced, or class -> the weight of its rows; those that are not named have 1
    "focal_gamma": 0.0,  # of the focal loss: rows that are right already count less
}
"""The settings of the loss (`train.model`), with their defaults."""
_PROBLEMS = {SEVERAL: "multi_label_classification", NUMBER: "regression"}


def target_of(info: Mapping[str, Any]) -> str:
    """The kind of the labels of prepared data."""
    return str(info.get("target") or (CLASS if "classes" in info else NUMBER))


# -- prepare ----------------------------------------------------------------------------------------------------------
def label_rows(table: TabularRows, info: dict[str, Any]) -> Sequence[Any]:
    """The labels of a table's rows: numbers of classes, 0 and 1 by class ``[rows, classes]``, or amounts.

    `info` gets what models and metrics need to know of them.
    """
    target, threshold = table.target, table.options.get("threshold", 0.5)
    info.update({} if target == CLASS else {"target": target})
    if target == NUMBER:
        info["label_scale"] = table.label_scale()
        numbers: Any = table.table.numbers(table.label)
        return memoryview(numbers)
    classes = table.classes()
    labels, train = table.class_numbers(classes), table.splits["train"]
    chosen = np.asarray(labels)[train]
    rows = chosen.sum(axis=0) if chosen.ndim == 2 else np.bincount(chosen, minlength=len(classes))
    info.update(classes=classes, class_rows=rows.tolist())
    if target == SEVERAL:
        if not 0 < threshold < 1:
            remedy = "Give a probability, such as 0.5."
            raise ConfigError("Out of range.", field="prepare.options.threshold", value=threshold, remedy=remedy)
        folds = table.label in table.options.get("merge", ())
        info.update(train_rows=len(train), threshold=threshold)
        info.update({"label_columns": table.marks} if table.marks else {})
        info["label_form"] = {"separator": table.options["label_separator"], "folds": folds}
    return labels


def with_labels(batch: dict[str, Tensor], rows: Sequence[Mapping[str, Any]]) -> dict[str, Tensor]:
    """A batch with the labels of its rows, where they have some.

    They are int64 ``[batch]`` of classes, else float32 ``[batch]`` or ``[batch, classes]``.
    """
    if "labels" in rows[0]:
        labels = np.array([row["labels"] for row in rows])
        is_class = labels.ndim == 1 and labels.dtype.kind in "iu"
        batch["labels"] = torch.from_numpy(labels.astype(np.int64 if is_class else np.float32))
    return batch


# -- models -----------------------------------------------------------------------------------------------------------
def head_names(info: Mapping[str, Any]) -> list[str]:
    """The names of a model's outputs: the classes, or the label that is a number."""
    return list(info["classes"]) if "classes" in info else [str(info["label"])]


def head_settings(info: Mapping[str, Any]) -> dict[str, Any]:
    """The outputs of a model as the configurations of transformers hold them."""
    names, problem = head_names(info), _PROBLEMS.get(target_of(info))
    named = {"id2label": dict(enumerate(names)), "label2id": {name: index for index, name in enumerate(names)}}
    return named | ({"problem_type": problem} if problem else {})


def split_loss(options: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """The settings of a model without those of its loss, and those of its loss."""
    own = {name: value for name, value in options.items() if name in LOSS}
    return {name: value for name, value in options.items() if name not in LOSS}, own


def use_loss(model: nn.Module, options: Mapping[str, Any], info: Mapping[str, Any]) -> nn.Module:
    """Let a model that is given labels return the loss of their kind; of amounts it predicts them in their unit.

    The model returns `logits` ``[batch, outputs]`` by name; the options are those of `LOSS`.

    Raises:
        ConfigError: a class is unknown, or a weight or gamma is out of range or not for this kind.
    """
    target = target_of(info)
    chosen = choose(options, LOSS if target != NUMBER else {}, field=FIELD)
    if target == NUMBER:
        return _in_unit(model, *info["label_scale"])
    weights, gamma = find_weights(chosen["class_weights"], info), float(chosen["focal_gamma"])
    if not 0 <= gamma < float("inf") or (gamma and target == ORDER):
        remedy = "Give 0 for the usual loss, or such as 2." if target != ORDER else "Remove it."
        what = "The focal loss takes a gamma from 0 on, and is of classes without an order."
        raise ConfigError(what, field=f"{FIELD}.focal_gamma", value=gamma, remedy=remedy)
    if weights is None and not gamma and target == CLASS:
        return model
    of_class = torch.tensor(weights or [1.0] * len(info["classes"]), dtype=torch.float32)
    loss: Callable[..., Tensor] = order_loss
    if target != ORDER:
        loss = partial(class_loss if target == CLASS else several_loss, gamma=gamma)

    def replace_loss(model: nn.Module, args: tuple[Any, ...], named: dict[str, Any], outputs: Any) -> Any:
        if (labels := named.get("labels")) is not None:
            outputs["loss"] = loss(outputs["logits"], labels, of_class)
        return outputs

    return _hooked(model, replace_loss)


def _in_unit(model: nn.Module, mean: float, spread: float) -> nn.Module:
    def restore(model: nn.Module, args: tuple[Any, ...], named: dict[str, Any], outputs: Any) -> Any:
        standard = outputs["logits"].float().reshape(-1)
        outputs["logits"] = standard * spread + mean
        if (labels := named.get("labels")) is not None:
            outputs["loss"] = mse_loss(standard, (labels.float() - mean) / spread)
        return outputs

    return _hooked(model, restore)


def _hooked(model: nn.Module, hook: Callable[..., Any]) -> nn.Module:
    # The loss is a mean over rows: the Trainer does not pass it their number, by which transformers' own would divide.
    inner: Any = innermost(model)
    inner.accepts_loss_kwargs, inner.has_class_loss = False, True
    model.register_forward_hook(hook, with_kwargs=True)
    return model


def class_loss(logits: Tensor, labels: Tensor, weights: Tensor, gamma: float) -> Tensor:
    """The mean of `weight * (1 - p) ** gamma * -log p`, where `p` is the probability of a row's class.

    Of logits ``[batch, classes]``, labels ``[batch]`` and weights ``[classes]``; gamma is that of Lin et al., Focal
    Loss for Dense Object Detection, 2017.
    """
    labels = labels.reshape(-1)
    logs = log_softmax(logits.float(), dim=-1).gather(1, labels[:, None]).squeeze(1)
    losses = -logs * weights.to(logits.device)[labels]
    if gamma:
        losses = losses * (-torch.expm1(logs)).clamp(min=0) ** gamma
    return losses.mean()


def several_loss(logits: Tensor, labels: Tensor, weights: Tensor, gamma: float) -> Tensor:
    """The binary cross-entropy, a mean over rows and classes, for labels of 0 and 1 ``[batch, classes]``.

    `weights` are of rows that have a class, against 1 of rows that do not have it; gamma as of `class_loss`.
    """
    logits, labels = logits.float(), labels.to(logits.device, torch.float32)
    plain = binary_cross_entropy_with_logits(logits, labels, reduction="none")
    losses = torch.where(labels > 0, plain * weights.to(logits.device), plain)
    if gamma:
        losses = losses * (-torch.expm1(-plain)).clamp(min=0) ** gamma
    return losses.mean()


def order_loss(logits: Tensor, labels: Tensor, weights: Tensor) -> Tensor:
    """The mean log loss of the answers whether a row is above all classes but the last: near misses cost less.

    These cumulative probabilities are sums of the softmax (the logarithmic form of the ranked probability score of
    Epstein, 1969), so any model of classes learns an order. Arguments are as of `class_loss`: logits
    ``[batch, classes]``, labels ``[batch]``.
    """
    labels, logs = labels.reshape(-1), log_softmax(logits.float(), dim=-1)
    up_to = torch.logcumsumexp(logs, dim=1)[:, :-1]
    above = torch.logcumsumexp(logs.flip(1), dim=1).flip(1)[:, 1:]
    is_above = labels[:, None] > torch.arange(logs.shape[1] - 1, device=logs.device)
    losses = -torch.where(is_above, above, up_to).mean(dim=1) * weights.to(logits.device)[labels]
    return losses.mean()


def find_weights(given: Any, info: Mapping[str, Any]) -> list[float] | None:
    """The weights of classes; None where all are 1.

    Balanced weights are scikit-learn's: all rows by the classes times the rows of this one, so that their mean over
    the training rows is 1. Where rows have several classes, they are the rows without a class by those with it.

    Raises:
        ConfigError: they are neither `balanced` nor weights above 0 by the names of classes.
    """
    field, classes = f"{FIELD}.class_weights", [str(name) for name in info["classes"]]
    if given is None:
        return None
    if given == "balanced":
        rows = info.get("class_rows")
        if rows is None:
            remedy = "Run with --force prepare, or give the weights by class."
            raise ConfigError("The prepared data has no count of its classes.", field=field, value=given, remedy=remedy)
        if target_of(info) == SEVERAL:
            return [(info["train_rows"] - count) / max(1, count) or 1.0 for count in rows]
        return [sum(rows) / (len(rows) * max(1, count)) for count in rows]
    if not isinstance(given, Mapping) or not given:
        remedy = f"Write balanced, or a mapping: {{{classes[-1]}: 5}}."
        raise ConfigError("These are not weights of classes.", field=field, value=given, remedy=remedy)
    by_name = {str(name): weight for name, weight in given.items()}
    for name, weight in by_name.items():
        require_known(name, classes, "The data has no such class.", field=f"{field}.{name}", value=weight)
        if isinstance(weight, bool) or not isinstance(weight, int | float) or not 0 < weight < float("inf"):
            remedy = "Give a number above 0: 5 has a row count like five."
            raise ConfigError("This is not a weight.", field=f"{field}.{name}", value=weight, remedy=remedy)
    return [float(by_name.get(name, 1.0)) for name in classes]


# -- metrics of held-out rows, next to those of a model without any input on the very same rows ----------------------
# That model knows the best constant for these rows: their most frequent class, their mean. It is at least as good as
# the constant that training would give, so a margin above zero is earned. For a resample of rows, `whole` has the
# labels of all of them, by which the constant is chosen.
_MOST_NAMED = 50  # classes whose scores are metrics by name, as many as a slice has values


def measure_classes(predictions: Any, labels: Any, whole: Any = None) -> dict[str, float]:
    """Accuracy, macro F1 and log loss of scores ``[rows, classes]`` for labels ``[rows]``, and the majority's accuracy.

    `accuracy_over_majority` is what the model is better by. Classes that neither occur nor are predicted do not count
    in the macro F1.
    """
    scores, truth = np.asarray(predictions, np.float64), np.asarray(labels).reshape(-1)
    predicted, classes = scores.argmax(axis=-1), scores.shape[-1]
    counts = np.bincount(truth, minlength=classes)
    right = np.bincount(truth[predicted == truth], minlength=classes)
    both = counts + np.bincount(predicted, minlength=classes)
    shifted = scores - scores.max(axis=-1, keepdims=True)
    log_likelihood = shifted[np.arange(len(truth)), truth] - np.log(np.exp(shifted).sum(axis=-1))
    of_whole = counts if whole is None else np.bincount(np.asarray(whole).reshape(-1), minlength=classes)
    accuracy, majority = right.sum() / len(truth), counts[of_whole.argmax()] / len(truth)
    return {
        "accuracy": float(accuracy),
        "macro_f1": float((2 * right[both > 0] / both[both > 0]).mean()),
        "log_loss": float(-log_likelihood.mean()),
        "majority_accuracy": float(majority),
        "accuracy_over_majority": float(accuracy - majority),
    }


def measure_several(predictions: Any, labels: Any, *, threshold: float) -> dict[str, float]:
    """F1, subset accuracy, log loss and average precision of scores ``[rows, classes]`` for labels of 0 and 1.

    `subset_accuracy` is the share of rows whose classes are all right; `average_precision` the mean over the classes
    that some row has, `chance_average_precision` the same of scores without any input.
    """
    scores, truth = np.asarray(predictions, np.float64), np.asarray(labels) > 0
    chosen, counts = scores >= np.log(threshold / (1 - threshold)), truth.sum(axis=0)
    right, both = (truth & chosen).sum(axis=0), counts + chosen.sum(axis=0)
    known, precision = counts > 0, average_precisions(scores, truth)
    mean, chance = (float(values[known].mean()) if known.any() else 0.0 for values in (precision, counts / len(truth)))
    return {
        "micro_f1": float(2 * right.sum() / max(both.sum(), 1)),
        "macro_f1": float((2 * right[both > 0] / both[both > 0]).mean()) if both.any() else 0.0,
        "subset_accuracy": float((truth == chosen).all(axis=1).mean()),
        "log_loss": float(np.logaddexp(0, np.where(truth, -scores, scores)).mean()),
        "average_precision": mean,
        "chance_average_precision": chance,
        "average_precision_over_chance": mean - chance,
    }


def measure_labels(predictions: Any, labels: Any, *, classes: Sequence[str], threshold: float) -> dict[str, float]:
    """The scores of several classes as those of slices, such as `f1/label/red`; nothing of more than 50 classes.

    Arguments are as of `measure_several`. A class without rows is left out.
    """
    scores, truth = np.asarray(predictions, np.float64), np.asarray(labels) > 0
    chosen, counts = scores >= np.log(threshold / (1 - threshold)), truth.sum(axis=0)
    right, guessed = (truth & chosen).sum(axis=0), chosen.sum(axis=0)
    by_name = {
        "rows": counts,
        "precision": right / np.maximum(guessed, 1),
        "recall": right / np.maximum(counts, 1),
        "f1": 2 * right / np.maximum(counts + guessed, 1),
        "average_precision": average_precisions(scores, truth),
    }
    names = [re.sub(r"[^\w .:-]", "_", name) for name in classes] if len(classes) <= _MOST_NAMED else []
    return {
        f"{metric}/label/{name}": float(values[index])
        for index, name in enumerate(names)
        for metric, values in by_name.items()
        if counts[index]
    }


def average_precisions(scores: np.ndarray, truth: np.ndarray) -> np.ndarray:
    """The average precisions of classes ``[classes]``, as scikit-learn's; of one without rows 0."""
    found = np.zeros(scores.shape[1])
    for index in range(scores.shape[1]):
        order = np.argsort(-scores[:, index], kind="stable")
        falling, hits = -scores[order, index], truth[order, index]
        last = np.searchsorted(falling, falling, side="right")  # rows of one score are chosen together
        found[index] = (np.cumsum(hits)[last - 1] / last)[hits].sum() / max(hits.sum(), 1)
    return found


def measure_ranks(predictions: Any, labels: Any, whole: Any = None) -> dict[str, float]:
    """Distances in ranks of scores ``[rows, classes]`` for labels ``[rows]``, and the quadratic weighted kappa.

    `rank_mae_below_median` is what the model is better by than the median class of the rows.
    """
    predicted, truth = np.asarray(predictions).argmax(axis=-1), np.asarray(labels).reshape(-1)
    median = np.median(truth if whole is None else np.asarray(whole))
    mae, of_median = float(np.abs(predicted - truth).mean()), float(np.abs(median - truth).mean())
    # Cohen's kappa: the squared distance by the one of ranks that are independent.
    by_chance = predicted.var() + truth.var() + (predicted.mean() - truth.mean()) ** 2
    kappa = float(1 - ((predicted - truth) ** 2).mean() / by_chance) if by_chance > 0 else 0.0
    return {
        "rank_mae": mae,
        "median_rank_mae": of_median,
        "rank_mae_below_median": of_median - mae,
        "quadratic_kappa": kappa,
    }


def measure_numbers(predictions: Any, labels: Any, whole: Any = None) -> dict[str, float]:
    """Errors of numbers ``[rows]`` or ``[rows, 1]`` for labels of that size, and the error of the rows' own mean.

    `rmse_below_mean` is what the model is better by, in the unit of the label.
    """
    predicted, truth = np.asarray(predictions, np.float64).reshape(-1), np.asarray(labels, np.float64).reshape(-1)
    error, spread = predicted - truth, truth - np.asarray(labels if whole is None else whole, np.float64).mean()
    rmse, of_mean = float(np.sqrt((error**2).mean())), float(np.sqrt((spread**2).mean()))
    return {
        "rmse": rmse,
        "mae": float(np.abs(error).mean()),
        "r2": 1.0 - (rmse / of_mean) ** 2 if of_mean > 0 else 0.0,
        "mean_rmse": of_mean,
        "rmse_below_mean": of_mean - rmse,
    }


# -- what is measured and written -------------------------------------------------------------------------------------
def compute_metrics(evaluation: EvalPrediction, data: DataInfo | None = None) -> dict[str, float]:
    """Compare outputs ``[rows, …]`` with what a model without any input would reach on these rows.

    Without `data`, outputs ``[rows, classes]`` are of one class a row, and others are numbers.
    """
    given = evaluation.predictions, evaluation.label_ids
    is_class = np.ndim(given[0]) > 1 and np.shape(given[0])[1] > 1
    info: Mapping[str, Any] = {"target": CLASS if is_class else NUMBER} if data is None else data.info
    target = target_of(info)
    if target == NUMBER:
        return measure_numbers(*given, evaluation.whole_labels)
    if target == SEVERAL:
        return measure_several(*given, threshold=info["threshold"])
    measured = measure_classes(*given, evaluation.whole_labels)
    return measured | (measure_ranks(*given, evaluation.whole_labels) if target == ORDER else {})


def prediction_columns(predictions: np.ndarray, data: DataInfo) -> dict[str, Any]:
    """Turn outputs into a number, or into the names of classes and their probabilities, of the best and of all."""
    info, target = data.info, target_of(data.info)
    if target == NUMBER:
        return {"prediction": predictions.reshape(-1).astype(np.float32)}
    classes: Sequence[str] = info["classes"]
    if target == SEVERAL:
        scores = 1 / (1 + np.exp(-predictions.astype(np.float64)))
        chosen = [np.flatnonzero(row >= info["threshold"]) for row in scores]
        names: list[Any] = [[classes[int(index)] for index in row] for row in chosen]
        sure: list[Any] = [row[kept].astype(np.float32) for row, kept in zip(scores, chosen, strict=True)]
    else:
        scores = np.exp(predictions - predictions.max(axis=-1, keepdims=True))
        scores /= scores.sum(axis=-1, keepdims=True)
        names = [classes[index] for index in scores.argmax(axis=-1)]
        sure = scores.max(axis=-1).astype(np.float32).tolist()
    return {"prediction": names, "confidence": sure, "scores": list(scores.astype(np.float32))}
