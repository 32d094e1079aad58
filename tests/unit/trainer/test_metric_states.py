"""Metrics of torchmetrics merge by their states: in any split of the rows, the numbers of all rows."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch

from trainer_lib.evaluation.metric_states import MetricStates, why_not_merged

ROWS = 60


def _metrics(name: str) -> Any:
    import torchmetrics
    from torchmetrics import classification, regression

    multiclass: dict[str, Any] = {"num_classes": 3}
    made: dict[str, Callable[[], Any]] = {
        "accuracy": lambda: classification.MulticlassAccuracy(**multiclass),
        "f1": lambda: classification.MulticlassF1Score(**multiclass, average="macro"),
        "confusion": lambda: classification.MulticlassConfusionMatrix(**multiclass, normalize="true"),
        "kappa": lambda: classification.MulticlassCohenKappa(**multiclass),
        "binned": lambda: classification.MulticlassAUROC(**multiclass, thresholds=20),
        "squared": regression.MeanSquaredError,
        "absolute": regression.MeanAbsoluteError,
        "r2": regression.R2Score,
        "largest": torchmetrics.MaxMetric,
        "collection": lambda: torchmetrics.MetricCollection(
            {
                "top": classification.MulticlassAccuracy(**multiclass, average="micro"),
                "macro": classification.MulticlassF1Score(**multiclass),
                "precision": classification.MulticlassPrecision(**multiclass),
            }
        ),
    }
    return made[name]()


def _batches(name: str) -> list[tuple[torch.Tensor, ...]]:
    generator = torch.Generator().manual_seed(0)
    if name in ("squared", "absolute", "r2", "largest"):
        rows = torch.randn(ROWS, 2, generator=generator)
        return [tuple(part.unbind(1)) for part in torch.split(rows, 7)]
    scores, labels = torch.randn(ROWS, 3, generator=generator), torch.randint(0, 3, (ROWS,), generator=generator)
    return list(zip(torch.split(scores.softmax(-1), 7), torch.split(labels, 7), strict=True))


def _update(metric: Any, name: str, batch: tuple[torch.Tensor, ...]) -> None:
    metric.update(*(batch[:1] if name == "largest" else batch))


def _numbers(found: Any) -> list[float]:
    values = found.values() if isinstance(found, dict) else [found]
    return [float(each) for value in values for each in torch.as_tensor(value).reshape(-1)]


def _merged(name: str, batches: list[Any], ranges: int) -> list[float]:
    """The metrics of ranges, each measured by a metric of its own and sent as JSON."""
    total = None
    for part in range(ranges):
        states = MetricStates(_metrics(name))
        for batch in batches[part::ranges]:
            _update(states, name, batch)
        states.compute()
        states.reset()
        taken = states.take()
        assert taken is not None
        total = MetricStates(_metrics(name)).add(total, json.loads(json.dumps(taken)))
    assert total is not None
    # As in a process that has measured nothing.
    return _numbers(dict(MetricStates(_metrics(name)).finish(total)))


@pytest.mark.parametrize(
    "name",
    ["accuracy", "f1", "confusion", "kappa", "binned", "squared", "absolute", "r2", "largest", "collection"],
)
def test_ranges_and_all_rows_give_the_same_numbers(name: str) -> None:
    batches, whole = _batches(name), _metrics(name)
    assert why_not_merged(whole) is None
    for batch in batches:
        _update(whole, name, batch)
    expected = _numbers(whole.compute())
    # Counts are exact; sums of floats differ by the order of their addition, in the metric's own 32 bits.
    exact = name not in ("squared", "absolute", "r2")
    for ranges in (1, 2, 4):
        found = _merged(name, batches, ranges)
        assert found == expected if exact else found == pytest.approx(expected, rel=1e-5)


def test_a_metric_that_has_measured_goes_on_with_other_states() -> None:
    batches = _batches("collection")
    states = MetricStates(_metrics("collection"))
    for batch in batches:
        states.update(*batch)
    states.compute()
    states.reset()
    taken = states.take()
    assert taken is not None
    doubled = states.add(taken, taken)
    assert _numbers(dict(states.finish(doubled))) == pytest.approx(_numbers(dict(states.finish(taken))))
    assert states.take() is None


def test_what_does_not_merge_is_named() -> None:
    import torchmetrics
    from torchmetrics import classification, regression, wrappers

    multiclass: dict[str, Any] = {"num_classes": 3}
    reasons = {
        "MulticlassAUROC keeps all rows": classification.MulticlassAUROC(**multiclass),
        "PearsonCorrCoef keeps what cannot be added up": regression.PearsonCorrCoef(),
        "wraps another metric": wrappers.ClasswiseWrapper(classification.MulticlassAccuracy(**multiclass)),
        "CatMetric keeps all rows": torchmetrics.CatMetric(),
    }
    for words, metric in reasons.items():
        assert words in str(why_not_merged(metric)), metric

    class Own:
        update = compute = reset = None

    assert why_not_merged(Own()) == "Own is not a metric of torchmetrics, so its states are not known"


def test_numbers_that_are_not_finite_cross_processes() -> None:
    states = MetricStates(_metrics("squared"))
    states.update(torch.tensor([math.inf]), torch.tensor([0.0]))
    states.compute()
    taken = states.take()
    assert taken is not None
    assert next(iter(states.finish(json.loads(json.dumps(taken))).values())) == math.inf
