"""`Trainer`: the public class. Its methods are spread over one file per concern, all of them overridable.

`loaders`, `steps` (forward, loss, backward, prediction, optimizer), `evaluator`, `saving` (checkpoints and the Hub),
`reporting`; here are construction, callbacks, training and search.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar

import torch
from torch import nn

from trainer_lib.arguments import TrainingArguments
from trainer_lib.arguments.foreign_arguments import adopt_arguments, apply_launcher
from trainer_lib.base.memory import MemoryTracker
from trainer_lib.base.outputs import BestRun, TrainOutput
from trainer_lib.callbacks.base import TrainerCallback
from trainer_lib.data.loading.collators import DataCollatorWithPadding, default_data_collator
from trainer_lib.distributed import communicator as distributed
from trainer_lib.distributed.precision import apply_tf32
from trainer_lib.errors import ConfigError
from trainer_lib.search.base import SearchSettings, default_compute_objective, parse_directions
from trainer_lib.trainer import trainer_checks
from trainer_lib.trainer.api.reporting import ReportingMethods
from trainer_lib.trainer.api.saving import SavingMethods
from trainer_lib.trainer.api.steps import StepMethods
from trainer_lib.trainer.engine import resolve_arguments
from trainer_lib.trainer.evaluator import EvaluationMethods
from trainer_lib.trainer.internals import Internals
from trainer_lib.trainer.loop import training_length
from trainer_lib.trainer.model.seeding import enable_full_determinism, set_seed
from trainer_lib.trainer.overrides import refuse_uncalled, takes_trial
from trainer_lib.trainer.world import World


class Trainer(StepMethods, EvaluationMethods, SavingMethods, ReportingMethods):
    """Trains, evaluates and predicts with any `torch.nn.Module` whose forward takes a batch by keyword.

    Args:
        model: the module; its forward returns a tuple, a dict or a `ModelOutput` with the loss first (or under "loss")
            when labels are given. Or `model_init`, which makes a new one for every training.
        args: the arguments; a basic set with output_dir "tmp_trainer" when not given. Those of transformers are
            converted: `trainer.args` are ours then.
        data_collator: list of samples -> batch; `DataCollatorWithPadding` when the processing class can pad, else
            `default_data_collator`.
        train_dataset: map-style or iterable.
        eval_dataset: a dataset, or a dict of them by name.
        processing_class: tokenizer or processor, saved with the model. Old name: tokenizer.
        model_init: `() -> model` or `(trial) -> model`.
        compute_loss_func: `(outputs, labels, num_items_in_batch) -> loss`; the last may be left out.
        compute_metrics: `EvalPrediction -> {name: number}`.
        callbacks: added to the default ones.
        optimizers: (optimizer, schedule) to use instead of those that the arguments ask for.
        optimizer_cls_and_kwargs: the optimizer's class and settings, instead of `optim` and `optim_args`.
        preprocess_logits_for_metrics: `(logits, labels) -> logits`, applied batch by batch before they are kept.

    Raises:
        ConfigError, DataError: something is wrong that can be known before the first step.
    """

    _trainflow_arguments_class: type[TrainingArguments] = TrainingArguments
    #: The library's own functions, to know which of them are overridden.
    _trainflow_defaults: ClassVar[Mapping[str, Any]]

    def __init__(
        self,
        model: nn.Module | None = None,
        args: TrainingArguments | None = None,
        data_collator: Callable[[list[Any]], Any] | None = None,
        train_dataset: Any = None,
        eval_dataset: Any = None,
        processing_class: Any = None,
        model_init: Callable[..., nn.Module] | None = None,
        compute_loss_func: Callable[..., torch.Tensor] | None = None,
        compute_metrics: Callable[..., dict[str, Any]] | None = None,
        callbacks: Sequence[TrainerCallback | type[TrainerCallback]] | None = None,
        optimizers: tuple[torch.optim.Optimizer | None, Any] = (None, None),
        optimizer_cls_and_kwargs: tuple[type[torch.optim.Optimizer], dict[str, Any]] | None = None,
        preprocess_logits_for_metrics: Callable[[Any, Any], Any] | None = None,
        tokenizer: Any = None,
    ) -> None:
        # First: it needs nothing, and what follows may join a process group.
        refuse_uncalled(type(self))
        functions = (data_collator, model_init, compute_loss_func, compute_metrics, preprocess_logits_for_metrics)
        own_loss = type(self).compute_loss is not Trainer.compute_loss
        trainer_checks.refuse_wrong_kinds(functions, callbacks, optimizers, optimizer_cls_and_kwargs, own_loss=own_loss)
        self._trainflow = internals = Internals(self._trainflow_hooks())
        given = self._trainflow_arguments_class(output_dir="tmp_trainer") if args is None else adopt_arguments(args)
        self._trainflow_set_up(given)
        internals.loop.set_up()
        distributed.mention_idle_gpus(internals.world.device, internals.world.comm.world_size)
        self.model_init = model_init
        self.processing_class = trainer_checks.choose_processing_class(processing_class, tokenizer)
        self.train_dataset = train_dataset
        self.eval_dataset = eval_dataset
        self.compute_loss_func = compute_loss_func
        self.compute_metrics = compute_metrics
        self.optimizer_cls_and_kwargs = optimizer_cls_and_kwargs
        self.preprocess_logits_for_metrics = preprocess_logits_for_metrics
        pads = callable(getattr(self.processing_class, "pad", None))
        default = DataCollatorWithPadding(self.processing_class) if pads else default_data_collator
        self.data_collator = data_collator or default
        internals.engine.take_optimizers(optimizers)
        # After `compute_loss_func` is set, whose signature is read as well.
        internals.read_signatures()
        with self._memory_tracker.stage("init"):
            internals.model.take(model)
            self.create_accelerator_and_postprocess()
            internals.accelerator.refuse_foreign()
            self._validate_args()
            internals.publisher.prepare_target()
            internals.events.create(callbacks or (), rank=internals.world.comm.rank)

    def _trainflow_set_up(self, args: TrainingArguments) -> None:
        """Adopt arguments, and everything that follows from them alone: ranks, device, seeds, strategy, precision.

        Called when the Trainer is built, and by a search for every trial.
        """
        # A copy where the launcher sets anything: the user's own arguments stay as they are.
        args = apply_launcher(args)
        trainer_checks.refuse_unserved(args, self._trainflow_arguments_class)
        self.args = args = resolve_arguments(args)
        internals = self._trainflow
        internals.world = world = World.form(args)
        logging.getLogger("trainer_lib").setLevel(args.get_process_log_level())
        if (args.log_level if args.should_log else args.log_level_replica) != "passive":
            logging.getLogger("transformers").setLevel(args.get_process_log_level())
        # Before model_init is called: initial weights are part of what the seed fixes.
        (enable_full_determinism if args.full_determinism else set_seed)(args.seed)
        apply_tf32(args)
        internals.engine.set_up(args, world)
        internals.model.set_up_smoothing(args)
        internals.attempts.allowed = None
        internals.loaders.kept.clear()  # those of other arguments
        if hasattr(self, "callback_handler"):  # the Trainer is built, so this is a trial of a search
            self.create_accelerator_and_postprocess()
        else:
            internals.accelerator.set_up()
        self._memory_tracker = MemoryTracker(enabled=not args.skip_memory_metrics, device=world.device)

    def _trainflow_hooks(self) -> Trainer:
        """The Trainer as its collaborators see it."""
        return self

    def _trainflow_look_at_model(self) -> None:
        """Find the facts about the model, whenever there is another one."""
        self._trainflow.model.look()

    def call_model_init(self, trial: Any = None) -> nn.Module:
        """A new model from `model_init`, which takes nothing or the trial of a search."""
        init = self.model_init
        if init is None:
            raise ConfigError("model_init is needed here.", field="model_init", remedy="Give it to the Trainer.")
        model = self._trainflow.engine.strategy.build(lambda: init(trial) if takes_trial(init) else init())
        if not isinstance(model, nn.Module):
            raise ConfigError(
                "model_init returned no model.", field="model_init", value=model, remedy="Return a torch.nn.Module."
            )
        return model

    def create_accelerator_and_postprocess(self) -> None:
        """Prepare `self.accelerator`; an override may change its settings afterwards, but not put another in its place.

        Called when the Trainer is built, and for every trial of a search.
        """
        self._trainflow.accelerator.set_up()

    def _validate_args(self) -> None:
        """Check what the Trainer was given; an override may add checks. Raises ConfigError and DataError."""
        trainer_checks.check_trainer(self, self._trainflow.world.comm.data_parallel.size)

    # -- callbacks ----------------------------------------------------------------------------------------------------

    def add_callback(self, callback: TrainerCallback | type[TrainerCallback]) -> None:
        """Add a callback (an instance, or a class to instantiate) after the present ones."""
        self.callback_handler.add_callback(callback)

    def pop_callback(self, callback: TrainerCallback | type[TrainerCallback]) -> TrainerCallback | None:
        """Remove and return a callback, or the first of a class; None when there is none."""
        return self.callback_handler.pop_callback(callback)

    def remove_callback(self, callback: TrainerCallback | type[TrainerCallback]) -> None:
        """Remove a callback, or the first of a class."""
        self.callback_handler.remove_callback(callback)

    # -- training -----------------------------------------------------------------------------------------------------

    def train(
        self,
        resume_from_checkpoint: str | bool | None = None,
        trial: Any = None,
        ignore_keys_for_eval: list[str] | None = None,
    ) -> TrainOutput:
        """Train, from the start or from a checkpoint. Collective.

        Args:
            resume_from_checkpoint: True = the newest good checkpoint in output_dir, "auto" = that or a new start, or
                the URL of one; None = as the arguments ask.
            trial: a search's trial, or its parameters.
            ignore_keys_for_eval: outputs of the model that evaluations leave out of predictions.

        Raises:
            Preempted: SIGTERM or SIGINT came; a checkpoint of the step that the error names is committed.
            NonFiniteError: loss or gradients stayed NaN or infinite.
            ConfigError, DataError: the arguments or the data cannot be used.
            StorageError: a checkpoint could not be saved.
        """
        return self._trainflow.loop.train(resume_from_checkpoint, trial, ignore_keys_for_eval)

    def _inner_training_loop(
        self,
        batch_size: int | None = None,
        args: TrainingArguments | None = None,
        resume_from_checkpoint: str | None = None,
        trial: Any = None,
        ignore_keys_for_eval: list[str] | None = None,
    ) -> TrainOutput:
        """One training with one micro-batch size: epochs of steps, and what the callbacks ask for in between."""
        return self._trainflow.loop.run(resume_from_checkpoint, trial, ignore_keys_for_eval)

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
        """Do what the callbacks asked for: log, then evaluate, then save. The host waits for the device here.

        Overrides of every age are called with what they take, and may call this one in their own way.

        Args:
            tr_loss: an override gets the sum of the losses since the last log, 0-dim; setting it to 0 in place counts
                as a log. Else the newest step's loss, and None between epochs. The log has means since the last log.
            grad_norm: of the newest step, 0-dim; None between epochs.
        """
        if isinstance(grad_norm, nn.Module):  # called without a norm, as before transformers 4.38
            model, trial, ignore_keys_for_eval = grad_norm, model, epoch
        self._trainflow.loop.log_evaluate_save(model, trial, ignore_keys_for_eval, start_time, learning_rate)

    def _finalize_training(self, trial: Any, num_train_samples: float, start_time: float) -> TrainOutput:
        """End a training: the best model if asked for, the metrics of the run, `on_train_end`, the final push.

        Args:
            num_train_samples: samples that this call of `train` has trained on, over all ranks.
            start_time: when it started, in seconds since the epoch of `time.time`.
        """
        return self._trainflow.loop.finalize()

    def set_initial_training_values(
        self, args: TrainingArguments, dataloader: Any, total_train_batch_size: int | None = None
    ) -> tuple[int, int, int, float, int, int | None, int]:
        """The length of a training with this loader. An override may change the first value and the last one.

        Returns:
            Epochs, optimizer steps per epoch, samples per epoch, samples in all, samples of one step over all ranks,
            micro-batches per epoch (None when unknown), optimizer steps in all.

        Raises:
            ConfigError: neither the data nor `max_steps` gives a length. DataError: the data has no batch.
        """
        source, step = self._trainflow.loaders.source_of(dataloader), self.get_total_train_batch_size(args)
        max_steps, epochs = training_length(args, source.steps_per_epoch)
        samples = source.epoch_samples if source.epoch_samples is not None else step * max_steps
        trained = step * max_steps if args.max_steps > 0 else samples * args.num_train_epochs
        steps = source.steps_per_epoch or max_steps
        return epochs, steps, samples, trained, step, source.micros_per_epoch, max_steps

    def _hp_search_setup(self, trial: Any) -> None:
        """Note the search's trial; the arguments hold its parameters already."""
        self._trainflow.trials.set_trial(trial)

    def hyperparameter_search(
        self,
        hp_space: Callable[[Any], Mapping[str, Any]] | None = None,
        compute_objective: Callable[[dict[str, float]], float | Sequence[float]] | None = None,
        n_trials: int | None = 20,
        direction: str | Sequence[str] = "minimize",
        backend: Any = None,
        hp_name: Callable[[Any], str] | None = None,
        **kwargs: Any,
    ) -> BestRun | list[BestRun]:
        """Train `n_trials` times, each time with other arguments; return the best run, on every rank. Collective.

        A search needs `model_init`, which may take the trial. Each trial writes to ``output_dir/run-<number>`` and
        trains with a copy of the arguments; afterwards the Trainer's model, state and callbacks are what they were.
        Trials are not pushed to a hub. A trial whose loss stays NaN, or (with one process) whose memory runs out,
        counts as failed, and the search continues.

        With Ray, each trial is a process of Ray; what the Trainer was given goes there by Ray's transport (a pickle).

        Args:
            hp_space: trial -> {argument: value}, called on rank 0 only; default: learning rate, epochs, seed and
                micro-batch. For Ray: None -> {argument: a space of `ray.tune`, or a value}, called once.
            compute_objective: metrics of an evaluation -> the number to optimize, or one number per direction. The
                default is the sum of all metrics but the loss, and the loss where it is the only one. The last
                evaluation of a trial counts.
            n_trials: number of trials in this call; None = until `timeout` (`time_budget_s` of Ray).
            direction: "minimize" or "maximize"; a list of them for several objectives.
            backend: "optuna" (default) or "ray".
            hp_name: trial -> name of its folder and run; default: ``run-<number>``. For Ray: values -> name.
            kwargs: `storage`, `study_name`, `load_if_exists`, `sampler`, `pruner` of `optuna.create_study`; `timeout`
                (seconds), `catch`, `gc_after_trial` of `Study.optimize`. For Ray: `scheduler`, `search_alg`,
                `resources_per_trial`, `max_concurrent_trials`, `max_failures` and others of `ray.tune.run`.

        Returns:
            The best run; with several directions, all runs that no other run beats in every direction.

        Raises:
            ConfigError: `model_init` or `eval_dataset` is missing, an argument is unknown or refused, or no trial
                was completed.
            MissingExtraError: the backend is not installed. Errors of a training pass through.
        """
        settings = SearchSettings(
            hp_space=hp_space,
            compute_objective=compute_objective or default_compute_objective,
            n_trials=n_trials,
            directions=parse_directions(direction),
            hp_name=hp_name,
            options=kwargs,
        )
        return self._trainflow.trials.search(settings, backend)


Trainer._trainflow_defaults = {
    name: getattr(Trainer, name)
    for name in (
        *("compute_loss", "_clip_grad_norm", "_get_grad_norm", "_track_num_input_tokens", "_maybe_log_save_evaluate"),
        *("save_model", "_save", "create_accelerator_and_postprocess"),
        *("_save_optimizer_and_scheduler", "_save_scaler", "_save_rng_state"),
    )
}
