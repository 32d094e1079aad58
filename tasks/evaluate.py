"""evaluate: a model and splits to metrics, in processes of its own."""

from __future__ import annotations

from functools import partial

from tasks.configs import EvaluateConfig, LaunchSettings
from tasks.stage.context import StageContext
from tasks.stage.facts import EvaluateFacts, PrepareFacts, TrainFacts
from tasks.stage.inference import run_inference
from tasks.stage.keys import evaluate_key
from tasks.stage.manifest import StageManifest
from tasks.stage.runner import StageAttempt, StageOutput
from tasks.stage.task import stage_task
from tasks.stage.worker import launch_request
from trainer_lib.requests import EvaluateRequest


@stage_task("evaluate")
def evaluate(
    config: EvaluateConfig,
    context: StageContext,
    data: StageManifest[PrepareFacts],
    model: StageManifest[TrainFacts],
) -> StageManifest[EvaluateFacts]:
    """Measure the model, unless that is committed already.

    Args:
        data: the manifest of prepare-data.
        model: the manifest of train.

    Returns:
        The stage's manifest; its `metrics` are split -> name -> value.
    """
    return run_inference(
        evaluate_key(config, context, data, model),
        config,
        context,
        data,
        model,
        # A tuple, because a request is frozen.
        request=partial(
            EvaluateRequest,
            splits=tuple(config.splits),
            resamples=config.resamples,
            confidence=config.confidence,
            metrics=tuple(config.metrics),
            slices=tuple(config.slices),
        ),
        carry_out=_measure,
    )


def _measure(
    request: EvaluateRequest, settings: LaunchSettings, context: StageContext, attempt: StageAttempt
) -> StageOutput:
    result = launch_request(request, settings, context, attempt)
    return StageOutput(result.files, metrics=result.metrics, facts=EvaluateFacts())
