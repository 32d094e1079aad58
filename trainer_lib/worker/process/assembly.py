"""From a recipe and a request to a Trainer: what the verbs train, evaluate and predict share."""

from __future__ import annotations

import os
import warnings
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from trainer_lib.arguments import TrainingArguments
from trainer_lib.arguments.configs.accelerator_config import total_batch_size
from trainer_lib.arguments.configs.parallelism_config import data_size, is_laid_out
from trainer_lib.base.json_text import parse_json
from trainer_lib.base.metric_names import MetricCall
from trainer_lib.base.records import to_record
from trainer_lib.callbacks.base import PrinterCallback, ProgressCallback
from trainer_lib.checkpoint.tensors import read_safetensors
from trainer_lib.checkpoint.transformers_checkpoint import load_adapter
from trainer_lib.data.loading.collators import StoredRowsCollator, default_data_collator
from trainer_lib.errors import ConfigError, DamagedError
from trainer_lib.evaluation.metrics import NamedMetrics, is_metric_object
from trainer_lib.hub.base import ADAPTER
from trainer_lib.keras_models.keras_backend import is_keras_model, register_parameters
from trainer_lib.protocol.recipe_functions import kind_of
from trainer_lib.recipes import DataInfo
from trainer_lib.storage import Store
from trainer_lib.trackers.spool import TRACKED_RUN
from trainer_lib.trainer import Trainer
from trainer_lib.trainer.model.models import describe_base, innermost, is_peft, set_compute_type
from trainer_lib.trainer.model.seeding import set_seed
from trainer_lib.worker.process.events import EventsCallback
from trainer_lib.worker.process.session import Work

ADAPTERS = "adapter_model.safetensors"
BASE = "base_model.json"
"""Next to exported adapters: what `describe_base` says of their base."""


def arguments(work: Work[Any], verb: str, output_dir: str) -> TrainingArguments:
    """The request's training arguments, completed by what the worker decides.

    Progress leaves a worker as events, so there are no progress bars. With a tracked run, the training curve goes to
    MLflow; the flow logs the results of the other stages. A recipe with its own `collate` gets all columns of its rows.
    """
    given = dict(work.request.args)
    given["output_dir"] = output_dir
    # A bar's lines would mix with the progress that the orchestrator shows.
    given.setdefault("disable_tqdm", True)
    if verb != "train":  # these arguments come from training, but there is no evaluation set and nothing to save
        given |= {"eval_strategy": "no", "save_strategy": "no", "load_best_model_at_end": False, "eval_on_start": False}
    if work.recipe.collate is not None:
        given.setdefault("remove_unused_columns", False)
        # Lists are stored, and arrive in collate, as arrays: the advice is for who could hand over anything else.
        warnings.filterwarnings("ignore", message="Creating a tensor from a list of numpy.ndarrays is")
    args = TrainingArguments.from_dict(given, prefix=f"{verb}.args")
    if verb != "train" and not is_laid_out(args, work.world_size):  # a stage with other processes has the model whole
        args.parallelism = args.parallelism_config = None
    if verb == "train" and work.request.tracking and os.environ.get(TRACKED_RUN):
        names = [args.report_to] if isinstance(args.report_to, str) else list(args.report_to or [])
        names = [name for name in names if name != "none"]
        args.report_to = names if "mlflow" in names or "all" in names else [*names, "mlflow"]
    return args


def build_model(work: Work[Any], args: TrainingArguments, data: DataInfo) -> nn.Module:
    """The recipe's model. Its initial weights depend only on the seed, so they are equal on every rank and retry."""
    set_seed(args.seed)
    model = work.recipe.build_model(work.request.model_options(), data)
    module = require_module(model, work, "build_model", field="recipe", remedy="Return the model.")
    if is_keras_model(module):
        given: Any = module
        if not given.built:
            what = "build_model() returned a Keras model that is not built, so it has no weights yet."
            remedy = "Give it an Input layer, or call it once with a batch of zeros."
            raise ConfigError(what, field="recipe", value=str(work.recipe.path), remedy=remedy)
        # Parameters get the names that they have in every process: exported weights are loaded by name.
        register_parameters(given)
    set_compute_type(module, args)
    if args.label_smoothing_factor and getattr(innermost(module), "has_class_loss", False):
        what = "The smoothed loss takes the place of the one by class_weights and focal_gamma."
        remedy = "Remove one of them."
        raise ConfigError(what, field="label_smoothing_factor", value=args.label_smoothing_factor, remedy=remedy)
    return module


