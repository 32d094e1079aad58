"""`TFTrainer`: Keras 3 models on torch, with the methods that the TFTrainer of older documents has.

Import it before keras: it lets Keras run on torch (`KERAS_BACKEND`), unless the environment chooses a backend.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

import torch
from torch import nn
from typing_extensions import override

from trainer_lib.arguments import TFTrainingArguments, TrainingArguments
from trainer_lib.arguments.fields import field_map
from trainer_lib.base.outputs import EvalLoopOutput
from trainer_lib.callbacks.base import TrainerCallback
from trainer_lib.data.loading.iterable import IterableLoader
from trainer_lib.data.loading.loader import EvalLoader, TrainLoader, has_length
from trainer_lib.errors import CodeError
from trainer_lib.evaluation import nested
from trainer_lib.keras_models import keras_backend
from trainer_lib.keras_models.keras_backend import (
    Batch,
    KerasOptimizer,
    KerasSchedule,
    PairCollator,
    Stream,
    as_dataset,
    placed_on,
    refusal,
)
from trainer_lib.trackers.vendors import TensorBoardCallback, vendor_callback
from trainer_lib.trainer import Trainer
from trainer_lib.trainer.model.forward import logits_of
from trainer_lib.trainer.overrides import parameters_of, refuse_uncalled, takes, takes_positionals

keras_backend.choose_torch()  # here, because a script imports keras after this module

#: Arguments that are refused unless they have their default -> the remedy.
_UNSERVED = {
    **dict.fromkeys(("fsdp", "deepspeed"), "Remove it: the model is replicated."),
    "bf16_full_eval": "Build the model with dtype='bfloat16'.",
    "fp16_full_eval": "Build the model with dtype='float16'.",
    "past_index": "Remove it, and let the model keep its memory.",
    "label_smoothing_factor": "Remove it: Keras' CategoricalCrossentropy takes label_smoothing.",
}
_OF_FIT = {
    "callbacks": "Give a TrainerCallback, such as EarlyStoppingCallback.",
    "compute_metrics": "Give a function: lambda p: {'accuracy': float(metric(p.label_ids, p.predictions))}.",
}
_UNCALLED = {
    "apply_gradients": "Override training_step, or use a callback's on_pre_optimizer_step.",
    "distributed_training_steps": "Override training_step: every process runs one replica.",
    "distributed_prediction_steps": "Override prediction_step: every process runs one replica.",
}


class LossSum:
    """The sum of the losses of a prediction step, as `eval_loss` of the older TFTrainer."""

    _total: torch.Tensor | None = None

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


class TFHooks:
    """A `TFTrainer` as the Trainer's collaborators see it.

    They call some methods with other parameters than a TFTrainer's have; these calls are translated here, so that the
    overrides of a subclass run. Every other attribute is the TFTrainer's.
    """

    _tf: TFTrainer
    _takes_items: bool

    def __init__(self, trainer: TFTrainer) -> None:
        object.__setattr__(self, "_tf", trainer)
        object.__setattr__(self, "_takes_items", takes_positionals(trainer.training_step, 3))

    def __getattr__(self, name: str) -> Any:
        return getattr(object.__getattribute__(self, "_tf"), name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self._tf, name, value)

    def training_step(self, model: nn.Module, inputs: Any, num_items_in_batch: Any = None) -> torch.Tensor:
        """The loss ``[]`` of one micro-batch; its gradients are added to those of the parameters."""
        batch = self._tf._trainflow_batch(inputs)
        more = (num_items_in_batch,) if self._takes_items else ()
        loss: Any = self._tf.training_step(batch["features"], batch["labels"], *more)
        if not isinstance(loss, torch.Tensor):
            field, what = f"{type(self._tf).__name__}.training_step", "The method training_step() must return the loss."
            remedy = "Call backward() on the loss, and return it."
            raise CodeError(what, field=field, value=type(loss).__name__, remedy=remedy)
        return loss.detach().sum() if loss.ndim else loss.detach()

    def prediction_step(
        self, model: nn.Module, inputs: Any, prediction_loss_only: bool, ignore_keys: list[str] | None = None
    ) -> tuple[torch.Tensor | None, Any, Any]:
        """(loss ``[]``, logits, labels ``[batch, ...]``) of one batch."""
        trainer = self._tf
        items, batch = trainer._trainflow.forward.target_items(inputs), trainer._trainflow_batch(inputs)
        trainer._trainflow_ignored = list(ignore_keys or ())
        trainer.eval_loss.reset_state()
        with torch.no_grad(), trainer.compute_loss_context_manager():
            logits = trainer.prediction_step(batch["features"], batch["labels"], items)
        loss, labels = trainer.eval_loss.result(), batch["labels"]
        if prediction_loss_only:
            return loss, None, None
        labels = tuple(labels.values()) if isinstance(labels, Mapping) else labels
        return loss, nested.detach(logits), nested.detach(labels)

    def create_optimizer_and_scheduler(self, num_training_steps: int) -> None:
        """Set up the optimizer and the schedule; those of Keras get the names of torch's."""
        self._tf.create_optimizer_and_scheduler(num_training_steps=num_training_steps)
        self._tf._trainflow_wrap_optimizer()

    def evaluation_loop(
        self,
        dataloader: Any,
        description: str,
        prediction_loss_only: bool | None = None,
        ignore_keys: Sequence[str] | None = None,
        metric_key_prefix: str = "eval",
    ) -> EvalLoopOutput:
        """One pass over a loader, by `prediction_loop`."""
        trainer = self._tf
        trainer._trainflow_ignored, trainer._trainflow_prefix = list(ignore_keys or ()), metric_key_prefix
        _, steps, examples = trainer._trainflow_sized(dataloader)
        return trainer.prediction_loop(dataloader, steps, examples, description, prediction_loss_only)

    prediction_loop = evaluation_loop


