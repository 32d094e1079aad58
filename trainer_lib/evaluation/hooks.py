"""What the evaluation loop asks of the Trainer: its overridable methods, through a protocol, for it lives above."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from torch import nn

from trainer_lib.arguments import TrainingArguments
from trainer_lib.distributed import Communicator
from trainer_lib.state import TrainerControl, TrainerState
from trainer_lib.strategies.base import Strategy

if TYPE_CHECKING:  # a sibling: only its name is known here
    from trainer_lib.callbacks.base import CallbackHandler


class EvaluationHooks(Protocol):
    """The Trainer, as seen from here."""

    args: TrainingArguments
    comm: Communicator
    strategy: Strategy
    state: TrainerState
    control: TrainerControl
    callback_handler: CallbackHandler
    compute_metrics: Callable[..., dict[str, Any]] | None
    preprocess_logits_for_metrics: Callable[[Any, Any], Any] | None
    label_names: list[str]

    def prediction_step(
        self, model: nn.Module, inputs: Any, prediction_loss_only: bool, ignore_keys: list[str] | None = None
    ) -> tuple[Any, Any, Any]:
        """Loss, logits, labels of one batch."""

    def get_test_dataloader(self, test_dataset: Any) -> Any:
        """The loader of a dataset to predict."""

    def evaluation_model(self, *, alone: bool = False) -> nn.Module:
        """The model in evaluation mode, on the device, in the dtype to evaluate in; `alone`: its forward sends nothing.

        Raises ConfigError when it cannot compute alone.
        """

    def target_items(self, inputs: Any) -> int:
        """Target items of a batch."""

    def spool_folder(self) -> Path | None:
        """Where predictions may pile up; None for the temporary folder."""

    def check_stop(self) -> None:
        """Raise when all ranks have agreed to stop; collective."""
