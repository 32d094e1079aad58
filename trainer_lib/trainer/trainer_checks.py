"""Checks when a Trainer is built: bad input is refused there, and not at step 1,000."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from torch.utils.data import IterableDataset

from trainer_lib.arguments import TrainingArguments
from trainer_lib.arguments.enums import IntervalStrategy, SaveStrategy
from trainer_lib.arguments.fields import field_map
from trainer_lib.arguments.groups import Seq2SeqArguments
from trainer_lib.data.loading.loader import has_length
from trainer_lib.errors import ConfigError, DataError
from trainer_lib.evaluation.metrics import is_metric_object
from trainer_lib.trainer.loaders import sorts_by_length
from trainer_lib.trainer.overrides import takes

if TYPE_CHECKING:
    from trainer_lib.trainer.trainer import Trainer

_WITHOUT_WARMUP = ("constant", "reduce_lr_on_plateau", "greedy")
_log = logging.getLogger(__name__)


def refuse_unserved(args: TrainingArguments, wanted: type[TrainingArguments]) -> None:
    """Raise ConfigError for an argument that a Trainer of `wanted` arguments does not serve; log what has no effect."""
    generates = issubclass(wanted, Seq2SeqArguments)
    if generates and not isinstance(args, Seq2SeqArguments):
        what = "The arguments have no generation settings."
        raise ConfigError(what, field="args", value=type(args).__name__, remedy="Give Seq2SeqTrainingArguments.")
    needs = {} if generates else dict.fromkeys(field_map(Seq2SeqArguments), "Seq2SeqTrainer")
    if not args.use_liger_kernel:
        needs["liger_kernel_config"] = "use_liger_kernel"
    if not str(args.optim).startswith(("galore", "apollo")):
        needs["optim_target_modules"] = "an optimizer that works on chosen layers, such as galore_adamw"
    if args.project != "huggingface" and {"trackio", "all"}.isdisjoint(args.report_to or ()):
        others = "other trackers read a variable, as WANDB_PROJECT or MLFLOW_EXPERIMENT_NAME"
        needs["project"] = f'report_to="trackio": {others}'
    for name, needed in needs.items():
        if getattr(args, name, None):
            _log.warning("%s = %s has no effect without %s.", name, getattr(args, name), needed)
    # Accepting an argument and ignoring it would mislead.
    what = "This version does not serve the argument."
    if isinstance(args.fsdp_config, str) and not args.fsdp:
        remedy = 'Remove it, or set fsdp="full_shard auto_wrap".'
        raise ConfigError(what, field="fsdp_config", value=args.fsdp_config, remedy=remedy)
    if "tpu_metrics_debug" in (args.debug or ()):
        remedy = "Remove it: torch_xla.debug.metrics prints them."
        raise ConfigError(what, field="debug", value=args.debug, remedy=remedy)


_FUNCTIONS = ("data_collator", "model_init", "compute_loss_func", "compute_metrics", "preprocess_logits_for_metrics")


def refuse_wrong_kinds(
    functions: Sequence[object], callbacks: object, optimizers: object, optimizer: object, *, own_loss: bool
) -> None:
    """Raise ConfigError for an argument of the constructor that is of another kind, which would fail far from here.

    `functions`: the values of `_FUNCTIONS`; `optimizer`: `optimizer_cls_and_kwargs`; `own_loss`: the Trainer's class
    overrides `compute_loss`.
    """
    for name, value in zip(_FUNCTIONS, functions, strict=True):
        # Libraries that compute the loss themselves pass a text for it, so that the loss counts as their own.
        stands_for_own_loss = own_loss and name == "compute_loss_func" and isinstance(value, str)
        is_metric = name == "compute_metrics" and is_metric_object(value)
        if value is not None and not callable(value) and not is_metric and not stands_for_own_loss:
            raise _wrong_kind(
                name, value, "This is not a function.", "Give a function, or an object that can be called."
            )
    if callbacks is not None and (isinstance(callbacks, str) or not isinstance(callbacks, Iterable)):
        raise _wrong_kind("callbacks", callbacks, "This is not a list of callbacks.", "Put it in a list: [callback].")
    pairs = {"optimizers": "(optimizer, schedule)", "optimizer_cls_and_kwargs": "(class, {name: value})"}
    for (name, form), value in zip(pairs.items(), (optimizers, optimizer), strict=True):
        if value is not None and not (isinstance(value, tuple | list) and len(value) == 2):
            raise _wrong_kind(name, value, "This is not a pair.", f"Give {form}.")


def _wrong_kind(name: str, value: object, what: str, remedy: str) -> ConfigError:
    return ConfigError(what, field=name, value=type(value).__name__, remedy=remedy)


def choose_processing_class(given: Any, tokenizer: Any) -> Any:
    """The processing class under its new or old name."""
    if tokenizer is None:
        return given
    if given is not None:
        raise ConfigError("Both were given.", field="processing_class and tokenizer", remedy="Give processing_class.")
    warnings.warn("`tokenizer` is the old name of `processing_class`.", DeprecationWarning, stacklevel=3)
    return tokenizer


def check_trainer(trainer: Trainer, data_parallel_size: int) -> None:
    """Raise ConfigError or DataError where the arguments contradict what else the Trainer was given."""
    args = trainer.args
    _check_training_data(args, trainer.train_dataset, sorts=sorts_by_length(args))
    # A subclass with its own `evaluate` may need no dataset.
    own = "evaluate" in vars(type(trainer)) and not type(trainer).__module__.startswith("trainer_lib.")
    if args.eval_strategy != IntervalStrategy.NO and trainer.eval_dataset is None and not own:
        what = f"eval_strategy = {args.eval_strategy} needs data to evaluate on."
        raise ConfigError(what, field="eval_dataset", remedy='Give eval_dataset, or eval_strategy="no".')
    if trainer.optimizer_cls_and_kwargs is not None and trainer.optimizer is not None:
        raise ConfigError("Both were given.", field="optimizers and optimizer_cls_and_kwargs", remedy="Give one.")
    if trainer.model_init is not None and (trainer.optimizer is not None or trainer.lr_scheduler is not None):
        what = "The optimizer holds parameters of another model: model_init makes a new one for every training."
        remedy = "Override create_optimizer, or give optimizer_cls_and_kwargs."
        raise ConfigError(what, field="optimizers", remedy=remedy)
    metrics = trainer.compute_metrics
    streams = args.batch_eval_metrics and metrics is not None and not is_metric_object(metrics)
    if streams and metrics is not None and not takes(metrics, "compute_result"):
        what = "batch_eval_metrics calls it with compute_result=True at the last batch."
        raise ConfigError(what, field="compute_metrics", remedy="Give it a parameter compute_result.")
    _check_best_metric(trainer)
    _check_effects(trainer, data_parallel_size)


def _check_effects(trainer: Trainer, data_parallel_size: int) -> None:
    """Arguments that what else was given leaves without an effect."""
    args = trainer.args
    if trainer.compute_loss_func is not None and args.label_smoothing_factor > 0:
        what = "compute_loss_func computes the loss: nothing would be smoothed."
        remedy = "Remove it, and smooth in compute_loss_func: torch's cross_entropy takes label_smoothing."
        raise ConfigError(what, field="label_smoothing_factor", value=args.label_smoothing_factor, remedy=remedy)
    if not args.dataloader_in_order and args.dataloader_num_workers > 0 and data_parallel_size > 1:
        what = "Several processes take their micro-batches by position."
        remedy = "Remove it, or train with one process."
        raise ConfigError(what, field="dataloader_in_order", value=False, remedy=remedy)
    own_warmup = str(args.optim).startswith("schedule_free")  # these optimizers warm up inside their step
    if args.warmup_steps and str(args.lr_scheduler_type) in _WITHOUT_WARMUP and not own_warmup:
        _log.warning(
            "warmup_steps = %s has no effect: the schedule %s has no warm-up. Give constant_with_warmup.",
            *(args.warmup_steps, args.lr_scheduler_type),
        )


def without_length(args: TrainingArguments) -> ConfigError:
    """The error for data without a length where `max_steps` is not given."""
    what = "The training data has no length, so the number of steps cannot follow from num_train_epochs."
    return ConfigError(what, field="max_steps", value=args.max_steps, remedy="Give max_steps.")


def _check_training_data(args: TrainingArguments, dataset: Any, *, sorts: bool) -> None:
    if dataset is None:
        return
    if args.max_steps <= 0 and not has_length(dataset):
        raise without_length(args)
    if has_length(dataset) and len(dataset) == 0:
        raise DataError("The training data has no samples.", field="train_dataset", remedy="Give data.")
    if sorts and (isinstance(dataset, IterableDataset) or not has_length(dataset)):
        name = "sortish_sampler" if getattr(args, "sortish_sampler", False) else "train_sampling_strategy"
        remedy = "Remove it, or give map-style data."
        raise ConfigError("A stream cannot be sorted by length.", field=name, value=getattr(args, name), remedy=remedy)


def _check_best_metric(trainer: Trainer) -> None:
    """With several evaluation sets, the metric must name exactly one of them."""
    args, sets = trainer.args, trainer.eval_dataset
    watched = args.load_best_model_at_end or args.save_strategy == SaveStrategy.BEST
    if not watched or not isinstance(sets, Mapping) or args.metric_for_best_model is None:
        return
    name = args.metric_for_best_model.removeprefix("eval_")
    if sum(name.startswith(f"{dataset}_") for dataset in sets) != 1:
        what = "The metric does not name the evaluation set that decides."
        remedy = f'Name one of {", ".join(sets)}: "eval_{next(iter(sets))}_loss", say.'
        raise ConfigError(what, field="metric_for_best_model", value=args.metric_for_best_model, remedy=remedy)
