"""Learning-rate schedules against their closed forms, and their plain state."""

from __future__ import annotations

import json
import math
import random
import sys
from typing import Any

import pytest
import torch

from trainer_lib.arguments import SchedulerType, TrainingArguments
from trainer_lib.errors import ConfigError, MissingExtraError
from trainer_lib.optim import create_scheduler, get_scheduler
from trainer_lib.optim.lr_schedules import GreedyLR

LR, WARMUP, TOTAL = 1e-3, 10, 110
WSD = "warmup_stable_decay"


def _optimizer(lr: float = LR, groups: int = 1) -> torch.optim.Optimizer:
    parameters = [{"params": [torch.nn.Parameter(torch.zeros(1))], "lr": lr} for _ in range(groups)]
    return torch.optim.SGD(parameters, lr=lr)


def _rates(name: str, steps: int = TOTAL + 5, **settings: Any) -> list[float]:
    optimizer = _optimizer()
    schedule: Any = get_scheduler(name, optimizer, WARMUP, TOTAL, settings)
    rates = []
    for _ in range(steps):
        rates.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        schedule.step()
    return rates


def _cosine(share: float) -> float:
    return 0.5 * (1 + math.cos(math.pi * share))


@pytest.mark.parametrize(
    ("name", "settings", "expected"),
    [
        ("linear", {}, {60: 0.5, 85: 0.25, 110: 0.0, 114: 0.0}),
        ("constant", {}, {0: 1.0, 5: 1.0, 114: 1.0}),
        ("constant_with_warmup", {}, {10: 1.0, 114: 1.0}),
        ("cosine", {}, {10: 1.0, 35: _cosine(0.25), 60: 0.5, 110: 0.0}),
        ("cosine", {"num_cycles": 1}, {60: 0.0, 110: 1.0}),
        ("cosine_with_restarts", {"num_cycles": 2}, {10: 1.0, 35: 0.5, 60: 1.0, 85: 0.5, 110: 0.0}),
        ("polynomial", {"power": 2.0, "lr_end": 0.0}, {60: 0.25, 110: 0.0}),
        ("polynomial", {"lr_end": 1e-4}, {60: 0.55, 110: 0.1, 114: 0.1}),
        ("inverse_sqrt", {}, {10: 1.0, 40: 0.5, 90: 1 / 3}),
        ("inverse_sqrt", {"timescale": 90}, {10: 1.0, 100: math.sqrt(0.5)}),
        ("cosine_with_min_lr", {"min_lr": 1e-4}, {60: 0.55, 110: 0.1}),
        ("cosine_with_min_lr", {"min_lr_rate": 0.2}, {60: 0.6, 110: 0.2}),
        ("cosine_warmup_with_min_lr", {"min_lr_rate": 0.1}, {0: 0.1, 4: 0.5, 9: 1.0, 59: 0.55, 109: 0.1}),
        ("cosine_warmup_with_min_lr", {"min_lr_rate": 0.1, "warmup_lr_rate": 0.4}, {0: 0.4, 9: 1.0, 109: 0.1}),
        (WSD, {"num_decay_steps": 50}, {10: 1.0, 59: 1.0, 85: 0.5, 110: 0.0}),
        (WSD, {"num_decay_steps": 50, "decay_type": "linear", "min_lr_ratio": 0.1}, {85: 0.55, 112: 0.1}),
        (WSD, {"num_decay_steps": 50, "decay_type": "1-sqrt"}, {60: 1.0, 85: 1 - math.sqrt(0.5)}),
        (WSD, {"num_decay_steps": 50, "warmup_type": "cosine"}, {0: 0.0, 5: 0.5, 10: 1.0}),
        (WSD, {"num_decay_steps": 50, "warmup_type": "1-sqrt"}, {0: 0.0, 5: 1 - math.sqrt(0.5)}),
        (WSD, {"num_decay_steps": 10, "num_stable_steps": 20}, {29: 1.0, 35: 0.5, 41: 0.0}),
    ],
)
def test_rates_follow_the_formula(name: str, settings: dict[str, Any], expected: dict[int, float]) -> None:
    rates = _rates(name, **settings)
    for step, factor in expected.items():
        assert rates[step] == pytest.approx(factor * LR, abs=1e-12), step


