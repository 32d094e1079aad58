"""Arguments about evaluation during training, and about the choice of the best model."""

from __future__ import annotations

from dataclasses import dataclass

from trainer_lib.arguments.enums import IntervalStrategy
from trainer_lib.arguments.fields import OptionalSteps, Steps, arg


@dataclass
class EvaluationArguments:
    """When to evaluate, what to keep, and which model is the best."""

    eval_strategy: IntervalStrategy | str = arg("no", "When to evaluate during training.", affects="selection")
    eval_steps: OptionalSteps = arg(
        None,
        "Steps between two evaluations; a number below 1 is a share of all steps; logging_steps when not given.",
        affects="selection",
        unit="steps, or a share",
        ge=0,
    )
    eval_delay: Steps = arg(
        0,
        "Steps or epochs (as eval_strategy says) before the first evaluation.",
        affects="selection",
        unit="steps or epochs",
        ge=0,
    )
    eval_on_start: bool = arg(False, "Evaluate once before the first step.", affects="selection")
    prediction_loss_only: bool = arg(False, "Keep only the loss: no predictions, no metrics.", affects="evaluation")
    # Not in a key: the outputs are the same wherever they wait.
    eval_accumulation_steps: int | None = arg(
        None,
        "Micro-batches whose outputs stay on the device before they go to disk.",
        affects="nothing",
        unit="micro-batches",
        ge=1,
    )
    batch_eval_metrics: bool = arg(
        False,
        "Call compute_metrics for every batch (with compute_result=True for the last) instead of once for all data.",
        affects="evaluation",
    )
    include_for_metrics: list[str] = arg(
        factory=list,
        help='Further values for compute_metrics: "inputs", "loss".',
        affects="evaluation",
        choices=("inputs", "loss"),
    )
    eval_do_concat_batches: bool = arg(
        True, "Give compute_metrics one array; false = a list of the batches' arrays.", affects="evaluation"
    )
    eval_use_gather_object: bool = arg(
        False, "Gather outputs that are not tensors from all processes.", affects="evaluation"
    )
    metric_for_best_model: str | None = arg(
        None,
        'Metric that decides which checkpoint is the best; "loss" if one is needed and none is given.',
        affects="selection",
    )
    greater_is_better: bool | None = arg(
        None, 'A larger metric is better; when not given, true unless the name ends in "loss".', affects="selection"
    )
    # In the train key by itself: it decides which weights the run ends with.
    load_best_model_at_end: bool = arg(
        False, "End with the weights of the best checkpoint instead of the last ones.", affects="weights"
    )
    use_legacy_prediction_loop: bool = arg(
        False,
        "Evaluate by prediction_loop, which older subclasses override, instead of evaluation_loop.",
        affects="nothing",
    )
