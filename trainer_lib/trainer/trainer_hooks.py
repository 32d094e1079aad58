"""`TrainerHooks`: the Trainer, as its collaborators see it.

A collaborator calls a documented method here and never its own version of it: an override in a subclass is what runs.
The Trainer's default body of such a method calls the collaborator back.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from concurrent.futures import Future
from contextlib import AbstractContextManager
from typing import Any, ClassVar, Protocol

import torch
from torch import nn
from torch.utils.data import Sampler

from trainer_lib.arguments import TrainingArguments
from trainer_lib.callbacks.base import CallbackHandler
from trainer_lib.memory import MemoryTracker
from trainer_lib.outputs import EvalLoopOutput, TrainOutput
from trainer_lib.state import TrainerControl, TrainerState
from trainer_lib.trainer.losses import LabelSmoother


class DataHooks(Protocol):
    """Data, columns and batches."""

    train_dataset: Any
    eval_dataset: Any
    processing_class: Any
    data_collator: Callable[[list[Any]], Any]
    label_names: list[str]
    _signature_columns: list[str] | None

    @property
    def _train_batch_size(self) -> int:
        """Samples of one micro-batch."""

    def get_total_train_batch_size(self, args: TrainingArguments) -> int:
        """Samples of one optimizer step over all ranks."""

    def num_examples(self, dataloader: Any) -> int:
        """Samples behind a loader."""

    def _set_signature_columns_if_needed(self) -> None:
        """Set `_signature_columns`."""

    def _remove_unused_columns(self, dataset: Any, description: str | None = None) -> Any:
        """The dataset without columns that the model does not take."""

    def _get_collator_with_removed_columns(
        self, data_collator: Callable[[list[Any]], Any], description: str | None = None
    ) -> Callable[[list[Any]], Any]:
        """The collator behind a filter of columns."""

    def _get_train_sampler(self, train_dataset: Any = None) -> Sampler[int] | None:
        """The order of the training samples."""

    def _get_eval_sampler(self, eval_dataset: Any) -> Sampler[int] | None:
        """The order of evaluated samples."""

    def get_train_dataloader(self) -> Any:
        """The loader of training micro-batches."""

    def get_eval_dataloader(self, eval_dataset: Any = None) -> Any:
        """The loader of an evaluation set."""

    def get_test_dataloader(self, test_dataset: Any) -> Any:
        """The loader of a dataset to predict."""

    def _get_dataloader(
        self,
        dataset: Any,
        description: str,
        batch_size: int,
        sampler_fn: Callable[[Any], Any] | None = None,
        is_training: bool = False,
        dataloader_key: str | None = None,
    ) -> Any:
        """A loader of a dataset."""

    def get_batch_samples(
        self, epoch_iterator: Any, num_batches: int, device: torch.device | None = None
    ) -> tuple[list[Any], torch.Tensor | int | None]:
        """(micro-batches of the next step, tensors ``[batch, ...]``; its target items ``[]``)."""


class StepHooks(Protocol):
    """One batch."""

    model: nn.Module
    compute_loss_func: Callable[..., torch.Tensor] | None
    label_smoother: LabelSmoother | None
    can_return_loss: bool
    neftune_noise_alpha: Any
    loss_is_scaled_for_ga: bool | None

    @property
    def model_accepts_loss_kwargs(self) -> bool:
        """Whether the model's forward takes `num_items_in_batch`."""

    def _prepare_input(self, data: Any) -> Any:
        """Tensors on the device."""

    def _prepare_inputs(self, inputs: Any) -> Any:
        """A batch ready for the model."""

    def compute_loss_context_manager(self) -> AbstractContextManager[Any]:
        """The context in which a loss is computed."""

    def training_step(
        self, model: nn.Module, inputs: Any, num_items_in_batch: torch.Tensor | int | None = None
    ) -> torch.Tensor:
        """Forward and backward of one micro-batch; its part of the step's loss, ``[]``."""

    def compute_loss(
        self,
        model: nn.Module,
        inputs: Any,
        return_outputs: bool = False,
        num_items_in_batch: torch.Tensor | int | None = None,
    ) -> Any:
        """The loss ``[]``, or (loss, outputs)."""

    def prediction_step(
        self, model: nn.Module, inputs: Any, prediction_loss_only: bool, ignore_keys: list[str] | None = None
    ) -> tuple[torch.Tensor | None, Any, Any]:
        """(loss ``[]``, logits, labels ``[batch, ...]``) of one batch."""


