"""evaluate: a model and splits to metrics, in processes of its own."""

from __future__ import annotations

from typing import Any

from trainer_lib.base.metric_names import read_metrics
from trainer_lib.protocol.requests import EvaluateRequest
from trainflow.tasks.configs import EvaluateConfig, LaunchSettings
from trainflow.tasks.keys.keys import evaluate_key
from trainflow.tasks.stage.context import StageContext
from trainflow.tasks.stage.facts import EvaluateFacts, PrepareFacts, TrainFacts
from trainflow.tasks.stage.manifest import StageManifest
from trainflow.tasks.stage.runner import StageAttempt, StageOutput
from trainflow.tasks.stage.task import stage_task
from trainflow.tasks.stage.worker import launch_request, run_inference


@stage_task("evaluate")
def evaluate(
    config: EvaluateConfig, context: StageContext, data: StageManifest[PrepareFacts], model: StageManifest[TrainFacts]
) -> StageManifest[EvaluateFacts]:
    """Measure the model, unless that is committed already.

    Args:
        data: the manifest of prepare-data.
        model: the manifest of train.

    Returns:
        The stage's manifest; its `metrics` are split -> name -> value.
    """

    def measure(fields: dict[str, Any], launch: LaunchSettings, attempt: StageAttempt) -> StageOutput:
        request = EvaluateRequest(
            **fields,
            splits=tuple(config.splits),  # a tuple, because a request is frozen
            resamples=config.resamples,
            confidence=config.confidence,
            metrics=read_metrics(config.metrics),
            slices=tuple(config.slices),
            show_inputs=config.show_inputs,
            importance_seconds=config.importance_seconds,
            benchmarks=tuple(entry.to_request(context.limit) for entry in config.benchmarks),
        )
        result = launch_request(request, launch, context, attempt)
        facts = EvaluateFacts(config.confidence, result.warnings)
        return StageOutput(result.files, metrics=result.metrics, facts=facts)

    return run_inference(evaluate_key(config, context, data, model), config, context, data, model, measure)
