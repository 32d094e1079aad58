"""Learning-rate schedules: each is a factor on the optimizer's learning rate, as a function of the optimizer step.

Steps count from 0; `warmup` and `total` are numbers of optimizer steps, and p is the share of the steps after the
warm-up that have passed. A formula holds after the warm-up, in which the factor rises from 0 to 1. The state of a
schedule is its step count, in plain JSON. The formulas are those of the transformers library, which cites big_vision
for the inverse square root and MiniCPM (arXiv:2404.06395) for warm-up-stable-decay; cosine with restarts is SGDR
(arXiv:1608.03983).
"""

from __future__ import annotations

import inspect
import logging
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR, LRScheduler, ReduceLROnPlateau

from trainer_lib.arguments import SchedulerType, TrainingArguments
from trainer_lib.base.suggestions import suggestion
from trainer_lib.errors import ConfigError, MissingExtraError

# GreedyLR: raise the learning rate while a metric keeps improving, lower it while it does not (arXiv:2512.14527).
#
# The rule is transformers' own class; this one checks the settings, logs instead of printing, and its state is JSON.


logger = logging.getLogger(__name__)

_WINDOW = "_streaming_avg"
#: The part of the state of transformers' class that changes; the settings come from the arguments.
_CHANGING = (
    *("best", "num_good_epochs", "num_bad_epochs", "cooldown_counter", "warmup_counter", "reset_start", "last_epoch"),
    *("_init_lrs", "_last_lr", _WINDOW),
)


