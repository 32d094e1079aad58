"""`TFTrainer`: Keras 3 models on torch, with the methods that the TFTrainer of older documents has.

Import it before keras: it lets Keras run on torch (`KERAS_BACKEND`), unless the environment chooses a backend.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

import torch
from torch import nn
from typing_extensions import override

from trainer_lib.arguments import TFTrainingArguments, TrainingArguments
from trainer_lib.base.outputs import EvalLoopOutput
from trainer_lib.callbacks.base import TrainerCallback
from trainer_lib.data.iterable import IterableLoader
from trainer_lib.data.loader import EvalLoader, TrainLoader, has_length
from trainer_lib.errors import CodeError, ConfigError
from trainer_lib.evaluation import nested
from trainer_lib.keras_models.keras_backend import choose_torch
from trainer_lib.keras_models.keras_forward import KerasForward, LossSum
from trainer_lib.keras_models.keras_optimizer import KerasOptimizer, KerasSchedule
from trainer_lib.keras_models.pairs import Batch, BatchLoader, as_dataset, to_batch
from trainer_lib.trackers.vendors import CometCallback, TensorBoardCallback, WandbCallback
from trainer_lib.trainer import Trainer
from trainer_lib.trainer.overrides import takes, takes_positionals


class SummaryWriter:
    """Writes to a `tf.summary.SummaryWriter`, which stays open."""

    def __init__(self, writer: Any) -> None:
        self._writer = writer
        self._summary: Any = importlib.import_module("tensorflow").summary  # imported already: it made the writer

    def add_scalar(self, name: str, value: float, step: int) -> None:
        """Write a number of one step."""
        with self._writer.as_default():
            self._summary.scalar(name, value, step=step)

    def add_text(self, name: str, text: str) -> None:
        """Write a text."""
        with self._writer.as_default():
            self._summary.text(name, text, step=0)

    def flush(self) -> None:
        """Write what is buffered."""
        self._writer.flush()


def adopt_writer(writer: Any) -> Any:
    """A writer with the methods of torch's; one of TensorFlow is wrapped. Raises ConfigError for anything else."""
    if callable(getattr(writer, "add_scalar", None)):
        return writer
    if callable(getattr(writer, "as_default", None)):
        return SummaryWriter(writer)
    raise ConfigError(
        "It has neither add_scalar() nor as_default().",
        field="tb_writer",
        value=type(writer).__name__,
        remedy="Give a SummaryWriter of torch or of TensorFlow.",
    )


# `TFHooks`: a `TFTrainer` as the Trainer's collaborators see it.
#
# Some methods have other parameters in a TFTrainer than in a Trainer. The collaborators call a Trainer's; here each
# call is handed to the TFTrainer's method, so that an override with the TFTrainer's parameters is what runs.


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


choose_torch()  # here, because a script imports keras after this module

_SETTINGS: dict[str, tuple[Callable[[Any], bool], str]] = {
    "fsdp": (lambda args: bool(args.fsdp), "Remove it: the model is replicated."),
    "deepspeed": (lambda args: args.deepspeed is not None, "Remove it: the model is replicated."),
    "bf16_full_eval": (lambda args: bool(args.bf16_full_eval), "Build the model with dtype='bfloat16'."),
    "fp16_full_eval": (lambda args: bool(args.fp16_full_eval), "Build the model with dtype='float16'."),
    "past_index": (lambda args: args.past_index >= 0, "Remove it, and let the model keep its memory."),
    "label_smoothing_factor": (
        lambda args: args.label_smoothing_factor > 0,
        "Remove it: Keras' CategoricalCrossentropy takes label_smoothing.",
    ),
}
_UNCALLED = {
    "apply_gradients": "Override training_step, or use a callback's on_pre_optimizer_step.",
    "distributed_training_steps": "Override training_step: every process runs one replica.",
    "distributed_prediction_steps": "Override prediction_step: every process runs one replica.",
}


