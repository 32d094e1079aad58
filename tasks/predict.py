"""predict: a model and a split to sharded Parquet files with row ids, in processes of its own."""

from __future__ import annotations

from tasks.configs import LaunchSettings, PredictConfig
from tasks.stage.context import StageContext
from tasks.stage.facts import PredictFacts, PrepareFacts, TrainFacts
from tasks.stage.keys import predict_key
from tasks.stage.manifest import StageManifest
from tasks.stage.retry import halve_evaluation_batch, max_halvings
from tasks.stage.runner import StageAttempt, StageOutput, run_stage
from tasks.stage.task import stage_task
from tasks.stage.worker import data_request, entries, model_request, run_verb
from trainer_lib.arguments import TrainingArguments


@stage_task("predict")
def predict(
    config: PredictConfig,
    context: StageContext,
    data: StageManifest[PrepareFacts],
    model: StageManifest[TrainFacts],
) -> StageManifest[PredictFacts]:
    """Predict a split, unless that is committed already; finished files of an attempt that died are kept.

    Args:
        data: the manifest of prepare-data.
        model: the manifest of train.

    Returns:
        The stage's manifest: ``predictions/<split>/part-00000.parquet`` and so on; its facts are rows and split.
    """
    data, model = data.with_facts(PrepareFacts), model.with_facts(TrainFacts)

    def work(attempt: StageAttempt) -> StageOutput:
        result = run_verb(
            "predict",
            context,
            attempt,
            config.launch or LaunchSettings(),
            recipe=config.recipe,
            options=config.options,
            tracking=context.tracking,
            data=data_request(data),
            **model_request(model),
            args=halve_evaluation_batch(config.args, attempt.batch_halvings),
            split=config.split,
            rows_per_file=config.rows_per_file,
        )
        return StageOutput(entries(result["files"]), facts=PredictFacts(result["rows"], config.split))

    batch = TrainingArguments.from_dict(config.args, prefix="predict.args").per_device_eval_batch_size
    key = predict_key(config, context.recipe, context.root, data.content_digest, model.content_digest)
    return run_stage(key, context, work, retries=config.retries, max_halvings=max_halvings(batch))