class GreedyLR:
    """Raises the rate after more than `patience` improvements in a row, lowers it after as many evaluations without.

    Args:
        optimizer: the optimizer whose learning rates it sets.
        mode: "min" = a smaller metric is better, "max" = a larger one.
        verbose: log every change of the rate.
        settings: of transformers' class, with its defaults: `factor` (the rate is divided by it to raise, multiplied by
            it to lower), `patience`, `threshold`, `threshold_mode` ("abs", "rel"), `cooldown` and `warmup` (evaluations
            that count for nothing after the rate went down, up), `min_lr` and `max_lr` (one number, or one per
            parameter group), `eps`, `smooth` and `window_size` (judge the mean of the last metrics), `reset_start`
            (reductions at the lower bound after which rates and counts return to their first values).

    Raises:
        ConfigError: a setting is out of range.
        MissingExtraError: transformers is not installed, or too old to have the schedule.
    """

    def __init__(self, optimizer: Optimizer, mode: str = "min", *, verbose: bool = False, **settings: Any) -> None:
        value = settings.get("factor", 0.5)
        _require(0 < value < 1, "factor", value, "Give a number between 0 and 1.")
        _require(mode in ("min", "max"), "mode", mode, 'Give "min" or "max".')
        value = settings.get("threshold_mode", "abs")
        _require(value in ("rel", "abs"), "threshold_mode", value, 'Give "rel" or "abs".')
        value = settings.get("window_size", 1)
        _require(value >= 1, "window_size", value, "Give a number of evaluations.")
        groups = len(optimizer.param_groups)
        for name in ("min_lr", "max_lr"):
            if isinstance(value := settings.get(name), Sequence):
                _require(len(value) == groups, name, value, f"Give one number, or {groups}: one per parameter group.")
                settings[name] = list(value)
        self.mode, self.verbose = mode, verbose
        self._schedule = _load_class()(optimizer, mode=mode, **settings)

    def step(self, metrics: float, epoch: int | None = None) -> None:
        """Judge evaluation number `epoch` and adjust the rates; a non-finite metric never improves."""
        before = self.get_last_lr()
        self._schedule.step(metrics, epoch)
        # The window's sum is kept by adding and subtracting: one NaN would stay in it after leaving the window.
        window = self._schedule.state_dict().get(_WINDOW)
        if window and not math.isfinite(window["sum"]):
            self._schedule.load_state_dict({_WINDOW: {**window, "sum": sum(window["values"])}})
        if self.verbose and self.get_last_lr() != before:
            logger.info("evaluation %d: learning rate %s -> %s", self._schedule.last_epoch, before, self.get_last_lr())

    def get_last_lr(self) -> list[float]:
        """The learning rate of every parameter group."""
        return [float(rate) for rate in self._schedule.get_last_lr()]

    def state_dict(self) -> dict[str, Any]:
        """Its changing state as JSON; the settings come from the arguments."""
        state = {name: value for name, value in self._schedule.state_dict().items() if name in _CHANGING}
        return {**state, "best": state["best"] if math.isfinite(state["best"]) else None}  # JSON has no infinity

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Restore `state_dict`, learning rates included."""
        state = {name: state_dict[name] for name in self.state_dict()}
        if state["best"] is None:  # the infinity from which the search for the best starts
            state["best"] = math.inf if self.mode == "min" else -math.inf
        self._schedule.load_state_dict(state)


def _load_class() -> Any:
    try:
        from transformers.optimization import GreedyLR as Theirs
    except ImportError as error:
        what = f"This schedule needs the GreedyLR of transformers ({error})."
        remedy = 'Install or upgrade it: pip install -U "trainflow[transformers]".'
        raise MissingExtraError(what, field="lr_scheduler_type", value="greedy", remedy=remedy) from None
    return Theirs


def _require(holds: bool, name: str, value: object, remedy: str) -> None:
    if not holds:
        raise ConfigError("The value is out of range.", field=f"lr_scheduler_kwargs.{name}", value=value, remedy=remedy)


AnySchedule = LRScheduler | ReduceLROnPlateau | GreedyLR

_SHAPES = ("linear", "cosine", "1-sqrt")


def linear(step: int, *, warmup: int, total: int) -> float:
    """Fall to 0 on a straight line."""
    return max(0.0, (total - step) / max(1, total - warmup))  # max: training may end within the warm-up


def constant(step: int) -> float:
    """Stay at 1 throughout."""
    return 1.0


def constant_with_warmup(step: int, *, warmup: int) -> float:
    """Stay at 1 after the warm-up."""
    return 1.0


def cosine(step: int, *, warmup: int, total: int, num_cycles: float = 0.5, floor: float = 0.0) -> float:
    """Follow ½(1 + cos 2π·num_cycles·p) between 1 and `floor`."""
    return _wave((step - warmup) / max(1, total - warmup), num_cycles, floor)


def _wave(progress: float, num_cycles: float, floor: float) -> float:
    wave = 0.5 * (1.0 + math.cos(2.0 * math.pi * num_cycles * progress))
    return max(0.0, wave * (1.0 - floor) + floor)


def cosine_with_restarts(step: int, *, warmup: int, total: int, num_cycles: float = 1) -> float:
    """Follow `num_cycles` half cosines, each from 1 to 0 (SGDR)."""
    progress = (step - warmup) / max(1, total - warmup)
    # Otherwise the remainder would be 0 again and the rate would jump back to 1.
    if progress >= 1.0:
        return 0.0
    return max(0.0, 0.5 * (1.0 + math.cos(math.pi * ((num_cycles * progress) % 1.0))))


def polynomial(step: int, *, warmup: int, total: int, lr: float, lr_end: float = 1e-7, power: float = 1.0) -> float:
    """Follow (lr − lr_end)·(1 − p)^power + lr_end, as a factor on `lr`."""
    if not lr > lr_end:
        raise _refused("lr_end", lr_end, f"The final rate must be below the learning rate ({lr}).", "Lower it.")
    if step > total:  # beyond the end the power of a negative number would not be real
        return lr_end / lr
    left = 1.0 - (step - warmup) / max(1, total - warmup)
    return float(((lr - lr_end) * left**power + lr_end) / lr)


def inverse_sqrt(step: int, *, warmup: int, timescale: int | None = None) -> float:
    """Follow 1/√((step + timescale − warmup)/timescale), without a jump.

    `timescale` is in steps; the default is the warm-up, or 10,000 without one.
    """
    # 10,000 as in the reference, which has it from big_vision.
    scale = timescale or warmup or 10_000
    return 1.0 / math.sqrt((step + scale - warmup) / scale)


def cosine_with_min_lr(
    step: int,
    *,
    warmup: int,
    total: int,
    lr: float,
    num_cycles: float = 0.5,
    min_lr: float | None = None,
    min_lr_rate: float | None = None,
) -> float:
    """Follow `cosine` down to `min_lr`, or to the share `min_lr_rate` of the learning rate, instead of to 0."""
    floor = _floor(lr, min_lr, min_lr_rate)
    return cosine(step, warmup=warmup, total=total, num_cycles=num_cycles, floor=floor)


def cosine_warmup_with_min_lr(
    step: int,
    *,
    warmup: int,
    total: int,
    lr: float,
    num_cycles: float = 0.5,
    min_lr: float | None = None,
    min_lr_rate: float | None = None,
    warmup_lr_rate: float | None = None,
) -> float:
    """Follow `cosine_with_min_lr`, with a warm-up that starts at `warmup_lr_rate` (default: 1/warmup) instead of 0."""
    floor = _floor(lr, min_lr, min_lr_rate)
    if step < warmup:
        if warmup_lr_rate is None:
            return (step + 1.0) / max(1.0, warmup)
        # warmup - 1: the last step of the warm-up reaches the full rate, as in the reference.
        return warmup_lr_rate + (1.0 - warmup_lr_rate) * step / max(1, warmup - 1)
    # The reference's shift by one step.
    return _wave((step - warmup + 1.0) / max(1.0, total - warmup), num_cycles, floor)


def warmup_stable_decay(
    step: int,
    *,
    warmup: int,
    total: int | None,
    num_decay_steps: int,
    num_stable_steps: int | None = None,
    warmup_type: str = "linear",
    decay_type: str = "cosine",
    min_lr_ratio: float = 0.0,
    num_cycles: float = 0.5,
) -> float:
    """Rise over the warm-up, stay at 1, then decay over `num_decay_steps` to `min_lr_ratio`.

    The stable part has `num_stable_steps`; when not given, all the steps that warm-up and decay leave.
    """
    for name, shape in (("warmup_type", warmup_type), ("decay_type", decay_type)):
        if shape not in _SHAPES:
            raise _refused(name, shape, "No shape has this name.", suggestion(str(shape), _SHAPES))
    if num_stable_steps is None and total is None:
        what = "The number of stable steps follows from num_training_steps, which is not given."
        raise _refused("num_stable_steps", "none", what, "Give either of the two.")
    stable = num_stable_steps if num_stable_steps is not None else (total or 0) - warmup - num_decay_steps
    if step < warmup:
        share = _rise(warmup_type, step / max(1, warmup))
    elif step < warmup + stable:
        return 1.0
    elif step < warmup + stable + num_decay_steps:
        share = _fall(decay_type, (step - warmup - stable) / max(1, num_decay_steps), num_cycles)
    else:
        return min_lr_ratio
    return max(0.0, share * (1.0 - min_lr_ratio) + min_lr_ratio)


def _rise(shape: str, progress: float) -> float:
    if shape == "linear":
        return progress
    if shape == "cosine":
        return 0.5 * (1.0 - math.cos(math.pi * progress))
    return 1.0 - math.sqrt(1.0 - progress)


def _fall(shape: str, progress: float, cycles: float) -> float:
    if shape == "linear":
        return 1.0 - progress
    if shape == "cosine":
        return _wave(progress, cycles, 0.0)
    return 1.0 - math.sqrt(progress)


def _floor(lr: float, min_lr: float | None, min_lr_rate: float | None) -> float:
    if min_lr is not None and min_lr_rate is None:
        return min_lr / lr
    if min_lr is None and min_lr_rate is not None:
        return min_lr_rate
    raise _refused("min_lr", min_lr, "Exactly one of min_lr and min_lr_rate must be given.", "Give one of them.")


def _refused(name: str, value: object, message: str, remedy: str) -> ConfigError:
    shown = "none" if value is None else value
    return ConfigError(message, field=f"lr_scheduler_kwargs.{name}", value=shown, remedy=remedy)


FACTORS: Mapping[SchedulerType, Callable[..., float]] = {
    SchedulerType.LINEAR: linear,
    SchedulerType.COSINE: cosine,
    SchedulerType.COSINE_WITH_RESTARTS: cosine_with_restarts,
    SchedulerType.POLYNOMIAL: polynomial,
    SchedulerType.CONSTANT: constant,
    SchedulerType.CONSTANT_WITH_WARMUP: constant_with_warmup,
    SchedulerType.INVERSE_SQRT: inverse_sqrt,
    SchedulerType.COSINE_WITH_MIN_LR: cosine_with_min_lr,
    SchedulerType.COSINE_WARMUP_WITH_MIN_LR: cosine_warmup_with_min_lr,
    SchedulerType.WARMUP_STABLE_DECAY: warmup_stable_decay,
}
#: These rise over the warm-up in their own way; the others from 0 to 1, on a straight line.
_OWN_WARMUP = (SchedulerType.COSINE_WARMUP_WITH_MIN_LR, SchedulerType.WARMUP_STABLE_DECAY)
#: Schedules that step on an evaluation's metric instead of on the optimizer's step.
METRIC_SCHEDULES: Mapping[SchedulerType, type[ReduceLROnPlateau] | type[GreedyLR]] = {
    SchedulerType.REDUCE_ON_PLATEAU: ReduceLROnPlateau,
    SchedulerType.GREEDY: GreedyLR,
}
# Parameters that this module fills: they are not settings.
_GIVEN = ("step", "warmup", "total", "lr", "floor", "optimizer", "self")


def get_scheduler(
    name: str | SchedulerType,
    optimizer: Optimizer,
    num_warmup_steps: int | None = None,
    num_training_steps: int | None = None,
    scheduler_specific_kwargs: Mapping[str, Any] | None = None,
    **kwargs: Any,
) -> AnySchedule:
    """Make a schedule by name: a `LambdaLR`, or one of the two metric schedules, whose `step` takes the metric.

    Args:
        name: one of `SchedulerType`.
        optimizer: the optimizer whose learning rates it scales.
        num_warmup_steps, num_training_steps: numbers of optimizer steps; some schedules do not need them.
        scheduler_specific_kwargs, kwargs: further settings of the schedule.

    Raises:
        ConfigError: no schedule has the name, a number of steps is missing, or the schedule does not have a setting.
        MissingExtraError: the schedule needs a package that is not installed.
    """
    try:
        kind = SchedulerType(name)
    except ValueError:
        remedy = suggestion(str(name), SchedulerType)
        what = "No schedule has this name."
        raise ConfigError(what, field="lr_scheduler_type", value=str(name), remedy=remedy) from None
    settings = {**(scheduler_specific_kwargs or {}), **kwargs}
    if kind in METRIC_SCHEDULES:
        declared = _load_class() if kind is SchedulerType.GREEDY else ReduceLROnPlateau
        return METRIC_SCHEDULES[kind](optimizer, **_checked(declared, settings, kind))
    maker = FACTORS[kind]
    parameters = inspect.signature(maker).parameters
    lr = optimizer.defaults.get("lr")
    given: dict[str, Any] = {"warmup": num_warmup_steps, "total": num_training_steps, "lr": lr}
    # Annotations are text here: `int | None` declares that the formula does without the number.
    for parameter, text in (("warmup", "num_warmup_steps"), ("total", "num_training_steps")):
        if parameter in parameters and given[parameter] is None and "None" not in str(parameters[parameter].annotation):
            remedy = "Give a number of steps."
            raise ConfigError(f"The schedule {kind} needs this number.", field=text, value="none", remedy=remedy)
    # Only what the formula takes: a constant rate has neither a warm-up nor a total.
    fixed = {key: value for key, value in given.items() if key in parameters}
    given = {**fixed, **_checked(maker, settings, kind)}
    rise = 0 if kind in _OWN_WARMUP else fixed.get("warmup", 0)

    def factor(step: int) -> float:
        return step / max(1, rise) if step < rise else maker(step, **given)

    maker(rise, **given)  # settings that do not fit are refused now, and not after the warm-up
    return LambdaLR(optimizer, factor)


def create_scheduler(args: TrainingArguments, optimizer: Optimizer, num_training_steps: int) -> AnySchedule:
    """Make the schedule that the arguments ask for, over `num_training_steps` optimizer steps.

    The two metric schedules watch for a larger metric when `greater_is_better`, unless their settings give a mode.
    The `poly_power` of `TFTrainingArguments` is the power of the linear schedule's decay.
    """
    kind = SchedulerType(args.lr_scheduler_type)
    settings = dict(args.lr_scheduler_kwargs or {})
    if (power := getattr(args, "poly_power", 1.0)) != 1.0:
        if kind is not SchedulerType.LINEAR or settings:
            what = f"The schedule {kind}{' with lr_scheduler_kwargs' if settings else ''} does not have this setting."
            remedy = 'Remove it, or give lr_scheduler_type="polynomial" and lr_scheduler_kwargs={"power": …}.'
            raise ConfigError(what, field="poly_power", value=power, remedy=remedy)
        kind, settings = SchedulerType.POLYNOMIAL, {"power": power, "lr_end": 0.0}
    if kind in METRIC_SCHEDULES and args.greater_is_better is not None:
        settings.setdefault("mode", "max" if args.greater_is_better else "min")
    return get_scheduler(kind, optimizer, args.get_warmup_steps(num_training_steps), num_training_steps, settings)


def _checked(maker: Callable[..., Any], settings: Mapping[str, Any], kind: SchedulerType) -> dict[str, Any]:
    parameters = inspect.signature(maker).parameters
    options = [name for name in parameters if name not in _GIVEN]
    for name in settings:
        if name not in options:
            remedy = suggestion(name, options) if options else "It has none: remove it."
            raise _refused(name, settings[name], f"The schedule {kind} has no such setting.", remedy)
    for name in options:
        if parameters[name].default is inspect.Parameter.empty and name not in settings:
            raise _refused(name, None, f"The schedule {kind} needs this setting.", "Give it in lr_scheduler_kwargs.")
    return dict(settings)
