"""`TrainingArguments`: every argument of a training run, flat, inert and checked.

The fields live in groups and are inherited, so that subclassing as a dataclass,
`dataclasses.fields`, `dataclasses.replace` and assignment after construction work as for any dataclass. Construction
touches no device, no environment variable and no disk; properties such as `device` look only when they are read.
"""

from __future__ import annotations

import functools
import inspect
import json
from abc import ABCMeta
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from typing_extensions import override

from trainer_lib.arguments import compat
from trainer_lib.arguments.coerce import plain, read_mapping
from trainer_lib.arguments.enums import HubStrategy, IntervalStrategy, OptimizerNames, SaveStrategy, SchedulerType
from trainer_lib.arguments.fields import declarations, field_map, nothing, weights
from trainer_lib.arguments.groups import Seq2SeqArguments
from trainer_lib.arguments.members import ArgumentMembers, fill_accelerate_state
from trainer_lib.arguments.validation import validate
from trainer_lib.base.suggestions import suggestion
from trainer_lib.errors import ConfigError
from trainer_lib.secrets import is_secret, mask, mask_value


class ArgumentSetters(ArgumentMembers):
    """The `set_*` methods, by subject. A set of values that is refused leaves the arguments as they were."""

    def validate(self) -> None:
        """Convert every field to its declared type and check all of them; building a Trainer calls it again.

        Raises ConfigError for a value that is refused, and for arguments that contradict each other.
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


class _Translating(ABCMeta):
    """Lets a class and its subclasses accept old names, by translating them before `__init__` gets them."""

    if not TYPE_CHECKING:  # type checkers see the dataclass's own signature

        def __call__(cls, *values, **given):
            # Before `__init__`, because a dataclass's own signature would refuse an old name with a bare TypeError.
            known = constructor_names(cls)
            if any(name in compat.OLD_NAMES and name not in known for name in given):
                given = compat.translate(given, keep=known, stacklevel=2)
            if "**" not in known:
                refuse_unknown(given, known)
            return super().__call__(*values, **given)


# Names that other libraries use, too short for a comparison of their letters.
_SHORT_NAMES = {
    "lr": "learning_rate",
    "epochs": "num_train_epochs",
    "batch_size": "per_device_train_batch_size",
    "steps": "max_steps",
    "optimizer": "optim",
    "scheduler": "lr_scheduler_type",
}
# What the constructor of the Trainer takes -> the recipe's function for it.
_OF_THE_TRAINER = {
    "data_collator": "collate",
    "compute_metrics": "compute_metrics",
    "compute_loss_func": "compute_loss_func",
    "preprocess_logits_for_metrics": "preprocess_logits_for_metrics",
    "callbacks": "callbacks",
    "model_init": "build_model",
}


@functools.cache
def constructor_names(cls: type) -> tuple[str, ...]:
    """Return the names that a class's constructor takes; "**" stands for a constructor that takes any name."""
    parameters = list(inspect.signature(cls.__init__).parameters.values())[1:]  # type: ignore[misc]
    return tuple("**" if parameter.kind is parameter.VAR_KEYWORD else parameter.name for parameter in parameters)


def refuse_unknown(given: Mapping[str, Any], known: tuple[str, ...]) -> None:
    """Raise a ConfigError for the first name that is not an argument, with the nearest argument as remedy."""
    for name in given:
        if name in known:
            continue
        if name in _OF_THE_TRAINER:
            remedy = f"Give it to the Trainer; in a recipe, define {_OF_THE_TRAINER[name]}."
            raise ConfigError("The Trainer takes this, not its arguments.", field=name, remedy=remedy)
        usual = f'Did you mean "{_SHORT_NAMES[name]}"?' if name in _SHORT_NAMES else None
        remedy = usual or suggestion(name, [*known, *compat.OLD_NAMES], listing=False)
        raise ConfigError("No argument has this name.", field=name, remedy=remedy)


