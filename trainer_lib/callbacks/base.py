"""Callbacks: where events fire in the life of a run, and the callbacks for early stopping and progress.

::

    Trainer()                       on_init_end
    train():                        on_train_begin
      for each epoch:               on_epoch_begin
        for each optimizer step:    on_step_begin
          for each micro-batch but the last:
            forward, backward       on_substep_end
          forward, backward         (the last micro-batch)
          clip gradients            on_pre_optimizer_step
          optimizer.step()          on_optimizer_step
          schedule, zero_grad       on_step_end         -> sets control.should_{log,evaluate,save,…_stop}
          if should_log:            on_log
          if should_evaluate:
            for each batch:         on_prediction_step
                                    on_evaluate         (and on_log, with the metrics)
          if should_save:           on_save             (and on_push_begin, when the model is pushed to a hub)
                                    on_epoch_end        then logs, evaluates and saves as after on_step_end
                                    on_train_end
    predict():                      on_prediction_step for each batch, then on_predict
    push_to_hub():                  on_push_begin

A callback reads `args`, `state` and the keyword arguments. It acts only by setting switches of `control`, which it may
return. Callbacks run in the order in which they were added, after the Trainer's own.
"""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any

from typing_extensions import override

from trainer_lib.arguments.enums import IntervalStrategy, SaveStrategy
from trainer_lib.errors import ConfigError
from trainer_lib.state import ExportableState, TrainerControl, TrainerState

if TYPE_CHECKING:
    from trainer_lib.arguments import TrainingArguments

logger = logging.getLogger(__name__)

# A number of 15 digits, which says nothing on a terminal.
_HIDDEN = frozenset({"total_flos"})


