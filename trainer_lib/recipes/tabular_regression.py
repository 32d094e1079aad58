"""The recipe tabular-regression: rows of a table to a number.

    name: diabetes
    recipe: tabular-regression
    prepare:
      sources: [diabetes.csv]
      options: {label: progression}
    train:
      args: {num_train_epochs: 50, learning_rate: 1.0e-3, global_batch_size: 32}
    evaluate: {splits: [validation, test]}

To replace a function, import the others into a file of your own, and define yours behind them::

    from trainer_lib.recipes.tabular_regression import *
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn

from trainer_lib.base.outputs import EvalPrediction
from trainer_lib.recipes.held_out_metrics import measure_numbers
from trainer_lib.recipes.option_names import PathOptions, choose
from trainer_lib.recipes.tabular_rows import NET, Regressor, TabularRows, collate_table

if TYPE_CHECKING:
    from trainer_lib.recipes import DataInfo, PrepareOutput


def prepare(options: PathOptions, out: PrepareOutput) -> Mapping[str, Iterator[dict[str, Any]]]:
    """Read the table (options: `tabular_rows.DEFAULTS`), and label the rows of each split with their number.

    Returns:
        For every split its rows: the features by name, `labels` (a number) and `row_id`.
    """
    table = TabularRows(options, out, classes=False)
    out.info.update(table.info(), label_scale=table.label_scale())
    return table.rows()


def build_model(options: Mapping[str, Any], data: DataInfo) -> nn.Module:
    """Build the untrained network; `options` are the spec's `train.model`."""
    chosen = choose(options, NET, field="train.model")
    numbers, texts = data.info["numbers"], data.info["texts"]
    return Regressor(data.info["label_scale"], numbers=numbers, texts=texts, **chosen)


def collate(rows: list[dict[str, Any]], data: DataInfo | None = None) -> dict[str, Tensor]:
    """Make a batch: numbers ``[batch, columns]``, texts ``[batch, columns]`` and labels ``[batch]``."""
    return collate_table(rows, label_dtype=torch.float32, info=None if data is None else data.info)


def compute_metrics(evaluation: EvalPrediction) -> dict[str, float]:
    """Measure predictions ``[rows]``, next to the mean of the same rows."""
    return measure_numbers(evaluation.predictions, evaluation.label_ids, evaluation.whole_labels)


def prediction_columns(predictions: np.ndarray, data: DataInfo) -> dict[str, np.ndarray]:
    """Turn predictions ``[rows]`` into a column."""
    return {"prediction": predictions.reshape(-1).astype(np.float32)}
