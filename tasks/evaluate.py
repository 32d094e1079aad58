"""evaluate: a model and splits to metrics, in processes of its own."""

from __future__ import annotations

from tasks.configs import EvaluateConfig, LaunchSettings
from tasks.stage.context import StageContext
from tasks.stage.facts import EvaluateFacts, PrepareFacts, TrainFacts
from tasks.stage.keys import evaluate_key
from tasks.stage.manifest import StageManifest
from tasks.stage.retry import halve_evaluation_batch, max_halvings
from tasks.stage.runner import StageAttempt, StageOutput, run_stage
from tasks.stage.task import stage_task
from tasks.stage.worker import data_request, entries, model_request, run_verb
from trainer_lib.arguments import TrainingArguments


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
    data, model = data.with_facts(PrepareFacts), model.with_facts(TrainFacts)

    def work(attempt: StageAttempt) -> StageOutput:
        result = run_verb(
            "evaluate",
            context,
            attempt,
            config.launch or LaunchSettings(),
            recipe=config.recipe,
            options=config.options,
            tracking=context.tracking,
            data=data_request(data),
            **model_request(model),
            args=halve_evaluation_batch(config.args, attempt.batch_halvings),
            splits=config.splits,
        )
        return StageOutput(entries(result["files"]), metrics=result["metrics"], facts=EvaluateFacts())

    batch = TrainingArguments.from_dict(config.args, prefix="evaluate.args").per_device_eval_batch_size
    key = evaluate_key(config, context.recipe, context.root, data.content_digest, model.content_digest)
    return run_stage(key, context, work, retries=config.retries, max_halvings=max_halvings(batch))
