"""train: prepared data and arguments to a model, continued from its newest good checkpoint."""

from __future__ import annotations

from typing import Any

from tasks.configs import TrainConfig
from tasks.stage.keys import train_key, world_size
from tasks.stage.retry import lower_training, rungs_of
from tasks.stage.runner import StageContext, StageManifest, StageOutput, run_stage
from tasks.stage.task import stage_task
from tasks.stage.worker import data_request, dismiss, entries, run_verb
from trainer_lib.arguments import TrainingArguments

_FACTS = ("global_step", "global_samples", "world_size", "resumed_from", "checkpoints", "parameters")


@stage_task("train")
def train(
    config: TrainConfig,
    *,
    recipe: str,
    storage: str,
    data: dict[str, Any],
    tracking: dict[str, Any] | None = None,
    root: str | None = None,
    force: bool = False,
    debug: bool = False,
) -> dict[str, Any]:
    """Train, unless this very training is committed already; an unfinished one continues from its checkpoints.

    Args:
        recipe: path of the recipe's Python file; `config.recipe` comes before it.
        storage: the pipeline's storage root.
        data: the manifest of prepare-data (or of a stage of your own that gives the same `meta`).
        tracking: the MLflow run to add the curve to (`RunHandle.to_dict()`).
        root: where the recipe's imports start; None: found from the recipe.
        force: discard a committed result and the checkpoints.

    Returns:
        The stage's manifest: the model lies below `model/`; `meta` holds steps, checkpoints and what was resumed.
    """
    StageManifest.from_dict(data)
    config = config.with_launchers_arguments()
    parsed = TrainingArguments.from_dict(config.args, prefix="train.args")
    attempts: list[int] = []

    def work(context: StageContext) -> StageOutput:
        attempts.append(context.attempt)
        where = {"recipe": config.recipe or recipe, "root": root, "debug": debug}
        return _attempt(context, config, parsed, data, tracking, **where)

    key, rungs = train_key(config, recipe, root, data["content_digest"]), rungs_of(parsed.per_device_train_batch_size)
    manifest = run_stage(key, storage, work, retries=config.retries, force=force, rungs=rungs)
    if not attempts:
        dismiss(config.launch)
    return manifest


def _attempt(
    context: StageContext,
    config: TrainConfig,
    parsed: TrainingArguments,
    data: dict[str, Any],
    tracking: dict[str, Any] | None,
    **where: Any,
) -> StageOutput:
    result = run_verb(
        "train",
        context,
        config.launch,
        options=config.options,
        tracking=tracking,
        data=data_request(data),
        model=config.model,
        args=_arguments(config, context.rung, parsed),
        train_split=config.train_split,
        eval_split=config.eval_split,
        **where,
    )
    origin = None if tracking is None else tracking["run_id"]
    facts = {name: result.get(name) for name in _FACTS} | {"model": config.model, "mlflow_run_id": origin}
    return StageOutput(entries(result["files"]), metrics=result["metrics"], meta=facts)


def _arguments(config: TrainConfig, rung: int, parsed: TrainingArguments) -> dict[str, Any]:
    """The arguments of this attempt: the same global batch, however far memory reaches and many machines come."""
    processes = world_size(config.launch, use_cpu=parsed.use_cpu)
    varies = ":" in str(config.launch.nodes)
    return lower_training(config.args, rung, world_size=processes, varies=varies)
