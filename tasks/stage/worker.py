"""Requests of the stages to their workers: the only way in which a stage does anything heavy."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from tasks.configs import LaunchSettings, StageSettings
from tasks.stage.closure import find_root
from tasks.stage.context import StageContext
from tasks.stage.facts import PrepareFacts
from tasks.stage.manifest import StageManifest
from tasks.stage.runner import StageAttempt
from tasks.stage.spec_words import in_words_of_spec
from trainer_lib.launch import launch, nodes, resolve_config
from trainer_lib.requests import PreparedData, RecipeFile, Request

R = TypeVar("R")

_ASK_EVERY_S = 3.0


def common_fields(config: StageSettings, context: StageContext, attempt: StageAttempt) -> dict[str, Any]:
    """The fields that every stage's request has, by name."""
    recipe = config.recipe or context.recipe
    root = context.root if context.root is not None else str(find_root(recipe))
    return {
        "output": attempt.store.url,
        "recipe": RecipeFile(recipe, root, context.recipe if recipe != context.recipe else None),
        "options": config.options,
        "debug": context.debug,
    }


def model_fields(
    config: StageSettings, context: StageContext, attempt: StageAttempt, data: StageManifest[PrepareFacts]
) -> dict[str, Any]:
    """The fields of `common_fields`, and those of a stage that works with a model, but for its arguments."""
    prepared = PreparedData(data.url, data.facts.splits, data.facts.info, data.files)
    common = common_fields(config, context, attempt)
    return {**common, "tracking": context.tracking is not None, "data": prepared}


def sent_arguments(args: Mapping[str, Any], context: StageContext) -> dict[str, Any]:
    """Training arguments as a request carries them: the launcher reads `use_cpu`, however a spec spells it."""
    return {**args, "use_cpu": context.resolver.arguments(args).use_cpu}


def launch_request(request: Request[R], settings: LaunchSettings, context: StageContext, attempt: StageAttempt) -> R:
    """Carry a request out in processes of its own and return the worker's answer.

    Raises:
        TrainflowError: the typed failure of the first rank that failed.
    """
    tracking = context.tracking if request.tracking else None
    # A verb is called like its section of the spec.
    with in_words_of_spec(request.verb):
        return launch(
            request,
            context.resolver.launch(settings, use_cpu=request.use_cpu),
            env=tracking.worker_env() if tracking is not None else {},
            on_line=attempt.progress.line,
            on_event=attempt.progress.event,
            should_cancel=_any(attempt.is_lost, context.stop.is_set, _cancelled_in_prefect()),
        )


def dismiss(settings: LaunchSettings) -> None:
    """Tell the machines that wait to take part that there is nothing to do, if the settings ask for any."""
    config = settings.to_config()
    # Only these launches have other machines.
    if config.kind in ("accelerate", "environment") or config.several_nodes:
        nodes.dismiss(resolve_config(config, use_cpu=True))


def _any(*questions: Callable[[], bool]) -> Callable[[], bool]:
    return lambda: any(question() for question in questions)


def _cancelled_in_prefect() -> Callable[[], bool]:
    """A question, cheap to repeat: was the flow run cancelled in Prefect's UI? Never, outside a flow run.

    A run started on the command line has no Prefect runner that would carry a cancel out.
    """
    from prefect.context import FlowRunContext

    context = FlowRunContext.get()
    if context is None or context.flow_run is None:
        return lambda: False
    flow_run_id = context.flow_run.id
    asked = time.monotonic()
    cancelled = False

    def question() -> bool:
        nonlocal asked, cancelled
        # The launcher asks several times a second; the server should not be.
        if not cancelled and time.monotonic() - asked >= _ASK_EVERY_S:
            asked = time.monotonic()
            cancelled = _is_cancelled(flow_run_id)
        return cancelled

    return question


def _is_cancelled(flow_run_id: Any) -> bool:
    from prefect.client.orchestration import get_client

    try:
        with get_client(sync_client=True) as client:
            state = client.read_flow_run(flow_run_id).state
    except Exception:  # without a server no one can cancel through it
        return False
    return state is not None and (state.is_cancelling() or state.is_cancelled())
