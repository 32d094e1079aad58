"""Metrics of held-out rows, compared with what a model without any input would reach on the very same rows.

That model knows the best constant for these rows: their most frequent class, their mean. It is at least as good as the
constant that training would give, so a margin above zero is earned. For a resample of rows, `whole` has the labels of
all of them, by which the constant is chosen.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any, TypeVar

import numpy as np

Key = TypeVar("Key")
Value = TypeVar("Value", int, str)
_MOST_NATS = 700.0  # whose exponential is still a number
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


def measure_forecasts(predictions: Any, labels: Any) -> dict[str, float]:
    """Errors of forecasts ``[rows, horizon, targets]``, and of two forecasts that need no model.

    MASE is the mean absolute error in units of what repeating the value of a season ago errs by in the training steps
    (Hyndman and Koehler, Another look at measures of forecast accuracy, 2006). `mase_below_naive` and
    `mase_below_seasonal` are what the model is better by than repeating the last value and the last season.

    Args:
        labels: ``[rows, 4, horizon, targets]``: the values, the last value, the last season, and the unit of MASE; a
            NaN in place of a value is left out.
    """
    forecast = np.asarray(predictions, np.float64)
    truth, last, season, scale = np.moveaxis(np.asarray(labels, np.float64), 1, 0)
    error = forecast - truth
    mase, naive, seasonal = (float(np.nanmean(np.abs(guess - truth) / scale)) for guess in (forecast, last, season))
    return {
        "mae": float(np.nanmean(np.abs(error))),
        "rmse": float(np.sqrt(np.nanmean(error**2))),
        "mase": mase,
        "naive_mase": naive,
        "seasonal_mase": seasonal,
        "mase_below_naive": naive - mase,
        "mase_below_seasonal": seasonal - mase,
    }


def measure_tokens(predictions: Any, labels: Any, whole: Any = None) -> dict[str, float]:
    """Perplexity of texts, and that of the tokens' own frequencies in these texts (a unigram model).

    `nats_below_unigram` is what the model is better by, per token; perplexities are the exponentials.

    Args:
        predictions: ``[rows, 2]``: the negative log-likelihoods of the rows' targets together, and their number.
        labels: tokens ``[rows, tokens]``, negative where there is no target.
    """
    nats, targets = np.asarray(predictions, np.float64).sum(axis=0)
    tokens, texts = np.asarray(labels), np.asarray(labels if whole is None else whole)
    counts = np.bincount(texts[texts >= 0])
    logs = np.log(np.maximum(counts, 1) / max(counts.sum(), 1))
    mean, unigram = nats / max(targets, 1), float(-logs[tokens[tokens >= 0]].sum() / max((tokens >= 0).sum(), 1))
    return {
        "perplexity": float(np.exp(min(mean, _MOST_NATS))),
        "nats_per_token": float(mean),
        "unigram_perplexity": float(np.exp(unigram)),
        "nats_below_unigram": float(unigram - mean),
        "tokens": float(targets),
    }


def name_classes(predictions: np.ndarray, classes: Sequence[str]) -> dict[str, Sequence[Any]]:
    """The name of the best class, its probability, and those of all classes, for logits ``[rows, classes]``."""
    scores = np.exp(predictions - predictions.max(axis=-1, keepdims=True))
    scores /= scores.sum(axis=-1, keepdims=True)
    return {
        "prediction": [classes[index] for index in scores.argmax(axis=-1)],
        "confidence": scores.max(axis=-1).astype(np.float32).tolist(),
        "scores": list(scores.astype(np.float32)),
    }


def name_several(predictions: np.ndarray, classes: Sequence[str], threshold: float) -> dict[str, Sequence[Any]]:
    """The names of the classes of logits ``[rows, classes]`` that reach the threshold, and all probabilities."""
    scores = 1 / (1 + np.exp(-predictions.astype(np.float64)))
    chosen = [np.flatnonzero(row >= threshold) for row in scores]
    return {
        "prediction": [[classes[int(index)] for index in row] for row in chosen],
        "confidence": [row[kept].astype(np.float32) for row, kept in zip(scores, chosen, strict=True)],
        "scores": list(scores.astype(np.float32)),
    }


def find_usual(pairs: Iterable[tuple[Key, Value]]) -> tuple[dict[Key, Value], Value]:
    """Key -> its most frequent value, and the most frequent one of all; of equally frequent ones the first in order."""
    by_key: dict[Key, Counter[Value]] = {}
    every: Counter[Value] = Counter()
    for key, value in pairs:
        by_key.setdefault(key, Counter())[value] += 1
        every[value] += 1

    def most_frequent(counts: Counter[Value]) -> Value:
        return min(counts, key=lambda value: (-counts[value], value))

    return {key: most_frequent(counts) for key, counts in by_key.items()}, most_frequent(every)
