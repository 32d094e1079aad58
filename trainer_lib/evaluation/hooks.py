"""The methods and attributes of the Trainer that evaluation uses, as a protocol: the Trainer lives one floor above."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

from torch import nn

from trainer_lib.arguments import TrainingArguments
from trainer_lib.callbacks.base import CallbackHandler
from trainer_lib.distributed import Communicator
from trainer_lib.state import TrainerControl, TrainerState
from trainer_lib.strategies.base import Strategy


class EvaluationHooks(Protocol):
    """The part of a Trainer that evaluation and prediction use. Every method may be an override of the user's."""

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
        """Loss ``[]`` or ``[batch]``, logits and labels (trees of ``[batch, …]``) of a batch; each may be None."""

    def get_test_dataloader(self, test_dataset: Any) -> Any:
        """The loader of a dataset to predict."""

    def evaluation_model(self, *, alone: bool = False) -> nn.Module:
        """The model in evaluation mode, on the device, in the dtype for evaluation.

        Raises:
            ConfigError: `alone`, and the model's forward needs the other ranks.
        """

    def target_items(self, inputs: Any) -> int:
        """Number of target items in a batch."""

    def spool_folder(self) -> Path | None:
        """The folder for predictions that do not fit in memory; None for the temporary folder."""

    def check_stop(self) -> None:
        """Raise when all ranks agreed to stop. Collective."""
