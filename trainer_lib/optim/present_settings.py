"""Going on from the state of another training with one's own settings, as a trial does that takes over a better one."""

from __future__ import annotations

from typing import Any

import torch
from torch.optim import Optimizer


class PresentSettings:
    """Hyperparameters of the arguments, kept while another training's optimizer and schedule are restored.

    Args:
        optimizer, schedule: as made from the arguments; None without one.
        rate: the learning rate of the arguments.
    """

    def __init__(self, optimizer: Optimizer | None, schedule: Any, rate: float) -> None:
        self._optimizer = optimizer
        self._schedule = schedule
        self._rate = rate
        groups = [] if optimizer is None else optimizer.param_groups
        self._groups = [{name: _copied(value) for name, value in group.items() if name != "params"} for group in groups]
        self._bases = list(getattr(schedule, "base_lrs", ()))

    def put_back(self, rate_then: Any) -> None:
        """Use the settings again; the learning rate is where the restored schedule is, from the rate of now.

        Args:
            rate_then: the learning rate of the other training's arguments.
        """
        groups = [] if self._optimizer is None else self._optimizer.param_groups
        for group, settings in zip(groups, self._groups, strict=True):
            # A schedule keeps the rate that it multiplies beside the one that it sets.
            then, now = group.get("initial_lr"), settings.get("initial_lr")
            if then is None or now is None:
                then, now = rate_then, self._rate
            reached = float(group["lr"])
            group.update(settings)
            _set_rate(group, reached * float(now) / float(then) if then else float(now))
        if self._bases:
            self._schedule.base_lrs = list(self._bases)
        if hasattr(self._schedule, "_last_lr"):
            self._schedule._last_lr = [group["lr"] for group in groups]


def _copied(value: Any) -> Any:
    return value.clone() if isinstance(value, torch.Tensor) else value


def _set_rate(group: dict[str, Any], rate: float) -> None:
    if isinstance(group["lr"], torch.Tensor):
        group["lr"].fill_(rate)
    else:
        group["lr"] = rate