class TFTrainer(Trainer):
    """Trains, evaluates and predicts with a Keras 3 model on torch, under the loop of `Trainer`.

    A data set yields pairs (features, labels), one per sample: a `tf.data.Dataset`, any iterable, or map-style data.
    Samples that are mappings have their labels under `label_names`. The loss is, in this order: `run_model`'s, where a
    subclass overrides it; `compute_loss_func`'s; the model's own, where its `call` takes the labels (``labels=``, or
    the names of a mapping of labels) and returns (loss, logits); the one of ``model.compile(loss=...)``.

    Args:
        model: a `keras.Model` that is built.
        args: the arguments; a basic set with output_dir "tmp_trainer" when not given.
        train_dataset, eval_dataset: data sets; for evaluation also a mapping of them by name.
        compute_metrics: `EvalPrediction -> {name: number}`.
        tb_writer: a `SummaryWriter` of torch or of TensorFlow that the log is written to.
        optimizers: a Keras optimizer and a Keras schedule to use instead of torch's AdamW with a linear decay; the
            schedule may be None. An optimizer and a schedule of torch are taken as well.
        data_collator, model_init, callbacks, further: as of `Trainer`.

    Raises:
        MissingExtraError: keras is not installed.
        ConfigError: keras runs on another backend than torch, the model is not a Keras model, or an argument cannot be
            served. Further errors are those of `Trainer`.
    """

    _trainflow_arguments_class = TFTrainingArguments
    # Of the training or evaluation that is running: target items of the step, left-out outputs, metric prefix.
    _trainflow_items: Any = None
    _trainflow_ignored: Sequence[str] = ()
    _trainflow_prefix = "eval"

    def __init__(
        self,
        model: Any = None,
        args: TrainingArguments | None = None,
        train_dataset: Any = None,
        eval_dataset: Any = None,
        compute_metrics: Callable[..., dict[str, Any]] | None = None,
        tb_writer: Any = None,
        optimizers: tuple[Any, Any] = (None, None),
        *,
        data_collator: Callable[[list[Any]], Any] | None = None,
        model_init: Callable[..., nn.Module] | None = None,
        callbacks: Sequence[TrainerCallback | type[TrainerCallback]] | None = None,
        **further: Any,
    ) -> None:
        refuse_uncalled(type(self), _UNCALLED)
        self._trainflow_package = keras = keras_backend.import_keras()
        _refuse_other_objects(keras, callbacks, compute_metrics)
        names = None if args is None else args.label_names
        self._trainflow_collate = PairCollator(data_collator, names or ["labels"])
        self.eval_loss = LossSum()
        for dataset in (train_dataset, eval_dataset):
            as_dataset(dataset)  # raises DataError for what is not a set of samples
        kinds = (torch.optim.Optimizer, torch.optim.lr_scheduler.LRScheduler)
        of_keras = optimizers != (None, None) and not isinstance(optimizers[0] or optimizers[1], kinds)
        if of_keras and model_init is not None:
            message = "The optimizer holds variables of another model: model_init makes a new one for every training."
            raise refusal("optimizers", message, "Override create_optimizer_and_scheduler.")
        writer = [] if tb_writer is None else [TensorBoardCallback(keras_backend.as_writer(tb_writer))]
        super().__init__(
            model=model,
            args=args,
            data_collator=self._trainflow_collate,
            train_dataset=train_dataset,
            eval_dataset=eval_dataset,
            model_init=model_init,
            compute_metrics=compute_metrics,
            callbacks=[*(callbacks or ()), *writer],
            optimizers=(None, None) if of_keras else optimizers,
            **further,
        )
        if of_keras:
            self.optimizer, self.lr_scheduler = optimizers
            self._trainflow_wrap_optimizer()
            self._trainflow.engine.take_optimizers((self.optimizer, self.lr_scheduler))
        _warn_of_compiled(keras, self.model, is_ours=self.optimizer is None)
        for name, set_up in (("wandb", self.setup_wandb), ("comet_ml", self.setup_comet)):
            if name in (self.args.report_to or ()):
                set_up()

    @override
    def _trainflow_hooks(self) -> Trainer:
        return cast(Trainer, TFHooks(self))

    # -- the model ----------------------------------------------------------------------------------------------------

    @override
    def _trainflow_look_at_model(self) -> None:
        for name, remedy in _UNSERVED.items():
            value = getattr(self.args, name)
            if value != field_map(self.args)[name].default:
                raise refusal(name, "The argument is not served for Keras models.", remedy, value)
        model, keras = cast(Any, self.model), self._trainflow_package
        if not keras_backend.is_keras_model(model):
            raise refusal("model", "A TFTrainer trains Keras models.", "Give a keras.Model, or use Trainer.", model)
        if type(model).train_step is not keras.Model.train_step and type(self).training_step is TFTrainer.training_step:
            message = "The Keras model overrides train_step(), which a TFTrainer does not call."
            remedy = "Override training_step of TFTrainer, or compute_loss of the model."
            raise refusal("model", message, remedy, model)
        inputs = getattr(model, "_inputs_struct", None)
        is_single = inputs is not None and not isinstance(inputs, Mapping) and len(model.inputs) == 1
        self._trainflow_collate.one_input = isinstance(model, keras.Sequential) or is_single
        if not model.built:
            remedy = "Give it an Input layer, or call it once with a batch."
            raise refusal("model", "The Keras model is not built: it has no variables yet.", remedy, model)
        keras_backend.register_parameters(model)
        super()._trainflow_look_at_model()
        self.label_names = ["labels"]  # where a `Batch` has them

    # -- data ---------------------------------------------------------------------------------------------------------

    def get_train_tfdataset(self) -> Any:
        """The training batches; an override may return any iterable of batches, such as a `tf.data.Dataset`."""
        return super().get_train_dataloader()

    def get_eval_tfdataset(self, eval_dataset: Any = None) -> tuple[Any, int | None, int | None]:
        """(batches, how many of them, how many samples) of an evaluation set; None where the length is unknown."""
        return self._trainflow_sized(super().get_eval_dataloader(eval_dataset))

    def get_test_tfdataset(self, test_dataset: Any) -> tuple[Any, int | None, int | None]:
        """(batches, how many of them, how many samples) of a data set to predict; None where the length is unknown."""
        return self._trainflow_sized(super().get_test_dataloader(test_dataset))

    @override
    def _get_dataloader(self, dataset: Any, description: str, batch_size: int, *args: Any, **settings: Any) -> Any:
        """A loader, in the order of the seed also for a `tf.data.Dataset`, which has no random access."""
        seed = self.args.seed if self.args.data_seed is None else self.args.data_seed
        shuffles = description == "training" and self.args.train_sampling_strategy == "random"
        samples = as_dataset(dataset, shuffle_seed=seed if shuffles else None)
        return super()._get_dataloader(samples, description, batch_size, *args, **settings)

    @override
    def get_train_dataloader(self) -> Any:
        return self._trainflow_loader(self.get_train_tfdataset())

    @override
    def get_eval_dataloader(self, eval_dataset: Any = None) -> Any:
        return self._trainflow_loader(self.get_eval_tfdataset(eval_dataset))

    @override
    def get_test_dataloader(self, test_dataset: Any) -> Any:
        return self._trainflow_loader(self.get_test_tfdataset(test_dataset))

    def _trainflow_sized(self, loader: Any) -> tuple[Any, int | None, int | None]:
        steps = len(loader) if has_length(loader) else None
        return loader, steps, None if steps is None else self.num_examples(loader)

    def _trainflow_loader(self, given: Any, steps: int | None = None) -> Any:
        """A loader of what a `get_..._tfdataset` returned: batches, or (batches, how many, how many samples)."""
        if isinstance(given, tuple) and len(given) == 3 and (given[1] is None or isinstance(given[1], int)):
            given, steps = given[0], given[1]
        if isinstance(given, TrainLoader | EvalLoader | IterableLoader | Stream):
            return given
        return Stream(given, steps=steps, convert=self._trainflow_collate.convert)

    def _trainflow_batch(self, inputs: Any) -> Batch:
        """A batch of any form on the device."""
        return self._trainflow_collate.to_batch(self._prepare_inputs(inputs))

    # -- one batch ----------------------------------------------------------------------------------------------------

    def run_model(self, features: Any, labels: Any, training: bool) -> tuple[Any, Any]:
        """The loss and the logits of a batch.

        Args:
            features: the model's inputs, tensors ``[batch, ...]``.
            labels: a tensor ``[batch, ...]`` or a mapping of them; None when there are none.
            training: whether layers such as Dropout act.

        Returns:
            The loss, 0-dim or one value per item; None without labels. The logits ``[batch, ...]``, a tuple of them
            when there are several.
        """
        model: Any = self.model
        called: Any = self.model_wrapped
        called = called if training else self._trainflow.engine.strategy.inference_model(called)
        named = dict(labels) if isinstance(labels, Mapping) else {} if labels is None else {"labels": labels}
        has_loss = bool(named) and self.compute_loss_func is None and named.keys() <= parameters_of(model.call).keys()
        loss = None
        with placed_on(self._trainflow.world.device):
            outputs = called(features, training=training, **(named if has_loss else {}))
            if has_loss:
                loss = outputs["loss"] if isinstance(outputs, Mapping) else outputs[0]
                loss = sum(model.losses, start=loss)  # what layers add, such as regularizers
            elif named:
                loss = self._trainflow_loss(features, labels, outputs, training)
        return loss, logits_of(outputs, self._trainflow_ignored, first_is_loss=has_loss)

    def _trainflow_loss(self, features: Any, labels: Any, outputs: Any, training: bool) -> Any:
        """The loss of `compute_loss_func`, or the one that the model was compiled with, and what layers add to it."""
        model: Any = self.model
        if (func := self.compute_loss_func) is not None:
            more = {"num_items_in_batch": self._trainflow_items} if takes(func, "num_items_in_batch") else {}
            return sum(model.losses, start=func(outputs, labels, **more))
        computes = type(model).compute_loss is not self._trainflow_package.Model.compute_loss
        if getattr(model, "loss", None) is None and not computes:
            remedy = "Call model.compile(loss=...), or let its call() take labels and return (loss, logits)."
            raise refusal("model", "The Keras model has no loss.", remedy, model)
        try:
            return model.compute_loss(x=features, y=labels, y_pred=outputs, training=training)
        except IndexError as error:
            message = f"The loss does not take these labels: {str(error).rstrip('.')}."
            remedy = "Count classes from 0 on, and give the last layer an output per class."
            raise refusal("labels", message, remedy) from error

    @override
    def compute_loss(
        self, model: nn.Module, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        """The mean loss of a batch, 0-dim, or (loss, logits), from `run_model`."""
        batch = self._trainflow_collate.to_batch(inputs)
        self._trainflow_items = num_items_in_batch
        try:
            loss, logits = self.run_model(batch["features"], batch["labels"], self.model.training)
        finally:
            self._trainflow_items = None
        if loss is None:
            message = "The batch has no labels, so there is no loss."
            raise refusal("train_dataset", message, "Give pairs (features, labels).")
        return (loss.mean(), logits) if return_outputs else loss.mean()

    @override
    def training_step(
        self, features: Any, labels: Any, nb_instances_in_global_batch: torch.Tensor | int | None = None
    ) -> torch.Tensor:
        """Forward and backward of one micro-batch; its part of the step's loss, 0-dim, as `Trainer.training_step`.

        `nb_instances_in_global_batch` is the number of target items of the whole step, over all processes.
        """
        return super().training_step(self.model_wrapped, Batch.of(features, labels), nb_instances_in_global_batch)

    @override
    def prediction_step(  # type: ignore[override]
        self, features: Any, labels: Any, nb_instances_in_global_batch: torch.Tensor | int | None = None
    ) -> Any:
        """The logits ``[batch, ...]`` of a batch; its mean loss is added to `eval_loss`."""
        loss, logits = self.run_model(features, labels, False)
        if loss is not None:
            self.eval_loss.update_state(loss.mean())
        return logits

    # -- optimizer and schedule ---------------------------------------------------------------------------------------

    @override
    def create_scheduler(self, num_training_steps: int, optimizer: torch.optim.Optimizer | None = None) -> Any:
        self._trainflow_wrap_optimizer()
        return super().create_scheduler(num_training_steps, self.optimizer)

    def _trainflow_wrap_optimizer(self) -> None:
        """Put a Keras optimizer and schedule, which the user's code may have set, under the names of torch's."""
        optimizer, schedule, model = cast(Any, self.optimizer), self.lr_scheduler, cast(Any, self.model)
        if isinstance(optimizer, self._trainflow_package.optimizers.Optimizer):
            if schedule is not None and not isinstance(schedule, KerasSchedule):
                keras_backend.use_schedule(optimizer, schedule)
            wrapped = KerasOptimizer(optimizer, model.trainable_variables, self._trainflow.world.device)
            self.optimizer, self.lr_scheduler = wrapped, KerasSchedule(wrapped)
        elif schedule is not None and not callable(getattr(schedule, "step", None)):
            message = "A Keras schedule was given without a Keras optimizer; torch's optimizer cannot follow it."
            remedy = "Give a Keras optimizer as well, or choose the schedule by lr_scheduler_type."
            raise refusal("optimizers", message, remedy, schedule)

    @override
    def get_decay_parameter_names(self, model: nn.Module) -> list[str]:
        """Names of the parameters with weight decay: all but biases, and the scales and offsets of norm layers."""
        names = super().get_decay_parameter_names(model)
        return [name for name in names if "norm" not in name and not name.endswith(("/beta", "/gamma", "/scale"))]

    # -- evaluation ---------------------------------------------------------------------------------------------------

    @override
    def prediction_loop(  # type: ignore[override]
        self,
        dataset: Any,
        steps: int | None = None,
        num_examples: int | None = None,
        description: str = "Evaluation",
        prediction_loss_only: bool | None = None,
    ) -> EvalLoopOutput:
        """One pass over at most `steps` batches: predictions and labels ``[samples, ...]``, and metrics.

        `num_examples`, the samples in them, is for overrides; the loop counts them itself.
        """
        loader, ignored = self._trainflow_loader(dataset, steps), list(self._trainflow_ignored)
        return self.evaluation_loop(loader, description, prediction_loss_only, ignored, self._trainflow_prefix)

    @override
    def evaluation_loop(self, dataloader: Any, *args: Any, **settings: Any) -> EvalLoopOutput:
        """One pass over a loader; every process has the running statistics (BatchNormalization) of rank 0."""
        comm = self._trainflow.world.comm
        for tensor in self.model.parameters() if comm.world_size > 1 else ():
            if not tensor.requires_grad and tensor.is_floating_point():
                local = tensor.detach()
                local.copy_(comm.sum_tensor(local if comm.rank == 0 else torch.zeros_like(local)))
        return super().evaluation_loop(dataloader, *args, **settings)

    # -- trackers -----------------------------------------------------------------------------------------------------

    def setup_wandb(self) -> None:
        """Log to Weights & Biases; called when the Trainer is built if `report_to` names it."""
        self._trainflow_report_to(vendor_callback("wandb"))

    def setup_comet(self) -> None:
        """Log to Comet; called when the Trainer is built if `report_to` names it."""
        self._trainflow_report_to(vendor_callback("comet_ml"))

    def _trainflow_report_to(self, callback: type[TrainerCallback]) -> None:
        if not any(isinstance(present, callback.__bases__) for present in self.callback_handler.callbacks):
            self.add_callback(callback)


def _refuse_other_objects(keras: Any, callbacks: Sequence[Any] | None, compute_metrics: Any) -> None:
    given = [("callbacks", callback, keras.callbacks.Callback) for callback in callbacks or ()]
    for name, value, kind in (*given, ("compute_metrics", compute_metrics, keras.metrics.Metric)):
        if isinstance(value, kind):
            raise refusal(name, "Objects of Keras for fit() are not called.", _OF_FIT[name], value)


def _warn_of_compiled(keras: Any, model: Any, *, is_ours: bool) -> None:
    """Name what compile() got and no training uses; `is_ours`: the optimizer is that of the arguments."""
    compiled = getattr(model, "optimizer", None)  # RMSprop where compile() was given none
    is_unused = is_ours and not isinstance(compiled, (keras.optimizers.RMSprop, type(None)))
    if is_unused or getattr(model, "_compile_metrics", None) is not None:
        what = "The optimizer and the metrics of compile() are not used"
        warnings.warn(f"{what}: give optimizers=(model.optimizer, None), and compute_metrics.", stacklevel=3)
