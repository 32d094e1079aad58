"""evaluate: a model and splits to metrics, in processes of its own."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

from trainer_lib.arguments.configs.parallelism_config import read_layout
from trainer_lib.base.metric_names import read_metrics
from trainer_lib.data.rows.parts import RECORDS, SUMS, sum_parts
from trainer_lib.launch.pool import apart
from trainer_lib.protocol.requests import EvaluateRequest
from trainflow.tasks.configs import EvaluateConfig, LaunchSettings
from trainflow.tasks.keys.keys import evaluate_key
from trainflow.tasks.keys.stage_code import code_of
from trainflow.tasks.stage.context import StageContext
from trainflow.tasks.stage.facts import EvaluateFacts, PrepareFacts, TrainFacts
from trainflow.tasks.stage.manifest import StageManifest
from trainflow.tasks.stage.runner import StageAttempt, StageOutput
from trainflow.tasks.stage.task import stage_task
from trainflow.tasks.stage.worker import launch_request, launch_shared, run_inference


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
            metrics=read_metrics(config.metrics),
            slices=tuple(config.slices),
            show_inputs=config.show_inputs,
            importance_seconds=config.importance_seconds,
            rows_per_range=config.rows_per_range,
            benchmarks=tuple(entry.to_request(context.limit) for entry in config.benchmarks),
        ),
        carry_out=partial(_measure, config),
    )


def _measure(
    config: EvaluateConfig,
    request: EvaluateRequest,
    settings: LaunchSettings,
    context: StageContext,
    attempt: StageAttempt,
) -> StageOutput:
    """Have one group of processes do it all or, where metrics merge, workers that take ranges of the rows."""
    for name in request.splits if _may_merge(config, context) else ():
        if (split := request.data.splits.get(name)) is not None:  # else the worker names it
            sum_parts(attempt.store, name, rows=split.rows, rows_per_range=request.rows_per_range).forget_damaged()
    if _is_shared(config, request, settings, context):
        launch_shared(replace(request, step="ranges"), settings, context, attempt)
        request, settings = replace(request, step="finish"), replace(settings, processes=1)
    result = launch_request(request, settings, context, attempt)
    for folder in (SUMS, f"{RECORDS}/{SUMS}"):
        attempt.store.delete_tree(folder)
    return StageOutput(result.files, metrics=result.metrics, facts=EvaluateFacts(config.confidence, result.warnings))


def _is_shared(
    config: EvaluateConfig, request: EvaluateRequest, settings: LaunchSettings, context: StageContext
) -> bool:
    """Whether several workers measure ranges of their own: metrics merge, and the model is whole in each process."""
    needs_all_rows = request.resamples or request.confidence or request.metrics or request.slices
    args = context.resolver.arguments(request.args)
    is_divided = args.fsdp or args.deepspeed or read_layout(args)
    has_trainer = code_of(config, context).defines("Trainer")
    if not _may_merge(config, context) or has_trainer or needs_all_rows or is_divided:
        return False
    return len(apart(context.resolver.launch(settings, use_cpu=request.use_cpu))) > 1


def _may_merge(config: EvaluateConfig, context: StageContext) -> bool:
    """Whether the recipe has metrics that merge."""
    return code_of(config, context).defines("metric_sums")
