"""The common part of evaluate and predict: a trained model, applied to prepared data.

Both give the worker the same fields, and both go on with half the batch when memory runs out: no result depends on it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from trainer_lib.protocol.requests import ModelRequest
from trainflow.tasks.configs import EvaluateConfig, LaunchSettings, PredictConfig
from trainflow.tasks.keys.keys import StageKey
from trainflow.tasks.stage.context import StageContext
from trainflow.tasks.stage.facts import PrepareFacts, TrainFacts
from trainflow.tasks.stage.manifest import StageManifest
from trainflow.tasks.stage.retry import count_sharers, halve_evaluation_batch, max_halvings
from trainflow.tasks.stage.runner import StageAttempt, StageOutput, run_stage
from trainflow.tasks.stage.worker import model_fields, sent_arguments

Q = TypeVar("Q", bound=ModelRequest[Any])


def run_inference(
    key: StageKey,
    config: EvaluateConfig | PredictConfig,
    context: StageContext,
    data: StageManifest[PrepareFacts],
    model: StageManifest[TrainFacts],
    *,
    request: Callable[..., Q],
    carry_out: Callable[[Q, LaunchSettings, StageContext, StageAttempt], StageOutput],
) -> StageManifest:
    """Run a stage that applies a model, unless its result is committed already.

    Args:
        request: makes the verb's request of the fields that both verbs have.
        carry_out: has workers do it, and makes the stage's output of their answer.

    Raises:
        ConfigError: `data` or `model` is the manifest of another stage.
    """
    # A manifest from a file has the facts of its stage; mypy learns which ones here.
    data, model = data.with_facts(PrepareFacts), model.with_facts(TrainFacts)
    launch = config.launch or LaunchSettings()
    # Only to know how far the batch can be halved.
    parsed = context.resolver.arguments(config.args, prefix=f"{key.stage}.args")
    sharers = count_sharers(parsed, lambda: context.resolver.launch(launch, use_cpu=parsed.use_cpu).world_size)

    def work(attempt: StageAttempt) -> StageOutput:
        args = halve_evaluation_batch(config.args, attempt.batch_halvings, shared_by=sharers)
        asked = request(
            **model_fields(config, context, attempt, data),
            args=sent_arguments(args, context),
            model=model.facts.model,
            model_url=f"{model.url}/model",
        )
        return carry_out(asked, launch, context, attempt)

    halvings = max_halvings(parsed.per_device_eval_batch_size, shared_by=sharers)
    return run_stage(key, context, work, retries=config.retries, max_halvings=halvings)
