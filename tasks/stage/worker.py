"""Requests of the stages to their workers: the only way in which a stage does anything heavy."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from trainer_lib.data.rows.mixture import INFO
from trainer_lib.launch.base import dismiss_followers, launch
from trainer_lib.launch.pool import apart, launch_workers
from trainer_lib.launch.settings.config import resolve_config
from trainer_lib.protocol.requests import PreparedData, RecipeFile, Request
from trainflow.tasks.code.closure import find_root
from trainflow.tasks.configs import EvaluateConfig, LaunchSettings, PredictConfig, StageSettings
from trainflow.tasks.keys.declared_paths import path_options
from trainflow.tasks.keys.keys import StageKey
from trainflow.tasks.keys.spec_words import in_words_of_spec
from trainflow.tasks.settings import RunnerSettings
from trainflow.tasks.stage.context import StageContext
from trainflow.tasks.stage.facts import PrepareFacts, TrainFacts
from trainflow.tasks.stage.manifest import StageManifest
from trainflow.tasks.stage.retry import count_sharers, halve_evaluation_batch, max_halvings
from trainflow.tasks.stage.runner import StageAttempt, StageFolder, StageOutput, run_stage

R = TypeVar("R")


def common_fields(config: StageSettings, context: StageContext, output: StageFolder) -> dict[str, Any]:
    """The fields that every request of a stage has, by name."""
    recipe = config.recipe or context.recipe
    root = context.root if context.root is not None else str(find_root(recipe))
    return {
        "output": output.store.url,
        "recipe": RecipeFile(recipe, root, context.recipe if recipe != context.recipe else None),
        "options": config.options,
        "paths": path_options(output.stage, config, context),
        "debug": context.debug,
    }


def model_fields(
    config: StageSettings, context: StageContext, output: StageFolder, data: StageManifest[PrepareFacts]
) -> dict[str, Any]:
    """The fields of `common_fields`, and those of a stage that works with a model, but for its arguments."""
    info = data.facts.info
    if context.mixture is not None:
        info = {**info, INFO: {**info.get(INFO, {}), **context.mixture}}
    prepared = PreparedData(data.url, data.facts.splits, info, data.files)
    common = common_fields(config, context, output)
    return {**common, "tracking": context.tracking is not None, "data": prepared}


def sent_arguments(args: Mapping[str, Any], context: StageContext) -> dict[str, Any]:
    """Training arguments as a request carries them: the launcher reads `use_cpu`, however a spec spells it."""
    return {**args, "use_cpu": context.resolver.arguments(args).use_cpu}


def launch_request(request: Request[R], settings: LaunchSettings, context: StageContext, attempt: StageAttempt) -> R:
    """Carry a request out in separate processes; return the answer, or raise the failure of the first failed rank."""
    config = context.resolver.launch(settings, use_cpu=request.use_cpu)
    # A verb is called like its section of the spec.
    with in_words_of_spec(request.verb):
        return launch(request, config, **_of_run(request, context), **_callbacks(context, attempt))


def launch_shared(
    request: Request[R], settings: LaunchSettings, context: StageContext, attempt: StageAttempt
) -> tuple[R, ...]:
    """Carry a request out in workers that share its parts, and return their answers: one that is lost ends no other."""
    use_cpu = request.use_cpu or not request.uses_devices
    config = apart(context.resolver.launch(settings, use_cpu=use_cpu), on_devices=not use_cpu)
    with in_words_of_spec(request.verb):
        return launch_workers(request, config, **_of_run(request, context), **_callbacks(context, attempt))


def launch_on_cluster(
    request: Request[R], runner: RunnerSettings, settings: LaunchSettings, context: StageContext, attempt: StageAttempt
) -> None:
    """Carry a request out in workers of a cluster that share its parts; each is started as the settings say."""
    from trainflow.tasks.runners.mapped_launch import launch_mapped  # Prefect, which planning does without

    with in_words_of_spec(request.verb):
        launch_mapped(request, runner, settings, **_callbacks(context, attempt))


def _of_run(request: Request[Any], context: StageContext) -> dict[str, Any]:
    """Arguments of a launch that name the run: the variables of its tracking, and words for those that wait."""
    tracking = context.tracking if request.tracking else None
    env = tracking.worker_env() if tracking is not None else {}
    return {"env": env, "what": f"{context.run_name or context.name}, {request.verb}"}


def _callbacks(context: StageContext, attempt: StageAttempt) -> dict[str, Any]:
    """Arguments of a launch that report progress and ask whether to stop."""
    progress = attempt.progress
    reasons = (attempt.is_lost, context.stop.is_set, progress.is_cancelled)
    return {
        "on_line": progress.line,
        "on_event": progress.event,
        "should_cancel": lambda: any(is_reason() for is_reason in reasons),
    }


def dismiss(settings: LaunchSettings) -> None:
    """Tell the machines that wait to take part that there is nothing to do, if the settings ask for any."""
    config = settings.to_config()
    # Only these launches have other machines. An engine places them when there is something to do.
    if config.engine is None and (config.kind in ("accelerate", "environment") or config.several_nodes):
        dismiss_followers(resolve_config(config, use_cpu=True))


def run_inference(
    key: StageKey,
    config: EvaluateConfig | PredictConfig,
    context: StageContext,
    data: StageManifest[PrepareFacts],
    model: StageManifest[TrainFacts],
    carry_out: Callable[[dict[str, Any], LaunchSettings, StageAttempt], StageOutput],
) -> StageManifest:
    """Run a stage that applies a model, unless its result is committed already.

    `carry_out` has workers do it, given the fields that the requests of both verbs have.
    """
    # A manifest from a file has the facts of its stage; mypy learns which ones here.
    data, model = data.with_facts(PrepareFacts), model.with_facts(TrainFacts)
    launch = config.launch or LaunchSettings()
    # Only to know how far the batch can be halved.
    parsed = context.resolver.arguments(config.args, prefix=f"{key.stage}.args")
    sharers = count_sharers(parsed, lambda: context.resolver.launch(launch, use_cpu=parsed.use_cpu).world_size)

    def work(attempt: StageAttempt) -> StageOutput:
        args = halve_evaluation_batch(config.args, attempt.batch_halvings, shared_by=sharers)
        own = {"args": sent_arguments(args, context), "model": model.facts.model, "model_url": f"{model.url}/model"}
        return carry_out({**model_fields(config, context, attempt, data), **own}, launch, attempt)

    halvings = max_halvings(parsed.per_device_eval_batch_size, shared_by=sharers)
    return run_stage(key, context, work, retries=config.retries, max_halvings=halvings)
