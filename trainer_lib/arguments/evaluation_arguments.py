"""Arguments about evaluation during training, and about which model counts as the best."""

from __future__ import annotations

from dataclasses import dataclass

from trainer_lib.arguments.enums import IntervalStrategy
from trainer_lib.arguments.fields import arg


@dataclass
class EvaluationArguments:
    """When to evaluate, what to keep, and what "best" means."""

    eval_strategy: IntervalStrategy | str = arg("no", "When to evaluate during training.", affects="selection")
    eval_steps: int | float | None = arg(
        None,
        "Steps between two evaluations; below 1 a share of all steps; logging_steps when not given.",
        affects="selection",
        unit="steps, or a share",
        ge=0,
    )
    eval_delay: int | float = arg(
        0,
        "Steps (or epochs, by eval_strategy) before the first evaluation.",
        affects="selection",
        unit="steps or epochs",
        ge=0,
    )
    eval_on_start: bool = arg(False, "Evaluate once before the first step.", affects="selection")
    prediction_loss_only: bool = arg(False, "Keep only the loss: no predictions, no metrics.", affects="evaluation")
    eval_accumulation_steps: int | None = arg(
        None,
        "Evaluation steps whose outputs stay on the device before they go to disk.",
        affects="nothing",
        unit="micro-batches",
        ge=1,
    )
    batch_eval_metrics: bool = arg(
        False,
        "Call compute_metrics on every batch (with compute_result=True on the last), instead of once on everything.",
        affects="evaluation",
    )
    include_for_metrics: list[str] = arg(
        factory=list,
        help='What compute_metrics also gets: "inputs", "loss".',
        affects="evaluation",
        choices=("inputs", "loss"),
    )
    eval_do_concat_batches: bool = arg(
        True, "Hand compute_metrics one array; false = a list of the batches' arrays.", affects="evaluation"
    )
    eval_use_gather_object: bool = arg(
        False, "Gather outputs that are no tensors from all processes.", affects="evaluation"
    )
    metric_for_best_model: str | None = arg(
        None, 'Metric that decides which checkpoint is best; "loss" when one is needed.', affects="selection"
    )
    greater_is_better: bool | None = arg(
        None, 'Whether more of it is better; when not given, unless its name ends in "loss".', affects="selection"
    )
    load_best_model_at_end: bool = arg(
        False, "End with the best checkpoint's weights instead of the last.", affects="weights"
    )
    use_legacy_prediction_loop: bool = arg(
        False,
        "Evaluate through prediction_loop, which older subclasses override, instead of evaluation_loop.",
        affects="nothing",
    )
