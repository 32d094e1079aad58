"""The optimizer and the schedule that a `TFTrainer` uses when none is given. Importing this module imports keras."""

from __future__ import annotations

from typing import Any

from typing_extensions import override

from trainer_lib.arguments import TrainingArguments
from trainer_lib.keras_models.keras_backend import import_keras

keras = import_keras()
_Schedule: Any = keras.optimizers.schedules.LearningRateSchedule


class WarmUp(_Schedule):  # type: ignore[misc]
    """Rises from 0 to `initial_learning_rate` over the warm-up, to the power `power`; then follows another schedule.

    Args:
        decay_schedule_fn: step after the warm-up -> rate.
        warmup_steps: optimizer steps of the warm-up.
    """

    def __init__(
        self, initial_learning_rate: float, decay_schedule_fn: Any, warmup_steps: int, power: float = 1.0
    ) -> None:
        self.initial_learning_rate = initial_learning_rate
        self.decay_schedule_fn = decay_schedule_fn
        self.warmup_steps = warmup_steps
        self.power = power

    @override
    def __call__(self, step: Any) -> Any:
        """The rate of a step, counted from 0."""
        number = keras.ops.cast(step, "float32")
        share = number / self.warmup_steps
        rising = self.initial_learning_rate * keras.ops.power(share, self.power)
        return keras.ops.where(share < 1.0, rising, self.decay_schedule_fn(number - self.warmup_steps))

    @override
    def get_config(self) -> dict[str, Any]:
        """The settings as plain values."""
        return {
            "initial_learning_rate": self.initial_learning_rate,
            "decay_schedule_fn": keras.saving.serialize_keras_object(self.decay_schedule_fn),
            "warmup_steps": self.warmup_steps,
            "power": self.power,
        }


def create_schedule(args: TrainingArguments, num_training_steps: int) -> Any:
    """A polynomial decay to 0 over the steps after the warm-up; its power is `poly_power`."""
    warmup = args.get_warmup_steps(num_training_steps)
    decay = keras.optimizers.schedules.PolynomialDecay(
        initial_learning_rate=args.learning_rate,
        decay_steps=max(1, num_training_steps - warmup),
        end_learning_rate=0.0,
        power=getattr(args, "poly_power", 1.0),
    )
    return WarmUp(args.learning_rate, decay, warmup) if warmup else decay


def create_optimizer(args: TrainingArguments, schedule: Any, variables: Any, decayed: set[int]) -> Any:
    """Adam or, with weight decay, AdamW; it follows `schedule`.

    Args:
        variables: the model's trainable variables.
        decayed: ids of the tensors that decay.
    """
    adam = {"beta_1": args.adam_beta1, "beta_2": args.adam_beta2, "epsilon": args.adam_epsilon}
    if not args.weight_decay:
        return keras.optimizers.Adam(schedule, **adam)
    optimizer = keras.optimizers.AdamW(schedule, weight_decay=args.weight_decay, **adam)
    optimizer.exclude_from_weight_decay(var_list=[each for each in variables if id(each.value) not in decayed])
    return optimizer
