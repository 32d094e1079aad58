"""GreedyLR: raise the learning rate while a metric keeps improving, lower it while it does not (arXiv:2512.14527).

The rule is transformers' own class; this one checks the settings, logs instead of printing, and keeps the state in the
form that checkpoints have had from the start.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping, Sequence
from typing import Any

from torch.optim import Optimizer

from trainer_lib.errors import ConfigError, MissingExtraError

logger = logging.getLogger(__name__)

#: Name in a checkpoint -> name in the state of transformers' class.
_STATE = {
    "num_good": "num_good_epochs",
    "num_bad": "num_bad_epochs",
    "cooldown_left": "cooldown_counter",
    "warmup_left": "warmup_counter",
    "until_reset": "reset_start",
    "last_epoch": "last_epoch",
    "base_lrs": "_init_lrs",
    "_last_lr": "_last_lr",
}
_WINDOW = "_streaming_avg"


class GreedyLR:
    """Raises the rate after more than `patience` improvements in a row, lowers it after as many evaluations without.

    Args:
        optimizer: the optimizer whose learning rates it sets.
        mode: "min" = a smaller metric is better, "max" = a larger one.
        factor: the rate is divided by it to raise, multiplied by it to lower; between 0 and 1.
        patience: evaluations in a row, improving or not, that leave the rate as it is.
        threshold, threshold_mode: by how much a metric must beat the best: "abs" in its unit, "rel" as a share of it.
        cooldown, warmup: evaluations that count for nothing after the rate went down, up.
        min_lr, max_lr: bounds of the rate; one number, or one per parameter group. A rate outside of them is not
            moved to the bound.
        eps: smaller changes of the rate are not made.
        smooth, window_size: judge the mean of the last `window_size` metrics instead of each.
        reset_start: reductions at the lower bound after which rates and counts return to their first values.
        verbose: log every change of the rate.

    Raises:
        ConfigError: a setting is out of range.
        MissingExtraError: transformers is not installed, or too old to have the schedule.
    """

    # The defaults are those of transformers' class.
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
        _require(0 < factor < 1, "factor", factor, "Give a number between 0 and 1.")
        _require(mode in ("min", "max"), "mode", mode, 'Give "min" or "max".')
        _require(threshold_mode in ("rel", "abs"), "threshold_mode", threshold_mode, 'Give "rel" or "abs".')
        _require(window_size >= 1, "window_size", window_size, "Give a number of evaluations.")
        groups = len(optimizer.param_groups)
        for name, value in (("min_lr", min_lr), ("max_lr", max_lr)):
            fits = not isinstance(value, Sequence) or len(value) == groups
            _require(fits, name, value, f"Give one number, or {groups}: one per parameter group.")
        self.mode, self.verbose = mode, verbose
        self._schedule = _load_class()(
            optimizer,
            mode=mode,
            factor=factor,
            patience=patience,
            threshold=threshold,
            threshold_mode=threshold_mode,
            cooldown=cooldown,
            warmup=warmup,
            min_lr=_as_list(min_lr),
            max_lr=_as_list(max_lr),
            eps=eps,
            smooth=smooth,
            window_size=window_size,
            reset_start=reset_start,
        )

    def step(self, metrics: float, epoch: int | None = None) -> None:
        """Judge one evaluation and adjust the learning rates.

        Args:
            metrics: the metric's value. A non-finite one never improves.
            epoch: number of this evaluation; counted when not given.
        """
        before = self.get_last_lr()
        self._schedule.step(metrics, epoch)
        self._repair_window()
        if self.verbose and self.get_last_lr() != before:
            logger.info("evaluation %d: learning rate %s -> %s", self._schedule.last_epoch, before, self.get_last_lr())

    def _repair_window(self) -> None:
        # The window's sum is kept by adding and subtracting: one NaN would stay in it after leaving the window.
        window = self._schedule.state_dict().get(_WINDOW)
        if window and not math.isfinite(window["sum"]):
            self._schedule.load_state_dict({_WINDOW: {**window, "sum": sum(window["values"])}})

    def get_last_lr(self) -> list[float]:
        """The learning rate of every parameter group."""
        return [float(rate) for rate in self._schedule.get_last_lr()]

    def state_dict(self) -> dict[str, Any]:
        """What changes while it runs, as JSON; the settings come from the arguments."""
        state = self._schedule.state_dict()
        window = state.get(_WINDOW, {"values": [], "sum": 0.0})
        best = state["best"] if math.isfinite(state["best"]) else None  # JSON has no infinity
        kept = {name: state[theirs] for name, theirs in _STATE.items()}
        return {**kept, "best": best, "window": list(window["values"]), "window_sum": window["sum"]}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Restore `state_dict`, learning rates included."""
        state: dict[str, Any] = {theirs: state_dict[name] for name, theirs in _STATE.items()}
        # None stands for the infinity from which the search for the best starts.
        best = state_dict["best"]
        state["best"] = float(best) if best is not None else math.inf if self.mode == "min" else -math.inf
        if self._schedule.smooth:
            values = list(state_dict["window"])
            # Checkpoints written before trainflow used transformers' class hold no sum.
            state[_WINDOW] = {"values": values, "sum": state_dict.get("window_sum", sum(values))}
        self._schedule.load_state_dict(state)


def _load_class() -> Any:
    try:
        from transformers.optimization import GreedyLR as Theirs
    except ImportError as error:
        raise MissingExtraError(
            f"This schedule needs the GreedyLR of transformers ({error}).",
            field="lr_scheduler_type",
            value="greedy",
            remedy='Install or upgrade it: pip install -U "trainflow[transformers]".',
        ) from None
    return Theirs


def _as_list(rates: float | Sequence[float]) -> float | list[float]:
    return list(rates) if isinstance(rates, Sequence) else rates


def _require(holds: bool, name: str, value: object, remedy: str) -> None:
    if not holds:
        raise ConfigError("The value is out of range.", field=f"lr_scheduler_kwargs.{name}", value=value, remedy=remedy)
