"""The section `sweep` of a spec: what its fields alone show to be wrong."""

from __future__ import annotations

from typing import Any

import pytest

from flows.spec.spec import parse_spec
from tasks.sweep_settings import Range
from trainer_lib.errors import ConfigError

SWEEP: dict[str, Any] = {
    "space": {"train.args.seed": [1, 2]},
    "objective": "test_error",
    "direction": "minimize",
    "trials": 4,
}


def refused(**changed: Any) -> str:
    with pytest.raises(ConfigError) as caught:
        parse_spec({"name": "toy", "recipe": "recipe.py", "sweep": {**SWEEP, **changed}})
    return str(caught.value)


@pytest.mark.parametrize(
    ("changed", "expected"),
    [
        ({"objektive": "x"}, "Did you mean 'objective'?"),
        ({"direction": "max"}, "maximize, minimize"),
        ({"direction": None}, "sweep.direction"),
        ({"objective": ["a", "b"]}, "2 objectives and 1 direction"),
        ({"trials": None}, "Set sweep.trials"),
        ({"trials": 0}, "at least 1"),
        ({"space": {}}, "at least 1 entry"),
        ({"space": {"train.args.seed": 3}}, "{low: 1e-4"),
        ({"space": {"train.args.seed": [3]}}, "List two values"),
        ({"space": {"train.args.seed": {"low": 2, "high": 1}}}, "The range is empty"),
        ({"space": {"train.args.seed": {"low": 0, "high": 1, "log": True}}}, "begins above zero"),
        ({"space": {"train.args.seed": {"low": 1, "high": 9, "log": True, "step": 2}}}, "has no step"),
        ({"space": {"train.args.seed": {"low": 1, "hihg": 9}}}, "Did you mean 'high'?"),
        ({"sampler": "grid", "space": {"train.args.lr": {"low": 0.1, "high": 0.9}}}, "values that can be counted"),
        ({"sampler": "gird"}, '"grid"'),
        ({"pruner": "hyperband"}, "asha"),
        ({"pruner": "asha", "objective": ["a", "b"], "direction": ["minimize"] * 2}, "several objectives"),
        ({"parallel": 0}, "at least 1"),
        ({"runner": "dask"}, "prefect"),
        ({"limits": "gpus"}, "Set sweep.runner to prefect"),
    ],
)
def test_a_sweep_that_cannot_work_is_refused(changed: dict[str, Any], expected: str) -> None:
    assert expected in refused(**changed)


def test_a_direction_that_is_missing_is_named() -> None:
    with pytest.raises(ConfigError, match=r"sweep\.direction"):
        parse_spec({"name": "t", "recipe": "r.py", "sweep": {k: v for k, v in SWEEP.items() if k != "direction"}})


def test_ranges_count_their_values() -> None:
    assert Range(low=1, high=4).values() == [1, 2, 3, 4]
    assert Range(low=0, high=1, step=0.25).values() == [0, 0.25, 0.5, 0.75, 1]
    assert Range(low=0.1, high=1.0).values() is None
    assert Range(low=1, high=100, log=True).values() is None
