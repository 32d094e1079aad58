"""The recipe tabular-regression: rows of a table to a number.

name: diabetes
recipe: tabular-regression
prepare:
  sources: [diabetes.csv]
  options: {label: progression}
train:
  args: {num_train_epochs: 50, learning_rate: 1.0e-3, global_batch_size: 32}
evaluate: {splits: [validation, test]}
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from trainer_lib.recipes import tabular_classification
from trainer_lib.recipes.shared.recipe_options import NUMBER, PathOptions
from trainer_lib.recipes.tabular_classification import build_model, collate, compute_metrics, prediction_columns

if TYPE_CHECKING:
    from trainer_lib.recipes import PrepareOutput

__all__ = ["build_model", "collate", "compute_metrics", "prediction_columns", "prepare"]


def prepare(options: PathOptions, out: PrepareOutput) -> Mapping[str, Iterator[dict[str, Any]]]:
    """Read the table (options: `recipe_options.DEFAULTS`), and label the rows of the splits with their number."""
    return tabular_classification.prepare({"target": NUMBER, **options}, out)  # type: ignore[typeddict-unknown-key]
