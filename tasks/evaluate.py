"""evaluate: a model and splits to metrics, in processes of its own."""

from __future__ import annotations

from typing import Any

from tasks.configs import EvaluateConfig, LaunchSettings
from tasks.stage.keys import evaluate_key
from tasks.stage.retry import lower_evaluation, rungs_of
from tasks.stage.runner import StageContext, StageManifest, StageOutput, run_stage
from tasks.stage.task import stage_task
from tasks.stage.worker import data_request, entries, model_request, run_verb
from trainer_lib.arguments import TrainingArguments


@stage_task("evaluate")
def evaluate(
    config: EvaluateConfig,
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
    """Measure the model, unless that is committed already.

    Args:
        recipe: path of the recipe's Python file; `config.recipe` comes before it.
        storage: the pipeline's storage root.
        data: the manifest of prepare-data.
        model: the manifest of train.
        tracking: the MLflow run the workers join (`RunHandle.to_dict()`).
        root: where the recipe's imports start; None: found from the recipe.
        force: discard a committed result.

    Returns:
        The stage's manifest; its `metrics` are split -> name -> value.
    """
    StageManifest.from_dict(data)
    StageManifest.from_dict(model, stage="train")

    def work(context: StageContext) -> StageOutput:
        result = run_verb(
            "evaluate",
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
            splits=config.splits,
        )
        return StageOutput(entries(result["files"]), metrics=result["metrics"])

    batch = TrainingArguments.from_dict(config.args, prefix="evaluate.args").per_device_eval_batch_size
    key = evaluate_key(config, recipe, root, data["content_digest"], model["content_digest"])
    return run_stage(key, storage, work, retries=config.retries, force=force, rungs=rungs_of(batch))