@pytest.mark.parametrize(
    "name", ["linear", "constant_with_warmup", "cosine", "cosine_with_restarts", "polynomial", "inverse_sqrt"]
)
def test_the_warmup_rises_on_a_straight_line_from_zero(name: str) -> None:
    assert _rates(name, steps=11) == pytest.approx([LR * step / 10 for step in range(11)])


def test_every_schedule_can_be_had_by_name() -> None:
    needed: dict[str, dict[str, Any]] = {
        "cosine_with_min_lr": {"min_lr": 0.0},
        "cosine_warmup_with_min_lr": {"min_lr": 0.0},
        WSD: {"num_decay_steps": 1},
    }
    for kind in SchedulerType:
        get_scheduler(kind, _optimizer(), 1, 10, **needed.get(kind.value, {}))
    for kind in (SchedulerType.LINEAR, SchedulerType.COSINE, SchedulerType.INVERSE_SQRT):
        for warmup in (0, 10):
            optimizer = _optimizer()
            schedule: Any = get_scheduler(kind, optimizer, warmup, 10)
            for _ in range(12):
                optimizer.step()
                schedule.step()
                assert math.isfinite(optimizer.param_groups[0]["lr"])


@pytest.mark.parametrize(
    ("name", "settings", "field", "remedy"),
    [
        ("cosin", {}, "lr_scheduler_type", '"cosine"'),
        ("cosine", {"cycles": 1}, "lr_scheduler_kwargs.cycles", '"num_cycles"'),
        ("constant", {"x": 1}, "lr_scheduler_kwargs.x", "remove it"),
        ("cosine_with_min_lr", {}, "lr_scheduler_kwargs.min_lr", "one of them"),
        ("cosine_with_min_lr", {"min_lr": 0.1, "min_lr_rate": 0.1}, "lr_scheduler_kwargs.min_lr", "one of them"),
        ("polynomial", {"lr_end": 1.0}, "lr_scheduler_kwargs.lr_end", "Lower it"),
        (WSD, {}, "lr_scheduler_kwargs.num_decay_steps", "lr_scheduler_kwargs"),
        (WSD, {"num_decay_steps": 1, "decay_type": "cubic"}, "lr_scheduler_kwargs.decay_type", "cosine"),
        ("reduce_lr_on_plateau", {"patienc": 1}, "lr_scheduler_kwargs.patienc", '"patience"'),
        ("greedy", {"factor": 1.5}, "lr_scheduler_kwargs.factor", "between 0 and 1"),
        ("greedy", {"mode": "up"}, "lr_scheduler_kwargs.mode", "max"),
        ("greedy", {"min_lr": [0.1, 0.1]}, "lr_scheduler_kwargs.min_lr", "one number"),
    ],
)
def test_a_wrong_setting_is_refused_by_name(name: str, settings: dict[str, Any], field: str, remedy: str) -> None:
    with pytest.raises(ConfigError) as caught:
        get_scheduler(name, _optimizer(), WARMUP, TOTAL, settings)
    assert caught.value.field == field
    assert remedy in (caught.value.remedy or "")


def test_missing_lengths_are_refused() -> None:
    with pytest.raises(ConfigError, match="num_training_steps"):
        get_scheduler("linear", _optimizer(), 1)
    with pytest.raises(ConfigError, match="num_warmup_steps"):
        get_scheduler("constant_with_warmup", _optimizer())
    with pytest.raises(ConfigError, match="num_stable_steps"):
        get_scheduler(WSD, _optimizer(), 1, num_decay_steps=5)


