"""The methods and attributes of the Trainer that evaluation uses, as a protocol: the Trainer lives one floor above."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

from torch import nn

from trainer_lib.arguments import TrainingArguments
from trainer_lib.distributed import Communicator
from trainer_lib.strategies.base import Strategy


# Each is the Trainer's own method or attribute, so an override of the user's takes effect.
class EvaluationHooks(Protocol):
    """The part of a Trainer that evaluation and prediction use. Every method may be an override of the user's."""

    @property
    def args(self) -> TrainingArguments:
        """The Trainer's arguments."""

    @property
    def comm(self) -> Communicator:
        """All ranks."""

    @property
    def strategy(self) -> Strategy:
        """How the model is trained, and therefore evaluated."""

    @property
    def compute_metrics(self) -> Callable[..., dict[str, Any]] | None:
        """The user's metrics."""

    @property
    def preprocess_logits_for_metrics(self) -> Callable[[Any, Any], Any] | None:
        """The user's reduction of logits before they are kept."""

    def prediction_step(
        self, model: nn.Module, inputs: Any, prediction_loss_only: bool, ignore_keys: list[str] | None = None
    ) -> tuple[Any, Any, Any]:
        """Loss ``[]`` or ``[batch]``, logits and labels (trees of ``[batch, …]``) of a batch; each may be None."""

    @property
    def steps_together(self) -> bool:
        """Whether every rank must predict equally many batches, because ranks communicate in a prediction step."""

    def dummy_prediction_step(
        self, model: nn.Module, inputs: Any, prediction_loss_only: bool, ignore_keys: list[str] | None = None
    ) -> None:
        """Call `prediction_step` for the other ranks' sake; what it returns is dropped."""

    def evaluation_model(self, *, alone: bool = False) -> nn.Module:
        """The model in evaluation mode, on the device, in the dtype for evaluation.

        Raises:
            ConfigError: `alone`, and the model's forward needs the other ranks.
        """

    def target_items(self, inputs: Any, samples: int | None = None) -> int:
        """Number of target items in a batch; `samples`: what the collator was given."""

    def spool_folder(self) -> Path | None:
        """The folder for predictions that do not fit in memory; None for the temporary folder."""

    def end_prediction_step(self) -> None:
        """A batch is done: call the callbacks, and raise when all ranks have agreed to stop. Collective."""