class OptimizationHooks(Protocol):
    """Model, optimizer and schedule."""

    model_init: Callable[..., nn.Module] | None
    model_wrapped: nn.Module
    optimizer: torch.optim.Optimizer | None
    lr_scheduler: Any
    optimizer_cls_and_kwargs: tuple[type[torch.optim.Optimizer], dict[str, Any]] | None
    is_model_parallel: bool
    place_model_on_device: bool

    def _trainflow_look_at_model(self) -> None:
        """Find the facts about the model."""

    def call_model_init(self, trial: Any = None) -> nn.Module:
        """A new model."""

    def _move_model_to_device(self, model: nn.Module, device: torch.device) -> None:
        """Move the model to the device."""

    def _wrap_model(self, model: nn.Module, training: bool = True, dataloader: Any = None) -> nn.Module:
        """The module whose forward trains."""

    def create_optimizer_and_scheduler(self, num_training_steps: int) -> None:
        """Set up the optimizer and the schedule."""

    def get_optimizer_cls_and_kwargs(
        self, args: TrainingArguments, model: nn.Module | None = None
    ) -> tuple[type[torch.optim.Optimizer], dict[str, Any]]:
        """The optimizer's class and settings."""

    def get_decay_parameter_names(self, model: nn.Module) -> list[str]:
        """Names of the parameters with weight decay."""

    def get_num_trainable_parameters(self) -> int:
        """Elements of the trained parameters."""

    def _get_learning_rate(self) -> Any:
        """The learning rate that is logged."""

    def _clip_grad_norm(self, model: nn.Module) -> torch.Tensor:
        """Clip the gradients; return their norm before clipping, 0-dim."""

    def _get_grad_norm(self, model: nn.Module, grad_norm: torch.Tensor | None = None) -> torch.Tensor:
        """The gradients' norm that is logged, 0-dim."""

    def create_scheduler(self, num_training_steps: int, optimizer: torch.optim.Optimizer | None = None) -> Any:
        """Set up the schedule."""


class EvaluationHooksOfTrainer(Protocol):
    """Evaluation and search."""

    gather_function: Any
    compute_metrics: Callable[..., dict[str, Any]] | None
    preprocess_logits_for_metrics: Callable[[Any, Any], Any] | None
    hp_name: Callable[[Any], str] | None
    hp_space: Callable[[Any], Any] | None
    compute_objective: Callable[[dict[str, float]], Any] | None
    hp_search_backend: str | None
    objective: list[float] | None
    _trial: Any

    def evaluate(
        self, eval_dataset: Any = None, ignore_keys: list[str] | None = None, metric_key_prefix: str = "eval"
    ) -> dict[str, float]:
        """Metrics of an evaluation set."""

    def evaluation_loop(
        self,
        dataloader: Any,
        description: str,
        prediction_loss_only: bool | None = None,
        ignore_keys: list[str] | None = None,
        metric_key_prefix: str = "eval",
    ) -> EvalLoopOutput:
        """One pass over a loader."""

    def prediction_loop(
        self,
        dataloader: Any,
        description: str,
        prediction_loss_only: bool | None = None,
        ignore_keys: list[str] | None = None,
        metric_key_prefix: str = "eval",
    ) -> EvalLoopOutput:
        """Old name of `evaluation_loop`."""

    def _evaluate(
        self, trial: Any, ignore_keys_for_eval: list[str] | None, skip_scheduler: bool = False
    ) -> dict[str, float]:
        """Evaluate in training."""

    def _report_to_hp_search(self, trial: Any, step: int, metrics: dict[str, float]) -> None:
        """Report to the search."""

    def _determine_best_metric(self, metrics: dict[str, float], trial: Any = None) -> bool:
        """Whether the metrics are the best so far."""