class TrainerCallback:
    """Base class of all callbacks; an event that is not overridden does nothing.

    Events get `args`, `state`, `control`, and by keyword `model`, `processing_class` (also as `tokenizer`),
    `optimizer`, `lr_scheduler`, `train_dataloader`, `eval_dataloader`. Declare the ones you need, and `**kwargs`.
    """

    def on_init_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> Any:
        """The Trainer is constructed."""

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> Any:
        """Training starts, or resumes from a checkpoint."""

    def on_train_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> Any:
        """Training has ended."""

    def on_epoch_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> Any:
        """A pass over the data starts."""

    def on_epoch_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> Any:
        """A pass over the data has ended."""

    def on_step_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> Any:
        """An optimizer step starts; its micro-batches are loaded."""

    def on_pre_optimizer_step(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> Any:
        """Gradients are complete and clipped; the optimizer steps next."""

    def on_optimizer_step(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> Any:
        """The optimizer has stepped; gradients are not cleared yet."""

    def on_substep_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> Any:
        """A micro-batch is done, and more follow in this optimizer step."""

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> Any:
        """An optimizer step is done and counted."""

    def on_evaluate(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> Any:
        """An evaluation is done; the keyword argument `metrics` holds its results."""

    def on_predict(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, metrics: Any, **kwargs: Any
    ) -> Any:
        """A prediction is done; `metrics` holds its results."""

    def on_save(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> Any:
        """The checkpoint of `state.global_step` is committed; with `save_async`, training is some steps ahead."""

    def on_log(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> Any:
        """The keyword argument `logs` is logged."""

    def on_prediction_step(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> Any:
        """A batch of an evaluation or prediction is done."""

    def on_push_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> Any:
        """The model is about to be pushed to a hub."""


EVENTS = tuple(name for name in vars(TrainerCallback) if name.startswith("on_"))
# Only these are worth a lookup table: the others fire at most once per log, save or epoch.
_OF_EVERY_STEP = frozenset(event for event in EVENTS if "step" in event)


class CallbackHandler(TrainerCallback):
    """Calls every event of a list of callbacks in order.

    Args:
        callbacks: instances, or classes to instantiate without arguments.
        model, processing_class, optimizer, lr_scheduler: passed to the events by keyword.
    """

    def __init__(
        self,
        callbacks: Iterable[TrainerCallback | type[TrainerCallback]],
        model: Any,
        processing_class: Any,
        optimizer: Any,
        lr_scheduler: Any,
    ) -> None:
        self.callbacks: list[TrainerCallback] = []
        self._looked_at: list[TrainerCallback] = []
        self._found: dict[str, list[Any]] = {}
        for callback in callbacks:
            self.add_callback(callback)
        self.model = model
        self.processing_class = processing_class
        self.optimizer = optimizer
        self.lr_scheduler = lr_scheduler
        self.train_dataloader: Any = None
        self.eval_dataloader: Any = None

    @property
    def callback_list(self) -> str:
        """The class names of the callbacks, one per line."""
        return "\n".join(type(callback).__name__ for callback in self.callbacks)

    def add_callback(self, callback: TrainerCallback | type[TrainerCallback]) -> None:
        """Append a callback; a class is instantiated. Raises ConfigError if it has none of the events."""
        instance = callback() if isinstance(callback, type) else callback
        if not any(callable(getattr(instance, event, None)) for event in EVENTS):
            what = "The object is not a callback."
            remedy = "Derive its class from TrainerCallback."
            raise ConfigError(what, field="callbacks", value=type(instance).__name__, remedy=remedy)
        if any(type(present) is type(instance) for present in self.callbacks):
            logger.warning("A %s is already among the callbacks; both will run.", type(instance).__name__)
        self.callbacks.append(instance)

    def pop_callback(self, callback: TrainerCallback | type[TrainerCallback]) -> TrainerCallback | None:
        """Remove and return a callback, or the first one of a class; None when there is none."""
        cls: Any = callback if isinstance(callback, type) else None
        named = cls is not None and cls.__module__.partition(".")[0] == "transformers"  # ours of that name is meant
        for present in self.callbacks:
            same_name = named and any(base.__name__ == cls.__name__ for base in type(present).__mro__)
            if same_name or (present == callback if cls is None else isinstance(present, cls)):
                self.callbacks.remove(present)
                return present
        return None

    def remove_callback(self, callback: TrainerCallback | type[TrainerCallback]) -> None:
        """Remove a callback, or the first one of a class."""
        self.pop_callback(callback)

    def call_event(
        self, event: str, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> TrainerControl:
        """Call an event of every callback that overrides it; return the control, or what a callback returned for it."""
        for method in self._methods(event):
            result = method(
                args,
                state,
                control,
                model=self.model,
                processing_class=self.processing_class,
                # The older name, which callbacks written for transformers still declare.
                tokenizer=self.processing_class,
                optimizer=self.optimizer,
                lr_scheduler=self.lr_scheduler,
                train_dataloader=self.train_dataloader,
                eval_dataloader=self.eval_dataloader,
                **kwargs,
            )
            # A callback may return another control; most return None.
            control = control if result is None else result
        return control

    def _methods(self, event: str) -> list[Any]:
        """The callbacks' own methods for an event, in order.

        For the events of a step they are looked up once, and again after any other event or a change of the list.
        """
        if self.callbacks != self._looked_at or event not in _OF_EVERY_STEP:
            self._looked_at = list(self.callbacks)
            self._found.clear()
        if (found := self._found.get(event)) is None:
            # Inherited methods do nothing and are left out: most events of a step have no listener.
            untouched = getattr(TrainerCallback, event, None)
            methods = [getattr(callback, event, None) for callback in self.callbacks]
            found = [call for call in methods if call is not None and getattr(call, "__func__", None) is not untouched]
            self._found[event] = found
        return found


#: Event -> the switch that it answers, which is cleared before the callbacks are called.
_ANSWERED = {
    "on_train_begin": "should_training_stop",
    "on_epoch_begin": "should_epoch_stop",
    "on_evaluate": "should_evaluate",
    "on_save": "should_save",
    "on_log": "should_log",
}
#: Event -> what it takes by position after the control, as in the reference.
_POSITIONAL = {"on_evaluate": "metrics", "on_predict": "metrics", "on_log": "logs"}


def _event(name: str) -> Callable[..., TrainerControl]:
    switch, positional = _ANSWERED.get(name), _POSITIONAL.get(name)

    def fire(
        handler: CallbackHandler,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        value: Any = None,
        **kwargs: Any,
    ) -> TrainerControl:
        if switch is not None:
            setattr(control, switch, False)
        elif name == "on_step_begin":
            control._new_step()
        if positional is not None:
            kwargs.setdefault(positional, value)
        return handler.call_event(name, args, state, control, **kwargs)

    fire.__name__ = name
    return fire


for _name in EVENTS:
    setattr(CallbackHandler, _name, _event(_name))


class DefaultFlowCallback(TrainerCallback):
    """Sets the switches of `control` by the strategies and intervals of the arguments.

    With the strategy "steps", the last step is also evaluated and saved, whatever the interval. `save_strategy="best"`
    is handled by the Trainer, which saves after an evaluation that is the best so far.
    """

    @override
    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> TrainerControl:
        step = state.global_step
        last = step >= state.max_steps
        if args.logging_strategy == IntervalStrategy.STEPS and _is_due(step, state.logging_steps):
            control.should_log = True
        if args.logging_first_step and step == 1:
            control.should_log = True
        if args.eval_strategy == IntervalStrategy.STEPS and (last or _is_due(step, state.eval_steps)):
            # Another callback may have asked for an evaluation before the delay is over.
            control.should_evaluate = control.should_evaluate or args.eval_delay <= step
        if args.save_strategy == SaveStrategy.STEPS and (last or _is_due(step, state.save_steps)):
            control.should_save = True
        if last:
            control.should_training_stop = True
        return control

    @override
    def on_epoch_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> TrainerControl:
        if args.logging_strategy == IntervalStrategy.EPOCH:
            control.should_log = True
        if args.eval_strategy == IntervalStrategy.EPOCH and args.eval_delay <= state.epoch:
            control.should_evaluate = True
        if args.save_strategy == SaveStrategy.EPOCH:
            control.should_save = True
        return control


def _is_due(step: int, interval: int) -> bool:
    return interval > 0 and step % interval == 0


class EarlyStoppingCallback(TrainerCallback, ExportableState):
    """Stops training after a number of evaluations in a row without improvement.

    An evaluation is an improvement when `metric_for_best_model` is better than the best value so far by more than the
    threshold. NaN never is. The counter and the best value are saved with checkpoints.

    Args:
        early_stopping_patience: number of evaluations without improvement that stop training.
        early_stopping_threshold: least improvement that counts, in the metric's unit.

    Raises:
        ConfigError: the patience is below 1 or the threshold is negative. At the start of training: no metric is
            named, or nothing is evaluated.
    """

    def __init__(self, early_stopping_patience: int = 1, early_stopping_threshold: float | None = 0.0) -> None:
        if early_stopping_patience < 1:
            what = "The patience must be at least 1."
            remedy = "Give a number of evaluations."
            raise ConfigError(what, field="early_stopping_patience", value=early_stopping_patience, remedy=remedy)
        # "not >=" and not "<", so that NaN is refused.
        if early_stopping_threshold is not None and not early_stopping_threshold >= 0:
            what = "The threshold must be at least 0."
            remedy = "Give a distance in the metric's unit."
            raise ConfigError(what, field="early_stopping_threshold", value=early_stopping_threshold, remedy=remedy)
        self.early_stopping_patience = early_stopping_patience
        self.early_stopping_threshold = early_stopping_threshold or 0.0
        self.early_stopping_patience_counter = 0
        self.best_metric: float | None = None

    def check_metric_value(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, metric_value: float
    ) -> None:
        """Reset the counter when `metric_value` is an improvement; otherwise add 1 to it."""
        best = self.best_metric
        gain = 0.0 if best is None else metric_value - best if args.greater_is_better else best - metric_value
        # `metric_value == metric_value` is false for NaN.
        if metric_value == metric_value and (best is None or gain > self.early_stopping_threshold):
            self.early_stopping_patience_counter = 0
        else:
            self.early_stopping_patience_counter += 1
        # A gain below the threshold still moves the best value, as in the reference.
        if metric_value == metric_value and (best is None or gain > 0):
            self.best_metric = float(metric_value)

    @override
    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        if not args.load_best_model_at_end:
            logger.warning(
                "EarlyStoppingCallback: without load_best_model_at_end, the last model is kept, not the best."
            )
        if args.metric_for_best_model is None:
            what = "EarlyStoppingCallback needs a metric to watch."
            remedy = 'Give a metric\'s name, such as "loss".'
            raise ConfigError(what, field="metric_for_best_model", value="none", remedy=remedy)
        if args.eval_strategy == IntervalStrategy.NO:
            what = "EarlyStoppingCallback needs evaluations during training."
            raise ConfigError(what, field="eval_strategy", value="no", remedy='Give "steps" or "epoch".')
        # A new training: the counter of an earlier `train()` of this Trainer does not count.
        if state.global_step == 0:
            self.early_stopping_patience_counter = 0
            self.best_metric = None
        # The checkpoint has no state of this callback, which may be new; it has the best metric.
        elif self.best_metric is None:
            self.best_metric = state.best_metric
        if self.early_stopping_patience_counter >= self.early_stopping_patience:
            control.should_training_stop = True  # a run that had stopped early does not train on when it resumes

    @override
    def on_evaluate(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        name = str(args.metric_for_best_model)
        name = name if name.startswith("eval_") else f"eval_{name}"
        value = (kwargs.get("metrics") or {}).get(name)
        if value is None:
            logger.warning("EarlyStoppingCallback: this evaluation has no metric %s and is not counted.", name)
            return
        self.check_metric_value(args, state, control, value)
        if self.early_stopping_patience_counter >= self.early_stopping_patience:
            control.should_training_stop = True

    @override
    def state(self) -> dict[str, Any]:
        return {
            "args": {
                "early_stopping_patience": self.early_stopping_patience,
                "early_stopping_threshold": self.early_stopping_threshold,
            },
            "attributes": {
                "early_stopping_patience_counter": self.early_stopping_patience_counter,
                "best_metric": self.best_metric,
            },
        }


class ProgressCallback(TrainerCallback):
    """Shows a bar with the time left when standard error is a terminal or a notebook, otherwise one line per log.

    Args:
        max_str_len: of a longer text among the logs, only the number of characters is shown.
    """

    def __init__(self, max_str_len: int = 100) -> None:
        self.max_str_len = max_str_len
        self.training_bar: Any = None
        self.prediction_bar: Any = None
        self.current_step = 0
        self._began, self._first_step = time.monotonic(), 0

    @override
    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        self.current_step = state.global_step
        # The steps before a resume took another process's time.
        self._began, self._first_step = time.monotonic(), state.global_step
        if state.is_world_process_zero and _is_interactive():
            # initial: a resumed run's bar starts where it stopped.
            self.training_bar = _open_bar(total=state.max_steps, initial=state.global_step)

    @override
    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        if self.training_bar is not None:
            self.training_bar.update(state.global_step - self.current_step)
        self.current_step = state.global_step

    @override
    def on_prediction_step(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        if not state.is_world_process_zero or not _is_interactive():
            return
        if self.prediction_bar is None:
            total = _length_of(kwargs.get("eval_dataloader"))
            if total is None:
                return
            self.prediction_bar = _open_bar(total=total, leave=self.training_bar is None)
        self.prediction_bar.update(1)

    @override
    def on_evaluate(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        self._close_prediction_bar()

    @override
    def on_predict(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, metrics: Any, **kwargs: Any
    ) -> None:
        self._close_prediction_bar()

    @override
    def on_log(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        logs = kwargs.get("logs")
        if not logs or not state.is_world_process_zero:
            return
        shown = {name: self._format(value) for name, value in logs.items() if name not in _HIDDEN}
        if self.training_bar is not None:
            # Through the bar, which a print would tear.
            self.training_bar.write(str(shown))
        else:
            _write(self._line(state, shown))

    @override
    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        if self.training_bar is not None:
            self.training_bar.close()
            self.training_bar = None

    def _close_prediction_bar(self) -> None:
        if self.prediction_bar is not None:
            self.prediction_bar.close()
            self.prediction_bar = None

    def _line(self, state: TrainerState, shown: Mapping[str, Any]) -> str:
        """`step 20/100  epoch 0.4  loss 1.23  …  left 0:00:12`, by the steps that this process has trained."""
        step, last = state.global_step, state.max_steps
        parts = [f"step {step}/{last}"] if last else []
        parts += [f"{name} {value}" for name, value in shown.items()]
        done = step - self._first_step
        if done > 0 and step < last:
            seconds = int((time.monotonic() - self._began) / done * (last - step))
            parts.append(f"left {seconds // 3600}:{seconds // 60 % 60:02d}:{seconds % 60:02d}")
        return "  ".join(parts)

    def _format(self, value: Any) -> Any:
        if isinstance(value, str) and len(value) > self.max_str_len:
            return f"[text of {len(value)} characters; raise max_str_len to see it]"
        return f"{value:.4g}" if isinstance(value, float) else value


class PrinterCallback(TrainerCallback):
    """Prints every log as a dictionary, once per machine; used when `disable_tqdm` is true."""

    @override
    def on_log(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        logs = kwargs.get("logs")
        if logs is not None and state.is_local_process_zero:
            shown = {name: value for name, value in logs.items() if name not in _HIDDEN}
            _write(str({name: f"{value:.4g}" if isinstance(value, float) else value for name, value in shown.items()}))


def _write(text: str) -> None:
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


def _is_interactive() -> bool:
    # A notebook's standard error is not a terminal, but it draws bars.
    return "ipykernel" in sys.modules or bool(getattr(sys.stderr, "isatty", bool)())


def _open_bar(**settings: Any) -> Any:
    from tqdm.auto import tqdm  # imported here: a run without a bar does not need it

    return tqdm(dynamic_ncols=True, **settings)


def _length_of(dataloader: Any) -> int | None:
    try:
        return len(dataloader)
    except (TypeError, NotImplementedError, AttributeError):
        return None
