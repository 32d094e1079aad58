"""The model's files as they are published: those of train or, with `publish.merge_adapters`, merged weights."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import PurePosixPath

from trainer_lib.errors import ConfigError
from trainer_lib.hub.base import ADAPTER, Source
from trainer_lib.protocol.requests import MergeRequest
from trainflow.tasks.configs import LaunchSettings, PublishConfig
from trainflow.tasks.stage import progress as _progress
from trainflow.tasks.stage.context import StageContext
from trainflow.tasks.stage.facts import PrepareFacts, TrainFacts
from trainflow.tasks.stage.manifest import StageManifest
from trainflow.tasks.stage.runner import StageAttempt
from trainflow.tasks.stage.worker import launch_request, model_fields, sent_arguments

MODEL = "model/"
CONFIG = "adapter_config.json"
_OF_ADAPTERS = (CONFIG, "adapter_model.safetensors", "base_model.json")
_MERGED = "merged"
"""Folder of the stage that holds the merged weights until they are published."""


def require_adapters(config: PublishConfig, model: StageManifest[TrainFacts]) -> None:
    """Raise ConfigError where the spec merges adapters and the trained model has none."""
    if not config.merge_adapters or f"{MODEL}{CONFIG}" in {entry.path for entry in model.files}:
        return
    raise ConfigError(
        "The trained model has no adapters.",
        field="publish.merge_adapters",
        value="true",
        remedy="Remove it: all weights of the model are published. Or train adapters: train.model.adapter.",
    )


@contextlib.contextmanager
def published_model(
    config: PublishConfig,
    context: StageContext,
    data: StageManifest[PrepareFacts],
    model: StageManifest[TrainFacts],
    attempt: StageAttempt,
) -> Iterator[tuple[dict[str, Source], dict[str, float]]]:
    """The files of the model by their path in a publication, and how merged weights agree with the adapters.

    Merged weights exist inside the block.

    Raises:
        TrainflowError: the typed failure of the worker that merges.
    """
    trained = {
        entry.path.removeprefix(MODEL): Source(model.store(), entry)
        for entry in model.files
        if entry.path.startswith(MODEL)
    }
    if not config.merge_adapters:
        yield trained, {}
        return
    store = attempt.store.child(_MERGED)
    store.delete_tree()  # of an attempt that was killed
    try:
        message = "merges the adapters into the weights of their base model"
        _progress.publish({"event": "progress", "stage": attempt.stage, "message": message})
        request = MergeRequest(
            **model_fields(config, context, attempt, data),
            args=sent_arguments({**config.args, "use_cpu": True}, context),
            model=model.facts.model,
            model_url=f"{model.url}/model",
            dtype=config.merged_type,
            tolerance=config.merge_tolerance,
        )
        result = launch_request(replace(request, output=store.url), LaunchSettings(processes=1), context, attempt)
        if result.agreement:
            words = "merged weights choose the next token of the adapters in {merge_agreement:.1%} of the places tried"
            message = words.format(**result.agreement)
            _progress.publish({"event": "progress", "stage": attempt.stage, "message": message})
        yield beside_adapters(trained) | {entry.path: Source(store, entry) for entry in result.files}, result.agreement
    finally:
        store.delete_tree()


def beside_adapters(trained: Mapping[str, Source]) -> dict[str, Source]:
    """The files of a model with adapters, the adapters in a folder of their own.

    Beside merged weights, transformers would put them on these once more.
    """
    return {
        f"{ADAPTER}/{path}" if PurePosixPath(path).name in _OF_ADAPTERS else path: source
        for path, source in trained.items()
    }
