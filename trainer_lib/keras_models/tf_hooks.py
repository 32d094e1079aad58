"""`TFHooks`: a `TFTrainer` as the Trainer's collaborators see it.

Some methods have other parameters in a TFTrainer than in a Trainer. The collaborators call a Trainer's; here each call
is handed to the TFTrainer's method, so that an override with the TFTrainer's parameters is what runs.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from trainer_lib.errors import CodeError
from trainer_lib.evaluation import nested
from trainer_lib.keras_models.pairs import Batch, as_dataset, to_batch
from trainer_lib.outputs import EvalLoopOutput
from trainer_lib.trainer.signatures import takes, takes_positionals

if TYPE_CHECKING:
    from trainer_lib.keras_models.tf_trainer import TFTrainer


class TFHooks:
    """Hands every call and every attribute to a TFTrainer, a few calls with other parameters."""

    _tf: TFTrainer
    _takes_items: bool

    def __init__(self, trainer: TFTrainer) -> None:
        object.__setattr__(self, "_tf", trainer)
        object.__setattr__(self, "_takes_items", takes_positionals(trainer.training_step, 3))

    def __getattr__(self, name: str) -> Any:
        return getattr(object.__getattribute__(self, "_tf"), name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self._tf, name, value)

    # -- data ---------------------------------------------------------------------------------------------------------

    @property
    def train_dataset(self) -> Any:
        """The training data as the loaders take it."""
        args = self._tf.args
        seed = args.seed if args.data_seed is None else args.data_seed
        shuffles = args.train_sampling_strategy == "random"
        return as_dataset(self._tf.train_dataset, shuffle_seed=seed if shuffles else None)

    @property
    def eval_dataset(self) -> Any:
        """The evaluation data, or a mapping of it, as the loaders take it."""
        sets = self._tf.eval_dataset
        return (
            {name: as_dataset(each) for name, each in sets.items()} if isinstance(sets, Mapping) else as_dataset(sets)
        )

    # -- one batch ----------------------------------------------------------------------------------------------------

    def _batch(self, inputs: Any) -> Batch:
        collate = self._tf._trainflow_keras.collate
        return to_batch(self._tf._prepare_inputs(inputs), collate.label_names, one_input=collate.one_input)

    def training_step(self, model: nn.Module, inputs: Any, num_items_in_batch: Any = None) -> torch.Tensor:
        """The loss ``[]`` of one micro-batch; its gradients are added to those of the parameters."""
        batch = self._batch(inputs)
        more = (num_items_in_batch,) if self._takes_items else ()
        loss: Any = self._tf.training_step(batch.features, batch.labels, *more)
        if not isinstance(loss, torch.Tensor):
            raise CodeError(
                "The method training_step() must return the loss.",
                field=f"{type(self._tf).__name__}.training_step",
                value=type(loss).__name__,
                remedy="Call backward() on the loss, and return it.",
            )
        return loss.detach().sum() if loss.ndim else loss.detach()

    def prediction_step(
        self, model: nn.Module, inputs: Any, prediction_loss_only: bool, ignore_keys: list[str] | None = None
    ) -> tuple[torch.Tensor | None, Any, Any]:
        """(loss ``[]``, logits, labels ``[batch, ...]``) of one batch."""
        trainer, forward = self._tf, self._tf._trainflow_keras
        items, batch = trainer._trainflow.forward.target_items(inputs), self._batch(inputs)
        forward.ignore_keys = list(ignore_keys or ())
        trainer.eval_loss.reset_state()
        with torch.no_grad(), trainer.compute_loss_context_manager():
            logits = trainer.prediction_step(batch.features, batch.labels, items)
        loss, labels = trainer.eval_loss.result(), batch.labels
        if prediction_loss_only:
            return loss, None, None
        if isinstance(labels, Mapping):
            labels = tuple(labels.values())
        return loss, nested.detach(logits), nested.detach(labels)

    # -- optimizer, evaluation ----------------------------------------------------------------------------------------

    def create_optimizer_and_scheduler(self, num_training_steps: int) -> None:
        """Set up the optimizer and the schedule; those of Keras get the names of torch's."""
        self._tf._trainflow_keras.total_steps = num_training_steps
        self._tf.create_optimizer_and_scheduler(num_training_steps=num_training_steps)
        self._tf._trainflow_keras.wrap_optimizer()

    def evaluate(self, eval_dataset: Any = None, ignore_keys: Any = None, metric_key_prefix: str = "eval") -> Any:
        """Metrics of an evaluation set; an override may take the data alone."""
        given = {"ignore_keys": ignore_keys, "metric_key_prefix": metric_key_prefix}
        taken = {name: value for name, value in given.items() if takes(self._tf.evaluate, name)}
        return self._tf.evaluate(eval_dataset, **taken)

    def evaluation_loop(
        self,
        dataloader: Any,
        description: str,
        prediction_loss_only: bool | None = None,
        ignore_keys: list[str] | None = None,
        metric_key_prefix: str = "eval",
    ) -> EvalLoopOutput:
        """One pass over a loader, through an override of `prediction_loop` where there is one."""
        trainer, forward = self._tf, self._tf._trainflow_keras
        if not trainer._trainflow_overrides("prediction_loop"):
            return trainer.evaluation_loop(
                dataloader, description, prediction_loss_only, ignore_keys, metric_key_prefix
            )
        forward.ignore_keys, forward.prefix = list(ignore_keys or ()), metric_key_prefix
        steps, examples = trainer._trainflow_sizes(dataloader)
        return trainer.prediction_loop(dataloader, steps, examples, description, prediction_loss_only)

    prediction_loop = evaluation_loop
