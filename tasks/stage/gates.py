"""Gates: what an evaluation has to measure before its model may be published or promoted (`evaluate.require`).

    verdict = judge(spec.evaluate, evaluation)      # the manifest of evaluate; None: nothing was measured
    verdict.enforce("publish")                      # raises GateError unless every requirement is met

A requirement is in no content key: another threshold runs nothing again but this check, which reads the metrics of the
committed evaluation, cached or not.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from trainer_lib.base.suggestions import nearest
from trainer_lib.errors import GateError
from trainflow.tasks.configs import EvaluateConfig
from trainflow.tasks.settings import parse_requirement
from trainflow.tasks.stage.manifest import StageManifest

_LISTED = 8
_NOT_FINITE = {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}
"""JSON has no number for these: a record may hold the text."""


@dataclass(frozen=True)
class GateCheck:
    """One requirement of the metric ``<split>_<name>``, and what became of it.

    `value` is None where nothing was measured under this name; NaN meets no requirement. `problem` says in a sentence
    why it is not met, and `remedy` what to do, if that is not to train another model.
    """

    metric: str
    requirement: str
    value: float | None
    passed: bool
    problem: str = ""
    remedy: str = ""

    def __str__(self) -> str:
        value = "not measured" if self.value is None else f"{self.value:.6g}"
        return f"{self.metric} {value} ({'' if self.passed else 'not '}{self.requirement})"


@dataclass(frozen=True)
class GateVerdict:
    """The checks of all requirements; without any, everything passes."""

    checks: tuple[GateCheck, ...] = ()

    @property
    def passed(self) -> bool:
        """Whether every requirement is met."""
        return not self.failed

    @property
    def failed(self) -> tuple[GateCheck, ...]:
        """The checks that are not passed."""
        return tuple(check for check in self.checks if not check.passed)

    def __str__(self) -> str:
        shown = self.failed or self.checks
        return f"{'passed' if self.passed else 'failed'}: {', '.join(map(str, shown))}" if shown else "no requirements"

    def to_dicts(self) -> list[dict[str, Any]]:
        """The checks as plain data."""
        return [asdict(check) for check in self.checks]

    def enforce(self, what: str) -> None:
        """Let a model through; `what` is a participle, "published". Raises GateError if a requirement is not met."""
        if self.passed:
            return
        first, *others = self.failed
        more = f" Not met either: {', '.join(check.metric for check in others)}." if others else ""
        raise GateError(
            f"The model is not {what}: {first.problem}.{more}",
            field=f"evaluate.require.{first.metric}",
            value=first.requirement,
            remedy=first.remedy
            or "Train a better model, or change the requirement: the evaluation is committed and is not run again.",
        )


def judge(config: EvaluateConfig, evaluation: StageManifest | None) -> GateVerdict:
    """Compare a committed evaluation with what the spec requires; without one, every requirement fails."""
    metrics = None if evaluation is None else _numbers(evaluation.metrics)
    return GateVerdict(tuple(_check(metric, text, metrics) for metric, text in config.require.items()))


def _check(metric: str, text: str, metrics: Mapping[str, float] | None) -> GateCheck:
    if metrics is None:
        problem = f"{metric} must be {text}, and nothing was evaluated"
        return GateCheck(metric, text, None, False, problem, "Run evaluate as well.")
    value = metrics.get(metric)
    if value is None:
        near = nearest(metric, metrics)
        some = ", ".join(sorted(metrics)[:_LISTED])
        remedy = f"Did you mean '{near}'?" if near else f"There are: {some}." if some else "Measure it in the recipe."
        return GateCheck(metric, text, None, False, f"the evaluation has no metric {metric}", remedy)
    passed = parse_requirement(text).is_met(value)
    problem = "" if passed else f"{metric} is {value:.6g}, and must be {text}"
    return GateCheck(metric, text, value, passed, problem)


def _numbers(metrics: Mapping[str, Any]) -> dict[str, float]:
    values = {
        f"{split}_{name}": _NOT_FINITE.get(value, value) if isinstance(value, str) else value
        for split, own in metrics.items()
        if isinstance(own, Mapping)
        for name, value in own.items()
    }
    numbers = {name: value for name, value in values.items() if isinstance(value, int | float)}
    return {name: float(value) for name, value in numbers.items() if not isinstance(value, bool)}
