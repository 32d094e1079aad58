"""The gradients and the logged loss of a first step, however its batch is cut up."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from tests.support.training import trainer
from trainer_lib import Trainer

Found = tuple[dict[str, torch.Tensor], float]


def gradients(
    rows: list[Any],
    *,
    micro: int,
    batch: int,
    model: Callable[[], nn.Module],
    cls: type[Trainer] = Trainer,
    **given: Any,
) -> Found:
    """Gradients and logged loss of the first step, in double precision so that only the formula matters."""
    found: dict[str, torch.Tensor] = {}

    class Watching(cls):  # type: ignore[misc,valid-type]
        def _clip_grad_norm(self, model: nn.Module) -> torch.Tensor:
            found.update({name: p.grad.clone() for name, p in self.model.named_parameters() if p.grad is not None})
            return torch.ones(())

    with tempfile.TemporaryDirectory() as folder:
        torch.manual_seed(0)
        one = model().double()
        chosen = {"train_sampling_strategy": "sequential", "max_steps": 1, "logging_strategy": "steps", **given}
        chosen |= {"logging_steps": 1, "per_device_train_batch_size": micro, "global_batch_size": batch}
        built = trainer(Path(folder), rows, model=one, cls=Watching, **chosen)
        built.train()
        return found, built.state.log_history[0]["loss"]


def assert_close(one: Found, other: Found, *, rtol: float = 1e-9, atol: float = 1e-12) -> None:
    """Equal names, gradients and loss, up to the rounding of sums in another order."""
    assert one[0].keys() == other[0].keys()
    for name, value in one[0].items():
        assert torch.allclose(value, other[0][name], rtol=rtol, atol=atol), name
    assert one[1] == pytest.approx(other[1], rel=1e-6)