@dataclass
class TrainingArguments(ArgumentSetters, metaclass=_Translating):
    """The arguments of a training run; the class of each group documents its fields.

    Construction, and `validate` again, fill the fields that follow from others: `output_dir`, `do_eval`, `eval_steps`,
    `metric_for_best_model`, `greater_is_better`, `torch_compile`, and both names of gradient checkpointing.

    Raises:
        ConfigError: at construction, when a value is out of range or of the wrong type, a name is unknown, or
            arguments contradict each other.
    """

    def __post_init__(self) -> None:
        self.validate()
        fill_accelerate_state(self)

    def __getattr__(self, name: str) -> Any:
        # Python calls this only for names that are not found otherwise: old names, and mistakes.
        old = compat.OLD_NAMES.get(name)
        if name == "_n_gpu":  # which older scripts set too, so a property would not do
            return self.n_gpu
        if old is None:
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        compat.warn(name, stacklevel=3)
        return old.read(self)

    def __setattr__(self, name: str, value: Any) -> None:
        # A subclass may declare a field that has an old name: then the field is meant.
        if name in compat.OLD_NAMES and name not in type(self).__dataclass_fields__:
            for new, changed in compat.changes_for(name, value, stacklevel=3).items():
                present: Any = self.__dict__.get(new)
                is_joined = isinstance(present, dict) and isinstance(changed, dict)
                object.__setattr__(self, new, type(present)({**present, **changed}) if is_joined else changed)
            return
        object.__setattr__(self, name, value)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any], *, prefix: str = "train.args") -> Self:
        """Make arguments from a mapping, such as a part of a spec. Old names are accepted.

        Args:
            values: names and values; texts are converted to the field's type ("1e-3", "true", "none").
            prefix: stands before the field's name in errors.

        Raises:
            ConfigError: an argument is refused; the error's field is `<prefix>.<name>`.
        """
        try:
            return cls(**{str(name): value for name, value in values.items()})
        except ConfigError as error:
            if prefix and error.field:
                error.field = f"{prefix}.{compat.name_as_given(error.field, values)}"
            raise

    @classmethod
    def from_file(cls, path: str | PathLike[str]) -> Self:
        """Make arguments from a JSON or YAML file. Raises ConfigError, whose field is `<file name>.<name>`."""
        file = Path(path)
        return cls.from_dict(read_mapping(file, field="file"), prefix=file.name)

    def to_dict(self) -> dict[str, Any]:
        """Return every argument as plain JSON values: enums by value, dtypes by name, secrets as `<NAME>`."""
        out: dict[str, Any] = {}
        declared = declarations(type(self))
        for name, field in field_map(self).items():
            if not field.init:  # the constructor, which reads this back, does not take it
                continue
            value = getattr(self, name)
            # A subclass's field may hold a secret without declaring it, so its name counts too.
            is_named = not isinstance(value, Mapping) and is_secret(name, value)
            is_hidden = is_named or (declared[name].secret and value is not None)
            out[name] = f"<{name.upper()}>" if is_hidden else plain(value)
        return out

    def to_json_string(self) -> str:
        """Return `to_dict` as indented JSON."""
        return json.dumps(self.to_dict(), indent=2)

    def to_sanitized_dict(self) -> dict[str, Any]:
        """Return `to_dict` and the process's batch sizes; what is neither a number nor a truth value becomes text."""
        sizes = {"train_batch_size": self.train_batch_size, "eval_batch_size": self.eval_batch_size}
        shown = {name: mask_value(name, value) for name, value in {**self.to_dict(), **sizes}.items()}
        # A text may be a URL with a password in it.
        texts = {name: mask(str(value)) for name, value in shown.items() if not isinstance(value, bool | int | float)}
        return {**shown, **texts}


@dataclass
class Seq2SeqTrainingArguments(Seq2SeqArguments, TrainingArguments):
    """`TrainingArguments` plus what `Seq2SeqTrainer` needs."""


_UNSERVED = {
    "tpu_name": "No TPU is used: the launcher starts the processes, such as torchrun --nproc-per-node 4. Remove it.",
    "tpu_zone": "No TPU is used. Remove it.",
    "gcp_project": "No TPU is used. Remove it.",
    "xla": "The model runs on torch. Remove it.",
}


@dataclass
class TFArguments:
    """The arguments that `TFTrainer` adds."""

    tpu_name: str | None = nothing(None, "Name of a TPU; refused.")
    tpu_zone: str | None = nothing(None, "Zone of a TPU; refused.")
    gcp_project: str | None = nothing(None, "Google Cloud project of a TPU; refused.")
    poly_power: float = weights(1.0, "Power of the polynomial decay of the learning rate.", unit="power", gt=0)
    xla: bool = nothing(False, "Compile with XLA; refused.")


class ReplicaStrategy:
    """The part of `tf.distribute.Strategy` that scripts use; every replica is a process that a launcher started."""

    def __init__(self, replicas: int) -> None:
        self.num_replicas_in_sync = replicas

    @contextmanager
    def scope(self) -> Iterator[ReplicaStrategy]:
        """A block in which a script builds its model; every process builds its own replica."""
        yield self

    def experimental_distribute_dataset(self, dataset: Any) -> Any:
        """The dataset itself: the Trainer gives each process its share."""
        return dataset

    def run(self, fn: Callable[..., Any], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None) -> Any:
        """Call `fn` on this replica; return its result."""
        return fn(*args, **(kwargs or {}))


@dataclass
class TFTrainingArguments(TFArguments, TrainingArguments):
    """`TrainingArguments` plus what `TFTrainer` needs. Raises ConfigError for arguments of TPUs and of XLA."""

    @override
    def validate(self) -> None:
        super().validate()
        for name, remedy in _UNSERVED.items():
            if getattr(self, name):
                what = "The argument has no effect on a Keras model that runs on torch."
                raise ConfigError(what, field=name, value=getattr(self, name), remedy=remedy)

    @property
    def strategy(self) -> ReplicaStrategy:
        """The replicas, with the methods that scripts call on a `tf.distribute.Strategy`."""
        return ReplicaStrategy(self.world_size)

    @property
    def n_replicas(self) -> int:
        """Number of processes that train together."""
        return self.world_size

    @property
    @override
    def n_gpu(self) -> int:
        return self.world_size
