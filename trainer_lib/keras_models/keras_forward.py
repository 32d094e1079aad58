"""`KerasForward`: the Keras side of a `TFTrainer`. Its model, how its loss comes about, its optimizer."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from trainer_lib.data.loader import has_length
from trainer_lib.errors import ConfigError
from trainer_lib.keras_models.keras_backend import import_keras, is_keras_model, placed_on, register_parameters
from trainer_lib.keras_models.keras_optimizer import KerasOptimizer, KerasSchedule, use_schedule
from trainer_lib.keras_models.pairs import PairCollator, as_dataset
from trainer_lib.trainer.overrides import parameters_of, takes

if TYPE_CHECKING:
    from trainer_lib.keras_models.tf_trainer import TFTrainer


class LossSum:
    """The sum of the losses of a prediction step, as `eval_loss` of the older TFTrainer."""

    def __init__(self) -> None:
        self._total: torch.Tensor | None = None

    def update_state(self, value: Any) -> None:
        """Add losses of any shape ``[...]``."""
        added = torch.as_tensor(value).detach().sum()
        self._total = added if self._total is None else self._total + added

    def result(self) -> torch.Tensor | None:
        """The sum ``[]``; None when nothing was added."""
        return self._total

    def reset_state(self) -> None:
        """Forget the losses."""
        self._total = None

    reset_states = reset_state


class KerasForward:
    """Calls the Keras model of a `TFTrainer`, and makes its optimizer.

    Attributes:
        keras: the package.
        collate: makes batches.
        given: the Keras (optimizer, schedule) that the user gave.
        ignore_keys: outputs that the prediction under way leaves out.
        prefix: of the metrics of the evaluation under way.
        total_steps: optimizer steps of the training under way.
        num_items: target items of the step whose loss is computed; None outside of training.
    """

    def __init__(self, trainer: TFTrainer, collate: Any, label_names: list[str] | None) -> None:
        self.keras = import_keras()
        self._trainer = trainer
        self.given: tuple[Any, Any] = (None, None)
        self.collate = PairCollator(collate, label_names or ["labels"])
        self.ignore_keys: list[str] = []
        self.prefix = "eval"
        self.total_steps = 0
        self.num_items: Any = None

    @property
    def _model(self) -> Any:
        return self._trainer.model

    # -- the model ----------------------------------------------------------------------------------------------------

    def adopt(self, model: nn.Module, device: torch.device) -> None:
        """Build the model if it is not built, and register its variables with torch.

        Raises:
            ConfigError: it is not a Keras model, or there is no sample to build it with.
        """
        if not is_keras_model(model):
            raise ConfigError(
                "A TFTrainer trains Keras models.",
                field="model",
                value=type(model).__name__,
                remedy="Give a keras.Model, or use Trainer.",
            )
        self._refuse_own_step(model)
        self.collate.one_input = self._takes_one_tensor(model)
        if not model.built:
            self._build(model, device)
        register_parameters(model)

    def _refuse_own_step(self, model: Any) -> None:
        if type(model).train_step is self.keras.Model.train_step or self._trainer._trainflow_overrides("training_step"):
            return
        raise ConfigError(
            "The Keras model overrides train_step(), which a TFTrainer does not call.",
            field="model",
            value=type(model).__name__,
            remedy="Override training_step of TFTrainer, or compute_loss of the model.",
        )

    def _takes_one_tensor(self, model: Any) -> bool:
        if isinstance(model, self.keras.Sequential):
            return True
        inputs = getattr(model, "_inputs_struct", None)
        return inputs is not None and not isinstance(inputs, Mapping) and len(model.inputs) == 1

    def _build(self, model: Any, device: torch.device) -> None:
        """Call the model once with the first sample: Keras creates its variables then."""
        sample = self._first_sample()
        if sample is None:
            raise ConfigError(
                "The Keras model is not built, and there is no sample to build it with.",
                field="model",
                value=type(model).__name__,
                remedy="Give it an Input layer, or call it once with a batch.",
            )
        batch = self._trainer._prepare_input(self.collate([sample]))
        with torch.no_grad(), placed_on(self.keras, device):
            model(batch.features, training=False)
        model.to(device)

    def _first_sample(self) -> Any:
        trainer = self._trainer
        sets = trainer.eval_dataset
        first = next(iter(sets.values()), None) if isinstance(sets, Mapping) else sets
        for dataset in (as_dataset(trainer.train_dataset), as_dataset(first)):
            if dataset is None or (not has_length(dataset) and iter(dataset) is dataset):
                continue  # reading from a stream that cannot start again would lose a sample
            if hasattr(dataset, "__getitem__") and has_length(dataset):
                return dataset[0] if len(dataset) else None
            return next(iter(dataset), None)
        return None

    def share_statistics(self) -> None:
        """Give every rank the running statistics of rank 0, such as those of BatchNormalization. Collective."""
        comm = self._trainer._trainflow.world.comm
        if comm.world_size == 1:
            return
        for tensor in self._trainer.model.parameters():
            if not tensor.requires_grad and tensor.is_floating_point():
                own = tensor.detach()
                own.copy_(comm.sum_tensor(own if comm.rank == 0 else torch.zeros_like(own)))

    # -- one batch ----------------------------------------------------------------------------------------------------

    def run(self, model: Any, features: Any, labels: Any, training: bool) -> tuple[Any, Any]:
        """(loss, logits) of a batch; `TFTrainer.run_model` documents it."""
        trainer = self._trainer
        with placed_on(self.keras, trainer._trainflow.world.device):
            if labels is None:
                return None, self._logits(model(features, training=training), has_loss=False)
            named = dict(labels) if isinstance(labels, Mapping) else {"labels": labels}
            if trainer.compute_loss_func is None and self._takes_labels(named):
                outputs = model(features, training=training, **named)
                loss = outputs["loss"] if isinstance(outputs, Mapping) else outputs[0]
                return self._with_added(loss), self._logits(outputs, has_loss=True)
            outputs = model(features, training=training)
            return self._loss(features, labels, outputs, training), self._logits(outputs, has_loss=False)

    def _takes_labels(self, named: Mapping[str, Any]) -> bool:
        """Whether the model computes its loss: its `call` has parameters of these names."""
        parameters = parameters_of(self._model.call)
        return all(name in parameters for name in named)

    def _loss(self, features: Any, labels: Any, outputs: Any, training: bool) -> Any:
        """The loss of `compute_loss_func`, or the one that the model was compiled with."""
        trainer, model = self._trainer, self._model
        if (func := trainer.compute_loss_func) is not None:
            more = {"num_items_in_batch": self.num_items} if takes(func, "num_items_in_batch") else {}
            return self._with_added(func(outputs, labels, **more))
        own = type(model).compute_loss is not self.keras.Model.compute_loss
        if getattr(model, "loss", None) is None and not own:
            raise ConfigError(
                "The Keras model has no loss.",
                field="model",
                value=type(model).__name__,
                remedy="Call model.compile(loss=...), or let its call() take labels and return (loss, logits).",
            )
        return model.compute_loss(x=features, y=labels, y_pred=outputs, training=training)

    def _with_added(self, loss: Any) -> Any:
        """The loss with what layers added in the newest call, such as regularizers; `compute_loss` of Keras adds it."""
        for added in self._model.losses:
            loss = loss + added
        return loss

    def _logits(self, outputs: Any, *, has_loss: bool) -> Any:
        if isinstance(outputs, Mapping):
            parts = tuple(v for k, v in outputs.items() if k != "loss" and k not in self.ignore_keys and v is not None)
        elif isinstance(outputs, tuple | list):
            parts = tuple(outputs[1:] if has_loss else outputs)
        else:
            return outputs
        return parts[0] if len(parts) == 1 else parts or None

    # -- optimizer and schedule ---------------------------------------------------------------------------------------

    def take_optimizers(self, given: tuple[Any, Any], model_init: Any) -> tuple[Any, Any]:
        """Keep a Keras (optimizer, schedule); returns those of torch, which the Trainer takes itself.

        Raises:
            ConfigError: a Keras optimizer was given together with `model_init`.
        """
        optimizer, schedule = given
        kinds = (torch.optim.Optimizer, torch.optim.lr_scheduler.LRScheduler)
        if isinstance(schedule if optimizer is None else optimizer, kinds):
            return given
        if model_init is not None and given != (None, None):
            raise ConfigError(
                "The optimizer holds variables of another model: model_init makes a new one for every training.",
                field="optimizers",
                remedy="Override create_optimizer_and_scheduler.",
            )
        self.given = given
        return None, None

    def create_optimizer(self) -> None:
        """Make the Trainer's optimizer: the user's, or Adam with a polynomial decay unless the arguments ask otherwise.

        Where they ask for another optimizer or schedule, nothing is made here.
        """
        trainer, (optimizer, schedule) = self._trainer, self.given
        if optimizer is None and schedule is None and not self._wants_keras():
            self._refuse_power()
            return
        variables = self._model.trainable_variables
        if optimizer is None:
            self._refuse_another_optimizer()
            from trainer_lib.keras_models import keras_defaults

            schedule = schedule or keras_defaults.create_schedule(trainer.args, self.total_steps)
            wanted = set(trainer.get_decay_parameter_names(trainer.model))
            decayed = {id(tensor) for name, tensor in trainer.model.named_parameters() if name in wanted}
            optimizer = keras_defaults.create_optimizer(trainer.args, schedule, variables, decayed)
        trainer.optimizer, trainer.lr_scheduler = optimizer, schedule
        self.wrap_optimizer()

    def _wants_keras(self) -> bool:
        args = self._trainer.args
        chosen = args.lr_scheduler_type != "linear" or args.lr_scheduler_kwargs
        return self._wants_adam() and not chosen

    def _wants_adam(self) -> bool:
        args = self._trainer.args
        is_default = str(args.optim) == args.default_optim and args.optim_args is None
        return is_default and self._trainer.optimizer_cls_and_kwargs is None

    def _refuse_another_optimizer(self) -> None:
        if not self._wants_adam():
            raise ConfigError(
                "A Keras schedule was given, and the arguments ask for an optimizer of torch, which cannot follow it.",
                field="optimizers",
                remedy="Give a Keras optimizer as well, or choose the schedule by lr_scheduler_type.",
            )

    def _refuse_power(self) -> None:
        power = getattr(self._trainer.args, "poly_power", 1.0)
        if power != 1.0:
            raise ConfigError(
                "Only the schedule of TFTrainer's own Adam has this power, and the arguments ask for another.",
                field="poly_power",
                value=power,
                remedy='Give lr_scheduler_type="polynomial" and lr_scheduler_kwargs={"power": …}.',
            )

    def wrap_optimizer(self) -> None:
        """Put a Keras optimizer and schedule, which the user's code may have set, under the names of torch's."""
        trainer, keras = self._trainer, self.keras
        optimizer: Any = trainer.optimizer
        if not isinstance(optimizer, keras.optimizers.Optimizer):
            return
        schedule = trainer.lr_scheduler
        if schedule is not None and not isinstance(schedule, KerasSchedule):
            use_schedule(keras, optimizer, schedule)
        device = trainer._trainflow.world.device
        wrapped = KerasOptimizer(keras, optimizer, self._model.trainable_variables, device)
        trainer.optimizer, trainer.lr_scheduler = wrapped, KerasSchedule(wrapped)
