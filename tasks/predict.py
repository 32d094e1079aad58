"""predict: a model and a split to sharded Parquet files with row ids, in processes of its own."""

from __future__ import annotations

from typing import Any

from tasks.configs import LaunchSettings, PredictConfig
from tasks.stage.keys import predict_key
from tasks.stage.retry import lower_evaluation, rungs_of
from tasks.stage.runner import StageContext, StageManifest, StageOutput, run_stage
from tasks.stage.task import stage_task
from tasks.stage.worker import data_request, entries, model_request, run_verb
from trainer_lib.arguments import TrainingArguments


@stage_task("predict")
def predict(
    config: PredictConfig,
    *,
    recipe: str,
    storage: str,
    data: dict[str, Any],
    model: dict[str, Any],
    tracking: dict[str, Any] | None = None,
    root: str | None = None,
    force: bool = False,
    debug: bool = False,
) -> dict[str, Any]:
    """Predict a split, unless that is committed already; finished files of an attempt that died are kept.

    Args:
        recipe: path of the recipe's Python file; `config.recipe` comes before it.
        storage: the pipeline's storage root.
        data: the manifest of prepare-data.
        model: the manifest of train.
        tracking: the MLflow run the workers join (`RunHandle.to_dict()`).
        root: where the recipe's imports start; None: found from the recipe.
        force: discard a committed result.

    Returns:
        The stage's manifest: ``predictions/<split>/part-00000.parquet`` and so on; `meta` holds `rows` and `split`.
    """
    StageManifest.from_dict(data)
    StageManifest.from_dict(model, stage="train")

    def work(context: StageContext) -> StageOutput:
        result = run_verb(
            "predict",
            context,
            config.launch or LaunchSettings(),
            recipe=config.recipe or recipe,
            root=root,
            options=config.options,
            tracking=tracking,
            debug=debug,
            data=data_request(data),
            **model_request(model),
            args=lower_evaluation(config.args, context.rung),
            split=config.split,
            rows_per_file=config.rows_per_file,
        )
        return StageOutput(entries(result["files"]), meta={"rows": result["rows"], "split": config.split})

    batch = TrainingArguments.from_dict(config.args, prefix="predict.args").per_device_eval_batch_size
    key = predict_key(config, recipe, root, data["content_digest"], model["content_digest"])
    return run_stage(key, storage, work, retries=config.retries, force=force, rungs=rungs_of(batch))
