"""The recipe tabular-classification: rows of a table to one of several classes.

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
import torch
from torch import Tensor, nn

from trainer_lib.base.outputs import EvalPrediction
from trainer_lib.recipes.class_losses import count_classes, split_loss, use_class_loss
from trainer_lib.recipes.held_out_metrics import measure_classes, name_classes
from trainer_lib.recipes.option_names import PathOptions, choose
from trainer_lib.recipes.tabular_rows import NET, Classifier, TabularRows, collate_table

if TYPE_CHECKING:
    from trainer_lib.recipes import DataInfo, PrepareOutput


def prepare(options: PathOptions, out: PrepareOutput) -> Mapping[str, Iterator[dict[str, Any]]]:
    """Read the table (options: `tabular_rows.DEFAULTS`), and label the rows with the number of their class.

    Returns:
        For every split its rows: the features by name, `labels` (0 on) and `row_id`.
    """
    table = TabularRows(options, out, classes=True)
    classes = table.classes()
    labels = table.class_numbers(classes)
    class_rows = count_classes(labels, table.splits["train"], len(classes))
    out.info.update(table.info(), classes=classes, class_rows=class_rows)
    return table.rows(labels)


def build_model(options: Mapping[str, Any], data: DataInfo) -> nn.Module:
    """Build the untrained network; `options` are the spec's `train.model`: those of `NET` and `LOSS`."""
    own, loss = split_loss(options)
    chosen = choose(own, NET, field="train.model")
    net = Classifier(data.info["numbers"], data.info["texts"], len(data.info["classes"]), **chosen)
    return use_class_loss(net, loss, data.info)


def collate(rows: list[dict[str, Any]], data: DataInfo | None = None) -> dict[str, Tensor]:
    """Make a batch: numbers ``[batch, columns]``, texts ``[batch, columns]`` and labels ``[batch]``."""
    return collate_table(rows, label_dtype=torch.int64, info=None if data is None else data.info)


def compute_metrics(evaluation: EvalPrediction) -> dict[str, float]:
    """Measure logits ``[rows, classes]``, next to the most frequent class of the same rows."""
    return measure_classes(evaluation.predictions, evaluation.label_ids, evaluation.whole_labels)


def prediction_columns(predictions: np.ndarray, data: DataInfo) -> dict[str, Sequence[Any]]:
    """Turn logits ``[rows, classes]`` into the name of the best class and the probability of each."""
    return name_classes(predictions, data.info["classes"])