def require_module(model: Any, work: Work[Any], function: str, *, field: str, remedy: str) -> nn.Module:
    """The model that the user's `function` has built. Raises ConfigError, about `field`, for what is not a module."""
    if isinstance(model, nn.Module):
        return model
    what = f"The function {function}() must return a torch.nn.Module, and returned {kind_of(model)}."
    raise ConfigError(what, field=field, value=str(work.recipe.path), remedy=remedy)


def build_trainer(
    work: Work[Any], args: TrainingArguments, model: nn.Module, callbacks: Sequence[Any], **datasets: Any
) -> Any:
    """The recipe's Trainer (or ours) with its functions and `callbacks`. Its logs become events and are not printed."""
    recipe = work.recipe
    default: type[Trainer] = Trainer
    if is_keras_model(model):
        from trainer_lib.keras_models.tf_trainer import TFTrainer

        default = TFTrainer
    data = DataInfo(to_record(work.request.data))
    own = recipe.callbacks(work.request.recipe_options())
    trainer = recipe.trainer_class(default)(
        model=model,
        args=args,
        data_collator=recipe.collate_with(data),
        compute_loss_func=recipe.compute_loss_func,
        compute_metrics=recipe.compute_metrics_with(data),
        preprocess_logits_for_metrics=recipe.preprocess_logits_for_metrics,
        callbacks=[*own, *callbacks],
        **datasets,
    )
    in_double = any(parameter.dtype == torch.float64 for parameter in model.parameters())
    if trainer.data_collator is default_data_collator and not in_double:
        trainer.data_collator = StoredRowsCollator()
    # The Trainer adds one of them by itself; one that the recipe asks for stays.
    for printer in (PrinterCallback, ProgressCallback):
        if printer not in [callback if isinstance(callback, type) else type(callback) for callback in own]:
            trainer.remove_callback(printer)
    return trainer


def add_metrics(trainer: Any, calls: Sequence[MetricCall]) -> None:
    """Have a Trainer's evaluations measure the metrics that choose its weights, besides those of the recipe."""
    if not calls:
        return
    if trainer.args.batch_eval_metrics or is_metric_object(trainer.compute_metrics):
        what = "Metrics by name are measured on all rows, and the recipe's metrics are given batch by batch."
        remedy = "Return it from compute_metrics, a function, without batch_eval_metrics."
        raise ConfigError(what, field="metric_for_best_model", value=calls[0].result, remedy=remedy)
    trainer.compute_metrics = NamedMetrics(trainer.compute_metrics, calls)


def events_callback(work: Work[Any], args: TrainingArguments) -> EventsCallback:
    """Progress events for a Trainer with these arguments."""
    return EventsCallback(work.events, total_batch_size(args, data_parallel_size=data_size(args, work.world_size)))


def load_weights(model: nn.Module, url: str) -> None:
    """Load the exported weights at `url`, of a model with adapters these. Raises DamagedError for another model's."""
    store = Store.open(url)
    # Where they are merged into the weights, the adapters lie in a folder of their own.
    for folder in (store, store.child(ADAPTER)) if is_peft(model) else ():
        if folder.exists(ADAPTERS):
            if folder.exists(BASE) and (base := describe_base(model)) is not None:
                trained = parse_json(folder.read_bytes(BASE))
                if base["files"] != trained["files"]:
                    base_of = f"other weights of {trained['name']} than this model's base has"
                    what = f"The adapters were trained on {base_of}."
                    remedy = "Put back the base that they were trained on, or train again (--force train)."
                    raise DamagedError(what, field="model", value=url, remedy=remedy)
            try:
                load_adapter(model, read_safetensors(folder, ADAPTERS))
            except ConfigError as error:
                raise _other_model(url, error.message) from error
            return
    load_tensors(model, read_safetensors(store, "model.safetensors"), url)


def load_tensors(model: nn.Module, tensors: Mapping[str, Tensor], url: str) -> None:
    """Load tensors ``[...]`` by name into the model. Raises DamagedError, about `url`, where they do not fit."""
    try:
        missing, unexpected = model.load_state_dict(tensors, strict=False)
    except RuntimeError as error:
        raise _other_model(url, str(error).splitlines()[-1].strip()) from error
    # A file holds a tied weight under one of its names: under the others it is missing, and loaded all the same.
    loaded = {tensor.data_ptr() for name, tensor in model.state_dict().items() if name in tensors}
    untied = [name for name in missing if model.state_dict()[name].data_ptr() not in loaded]
    if untied or unexpected:
        raise _other_model(url, f"missing: {untied[:5]}, unknown: {list(unexpected)[:5]}")


def _other_model(url: str, what: str) -> DamagedError:
    remedy = "Train again (--force train): the model or its options differ from what was exported."
    return DamagedError(f"The weights do not fit this model ({what}).", field="model", value=url, remedy=remedy)
