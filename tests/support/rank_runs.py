"""Trainings that the tests of several strategies run on every rank."""

from __future__ import annotations

from typing import Any

import torch

from tests.support.toys import TokenModel, classification_rows, token_rows
from tests.support.training import trainer
from trainer_lib import Trainer
from trainer_lib.errors import NonFiniteError

LOGGED: dict[str, Any] = {"logging_strategy": "steps", "logging_steps": 1}


def train_on_tokens(folder: str, **given: Any) -> Trainer:
    """Train two epochs over 23 sequences of unequal token counts, in global batches of 10: the last step has 3."""
    settings = {"num_train_epochs": 2, "global_batch_size": 10, "per_device_train_batch_size": 2, **LOGGED, **given}
    one = trainer(folder, token_rows(23), model=TokenModel(), **settings)
    one.train()
    return one


def train_on_poisoned_rank(folder: str, **given: Any) -> str:
    """Train on rows of which only rank 1's samples of step 2 have a NaN: every rank skips the step and gives up with
    finite weights. Returns "<step of the error> <number of logs>", or that nothing was noticed."""
    rows = [dict(row) for row in classification_rows(23)[:12]]
    for index in range(4, 12):
        rows[index]["x"] = rows[index]["x"] * float("nan") if (index // 2) % 2 else rows[index]["x"]
    settings = {"per_device_train_batch_size": 2, "max_steps": 9, "max_nonfinite_steps": 2, **LOGGED, **given}
    one = trainer(folder, rows, train_sampling_strategy="sequential", **settings)
    try:
        one.train()
    except NonFiniteError as error:
        state = one._trainflow.engine.strategy.checkpoint_tensors(
            one._trainflow.engine.strategy.local_state(one.model_wrapped)
        )
        assert all(bool(torch.isfinite(value).all()) for value in state.values() if not value.is_meta)
        return f"{error.step} {len(one.state.log_history)}"
    return "did not notice"