def test_the_arguments_choose_the_schedule() -> None:
    optimizer = _optimizer()
    args = TrainingArguments("out", lr_scheduler_type="cosine", warmup_steps=0.1, lr_scheduler_kwargs={"num_cycles": 1})
    create_scheduler(args, optimizer, 100)
    assert optimizer.param_groups[0]["lr"] == 0.0
    given: dict[str, Any] = {"eval_strategy": "steps", "metric_for_best_model": "accuracy"}
    # Of accuracy more is better, unless something else is said.
    cases: list[tuple[str, Any, str]] = [("reduce_lr_on_plateau", {}, "max"), ("greedy", {"mode": "min"}, "min")]
    for name, more, mode in cases:
        args = TrainingArguments("out", lr_scheduler_type=name, lr_scheduler_kwargs=more, **given)
        following: Any = create_scheduler(args, optimizer, 9)
        assert following.mode == mode


# ------------------------------------------------------------------------------------------- greedy
def _greedy(metrics: list[float], lr: float = 0.1, **settings: Any) -> list[float]:
    optimizer = _optimizer(lr)
    schedule = GreedyLR(optimizer, **{"patience": 1, "factor": 0.5, "min_lr": 0.01, **settings})
    rates = []
    for metric in metrics:
        schedule.step(metric)
        rates.append(optimizer.param_groups[0]["lr"])
    return rates


def test_greedy_takes_what_is_not_finite_for_no_improvement() -> None:
    assert _greedy([1.0, math.nan, math.nan]) == [0.1, 0.1, 0.05]
    # The NaN has left the window of two when the last metric arrives.
    assert _greedy([5, math.nan, 5, 5, 1], smooth=True, window_size=2, patience=0)[-1] == 0.05


def test_greedy_never_lowers_to_a_bound_above_the_rate() -> None:
    # The default bound, 1e-3, is twenty times the default learning rate.
    optimizer = _optimizer(5e-5)
    schedule = GreedyLR(optimizer, patience=0)
    schedule.step(1.0)
    risen = optimizer.param_groups[0]["lr"]
    for metric in (1.0, 1.0, 1.0):
        schedule.step(metric)
        assert optimizer.param_groups[0]["lr"] <= risen


GREEDY: dict[str, dict[str, Any]] = {
    "smooth": {"smooth": True, "window_size": 3, "cooldown": 1},
    "bounds": {"min_lr": 0.05, "max_lr": 0.3, "warmup": 1},
    "more is better": {"mode": "max", "min_lr": 0.01, "warmup": 2},
    "shares": {"threshold": 0.1, "threshold_mode": "rel", "cooldown": 2},
}


@pytest.mark.parametrize("name", GREEDY)
def test_greedy_is_transformers_own_step_by_step_also_after_a_resume(name: str, caplog: Any) -> None:
    theirs = pytest.importorskip("transformers").GreedyLR
    settings = {"patience": 1, "factor": 0.5, "reset_start": 2, **GREEDY[name]}
    ours_optimizer, their_optimizer, dice = _optimizer(0.1), _optimizer(0.1), random.Random(0)
    ours, reference = GreedyLR(ours_optimizer, verbose=True, **settings), theirs(their_optimizer, **settings)
    rates = set()
    caplog.set_level("INFO")
    for _ in range(60):
        metric = dice.random()
        ours.step(metric)
        reference.step(metric)
        assert ours.get_last_lr() == reference.get_last_lr() == [ours_optimizer.param_groups[0]["lr"]]
        rates.add(ours.get_last_lr()[0])
        state = json.loads(json.dumps(ours.state_dict(), allow_nan=False))
        ours_optimizer = _optimizer(0.1)
        ours = GreedyLR(ours_optimizer, verbose=True, **settings)
        ours.load_state_dict(state)
    assert len(rates) > 1
    assert "learning rate" in caplog.text


def test_greedy_without_transformers_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "transformers.optimization", None)
    with pytest.raises(MissingExtraError, match="transformers") as caught:
        get_scheduler("greedy", _optimizer())
    assert (caught.value.field, caught.value.value) == ("lr_scheduler_type", "greedy")
    assert "trainflow[transformers]" in str(caught.value)
