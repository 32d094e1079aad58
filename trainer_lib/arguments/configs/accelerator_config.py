"""`accelerator_config`: the meaning of its settings, given that every process reads its own share of the data.

split_batches                per_device_train_batch_size (and eval's) is divided among the processes
non_blocking                 copies to the device overlap with the host's work (the default)
gradient_accumulation_kwargs `sync_each_batch`: gradients are exchanged after every micro-batch (less memory)
use_configured_state         the caller has formed the process group: the Trainer forms none
even_batches                 no effect: no sample is repeated, and a process without samples gets a dummy batch
use_seedable_sampler         True only: the order is a function of the seed, on which resuming depends
dispatch_batches             False only: no process reads for the others

The micro-batch and the global batch follow from these and the arguments:

::

    micro-batch   per_device_train_batch_size                            or, with split_batches,
                  per_device_train_batch_size / processes
                  global_batch_size / processes                          when only that is given
    global batch  global_batch_size                                      when it is given, else
                  micro-batch x gradient_accumulation_steps x processes

*processes* are the data-parallel ones: those that train on different samples. Every other place that needs one of
these numbers asks here.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from trainer_lib.arguments.coerce import coerce, read_mapping
from trainer_lib.base.suggestions import require_known
from trainer_lib.errors import ConfigError

if TYPE_CHECKING:
    from trainer_lib.arguments.groups import ArgumentGroups


_FIELD = "accelerator_config"
_ACCUMULATION = "gradient_accumulation_kwargs"
#: The settings of the reference's `AcceleratorConfig`, and what they mean when they are not given.
ACCELERATOR_KEYS: Mapping[str, Any] = {
    **dict.fromkeys(("split_batches", "use_configured_state"), False),
    **dict.fromkeys(("dispatch_batches", _ACCUMULATION), None),
    **dict.fromkeys(("even_batches", "use_seedable_sampler", "non_blocking"), True),
}
_ACCUMULATION_KEYS = ("sync_each_batch", "adjust_scheduler", "sync_with_dataloader")
# Settings that are supported with one value only: (that value, the reason, the alternative).
_ONLY: Mapping[str, tuple[bool, str, str]] = {
    "dispatch_batches": (
        False,
        "no process reads data for the others: each reads its own share by position.",
        "Remove it; make expensive reading cheaper with dataloader_num_workers.",
    ),
    "use_seedable_sampler": (
        True,
        "the order of the data is always a function of the seed, on which resuming depends.",
        "Remove it, or override _get_train_sampler.",
    ),
    f"{_ACCUMULATION}.adjust_scheduler": (
        True,
        "the schedule always counts optimizer steps.",
        "Remove it, or pass a schedule of your own in `optimizers`.",
    ),
    f"{_ACCUMULATION}.sync_with_dataloader": (
        True,
        "the last group of micro-batches of an epoch is always stepped on, at its exact weight.",
        "Remove it; dataloader_drop_last=True leaves an incomplete one out.",
    ),
}


class AcceleratorConfig(dict[str, Any]):
    """The settings that were given; each setting is an attribute too, with its usual value when it was not given."""

    def __getattr__(self, name: str) -> Any:
        if name not in ACCELERATOR_KEYS:
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        return self.get(name, ACCELERATOR_KEYS[name])

    def __setattr__(self, name: str, value: Any) -> None:
        refuse_unknown({name: value})
        self[name] = value

    @classmethod
    def from_file(cls, name: str) -> Self:
        """Read the settings from a JSON or YAML file. Raises ConfigError when it cannot be read."""
        return cls(read_mapping(Path(name), field=_FIELD))

    def to_dict(self) -> dict[str, Any]:
        """Return every setting, given or not."""
        return {**ACCELERATOR_KEYS, **self}


@dataclass(frozen=True)
class BatchSettings:
    """The settings of `accelerator_config` that have an effect, as the top of this file explains them."""

    split_batches: bool = False
    non_blocking: bool = True
    sync_each_batch: bool = False
    use_configured_state: bool = False

    @classmethod
    def of(cls, config: Mapping[str, Any] | str | None) -> BatchSettings:
        """Read the argument: a mapping, or the name of a JSON or YAML file. Raises ConfigError."""
        values = dict(AcceleratorConfig.from_file(config) if isinstance(config, str) else config or {})
        refuse_unknown(values)
        # Taken apart, so that its settings are checked under their dotted names like the others.
        values |= {f"{_ACCUMULATION}.{name}": value for name, value in (values.pop(_ACCUMULATION, None) or {}).items()}
        flags = {name: coerce(value, bool | None, field=f"{_FIELD}.{name}") for name, value in values.items()}
        for name, (served, why, remedy) in _ONLY.items():
            if flags.get(name) not in (None, served):
                what = f"This setting is not supported: {why}"
                raise ConfigError(what, field=f"{_FIELD}.{name}", value=not served, remedy=remedy)
        # None: the setting is absent, or null in a file that was written out in full.
        non_blocking = flags.get("non_blocking")
        return cls(
            split_batches=bool(flags.get("split_batches")),
            non_blocking=True if non_blocking is None else non_blocking,
            sync_each_batch=bool(flags.get(f"{_ACCUMULATION}.sync_each_batch")),
            use_configured_state=bool(flags.get("use_configured_state")),
        )

    def share(self, batch_size: int, data_parallel_size: int, *, field: str) -> int:
        """The samples of one process out of the `batch_size` that the argument `field` gives. Raises ConfigError."""
        if not self.split_batches:
            return batch_size
        if batch_size % data_parallel_size:
            what = f"The batch cannot be divided among {data_parallel_size} processes, which split_batches asks for."
            raise ConfigError(what, field=field, value=batch_size, remedy=f"Give a multiple of {data_parallel_size}.")
        return batch_size // data_parallel_size

    def check_state(self, *, world_size: int, formed: bool) -> None:
        """Raise ConfigError when `use_configured_state` is on and the caller has not formed a process group."""
        # A job of one process needs no group.
        if self.use_configured_state and world_size > 1 and not formed:
            what = "This asks for a process group that the program formed before, and there is none."
            remedy = "Call torch.distributed.init_process_group first, or remove it."
            raise ConfigError(what, field=f"{_FIELD}.use_configured_state", value=True, remedy=remedy)


def refuse_unknown(values: Mapping[str, Any]) -> None:
    """Raise ConfigError for a name that is not a setting, also of gradient_accumulation_kwargs."""
    for name in values:
        require_known(name, ACCELERATOR_KEYS, "No setting has this name.", field=_FIELD, value=str(name))
    group = values.get(_ACCUMULATION) or {}
    field = f"{_FIELD}.{_ACCUMULATION}"
    if not isinstance(group, Mapping):
        raise ConfigError("This is not a mapping.", field=field, value=group, remedy="Give a mapping.")
    for name, value in group.items():
        if name == "num_steps":
            remedy = "Remove it; set gradient_accumulation_steps."
            what = "This contradicts gradient_accumulation_steps."
            raise ConfigError(what, field=f"{field}.{name}", value=value, remedy=remedy)
        require_known(name, _ACCUMULATION_KEYS, "No setting has this name.", field=f"{field}.{name}", value=value)


def total_batch_size(args: ArgumentGroups, *, data_parallel_size: int, settings: BatchSettings | None = None) -> int:
    """The samples of one optimizer step over all processes, those that train on different samples. Raises ConfigError.

    `settings`: what `args.accelerator_config` holds, where the caller has read it.
    """
    if args.global_batch_size:
        return args.global_batch_size
    split = (settings or BatchSettings.of(args.accelerator_config)).split_batches
    processes = 1 if split else data_parallel_size  # a split batch is given for all processes together
    return args.per_device_train_batch_size * args.gradient_accumulation_steps * processes


def micro_batch_size(args: ArgumentGroups, *, data_parallel_size: int, settings: BatchSettings | None = None) -> int:
    """The samples that one process trains on at a time; arguments and errors as in `total_batch_size`."""
    settings = settings or BatchSettings.of(args.accelerator_config)
    return settings.share(args.per_device_train_batch_size, data_parallel_size, field="per_device_train_batch_size")


def rows_at_a_time(args: ArgumentGroups, *, data_parallel_size: int) -> int:
    """Return the samples that a process really trains on at a time: its share of the global batch may be smaller."""
    share = -(-total_batch_size(args, data_parallel_size=data_parallel_size) // data_parallel_size)
    return min(micro_batch_size(args, data_parallel_size=data_parallel_size), share)


def follows_global_batch(args: ArgumentGroups) -> bool:
    """Whether the micro-batch follows from `global_batch_size`, because no micro-batch was given."""
    return "per_device_train_batch_size" in args.__dict__.get("_filled", ())


def describe_step(args: ArgumentGroups, *, data_parallel_size: int, micro_batch: int | None = None) -> str:
    """Return the samples of a step in words; `micro_batch` where memory allowed fewer than the arguments."""
    total = total_batch_size(args, data_parallel_size=data_parallel_size)
    size = min(micro_batch or total, rows_at_a_time(args, data_parallel_size=data_parallel_size))
    accumulation = -(-total // (size * data_parallel_size))
    processes = f"{data_parallel_size} process{'es' if data_parallel_size > 1 else ''}"
    return f"{total:,} samples a step: micro-batch {size:,} x accumulation {accumulation:,} x {processes}"


def accumulation_steps(args: ArgumentGroups, *, data_parallel_size: int) -> int:
    """Return the micro-batches that a process adds up for one full global batch, at least 1."""
    if args.global_batch_size is None:
        return args.gradient_accumulation_steps
    micro_batch = micro_batch_size(args, data_parallel_size=data_parallel_size)
    # Rounded up: with fewer micro-batches the step would miss samples of the global batch.
    return max(1, -(-args.global_batch_size // (micro_batch * data_parallel_size)))
