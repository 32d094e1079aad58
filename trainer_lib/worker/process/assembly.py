"""From a recipe and a request to a Trainer: what the verbs train, evaluate and predict share.

Its progress leaves it as events: what is logged, and in between a sign of life at most twice a second.
"""

from __future__ import annotations

import os
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn

from trainer_lib.arguments import TrainingArguments
from trainer_lib.arguments.configs.accelerator_config import describe_step, total_batch_size
from trainer_lib.arguments.configs.parallelism_config import data_size, is_laid_out
from trainer_lib.base.durations import describe_seconds
from trainer_lib.base.json_text import parse_json
from trainer_lib.base.metric_names import MetricCall
from trainer_lib.callbacks.base import PrinterCallback, ProgressCallback, TrainerCallback
from trainer_lib.checkpoint.tensors import read_safetensors
from trainer_lib.checkpoint.transformers_checkpoint import load_adapter
from trainer_lib.data.loading.collators import StoredRowsCollator, default_data_collator
from trainer_lib.data.loading.loader import has_length
from trainer_lib.distributed.communicator import shutdown
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
from trainer_lib.worker.process.session import Events, Pace, Work

if TYPE_CHECKING:
    from trainer_lib.state import TrainerControl, TrainerState
    from trainer_lib.trainer.internals import Internals
    from trainer_lib.trainer.run import TrainingRun

ADAPTERS = "adapter_model.safetensors"
BASE = "base_model.json"  # next to exported adapters: what `describe_base` says of their base


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
    data = DataInfo(work.prepared)
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


def leave_together(trainer: Any) -> None:
    """End the communication of this rank once all ranks have come here. Collective."""
    trainer._trainflow.comm.barrier()
    shutdown()


_SHOWN = 300  # entries of an earlier attempt's log that a resumed one reports again
_FIRST_BATCHES = 3  # they are slow, so no time left is estimated from them


class _Counted(NamedTuple):
    """Progress of a training at a log."""

    trained_s: float = 0.0
    step: int = 0
    tokens: int = 0


class _Rows(NamedTuple):
    """Rows of an evaluation: their offset, their number, and the number of all rows."""

    before: int
    now: int
    total: int


