"""The metrics that a spec takes by name (`evaluate.metrics`). Nothing heavy is imported here."""

from __future__ import annotations

CLASS_METRICS = {
    "accuracy": "share of rows whose best class is the label",
    "balanced_accuracy": "mean of the classes' recalls",
    "f1_macro": "mean of the classes' F1",
    "f1_micro": "F1 over all rows",
    "f1_weighted": "mean of the classes' F1, by their rows",
    "precision_macro": "mean of the classes' precisions",
    "recall_macro": "mean of the classes' recalls, where classes without rows count as 0",
    "matthews": "Matthews' correlation coefficient",
    "log_loss": "mean negative log-likelihood of the labels, in nats",
    "roc_auc": "area under the ROC curve; of several classes the mean of each against the others",
    "average_precision": "area under precision over recall, likewise",
    "calibration_error": "mean distance of confidence and accuracy, over 15 equal bins of the confidence",
}
"""Metrics of scores ``[rows, classes]`` and whole labels ``[rows]``. `roc_auc` and `average_precision` are of classes
that some rows have and others have not; where all rows are of one class they are left out."""
NUMBER_METRICS = {
    "rmse": "root of the mean squared error",
    "mae": "mean absolute error",
    "median_absolute_error": "median of the absolute errors",
    "max_error": "the largest absolute error",
    "r2": "share of the label's variance that is explained",
    "bias": "mean of prediction minus label",
}
"""Metrics of numbers ``[rows]`` and labels of that size."""
NAMES = (*CLASS_METRICS, *NUMBER_METRICS)
