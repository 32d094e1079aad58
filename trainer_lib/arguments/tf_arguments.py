"""`TFTrainingArguments`: the arguments that `TFTrainer` adds, from the time when it trained with TensorFlow."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from typing_extensions import override

from trainer_lib.arguments.fields import arg
from trainer_lib.arguments.training import TrainingArguments
from trainer_lib.errors import ConfigError

_UNSERVED = {
    "tpu_name": "No TPU is used: the launcher starts the processes, such as torchrun --nproc-per-node 4. Remove it.",
    "tpu_zone": "No TPU is used. Remove it.",
    "gcp_project": "No TPU is used. Remove it.",
    "xla": "The model runs on torch. Remove it.",
}


@dataclass
class TFArguments:
    """The arguments that `TFTrainer` adds."""

    tpu_name: str | None = arg(None, "Name of a TPU; refused.", affects="nothing")
    tpu_zone: str | None = arg(None, "Zone of a TPU; refused.", affects="nothing")
    gcp_project: str | None = arg(None, "Google Cloud project of a TPU; refused.", affects="nothing")
    poly_power: float = arg(
        1.0, "Power of the polynomial decay of the learning rate.", affects="weights", unit="power", gt=0
    )
    xla: bool = arg(False, "Compile with XLA; refused.", affects="nothing")


class ReplicaStrategy:
    """What scripts use of a `tf.distribute.Strategy`; every replica is a process that a launcher started.

    Attributes:
        num_replicas_in_sync: number of processes that train together.
    """

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
    """`TrainingArguments` plus what `TFTrainer` needs.

    Raises:
        ConfigError: an argument of TPUs or of XLA is set. Further errors are those of `TrainingArguments`.
    """

    @override
    def validate(self) -> None:
        super().validate()
        for name, remedy in _UNSERVED.items():
            if getattr(self, name):
                raise ConfigError(
                    "The argument has no effect on a Keras model that runs on torch.",
                    field=name,
                    value=getattr(self, name),
                    remedy=remedy,
                )

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
