"""One worker verb, launched: the only way in which a stage does anything heavy."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any

from tasks.configs import LaunchSettings
from tasks.stage.closure import find_root
from tasks.stage.context import StageContext
from tasks.stage.facts import PrepareFacts, TrainFacts
from tasks.stage.manifest import StageManifest
from tasks.stage.runner import StageAttempt
from tasks.tracking import RunHandle
from trainer_lib.arguments import TrainingArguments
from trainer_lib.launch import check, from_settings, launch, nodes
from trainer_lib.records import to_record
from trainer_lib.requests import PreparedData
from trainer_lib.storage import FileEntry

_ASK_EVERY_S = 3.0


def run_verb(
    verb: str,
    context: StageContext,
    attempt: StageAttempt,
    settings: LaunchSettings,
    *,
    recipe: str | None,
    options: Mapping[str, Any],
    tracking: RunHandle | None = None,
    **more: Any,
) -> dict[str, Any]:
    """Run one verb of `trainer_lib.worker` in processes of its own; its result.

    Args:
        recipe: the stage's own recipe; None: the context's.
        tracking: the MLflow run that the workers add their points to, or None.
        more: the verb's own part of the request.

    Raises:
        TrainflowError: the typed failure of the first rank that failed.
    """
    recipe = recipe or context.recipe
    root = context.root
    request = {
        "format": 1,
        "verb": verb,
        "recipe": {"path": recipe, "root": root if root is not None else str(find_root(recipe))},
        "options": dict(options),
        "output": attempt.store.url,
        "tracking": tracking is not None,
        "debug": context.debug,
        **more,
    }
    if "args" in more:  # the launcher counts devices or cores by it: however it was spelt
        request["args"] = {**more["args"], "use_cpu": TrainingArguments.from_dict(more["args"]).use_cpu}
    return launch(
        request,
        from_settings(settings.model_dump()),
        env=tracking.worker_env() if tracking is not None else {},
        on_line=attempt.progress.line,
        on_event=attempt.progress.event,
        should_cancel=_any(attempt.is_lost, _cancelled_in_prefect()),
    )


def dismiss(settings: LaunchSettings) -> None:
    """Tell the machines that wait to take part that there is nothing to do, if the settings ask for any."""
    config = from_settings(settings.model_dump())
    if config.kind in ("accelerate", "environment") or config.several_nodes:
        nodes.dismiss(check(config, use_cpu=True))


def entries(files: list[Mapping[str, Any]]) -> list[FileEntry]:
    """The files of a worker's result."""
    return [FileEntry(str(file["path"]), int(file["size"]), str(file["sha256"])) for file in files]


def data_request(manifest: StageManifest[PrepareFacts]) -> dict[str, Any]:
    """The prepared data as a request carries it."""
    facts = manifest.facts
    return to_record(PreparedData(manifest.url, facts.splits, facts.info, manifest.files))


def model_request(manifest: StageManifest[TrainFacts]) -> dict[str, Any]:
    """The trained model as a request carries it: where it lies, and the settings it was built with."""
    return {"model_url": f"{manifest.url}/model", "model": manifest.facts.model}


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
    except Exception:  # the server is away: nobody can cancel through it
        return False
    return state is not None and (state.is_cancelling() or state.is_cancelled())