class SavingHooks(Protocol):
    """Checkpoints and the Hub."""

    hub_model_id: str | None

    def _get_output_dir(self, trial: Any = None) -> str:
        """The folder that this training writes to."""

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Write the model to a folder."""

    def _save(self, output_dir: str | None = None, state_dict: dict[str, torch.Tensor] | None = None) -> None:
        """Write the model's files."""

    def _save_checkpoint(self, model: nn.Module, trial: Any = None, metrics: dict[str, float] | None = None) -> None:
        """Save this step."""

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: nn.Module | None = None) -> None:
        """Load a checkpoint's weights."""

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        """Restore optimizer and schedule."""

    def _load_scaler(self, checkpoint: str | None) -> None:
        """Restore the loss scale."""

    def _load_rng_state(self, checkpoint: str | None) -> None:
        """Restore the random generators."""

    def _load_best_model(self) -> None:
        """Load the best checkpoint's weights."""

    def _push_from_checkpoint(self, checkpoint_folder: str) -> None:
        """Push a committed checkpoint."""

    def init_hf_repo(self, token: str | None = None) -> None:
        """Create the repository that pushes go to."""

    def create_model_card(self) -> None:
        """Write the model card."""

    def push_to_hub(self, commit_message: str | None = ..., blocking: bool = ...) -> str | Future[str] | None:
        """Publish the model."""


class LoopHooks(Protocol):
    """The life of a run."""

    args: TrainingArguments
    state: TrainerState
    control: TrainerControl
    callback_handler: CallbackHandler
    _trainflow_defaults: ClassVar[Mapping[str, Any]]
    is_in_train: bool
    current_flos: float
    current_gradient_accumulation_steps: int
    _memory_tracker: MemoryTracker

    def _trainflow_set_up(self, args: TrainingArguments) -> None:
        """Adopt arguments."""

    def train(
        self,
        resume_from_checkpoint: str | bool | None = None,
        trial: Any = None,
        ignore_keys_for_eval: list[str] | None = None,
    ) -> TrainOutput:
        """Train."""

    def _inner_training_loop(
        self,
        batch_size: int | None = None,
        args: TrainingArguments | None = None,
        resume_from_checkpoint: str | None = None,
        trial: Any = None,
        ignore_keys_for_eval: list[str] | None = None,
    ) -> TrainOutput:
        """One training with one micro-batch size."""

    def _maybe_log_save_evaluate(
        self,
        tr_loss: torch.Tensor | None,
        grad_norm: Any,
        model: nn.Module,
        trial: Any,
        epoch: Any,
        ignore_keys_for_eval: Any = None,
        start_time: float | None = None,
        learning_rate: Any = None,
    ) -> None:
        """Log, evaluate and save as asked for."""

    def _finalize_training(self, trial: Any, num_train_samples: float, start_time: float) -> TrainOutput:
        """End a training."""

    def set_initial_training_values(
        self, args: TrainingArguments, dataloader: Any, total_train_batch_size: int | None = None
    ) -> tuple[int, int, int, float, int, int | None, int]:
        """How long a training is: epochs first, optimizer steps last."""

    def _hp_search_setup(self, trial: Any) -> None:
        """Note the search's trial."""

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """Log an entry."""

    def floating_point_ops(self, inputs: Any) -> int:
        """Floating-point operations of a batch."""

    def store_flos(self) -> None:
        """Add counted operations to the state."""

    def _track_num_input_tokens(self, inputs: Any) -> None:
        """Count input tokens."""

    def is_local_process_zero(self) -> bool:
        """Whether this is the main process of its machine."""

    def is_world_process_zero(self) -> bool:
        """Whether this is the main process of the job."""


# Declared as the Trainer declares them: mypy then compares every signature.
class TrainerHooks(DataHooks, StepHooks, OptimizationHooks, EvaluationHooksOfTrainer, SavingHooks, LoopHooks, Protocol):
    """Everything that collaborators use of the Trainer."""
