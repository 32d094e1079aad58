"""`TrainerBase`: the attributes of a Trainer, as declared for its API files. Each has one writer.

Every API file holds methods that a subclass may override. Their default bodies call a collaborator of
`self._trainflow`; a collaborator calls such methods on the Trainer and never its own version of them, so that an
override is what runs. The Trainer's own attributes begin with `_trainflow`: subclasses define names such as
`_step`, `device` or `strategy`, and none of them is used here.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Generic, TypeVar

import torch
from torch import nn

from trainer_lib.arguments import TrainingArguments
from trainer_lib.base.memory import MemoryTracker
from trainer_lib.callbacks.base import CallbackHandler
from trainer_lib.state import TrainerControl, TrainerState

if TYPE_CHECKING:
    from trainer_lib.hub.publisher import PushQueue
    from trainer_lib.trainer.accelerator.trainer_accelerator import TrainerAccelerator
    from trainer_lib.trainer.internals import Internals
    from trainer_lib.trainer.model.trained_model import LabelSmoother


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

    accelerator: _Derived[TrainerAccelerator] = _Derived(
        lambda self: self._trainflow.accelerator.get(),
        "An `accelerate.Accelerator` around the Trainer's engine, for overrides; made at its first use.",
    )
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
    # Never here: no layer is split over processes, torch_xla's FSDP is not used, `from_pretrained` shards nothing.
    is_tp_enabled = is_fsdp_xla_enabled = is_fsdp_xla_v1_enabled = is_fsdp_xla_v2_enabled = False
    is_distributed_loading_by_transformers = False
    gather_function: _Derived[Any] = _Derived(
        lambda self: self.accelerator.gather_for_metrics,
        "Gathers the tensors of an overridden `evaluation_loop`; the library's own loop does not repeat samples.",
    )
    neftune_noise_alpha: _Derived[float | None] = _Derived(
        lambda self: self.args.neftune_noise_alpha, "The noise of NEFTune that the next training adds."
    )
    model_accepts_loss_kwargs: _Derived[bool] = _Derived(
        lambda self: self._trainflow.facts.accepts_loss_kwargs,
        "Whether the model's forward takes `num_items_in_batch`, by name or among its keyword arguments.",
    )
    loss_is_scaled_for_ga: bool | None = None
    push_in_progress: _Derived[PushQueue | None] = _Derived(
        lambda self: self._trainflow.publisher.push_in_progress,
        "The pushes in the background: `is_done()` and `wait_until_done()`; None when nothing was pushed yet.",
    )
    _tr_loss: _Derived[torch.Tensor] = _Derived(
        lambda self: torch.zeros(()) if (run := self._trainflow.run) is None else run.history.sum_since_log(),
        "The sum of the losses since the last log, ``[]``.",
    )
    _total_loss_scalar: float = 0.0  # an override that logs by itself adds up here
    _initial_global_step: _Derived[int] = _Derived(
        lambda self: 0 if self._trainflow.run is None else self._trainflow.run.first_step,
        "The step at which this call of `train` took over.",
    )
    _initial_num_input_tokens_seen: _Derived[int] = _Derived(
        lambda self: 0 if self._trainflow.run is None else self._trainflow.run.first_tokens,
        "The tokens that were counted before this call of `train`.",
    )
    _loss_shifts_labels: _Derived[bool] = _Derived(
        lambda self: self._trainflow.facts.shifts_labels,
        "Whether the model's loss compares position t with label t + 1.",
    )
    _created_lr_scheduler: _Derived[bool] = _Derived(
        lambda self: self.lr_scheduler is not None and self._trainflow.engine.given_optimizers[1] is None,
        "Whether the schedule was made for the training, and not given.",
    )
    tokenizer: _Derived[Any] = _Derived(lambda self: self.processing_class, "Old name of `processing_class`.")
