"""`TrainerBase`: the attributes of a Trainer, as declared for its API files. Each has one writer.

Every API file holds methods that a subclass may override. Their default bodies call a collaborator of
`self._trainflow`; a collaborator calls such methods on the Trainer and never its own version of them, so that an
override is what runs. Attributes of ours are reserved under the prefix `_trainflow`: subclasses define names such as
`_step`, `device` or `strategy`, and none of them is used here.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Generic, TypeVar

import torch
from torch import nn

from trainer_lib.arguments import TrainingArguments
from trainer_lib.callbacks.base import CallbackHandler
from trainer_lib.memory import MemoryTracker
from trainer_lib.state import TrainerControl, TrainerState
from trainer_lib.trainer.accelerator import AcceleratorFacade
from trainer_lib.trainer.losses import LabelSmoother

if TYPE_CHECKING:
    from trainer_lib.trainer.internals import Internals


T = TypeVar("T")


class _Derived(Generic[T]):
    """An attribute that is computed, until a subclass sets its own value under this name."""

    def __init__(self, compute: Callable[[Any], T], doc: str) -> None:
        self._compute = compute
        self.__doc__ = doc

    # Without a `__set__`, an assignment to the instance hides this descriptor.
    def __get__(self, trainer: Any, owner: type | None = None) -> T:
        return self._compute(trainer) if trainer is not None else self  # type: ignore[return-value]


class TrainerBase:
    """Attributes that all API files share; `Trainer` is the public class."""

    _trainflow: Internals

    # What the user gave.
    args: TrainingArguments
    model_init: Callable[..., nn.Module] | None
    processing_class: Any
    train_dataset: Any
    eval_dataset: Any
    data_collator: Callable[[list[Any]], Any]
    compute_loss_func: Callable[..., torch.Tensor] | None
    compute_metrics: Callable[..., dict[str, Any]] | None
    optimizer_cls_and_kwargs: tuple[type[torch.optim.Optimizer], dict[str, Any]] | None
    preprocess_logits_for_metrics: Callable[[Any, Any], Any] | None

    # What is made of it.
    accelerator: AcceleratorFacade
    model: nn.Module
    model_wrapped: nn.Module
    optimizer: torch.optim.Optimizer | None
    lr_scheduler: Any
    callback_handler: CallbackHandler
    state: TrainerState
    control: TrainerControl
    label_names: list[str]
    label_smoother: LabelSmoother | None
    can_return_loss: bool
    is_model_parallel: bool
    place_model_on_device: bool
    is_in_train: bool
    current_flos: float
    current_gradient_accumulation_steps: int
    hub_model_id: str | None = None
    _memory_tracker: MemoryTracker
    _signature_columns: list[str] | None = None

    # Of a search.
    hp_name: Callable[[Any], str] | None
    hp_space: Callable[[Any], Any] | None
    compute_objective: Callable[[dict[str, float]], Any] | None
    hp_search_backend: str | None
    objective: list[float] | None
    _trial: Any

    def is_local_process_zero(self) -> bool:
        """Whether this is the main process of its machine."""
        return self._trainflow.world.comm.local_rank == 0

    def is_world_process_zero(self) -> bool:
        """Whether this is the main process of the whole job."""
        return self._trainflow.world.comm.rank == 0

    is_fsdp_enabled: _Derived[bool] = _Derived(
        lambda self: self._trainflow.engine.strategy.name == "fsdp",
        "Whether FSDP shards the model: overridden methods check it before they gather parameters.",
    )
    is_deepspeed_enabled: _Derived[bool] = _Derived(
        lambda self: self._trainflow.engine.strategy.name == "deepspeed", "Whether DeepSpeed trains the model."
    )
    deepspeed: _Derived[Any] = _Derived(
        lambda self: getattr(self._trainflow.engine.strategy, "engine", None),
        "DeepSpeed's engine; None before training, and without DeepSpeed.",
    )
    tokenizer: _Derived[Any] = _Derived(lambda self: self.processing_class, "Old name of `processing_class`.")
