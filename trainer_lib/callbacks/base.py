"""The callback protocol. This is the life of a run, and where each event fires:

::

    Trainer()                       on_init_end
    train():                        on_train_begin
      for each epoch:               on_epoch_begin
        for each optimizer step:    on_step_begin
          for each micro-batch but the last:
            forward, backward       on_substep_end
          forward, backward of the last
          clip gradients            on_pre_optimizer_step
          optimizer.step()          on_optimizer_step
          schedule, zero_grad       on_step_end         -> sets control.should_{log,evaluate,save,…_stop}
          if should_log:            on_log
          if should_evaluate:
            for each batch:         on_prediction_step
                                    on_evaluate         (and on_log, with the metrics)
          if should_save:           on_save             then on_push_begin, if the model is pushed to a hub
                                    on_epoch_end        -> log, evaluate and save again, as after on_step_end
                                    on_train_end
    predict():                      on_prediction_step for each batch, then on_predict
    push_to_hub():                  on_push_begin

A callback reads `args`, `state` and the keyword arguments; it acts only by setting switches of `control`, which it may
return. Callbacks run in the order in which they were added, the Trainer's own first.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from trainer_lib.errors import ConfigError
from trainer_lib.state import TrainerControl, TrainerState

if TYPE_CHECKING:
    from trainer_lib.arguments import TrainingArguments

logger = logging.getLogger(__name__)

EVENTS = (
    *("on_init_end", "on_train_begin", "on_train_end", "on_epoch_begin", "on_epoch_end", "on_step_begin"),
    *("on_pre_optimizer_step", "on_optimizer_step", "on_substep_end", "on_step_end", "on_evaluate", "on_predict"),
    *("on_save", "on_log", "on_prediction_step", "on_push_begin"),
)

_OF_EVERY_STEP = frozenset(event for event in EVENTS if "step" in event)


class TrainerCallback:
    """Base of all callbacks: every event does nothing until overridden.

    Each event gets `args`, `state`, `control`, and by keyword `model`, `processing_class` (also as `tokenizer`),
    `optimizer`, `lr_scheduler`, `train_dataloader`, `eval_dataloader`; take the ones you need and `**kwargs`.
    """

    def on_init_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> Any:
        """The Trainer is constructed."""

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> Any:
        """Training begins (or goes on from a checkpoint)."""

    def on_train_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> Any:
        """Training has ended."""

    def on_epoch_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> Any:
        """A pass over the data begins."""

    def on_epoch_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> Any:
        """A pass over the data has ended."""

    def on_step_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> Any:
        """The first micro-batch of an optimizer step comes next."""

    def on_pre_optimizer_step(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> Any:
        """Gradients are complete and clipped; the optimizer steps next."""

    def on_optimizer_step(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> Any:
        """The optimizer has stepped; gradients are still there."""

    def on_substep_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> Any:
        """A micro-batch that is not the last of its step is done."""

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> Any:
        """An optimizer step is done and counted."""

    def on_evaluate(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> Any:
        """An evaluation is done; keyword `metrics` has its results."""

    def on_predict(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, metrics: Any, **kwargs: Any
    ) -> Any:
        """A prediction is done; `metrics` has its results."""

    def on_save(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> Any:
        """A checkpoint is committed: that of `state.global_step`, which with `save_async` was some steps ago."""

    def on_log(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> Any:
        """Something is logged; keyword `logs` has it."""

    def on_prediction_step(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> Any:
        """A batch of an evaluation or prediction is done."""

    def on_push_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> Any:
        """The model is about to be pushed to a hub."""


class CallbackHandler(TrainerCallback):
    """Calls a list of callbacks in order, and hands each what it may read.

    Args:
        callbacks: instances, or classes to instantiate without arguments.
        model, processing_class, optimizer, lr_scheduler: what the events get by keyword.
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
        """The callbacks' class names, one a line."""
        return "\n".join(type(callback).__name__ for callback in self.callbacks)

    def add_callback(self, callback: TrainerCallback | type[TrainerCallback]) -> None:
        """Append a callback; a class is instantiated.

        Raises:
            ConfigError: it is neither a callback nor a class of callbacks.
        """
        instance = callback() if isinstance(callback, type) else callback
        if not any(callable(getattr(instance, event, None)) for event in EVENTS):
            raise ConfigError(
                "is not a callback.",
                field="callbacks",
                value=type(instance).__name__,
                remedy="Derive its class from TrainerCallback.",
            )
        if any(type(present) is type(instance) for present in self.callbacks):
            logger.warning("There is a %s among the callbacks already; both will run.", type(instance).__name__)
        self.callbacks.append(instance)

    def pop_callback(self, callback: TrainerCallback | type[TrainerCallback]) -> TrainerCallback | None:
        """Remove and return a callback, or the first of a class; None if there is none."""
        for present in self.callbacks:
            if isinstance(present, callback) if isinstance(callback, type) else present == callback:
                self.callbacks.remove(present)
                return present
        return None

    def remove_callback(self, callback: TrainerCallback | type[TrainerCallback]) -> None:
        """`pop_callback` without the return."""
        self.pop_callback(callback)

    def call_event(
        self, event: str, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> TrainerControl:
        """Call one event of every callback that has it; a callback may return another control."""
        for method in self._methods(event):
            result = method(
                args,
                state,
                control,
                model=self.model,
                processing_class=self.processing_class,
                tokenizer=self.processing_class,
                optimizer=self.optimizer,
                lr_scheduler=self.lr_scheduler,
                train_dataloader=self.train_dataloader,
                eval_dataloader=self.eval_dataloader,
                **kwargs,
            )
            control = control if result is None else result
        return control

    def _methods(self, event: str) -> list[Any]:
        """What the callbacks have for an event, in their order.

        For events of every step it is looked up once, and again after any other event or another list of callbacks.
        """
        if self.callbacks != self._looked_at or event not in _OF_EVERY_STEP:
            self._looked_at = list(self.callbacks)
            self._found.clear()
        if (found := self._found.get(event)) is None:
            untouched = getattr(TrainerCallback, event, None)
            methods = [getattr(callback, event, None) for callback in self.callbacks]
            found = [each for each in methods if each is not None and getattr(each, "__func__", None) is not untouched]
            self._found[event] = found
        return found

    def on_init_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> TrainerControl:
        """See `TrainerCallback`."""
        return self.call_event("on_init_end", args, state, control, **kwargs)

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> TrainerControl:
        """Clears `should_training_stop` first."""
        control.should_training_stop = False
        return self.call_event("on_train_begin", args, state, control, **kwargs)

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> TrainerControl:
        """See `TrainerCallback`."""
        return self.call_event("on_train_end", args, state, control, **kwargs)

    def on_epoch_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> TrainerControl:
        """Clears `should_epoch_stop` first."""
        control.should_epoch_stop = False
        return self.call_event("on_epoch_begin", args, state, control, **kwargs)

    def on_epoch_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> TrainerControl:
        """See `TrainerCallback`."""
        return self.call_event("on_epoch_end", args, state, control, **kwargs)

    def on_step_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> TrainerControl:
        """Clears `should_log`, `should_evaluate` and `should_save` first."""
        control._new_step()
        return self.call_event("on_step_begin", args, state, control, **kwargs)

    def on_pre_optimizer_step(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> TrainerControl:
        """See `TrainerCallback`."""
        return self.call_event("on_pre_optimizer_step", args, state, control, **kwargs)

    def on_optimizer_step(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> TrainerControl:
        """See `TrainerCallback`."""
        return self.call_event("on_optimizer_step", args, state, control, **kwargs)

    def on_substep_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> TrainerControl:
        """See `TrainerCallback`."""
        return self.call_event("on_substep_end", args, state, control, **kwargs)

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> TrainerControl:
        """See `TrainerCallback`."""
        return self.call_event("on_step_end", args, state, control, **kwargs)

    def on_evaluate(  # the metrics are positional here, as in the reference
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, metrics: Any = None, **kwargs: Any
    ) -> TrainerControl:
        """Clears `should_evaluate` first."""
        control.should_evaluate = False
        return self.call_event("on_evaluate", args, state, control, metrics=metrics, **kwargs)

    def on_predict(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, metrics: Any, **kwargs: Any
    ) -> TrainerControl:
        """See `TrainerCallback`."""
        return self.call_event("on_predict", args, state, control, metrics=metrics, **kwargs)

    def on_save(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> TrainerControl:
        """Clears `should_save` first."""
        control.should_save = False
        return self.call_event("on_save", args, state, control, **kwargs)

    def on_log(  # the logs are positional here, as in the reference
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, logs: Any = None, **kwargs: Any
    ) -> TrainerControl:
        """Clears `should_log` first."""
        control.should_log = False
        return self.call_event("on_log", args, state, control, logs=logs, **kwargs)

    def on_prediction_step(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> TrainerControl:
        """See `TrainerCallback`."""
        return self.call_event("on_prediction_step", args, state, control, **kwargs)

    def on_push_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> TrainerControl:
        """See `TrainerCallback`."""
        return self.call_event("on_push_begin", args, state, control, **kwargs)
