"""The metrics of evaluate that choose a training's weights: only these are measured while it trains.

They count for train's key. Every other metric is measured by evaluate alone, so that a changed one trains nothing.
"""

from __future__ import annotations

from trainer_lib.base.metric_names import LESS_IS_BETTER, MetricCall, read_metrics
from trainer_lib.base.suggestions import nearest
from trainer_lib.errors import ConfigError
from trainflow.tasks.configs import EvaluateConfig, TrainConfig
from trainflow.tasks.keys.stage_code import METRICS, code_of
from trainflow.tasks.stage.context import StageContext

_FIELD = "train.args.metric_for_best_model"
_MEASURES = (*METRICS, "Trainer", "callbacks")


def choosing_metrics(train: TrainConfig, evaluate: EvaluateConfig, context: StageContext) -> tuple[MetricCall, ...]:
    """Those of `evaluate.metrics` that `metric_for_best_model` names; none where it names another one, or none.

    Raises:
        ConfigError: no evaluation could give the metric that it names, or its direction is the wrong one.
    """
    named = train.args.get("metric_for_best_model")
    if not isinstance(named, str):
        return ()
    wanted, calls = named.removeprefix("eval_"), read_metrics(evaluate.metrics)
    # A metric of a package may give several numbers, by the names that follow its own.
    found = [each for each in calls if wanted == each.result or (each.module and wanted.startswith(f"{each.result}_"))]
    if found and found[0].name in LESS_IS_BETTER and train.args.get("greater_is_better") is None:
        raise ConfigError(
            f"Less is better of {found[0].name}, and unless the setting says so the greatest one is chosen.",
            field="train.args.greater_is_better",
            remedy="Set train.args.greater_is_better=false.",
        )
    code = code_of(train, context)
    if not found and wanted != "loss" and not any(code.defines(name) for name in _MEASURES):
        near = nearest(wanted, [each.result for each in calls])
        remedy = "Name it in evaluate.metrics, or return it from compute_metrics."
        raise ConfigError(
            "The recipe has no compute_metrics, so an evaluation while training gives the loss alone.",
            field="train.stop_early.metric" if train.stop_early else _FIELD,
            value=named,
            remedy=remedy if near is None else f'Did you mean "{near}"?',
        )
    return tuple(found)
