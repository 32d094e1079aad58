"""train: prepared data and arguments to a model, continued from its newest good checkpoint."""

from __future__ import annotations

from dataclasses import fields

from trainer_lib.arguments import TrainingArguments
from trainer_lib.arguments.configs.accelerator_config import rows_at_a_time
from trainer_lib.arguments.configs.parallelism_config import data_size
from trainer_lib.protocol.requests import Trained, TrainRequest
from trainflow.tasks.configs import TrainConfig
from trainflow.tasks.keys.keys import train_key
from trainflow.tasks.keys.stage_code import code_of, metrics_digest
from trainflow.tasks.model.model_lineage import digest_checkpoints, find_processor, find_versions
from trainflow.tasks.stage.context import StageContext
from trainflow.tasks.stage.facts import PrepareFacts, TrainFacts
from trainflow.tasks.stage.manifest import StageManifest
from trainflow.tasks.stage.retry import halve_training_batch, max_halvings
from trainflow.tasks.stage.runner import StageAttempt, StageOutput, run_stage
from trainflow.tasks.stage.task import stage_task
from trainflow.tasks.stage.worker import dismiss, launch_request, model_fields, sent_arguments


@stage_task("train")
def train(config: TrainConfig, context: StageContext, data: StageManifest[PrepareFacts]) -> StageManifest[TrainFacts]:
    """Train, unless this very training is committed already; an unfinished one continues from its checkpoints.

    Args:
        data: the manifest of prepare-data, or of a stage of your own with such facts.

    Returns:
        The stage's manifest: the model lies below `model/`; its facts hold steps, checkpoints and what was resumed.
    """
    data = data.with_facts(PrepareFacts)
    # First: the launcher's file may set arguments, and the key has to see them.
    config = config.with_launchers_arguments()
    parsed = context.resolver.arguments(config.args, prefix="train.args")
    attempts: list[int] = []

    def work(attempt: StageAttempt) -> StageOutput:
        attempts.append(attempt.number)
        return _train(context, attempt, config, parsed, data)

    key = train_key(config, context, data)
    processes = context.resolver.launch(config.launch, use_cpu=parsed.use_cpu).world_size
    halvings = max_halvings(rows_at_a_time(parsed, data_parallel_size=data_size(parsed, processes)))
    manifest = run_stage(key, context, work, retries=config.retries, max_halvings=halvings)
    # The result was cached, so no launch came: machines that wait to take part would wait until their timeout.
    if not attempts:
        dismiss(config.launch)
    return manifest


def _train(
    context: StageContext,
    attempt: StageAttempt,
    config: TrainConfig,
    parsed: TrainingArguments,
    data: StageManifest[PrepareFacts],
) -> StageOutput:
    # Before the launch: the workers load the recipe as it is now.
    measured_by = metrics_digest(code_of(config, context))
    # Of a range of machines ("2:4") the largest number: fewer of them take more micro-batches each.
    processes = context.resolver.launch(config.launch, use_cpu=parsed.use_cpu).world_size
    varies = ":" in str(config.launch.nodes)
    args = halve_training_batch(config.args, attempt.batch_halvings, world_size=processes, varies=varies)
    request = TrainRequest(
        **model_fields(config, context, attempt, data),
        args=sent_arguments(args, context),
        model=config.model,
        train_split=config.train_split,
        eval_split=config.eval_split,
        flavor=context.flavor,
        metrics=context.metrics,
        preemption=None if config.preemption is None else config.preemption.to_request(),
        stop_early=None if config.stop_early is None else config.stop_early.to_request(),
    )
    result = launch_request(request, config.launch, context, attempt)
    digests, exported = digest_checkpoints(attempt.store, result.checkpoints, result.files)
    facts = TrainFacts(
        **{fact.name: getattr(result, fact.name) for fact in fields(Trained)},
        model=config.model,
        mlflow_run_id=context.tracking.run_id if context.tracking else None,
        tracked_run=context.tracking.token if context.tracking else None,
        metrics_code=measured_by,
        checkpoint_digests=digests,
        exported=exported,
        environment={**find_versions(), "processor": find_processor()},
    )
    return StageOutput(result.files, metrics=result.metrics, facts=facts)
