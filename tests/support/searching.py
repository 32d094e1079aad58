"""A Trainer to search with: a new classifier for every trial, evaluated twice per training."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tests.support.toys import Classifier, classification_rows
from tests.support.training import trainer

ROWS = classification_rows(24)
HELD_OUT = classification_rows(12, seed=1)


def fresh() -> Classifier:
    """Weights depend on the seed, as in real use."""
    return Classifier(dropout=0.0)


def search_trainer(folder: Path | str, **given: Any) -> Any:
    """4 steps a training, evaluated after steps 2 and 4."""
    settings: dict[str, Any] = {"model_init": fresh, "eval_dataset": HELD_OUT, "per_device_train_batch_size": 6}
    settings |= {"max_steps": 4, "eval_strategy": "steps", "eval_steps": 2}
    return trainer(folder, ROWS, **{**settings, **given})


def rate(trial: Any) -> dict[str, Any]:
    return {"learning_rate": trial.suggest_float("learning_rate", 1e-4, 1e-1, log=True)}
