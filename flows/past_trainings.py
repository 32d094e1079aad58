"""The earlier training that shows how long a planned one will take: one that differs in nothing that takes time."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from flows.past_runs import list_runs
from tasks.stage.facts import TrainFacts
from tasks.stage.manifest import StageManifest, look_up_in

if TYPE_CHECKING:
    from flows.plan import Plan

# Fields of the training's key that change what is computed, and not how long a step takes.
_TIMELESS = (
    *("learning_rate", "weight_decay", "adam_", "max_grad_norm", "seed", "data_seed", "num_train_epochs", "max_steps"),
    *("warmup", "lr_scheduler", "label_smoothing", "metric_for_best_model", "greater_is_better", "optim_target"),
)


@dataclass(frozen=True)
class PastTraining:
    """How long an earlier training took.

    Attributes:
        seconds_per_step: with its evaluations and saves, on average.
        overhead_s: of its stage, around the training itself.
        described: the run in words.
    """

    seconds_per_step: float
    overhead_s: float
    described: str


def find_similar(plan: Plan) -> PastTraining | None:
    """The training itself where it is committed, else the nearest one, if only what takes no time differs; or None.

    Raises:
        StorageError: the storage cannot be read.
    """
    reason, launch = plan.reasons["train"], plan.stages["train"].launch
    manifest = reason.manifest
    if manifest is None and reason.nearest is not None and all(_is_timeless(each.field) for each in reason.differences):
        manifest = look_up_in(plan.spec.storage, "train", reason.nearest)
    if manifest is None or not isinstance(manifest.facts, TrainFacts):
        return None
    steps, seconds = manifest.facts.global_step, manifest.metrics.get("train_runtime")
    # A resumed training measured only its last part, and another number of processes is as good as another machine.
    resumed = manifest.facts.resumed_from is not None
    if not steps or not isinstance(seconds, int | float) or resumed or launch is None:
        return None
    if manifest.facts.world_size != launch.world_size:
        return None
    whole = _stage_seconds(plan, manifest)
    overhead = 0.0 if whole is None else max(0.0, whole - seconds)
    what = "this training" if reason.hit else "a training that differs in nothing that takes time"
    return PastTraining(seconds / steps, overhead, f"{what}, committed {manifest.created[:16].replace('T', ' ')} UTC")


def _is_timeless(field: str) -> bool:
    return field.startswith("args.") and field.removeprefix("args.").startswith(_TIMELESS)


def _stage_seconds(plan: Plan, manifest: StageManifest) -> float | None:
    """The time of the whole stage, from the record of the run that made the manifest."""
    for run in list_runs(plan.spec.storage):
        outcome = (run.record.get("outcomes") or {}).get("train") if run.stages.get("train") == manifest.key else None
        if isinstance(outcome, dict) and outcome.get("status") == "ran":
            return float(outcome.get("seconds") or 0.0)
    return None
