"""The recipe tabular-classification: rows of a table to one of several classes, to any number of them, or to a number.

    name: iris
    recipe: tabular-classification
    prepare:
      sources: [iris.csv]
      options: {label: species}
    train:
      args: {num_train_epochs: 50, learning_rate: 3.0e-3, global_batch_size: 32}
    evaluate: {splits: [validation, test]}

To replace a function, import the others into a file of your own, and define yours behind them::

    from trainer_lib.recipes.tabular_classification import *
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from torch import Tensor, nn

from trainer_lib.base.outputs import EvalPrediction
from trainer_lib.recipes.option_names import PathOptions, choose
from trainer_lib.recipes.tabular_net import NET, Classifier, Regressor, collate_table
from trainer_lib.recipes.tabular_rows import TabularRows
from trainer_lib.recipes.targets import (
    NUMBER,
    describe_predictions,
    label_rows,
    measure,
    split_loss,
    target_of,
    use_loss,
)

if TYPE_CHECKING:
    from trainer_lib.recipes import DataInfo, PrepareOutput


def prepare(options: PathOptions, out: PrepareOutput) -> Mapping[str, Iterator[dict[str, Any]]]:
    """Read the table (options: `tabular_rows.DEFAULTS`), and label the rows of each split.

    Returns:
        For every split its rows: the features by name, `labels` (of a class its number, 0 on) and `row_id`.
    """
    table = TabularRows(options, out)
    labels = label_rows(table, out.info)
    out.info.update(table.info())
    return table.rows(labels)


def build_model(options: Mapping[str, Any], data: DataInfo) -> nn.Module:
    """Build the untrained network; `options` are the spec's `train.model`: those of `NET` and of `targets.LOSS`."""
    own, loss = (options, {}) if target_of(data.info) == NUMBER else split_loss(options)
    chosen, numbers, texts = choose(own, NET, field="train.model"), data.info["numbers"], data.info["texts"]
    if target_of(data.info) == NUMBER:
        return Regressor(data.info["label_scale"], numbers=numbers, texts=texts, **chosen)
    return use_loss(Classifier(numbers, texts, len(data.info["classes"]), **chosen), loss, data.info)


def collate(rows: list[dict[str, Any]], data: DataInfo | None = None) -> dict[str, Tensor]:
    """Make a batch: numbers ``[batch, columns]``, texts ``[batch, columns]``, and labels."""
    return collate_table(rows, None if data is None else data.info)


def compute_metrics(evaluation: EvalPrediction, data: DataInfo | None = None) -> dict[str, float]:
    """Measure outputs, next to the most frequent class or the mean of the same rows."""
    return measure(evaluation, None if data is None else data.info)


def prediction_columns(predictions: np.ndarray, data: DataInfo) -> dict[str, Sequence[Any]]:
    """Turn outputs into the names of classes and their probabilities, or into a number."""
    return describe_predictions(predictions, data.info)
