"""GreedyLR: raise the learning rate while a metric keeps improving, lower it while it does not (arXiv:2512.14527)."""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping, Sequence
from typing import Any

from torch.optim import Optimizer

from trainer_lib.errors import ConfigError

logger = logging.getLogger(__name__)

_STATE = ("num_good", "num_bad", "cooldown_left", "warmup_left", "until_reset", "window", "last_epoch")


class GreedyLR:
    """Raises the rate after more than `patience` improvements in a row, lowers it after as many evaluations without.

    Args:
        optimizer: whose learning rates it sets.
        mode: "min" = a smaller metric is better, "max" = a larger one.
        factor: the rate is divided by it to raise, multiplied by it to lower; below 1.
        patience: evaluations in a row, improving or not, that leave the rate as it is.
        threshold, threshold_mode: by how much a metric must beat the best: "abs" in its unit, "rel" as a share of it.
        cooldown, warmup: evaluations that count for nothing after the rate went down, up.
        min_lr, max_lr: bounds of the rate; one number, or one per parameter group.
        eps: smaller changes of the rate are not made.
        smooth, window_size: judge the mean of the last `window_size` metrics instead of each.
        reset_start: reductions at the lower bound after which everything starts anew.
        verbose: log every change of the rate.

    Raises:
        ConfigError: a setting out of range.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        mode: str = "min",
        factor: float = 0.95,
        patience: int = 10,
        threshold: float = 1e-6,
        threshold_mode: str = "abs",
        cooldown: int = 0,
        warmup: int = 0,
        min_lr: float | Sequence[float] = 1e-3,
        max_lr: float | Sequence[float] = 1.0,
        eps: float = 1e-8,
        verbose: bool = False,
        smooth: bool = False,
        window_size: int = 50,
        reset_start: int = 500,
    ) -> None:
        _demand(0 < factor < 1, "factor", factor, "Give a number between 0 and 1.")
        _demand(mode in ("min", "max"), "mode", mode, 'Give "min" or "max".')
        _demand(threshold_mode in ("rel", "abs"), "threshold_mode", threshold_mode, 'Give "rel" or "abs".')
        _demand(window_size >= 1, "window_size", window_size, "Give a number of evaluations.")
        self.optimizer = optimizer
        self.mode, self.factor, self.patience = mode, factor, patience
        self.threshold, self.threshold_mode = threshold, threshold_mode
        self.cooldown, self.warmup, self.eps = cooldown, warmup, eps
        self.verbose = verbose
        self.smooth, self.window_size, self.reset_start = smooth, window_size, reset_start
        self.min_lrs = self._per_group(min_lr, "min_lr")
        self.max_lrs = self._per_group(max_lr, "max_lr")
        self.base_lrs = [float(group["lr"]) for group in optimizer.param_groups]
        self.last_epoch = 0
        self._begin()

    def _per_group(self, value: float | Sequence[float], name: str) -> list[float]:
        count = len(self.optimizer.param_groups)
        if not isinstance(value, Sequence):
            return [float(value)] * count
        _demand(len(value) == count, name, value, f"Give one number, or {count}: one per parameter group.")
        return [float(each) for each in value]

    def _begin(self) -> None:
        self.best = math.inf if self.mode == "min" else -math.inf
        self.num_good = self.num_bad = 0
        self.cooldown_left = self.warmup_left = 0
        self.until_reset = self.reset_start
        self.window: list[float] = []

    def step(self, metrics: float, epoch: int | None = None) -> None:
        """Judge one evaluation and adjust the learning rates.

        Args:
            metrics: the metric's value. A non-finite one never improves.
            epoch: number of this evaluation; counted when not given.
        """
        self.last_epoch = self.last_epoch + 1 if epoch is None else epoch
        current = float(metrics)
        if self.smooth:
            self.window = [*self.window, current][-self.window_size :]
            current = sum(self.window) / len(self.window)
        if self.cooldown_left > 0 or self.warmup_left > 0:
            if self.cooldown_left > 0:
                self.cooldown_left -= 1
            else:
                self.warmup_left -= 1
            self.num_good = self.num_bad = 0
            return
        if self.is_better(current, self.best):
            self.best = current
            self.num_good, self.num_bad = self.num_good + 1, 0
        else:
            self.num_good, self.num_bad = 0, self.num_bad + 1
        if self.num_good > self.patience:
            self._raise()
        elif self.num_bad > self.patience:
            self._lower()

    def is_better(self, current: float, best: float) -> bool:
        """Whether `current` beats `best` by more than the threshold."""
        margin = self.threshold if self.threshold_mode == "abs" else abs(best) * self.threshold
        if math.isinf(best):
            margin = 0.0
        return current < best - margin if self.mode == "min" else current > best + margin

    def _raise(self) -> None:
        self._set([min(lr / self.factor, bound) for lr, bound in zip(self.get_last_lr(), self.max_lrs, strict=True)])
        self.warmup_left = self.warmup
        self.num_good = 0
        self.until_reset = self.reset_start

    def _lower(self) -> None:
        self._set([max(lr * self.factor, bound) for lr, bound in zip(self.get_last_lr(), self.min_lrs, strict=True)])
        self.cooldown_left = self.cooldown
        self.num_bad = 0
        if all(lr <= bound for lr, bound in zip(self.get_last_lr(), self.min_lrs, strict=True)):
            self.until_reset -= 1
            if self.until_reset <= 0:
                self._set(self.base_lrs)
                self._begin()

    def _set(self, rates: Sequence[float]) -> None:
        for group, rate in zip(self.optimizer.param_groups, rates, strict=True):
            if abs(rate - group["lr"]) > self.eps:
                if self.verbose:
                    logger.info("evaluation %d: learning rate %g -> %g", self.last_epoch, group["lr"], rate)
                group["lr"] = rate

    def get_last_lr(self) -> list[float]:
        """The learning rate of every parameter group."""
        return [float(group["lr"]) for group in self.optimizer.param_groups]

    def state_dict(self) -> dict[str, Any]:
        """What changes while it runs, as JSON; the settings come from the arguments."""
        state = {name: getattr(self, name) for name in _STATE}
        best = self.best if math.isfinite(self.best) else None  # JSON has no infinity
        return {**state, "best": best, "base_lrs": self.base_lrs, "_last_lr": self.get_last_lr()}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Restore `state_dict`, learning rates included."""
        for name in _STATE:
            setattr(self, name, state_dict[name])
        self.window = list(state_dict["window"])
        if state_dict["best"] is None:
            self.best = math.inf if self.mode == "min" else -math.inf
        else:
            self.best = float(state_dict["best"])
        self.base_lrs = list(state_dict["base_lrs"])
        for group, rate in zip(self.optimizer.param_groups, state_dict["_last_lr"], strict=True):
            group["lr"] = rate


def _demand(holds: bool, name: str, value: object, remedy: str) -> None:
    if not holds:
        raise ConfigError("is out of range.", field=f"lr_scheduler_kwargs.{name}", value=value, remedy=remedy)
