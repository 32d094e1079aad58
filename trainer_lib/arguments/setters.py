"""The `set_*` methods: each sets related arguments, checks them together, and returns the arguments for chaining."""

from __future__ import annotations

from typing import Any, Self

from trainer_lib.arguments.enums import HubStrategy, IntervalStrategy, OptimizerNames, SaveStrategy, SchedulerType
from trainer_lib.arguments.members import ArgumentMembers
from trainer_lib.arguments.validation import validate


class ArgumentSetters(ArgumentMembers):
    """The `set_*` methods, by subject. A set of values that is refused leaves the arguments as they were."""

    def validate(self) -> None:
        """Convert every field to its declared type and check all of them; building a Trainer calls it again.

        Raises:
            ConfigError: a value is refused, or two arguments contradict each other.
        """
        validate(self)

    def _set(self, **values: Any) -> Self:
        before = dict(self.__dict__)  # with the fields that validation fills, so that all of them come back
        try:
            for name, value in values.items():
                setattr(self, name, value)
            self.validate()
        except Exception:
            self.__dict__.clear()
            self.__dict__.update(before)
            raise
        return self

    def set_training(
        self,
        learning_rate: float = 5e-5,
        batch_size: int = 8,
        weight_decay: float = 0.0,
        num_epochs: float = 3.0,
        max_steps: int = -1,
        gradient_accumulation_steps: int = 1,
        seed: int = 42,
        gradient_checkpointing: bool = False,
    ) -> Self:
        """Set the basics of training; `batch_size` is in samples per process. Raises ConfigError, as every setter."""
        return self._set(
            learning_rate=learning_rate,
            per_device_train_batch_size=batch_size,
            weight_decay=weight_decay,
            num_train_epochs=num_epochs,
            max_steps=max_steps,
            gradient_accumulation_steps=gradient_accumulation_steps,
            seed=seed,
            gradient_checkpointing=gradient_checkpointing,
            activation_checkpointing=None,  # it would contradict its other name
            do_train=True,
        )

    def set_evaluate(
        self,
        strategy: str | IntervalStrategy = "no",
        steps: int | float = 500,
        batch_size: int = 8,
        accumulation_steps: int | None = None,
        delay: float | None = None,
        loss_only: bool = False,
    ) -> Self:
        """Set when and how to evaluate; `delay` is in steps or epochs, by `strategy`."""
        return self._set(
            eval_strategy=strategy,
            eval_steps=steps,
            per_device_eval_batch_size=batch_size,
            eval_accumulation_steps=accumulation_steps,
            # The argument itself does not take None.
            eval_delay=delay or 0,
            prediction_loss_only=loss_only,
        )

    def set_testing(self, batch_size: int = 8, loss_only: bool = False) -> Self:
        """Set how to predict on a test set."""
        return self._set(do_predict=True, per_device_eval_batch_size=batch_size, prediction_loss_only=loss_only)

    def set_save(
        self,
        strategy: str | SaveStrategy = "steps",
        steps: int | float = 500,
        total_limit: int | None = None,
        on_each_node: bool = False,
    ) -> Self:
        """Set when to write checkpoints, and how many to keep."""
        return self._set(
            save_strategy=strategy, save_steps=steps, save_total_limit=total_limit, save_on_each_node=on_each_node
        )

    def set_logging(
        self,
        strategy: str | IntervalStrategy = "steps",
        steps: int | float = 500,
        report_to: str | list[str] = "none",
        level: str = "passive",
        first_step: bool = False,
        # The defaults are those of the reference's method, which are not the arguments' own (True, "warning").
        nan_inf_filter: bool = False,
        on_each_node: bool = False,
        replica_level: str = "passive",
    ) -> Self:
        """Set what to log, when, and to which trackers."""
        return self._set(
            logging_strategy=strategy,
            logging_steps=steps,
            report_to=report_to,
            log_level=level,
            logging_first_step=first_step,
            logging_nan_inf_filter=nan_inf_filter,
            log_on_each_node=on_each_node,
            log_level_replica=replica_level,
        )

    def set_push_to_hub(
        self,
        model_id: str,
        strategy: str | HubStrategy = "every_save",
        token: str | None = None,
        private_repo: bool | None = None,
        always_push: bool = False,
        revision: str | None = None,
    ) -> Self:
        """Set where and when to publish."""
        return self._set(
            push_to_hub=True,
            hub_model_id=model_id,
            hub_strategy=strategy,
            hub_token=token,
            hub_private_repo=private_repo,
            hub_always_push=always_push,
            hub_revision=revision,
        )

    def set_optimizer(
        self,
        # As in the reference, not the argument's own default, which is fused.
        name: str | OptimizerNames = "adamw_torch",
        learning_rate: float = 5e-5,
        weight_decay: float = 0.0,
        beta1: float = 0.9,
        beta2: float = 0.999,
        epsilon: float = 1e-8,
        args: str | None = None,
    ) -> Self:
        """Set the optimizer and its settings; `args` is "name=value,name=value"."""
        return self._set(
            optim=name,
            learning_rate=learning_rate,
            weight_decay=weight_decay,
            adam_beta1=beta1,
            adam_beta2=beta2,
            adam_epsilon=epsilon,
            optim_args=args,
        )

    def set_lr_scheduler(
        self,
        name: str | SchedulerType = "linear",
        num_epochs: float = 3.0,
        max_steps: int = -1,
        warmup_steps: int | float = 0,
        warmup_ratio: float | None = None,
    ) -> Self:
        """Set the schedule, its length, and its warm-up (`warmup_ratio` is the old name of a share)."""
        values: dict[str, Any] = {} if warmup_ratio is None else {"warmup_ratio": warmup_ratio}
        # As in the reference, a number of steps wins over the share.
        if warmup_steps or warmup_ratio is None:
            values = {"warmup_steps": warmup_steps}
        return self._set(lr_scheduler_type=name, num_train_epochs=num_epochs, max_steps=max_steps, **values)

    def set_dataloader(
        self,
        train_batch_size: int = 8,
        eval_batch_size: int = 8,
        drop_last: bool = False,
        num_workers: int = 0,
        pin_memory: bool = True,
        persistent_workers: bool = False,
        prefetch_factor: int | None = None,
        auto_find_batch_size: bool = False,
        ignore_data_skip: bool = False,
        sampler_seed: int | None = None,
    ) -> Self:
        """Set how data is loaded; batch sizes are in samples per process."""
        return self._set(
            per_device_train_batch_size=train_batch_size,
            per_device_eval_batch_size=eval_batch_size,
            dataloader_drop_last=drop_last,
            dataloader_num_workers=num_workers,
            dataloader_pin_memory=pin_memory,
            dataloader_persistent_workers=persistent_workers,
            dataloader_prefetch_factor=prefetch_factor,
            auto_find_batch_size=auto_find_batch_size,
            ignore_data_skip=ignore_data_skip,
            data_seed=sampler_seed,
        )