class TFTrainer(Trainer):
    """Trains, evaluates and predicts with a Keras 3 model on torch, under the loop of `Trainer`.

    A data set yields pairs (features, labels), one per sample: a `tf.data.Dataset`, any iterable, or map-style data.
    Samples that are mappings have their labels under `label_names`. The loss is, in this order: `run_model`'s, where a
    subclass overrides it; `compute_loss_func`'s; the model's own, where its `call` takes the labels (``labels=``, or
    the names of a mapping of labels) and returns (loss, logits); the one of ``model.compile(loss=...)``.

    Args:
        model: a `keras.Model`; one that is not built yet is built with the first sample.
        args: the arguments; a basic set with output_dir "tmp_trainer" when not given.
        train_dataset, eval_dataset: data sets; for evaluation also a mapping of them by name.
        compute_metrics: `EvalPrediction -> {name: number}`.
        tb_writer: a `SummaryWriter` of torch or of TensorFlow that the log is written to.
        optimizers: a Keras optimizer and a Keras schedule to use instead of Adam with a polynomial decay; each may be
            None. An optimizer and a schedule of torch are taken as well.
        data_collator, processing_class, model_init, compute_loss_func, callbacks, optimizer_cls_and_kwargs,
            preprocess_logits_for_metrics: as of `Trainer`.

    Raises:
        MissingExtraError: keras is not installed.
        ConfigError: keras runs on another backend than torch, the model is not a Keras model, or an argument cannot be
            served. Further errors are those of `Trainer`.
    """

    _trainflow_arguments_class = TFTrainingArguments
    _trainflow_keras: KerasForward

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
        processing_class: Any = None,
        model_init: Callable[..., nn.Module] | None = None,
        compute_loss_func: Callable[..., torch.Tensor] | None = None,
        callbacks: Sequence[TrainerCallback | type[TrainerCallback]] | None = None,
        optimizer_cls_and_kwargs: tuple[type[torch.optim.Optimizer], dict[str, Any]] | None = None,
        preprocess_logits_for_metrics: Callable[[Any, Any], Any] | None = None,
    ) -> None:
        self._trainflow_refuse_uncalled()
        names = None if args is None else args.label_names
        self._trainflow_keras = forward = KerasForward(self, data_collator, names)
        self.eval_loss = LossSum()
        for dataset in (train_dataset, eval_dataset):
            as_dataset(dataset)  # raises DataError for what is not a set of samples
        writer = [] if tb_writer is None else [TensorBoardCallback(adopt_writer(tb_writer))]
        super().__init__(
            model=model,
            args=args,
            data_collator=forward.collate,
            train_dataset=train_dataset,
            eval_dataset=eval_dataset,
            processing_class=processing_class,
            model_init=model_init,
            compute_loss_func=compute_loss_func,
            compute_metrics=compute_metrics,
            callbacks=[*(callbacks or ()), *writer],
            optimizers=forward.take_optimizers(optimizers, model_init),
            optimizer_cls_and_kwargs=optimizer_cls_and_kwargs,
            preprocess_logits_for_metrics=preprocess_logits_for_metrics,
        )
        if forward.given[0] is not None:
            forward.create_optimizer()
            self._trainflow.engine.take_optimizers((self.optimizer, self.lr_scheduler))
        reporters = [self.args.report_to] if isinstance(self.args.report_to, str) else list(self.args.report_to or ())
        for name, set_up in (("wandb", self.setup_wandb), ("comet_ml", self.setup_comet)):
            if name in reporters:
                set_up()

    # -- how it fits under a Trainer ----------------------------------------------------------------------------------

    @override
    def _trainflow_hooks(self) -> Trainer:
        return cast(Trainer, TFHooks(self))

    @override
    def _trainflow_look_at_model(self) -> None:
        for name, (asked, remedy) in _SETTINGS.items():
            if asked(self.args):
                raise ConfigError(
                    "The argument is not served for Keras models.",
                    field=name,
                    value=getattr(self.args, name),
                    remedy=remedy,
                )
        self._trainflow_keras.adopt(self.model, self._trainflow.world.device)
        super()._trainflow_look_at_model()
        self.label_names = ["labels"]  # where a `Batch` has them

    def _trainflow_overrides(self, method: str) -> bool:
        return getattr(type(self), method) is not getattr(TFTrainer, method)

    def _trainflow_refuse_uncalled(self) -> None:
        for name, remedy in _UNCALLED.items():
            if getattr(type(self), name, None) is not getattr(TFTrainer, name, None):
                raise ConfigError(
                    "The class overrides a method that the training loop does not call.",
                    field=f"{type(self).__name__}.{name}",
                    remedy=remedy,
                )

    def _trainflow_sizes(self, loader: Any) -> tuple[int | None, int | None]:
        """(batches, samples) of a loader; None where it is unknown."""
        steps = len(loader) if has_length(loader) else None
        return steps, None if steps is None else self.num_examples(loader)

    # -- data ---------------------------------------------------------------------------------------------------------

    def get_train_tfdataset(self) -> Any:
        """The training batches; an override may return any iterable of batches, such as a `tf.data.Dataset`."""
        return super().get_train_dataloader()

    def get_eval_tfdataset(self, eval_dataset: Any = None) -> tuple[Any, int | None, int | None]:
        """(batches, how many of them, how many samples) of an evaluation set; None where the length is unknown."""
        given = eval_dataset if isinstance(eval_dataset, str) else as_dataset(eval_dataset)
        loader = super().get_eval_dataloader(given)
        return loader, *self._trainflow_sizes(loader)

    def get_test_tfdataset(self, test_dataset: Any) -> tuple[Any, int | None, int | None]:
        """(batches, how many of them, how many samples) of a data set to predict; None where the length is unknown."""
        loader = super().get_test_dataloader(as_dataset(test_dataset))
        return loader, *self._trainflow_sizes(loader)

    @override
    def get_train_dataloader(self) -> Any:
        return self._trainflow_loader(self.get_train_tfdataset())

    @override
    def get_eval_dataloader(self, eval_dataset: Any = None) -> Any:
        return self._trainflow_loader(self.get_eval_tfdataset(eval_dataset))

    @override
    def get_test_dataloader(self, test_dataset: Any) -> Any:
        return self._trainflow_loader(self.get_test_tfdataset(test_dataset))

    def _trainflow_loader(self, given: Any, steps: int | None = None) -> Any:
        """A loader of what a `get_..._tfdataset` returned: batches, or (batches, how many, how many samples)."""
        if isinstance(given, tuple) and len(given) == 3 and (given[1] is None or isinstance(given[1], int)):
            given, steps = given[0], given[1]
        if isinstance(given, TrainLoader | EvalLoader | IterableLoader | BatchLoader):
            return given
        return BatchLoader(given, self._trainflow_keras.collate, steps=steps)

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
        model: nn.Module = self.model_wrapped
        if not training:
            model = self._trainflow.engine.strategy.inference_model(model)
        return self._trainflow_keras.run(model, features, labels, training)

    @override
    def compute_loss(
        self,
        model: nn.Module,
        inputs: Any,
        return_outputs: bool = False,
        num_items_in_batch: torch.Tensor | int | None = None,
    ) -> Any:
        """The mean loss of a batch, 0-dim, or (loss, logits), from `run_model`."""
        collate = self._trainflow_keras.collate
        batch = to_batch(inputs, collate.label_names, one_input=collate.one_input)
        self._trainflow_keras.num_items = num_items_in_batch
        try:
            loss, logits = self.run_model(batch.features, batch.labels, self.model.training)
        finally:
            self._trainflow_keras.num_items = None
        if loss is None:
            raise ConfigError(
                "The batch has no labels, so there is no loss.",
                field="train_dataset",
                remedy="Give pairs (features, labels).",
            )
        return (loss.mean(), logits) if return_outputs else loss.mean()

    @override
    def training_step(
        self, features: Any, labels: Any, nb_instances_in_global_batch: torch.Tensor | int | None = None
    ) -> torch.Tensor:
        """Forward and backward of one micro-batch; its part of the step's loss, 0-dim, as `Trainer.training_step`.

        Args:
            features, labels: as of `run_model`.
            nb_instances_in_global_batch: target items of the whole step, over all processes.
        """
        batch = Batch.of(features, labels)
        return super().training_step(self.model_wrapped, batch, nb_instances_in_global_batch)

    @override
    def prediction_step(  # type: ignore[override]
        self, features: Any, labels: Any, nb_instances_in_global_batch: torch.Tensor | int | None = None
    ) -> Any:
        """The logits ``[batch, ...]`` of a batch; its mean loss is added to `eval_loss`."""
        loss, logits = self.run_model(features, labels, False)
        if loss is not None:
            self.eval_loss.update_state(loss.mean())
        return logits

    def apply_gradients(
        self, features: Any, labels: Any, nb_instances_in_global_batch: torch.Tensor | int | None = None
    ) -> torch.Tensor:
        """One optimizer step on a batch ``[batch, ...]``, outside `train`; its loss ``[]``. An override is refused."""
        self.model.train()
        loss = self.training_step(features, labels, nb_instances_in_global_batch)
        self._clip_grad_norm(self.model_wrapped)
        optimizer = self._trainflow.engine.ready_optimizer()
        optimizer.step()
        if self.lr_scheduler is not None:
            self.lr_scheduler.step()
        optimizer.zero_grad()
        return loss

    # -- optimizer and schedule ---------------------------------------------------------------------------------------

    @override
    def create_optimizer_and_scheduler(self, num_training_steps: int) -> None:
        """Set up the optimizer and the schedule: those that were given, or Adam with a polynomial decay.

        With weight decay it is AdamW, with `warmup_steps` the decay follows a warm-up; `poly_power` is its power. Where
        `optim`, `optim_args`, `lr_scheduler_type` or `lr_scheduler_kwargs` ask for something else, it is torch's. An
        override sets `self.optimizer` and `self.lr_scheduler`, to Keras objects or torch's.
        """
        self._trainflow_keras.total_steps = num_training_steps
        super().create_optimizer_and_scheduler(num_training_steps)

    @override
    def create_optimizer(self, model: nn.Module | None = None) -> torch.optim.Optimizer:
        if self.optimizer is None:
            self._trainflow_keras.create_optimizer()
        return super().create_optimizer(model)

    @override
    def create_scheduler(self, num_training_steps: int, optimizer: torch.optim.Optimizer | None = None) -> Any:
        self._trainflow_keras.wrap_optimizer()
        if self.lr_scheduler is None and isinstance(self.optimizer, KerasOptimizer):
            self.lr_scheduler = KerasSchedule(self.optimizer)
        return super().create_scheduler(num_training_steps, self.optimizer)

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
        """One pass over batches: predictions and labels ``[samples, ...]``, and metrics.

        Args:
            dataset: batches, as `get_eval_tfdataset` returns them.
            steps: batches to read at most; None for all.
            num_examples: samples in them; the loop counts them itself.
            description: of the pass.
            prediction_loss_only: compute the loss alone.
        """
        forward = self._trainflow_keras
        loader = self._trainflow_loader(dataset, steps)
        return self.evaluation_loop(loader, description, prediction_loss_only, forward.ignore_keys, forward.prefix)

    @override
    def evaluation_loop(
        self,
        dataloader: Any,
        description: str,
        prediction_loss_only: bool | None = None,
        ignore_keys: list[str] | None = None,
        metric_key_prefix: str = "eval",
    ) -> EvalLoopOutput:
        """One pass over a loader, as `Trainer.evaluation_loop`; every process has the running statistics of rank 0."""
        self._trainflow_keras.share_statistics()
        return super().evaluation_loop(dataloader, description, prediction_loss_only, ignore_keys, metric_key_prefix)

    # -- trackers -----------------------------------------------------------------------------------------------------

    def setup_wandb(self) -> None:
        """Log to Weights & Biases; called when the Trainer is built if `report_to` names it."""
        self._trainflow_report_to(WandbCallback)

    def setup_comet(self) -> None:
        """Log to Comet; called when the Trainer is built if `report_to` names it."""
        self._trainflow_report_to(CometCallback)

    def _trainflow_report_to(self, callback: type[TrainerCallback]) -> None:
        if not any(isinstance(each, callback) for each in self.callback_handler.callbacks):
            self.add_callback(callback)