class EventsCallback(TrainerCallback):
    """Turns callback events into progress events. It reads counters and never a tensor, so it never waits for a GPU."""

    def __init__(self, events: Events, samples_per_step: int = 0) -> None:
        self._events = events
        self._samples_per_step = samples_per_step
        self._pace = Pace()
        self._began = 0.0
        self._first_step = 0
        self._predicted = self._all_predicted = 0
        self._rows: _Rows | None = None
        self.resumed_from: int | None = None  # the step training started from; None: it started at the beginning
        # Set at the end: model FLOPs of this process's training on all ranks, its seconds in steps, and (step, loss) of
        # the steps after the last log.
        self.flops = self.trained_s = 0.0
        self.unlogged: list[tuple[int, float]] = []
        self._first_flops = 0.0
        self._run: Callable[[], TrainingRun | None] = lambda: None
        self._internals: Internals | None = None
        self._rated = _Counted()

    def begin_split(self, *, before: int, rows: int, total: int) -> None:
        """The next batches are of so many rows, behind `before` of `total`: without training, they are the progress."""
        if self._rows is None:
            self._began = time.monotonic()
        self._rows = _Rows(before, rows, total)

    def follow(self, trainer: Trainer) -> None:
        """Report where the time of this Trainer's training goes, and keep the losses that it does not log."""
        self._run = lambda: trainer._trainflow.run
        self._internals = trainer._trainflow

    def spent(self) -> dict[str, float] | None:
        """Seconds by name of the training under way; None outside of one."""
        run = self._run()
        return None if run is None else run.spent.so_far()

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Report the step that training continues from, and start the clock."""
        self._began, self._first_step = time.monotonic(), state.global_step
        self._rated = _Counted(step=state.global_step)
        self._first_flops = float(state.total_flos)
        if self._internals is not None:
            size = self._internals.world.comm.data_parallel.size
            step = describe_step(args, data_parallel_size=size, micro_batch=state.train_batch_size)
            self._events.emit("begin", message=step)
        if state.global_step:
            self.resumed_from = state.global_step
            message = f"continues from step {state.global_step}"
            history = state.log_history[:: 1 + len(state.log_history) // _SHOWN]
            where = {"step": state.global_step, "max_steps": state.max_steps}
            self._events.emit("resume", **where, message=message, history=history)

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Report the last position, and keep what is lost with the training."""
        self.flops = float(state.total_flos) - self._first_flops
        if (run := self._run()) is not None:
            self.unlogged = run.history.unlogged(state.global_step)
            self.trained_s = run.spent.so_far()["trained"]
        self._events.emit("progress", **self._where(state))

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Report a sign of life."""
        if self._pace.is_due():
            self._events.emit("progress", **self._where(state))

    def on_log(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        logs: Mapping[str, Any] | None = None,
        **kwargs: Any,
    ) -> None:
        """Report the logged values, with the position of the training."""
        numbers = {key: value for key, value in (logs or {}).items() if isinstance(value, int | float | str)}
        self._events.emit("log", loss=numbers.get("loss"), logs=numbers, **self._where(state))
        if "loss" in numbers:
            self._report_rates(state)

    def on_prediction_step(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Report a sign of life."""
        self._predicted += 1
        self._all_predicted += 1
        if not self._pace.is_due():
            return
        loader = kwargs.get("eval_dataloader")
        batches = len(loader) if has_length(loader) else 0  # type: ignore[arg-type]
        message = f"evaluating: batch {self._predicted:,}" + (f" of {batches:,}" if batches else "")
        where = self._where(state) or self._row(batches)
        if not state.max_steps and "eta_s" in where:
            message += f", {describe_seconds(where['eta_s'])} left"
        self._events.emit("progress", message=message, **where)

    def on_evaluate(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Start to count batches from zero."""
        self._predicted = 0

    def on_save(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Report that a checkpoint is committed."""
        self._events.emit("save", **self._where(state))

    def _report_rates(self, state: TrainerState) -> None:
        """Pass samples and tokens per second of training since the last log to the trackers."""
        spent, internals = self.spent(), self._internals
        if spent is None or internals is None:
            return
        counted = _Counted(spent["trained"], state.global_step, internals.counters.own_tokens)
        before, self._rated = self._rated, counted
        seconds = counted.trained_s - before.trained_s
        if seconds <= 0 or counted.step <= before.step:
            return
        rates = {"samples_per_second": (counted.step - before.step) * self._samples_per_step / seconds}
        if counted.tokens > before.tokens:
            # Of this rank's batches: those of the others are about as long.
            ranks = internals.world.comm.data_parallel.size
            rates["tokens_per_second"] = (counted.tokens - before.tokens) * ranks / seconds
        internals.events.report(rates)

    def _row(self, batches: int) -> dict[str, Any]:
        """The row that an evaluation of one split after the other has reached, and the time left."""
        if self._rows is None or not batches:
            return {}
        before, now, total = self._rows
        row = before + min(now, now * self._predicted // batches)
        where: dict[str, Any] = {"step": row, "max_steps": total}
        if row and self._all_predicted >= _FIRST_BATCHES:
            where["eta_s"] = (total - row) * (time.monotonic() - self._began) / row
        return where

    def _where(self, state: TrainerState) -> dict[str, Any]:
        """Position, speed and time left, as far as they are known."""
        if not state.max_steps:  # evaluation without training
            return {}
        where: dict[str, Any] = {"step": state.global_step, "max_steps": state.max_steps, "epoch": state.epoch}
        # Since this process took over: the steps before a resume took none of its time.
        steps, seconds = state.global_step - self._first_step, time.monotonic() - self._began
        if steps > 0 and seconds > 0:
            where["eta_s"] = (state.max_steps - state.global_step) * seconds / steps
            where["samples_per_second"] = steps * self._samples_per_step / seconds
        if (spent := self.spent()) is not None:
            where["spent"] = spent
        return where
