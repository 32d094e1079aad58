"""Arguments about the optimizer, its learning-rate schedule, clipping and regularisation."""

from __future__ import annotations

from dataclasses import dataclass

from trainer_lib.arguments.enums import OptimizerNames, SchedulerType
from trainer_lib.arguments.fields import Settings, Steps, Words, arg


@dataclass
class OptimisationArguments:
    """Optimizer, schedule, clipping, regularisation."""

    # The defaults below are the reference's.
    learning_rate: float = arg(
        5e-5,
        "Learning rate at the end of the warm-up, from which the schedule starts.",
        affects="weights",
        unit="per step",
        ge=0,
    )
    lr_scheduler_type: SchedulerType | str = arg(
        "linear", "How the learning rate changes over training.", affects="weights"
    )
    lr_scheduler_kwargs: Settings = arg(
        None, 'Further settings of the schedule, such as {"num_cycles": 2}.', affects="weights"
    )
    warmup_steps: Steps = arg(
        0,
        "Steps over which the learning rate rises from 0; a number below 1 is a share of all steps.",
        affects="weights",
        unit="steps, or a share",
        ge=0,
    )
    optim: OptimizerNames | str = arg("adamw_torch_fused", "The optimizer.", affects="weights")
    optim_args: str | None = arg(
        None, 'Further settings of the optimizer, as "name=value,name=value".', affects="weights"
    )
    optim_target_modules: Words = arg(
        None,
        'Modules whose matrices a low-rank optimizer (GaLore, APOLLO) projects: names, a pattern, or "all-linear".',
        affects="weights",
    )
    weight_decay: float = arg(
        0.0,
        "Decoupled weight decay of all parameters except biases and norm layers.",
        affects="weights",
        unit="per step",
        ge=0,
    )
    adam_beta1: float = arg(
        0.9, "Decay of Adam's running mean of gradients.", affects="weights", unit="per step", ge=0, lt=1
    )
    adam_beta2: float = arg(
        0.999, "Decay of Adam's running mean of squared gradients.", affects="weights", unit="per step", ge=0, lt=1
    )
    adam_epsilon: float = arg(
        1e-8, "Added to Adam's denominator to avoid division by zero.", affects="weights", unit="gradient", ge=0
    )
    max_grad_norm: float = arg(
        1.0, "Gradients with a larger norm are scaled down to it; 0 = never.", affects="weights", unit="L2 norm", ge=0
    )
    # Ours: the reference has no such limit.
    max_nonfinite_steps: int = arg(
        10,
        "The run fails after so many steps in a row with a NaN or infinite loss or gradient; such steps are skipped.",
        affects="nothing",
        unit="steps",
        ge=1,
        alone=True,
    )
    # Ours, too. The window is in the train key only when a spike rolls back (`numeric`).
    loss_spike_sigma: float | None = arg(
        None,
        "Roll back when a step's loss exceeds the mean of loss_spike_window steps by so many standard deviations, or "
        "when max_nonfinite_steps in a row are not finite: training goes back to the checkpoint before and skips the "
        "samples in between. When not given, never.",
        affects="weights",
        unit="standard deviations",
        gt=0,
        alone=True,
    )
    loss_spike_window: int = arg(
        128, "Steps whose losses loss_spike_sigma compares with.", affects="nothing", unit="steps", ge=2, alone=True
    )
    max_loss_spikes: int = arg(
        3,
        "Rollbacks of one training, after which the next spike ends it.",
        affects="nothing",
        unit="rollbacks",
        ge=0,
        alone=True,
    )
    label_smoothing_factor: float = arg(
        0.0,
        "Share of the target's probability that is distributed over all labels; 0 = none.",
        affects="outputs",
        unit="probability",
        ge=0,
        lt=1,
    )
    # In the train key only: the noise is added in training mode.
    neftune_noise_alpha: float | None = arg(
        None,
        "Strength of the noise that training adds to embeddings (NEFTune, arXiv:2310.05914).",
        affects="weights",
        unit="noise scale",
        ge=0,
    )
