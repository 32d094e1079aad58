"""One micro-batch forward and backward, and one batch of predictions. Every public method may be overridden."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import nn

from trainer_lib.data.items import MAPPINGS
from trainer_lib.errors import ConfigError, DataError
from trainer_lib.evaluation import nested
from trainer_lib.trainer.base import TrainerBase
from trainer_lib.trainer.losses import CountedItems, loss_of, plain_items


class StepMixin(TrainerBase):
    """Forward, loss, backward."""

    # -- inputs and contexts ------------------------------------------------------------------------------------------

    def _prepare_input(self, data: Any) -> Any:
        """Move a tensor, or every tensor in a nested structure, to the device."""
        if isinstance(data, torch.Tensor):
            return data.to(self.device, non_blocking=self._batching.non_blocking)
        if isinstance(data, MAPPINGS):
            moved = {name: self._prepare_input(value) for name, value in data.items()}
            return moved if type(data) is dict else type(data)(moved)  # type: ignore[call-arg]
        if isinstance(data, list | tuple):
            parts = [self._prepare_input(value) for value in data]
            return type(data)(*parts) if hasattr(data, "_fields") else type(data)(parts)
        return data

    def _prepare_inputs(self, inputs: Any) -> Any:
        """A batch ready for the model. Raises DataError when it is empty."""
        if isinstance(inputs, MAPPINGS) and not inputs:
            raise DataError(
                f"A batch has nothing that the model takes ({', '.join(self._signature()) or 'no parameter'}).",
                field="train_dataset",
                remedy="Name the columns like the parameters of the model's forward, or give a data_collator.",
            )
        inputs = self._prepare_input(inputs)
        if self._past is not None and isinstance(inputs, MAPPINGS):
            inputs = {**inputs, "mems": self._past}
        return inputs

    def _keep_past(self, outputs: Any) -> None:
        """`past_index`: what the model remembers of this batch is given to it with the next, without its graph."""
        if self.args.past_index < 0:
            return
        values = list(outputs.values()) if isinstance(outputs, MAPPINGS) else outputs
        has_loss = "loss" in outputs if isinstance(outputs, MAPPINGS) else len(values) > 0 and _is_scalar(values[0])
        index = self.args.past_index - (0 if has_loss else 1)
        if isinstance(values, torch.Tensor) or not 0 <= index < len(values):
            count = "one tensor" if isinstance(values, torch.Tensor) else f"{len(values)} values"
            raise ConfigError(
                f"The model returns {count}: there is no memory at that position.",
                field="past_index",
                value=self.args.past_index,
                remedy="Count from the loss, which is position 0.",
            )
        self._past = nested.detach(values[index])

    def _signature(self) -> tuple[str, ...]:
        return self._forward.columns or ()

    def compute_loss_context_manager(self) -> AbstractContextManager[Any]:
        """Everything a loss is computed under."""
        return self.autocast_smart_context_manager()

    def autocast_smart_context_manager(self, cache_enabled: bool | None = True) -> AbstractContextManager[Any]:
        """Mixed precision, when the arguments ask for it."""
        return self.precision.autocast(cache_enabled=bool(cache_enabled))

    # -- training -----------------------------------------------------------------------------------------------------

    def training_step(
        self, model: nn.Module, inputs: Any, num_items_in_batch: torch.Tensor | int | None = None
    ) -> torch.Tensor:
        """Forward and backward of one micro-batch; its detached contribution to the step's loss, on the device.

        Summed over the micro-batches of a step and averaged over ranks, contributions are the mean loss over all target
        items of the global batch.
        """
        inputs = self._prepare_inputs(inputs)
        with self.compute_loss_context_manager():
            loss, divided = self._call_compute_loss(model, inputs, num_items_in_batch)
        if loss.dtype in (torch.float16, torch.bfloat16):
            loss = loss.float()  # a weight such as 1/3 has too few digits there
        weight = self._loss_weight(divided)
        detached = loss.detach()
        # A non-finite loss must not leave finite gradients behind: NaN flows back to every parameter, on every rank.
        seed = torch.full_like(detached, weight).add_(detached, alpha=0)
        if (scaler := self.precision.scaler) is not None:
            self.strategy.backward(scaler.scale(loss), seed)
        else:
            self.strategy.backward(loss, seed)
        return detached if weight == 1.0 else detached * weight

    def _loss_weight(self, divided: bool) -> float:
        """What the returned loss counts: its share of the global batch's items, unless it was divided by them."""
        run = self._run
        if run is None:
            return 1.0
        return run.weight(divided, average_over_ranks=self.args.average_tokens_across_devices)

    def _call_compute_loss(
        self, model: nn.Module, inputs: Any, num_items: torch.Tensor | int | None
    ) -> tuple[torch.Tensor, bool]:
        """The loss, and whether it was divided by `num_items` already."""
        self._items_used = False
        if num_items is None or not self._compute_loss_takes_items:
            loss = self.compute_loss(model, inputs)
            return loss, self._items_used
        if not self._compute_loss_overridden:
            loss = self.compute_loss(model, inputs, num_items_in_batch=num_items)
            return loss, self._items_used
        items = CountedItems.of(num_items, self.device)
        loss = self.compute_loss(model, inputs, num_items_in_batch=items)
        return loss, items.used or self._items_used

    @property
    def _compute_loss_overridden(self) -> bool:
        return getattr(type(self), "compute_loss", None) is not StepMixin.compute_loss

    def compute_loss(
        self,
        model: nn.Module,
        inputs: Any,
        return_outputs: bool = False,
        num_items_in_batch: torch.Tensor | int | None = None,
    ) -> Any:
        """The loss of a batch: the model's own, or `compute_loss_func`'s, or the label smoother's.

        `num_items_in_batch` goes to a model whose forward takes it and to `compute_loss_func`; both may ignore it.
        Returns the loss, or (loss, outputs). Raises ConfigError when there is no loss.
        """
        labels = None
        if isinstance(inputs, MAPPINGS) and (self.compute_loss_func is not None or self.label_smoother is not None):
            labels = self._labels(inputs)
            if labels is not None and self._drops_labels(inputs):
                inputs = {name: value for name, value in inputs.items() if name not in self.label_names}
        own = self.compute_loss_func is None and (self.label_smoother is None or labels is None)
        if own and num_items_in_batch is not None and self._forward.uses_num_items and isinstance(inputs, MAPPINGS):
            outputs = self._called_with_items(model, inputs, num_items_in_batch)
        else:
            outputs = self._called(model, inputs)
        self._keep_past(outputs)
        if self.compute_loss_func is not None:
            loss = self._call_loss_func(outputs, labels, num_items_in_batch)
        elif self.label_smoother is not None and labels is not None:
            loss = self.label_smoother(outputs, labels, shifts=self._forward.shifts_labels)
        else:
            loss = loss_of(outputs, inputs)
        return (loss, outputs) if return_outputs else loss

    def _called_with_items(self, model: nn.Module, inputs: Mapping[str, Any], num_items: torch.Tensor | int) -> Any:
        """The outputs of a model that may divide its loss by the count, and the note whether it did."""
        if self.args.torch_compile:  # a compiled graph is given a plain tensor, and what the code says is believed
            self._items_used = self._forward.divides_by_items
            return self._called(model, {**inputs, "num_items_in_batch": plain_items(num_items, self.device)})
        items = num_items if isinstance(num_items, CountedItems) else CountedItems.of(num_items, self.device)
        outputs = self._called(model, {**inputs, "num_items_in_batch": items})
        self._items_used = items.used
        return outputs

    def _called(self, model: nn.Module, inputs: Any) -> Any:
        """The model's outputs. Raises ConfigError for a batch whose names its forward does not take."""
        try:
            return model(**inputs) if isinstance(inputs, MAPPINGS) else model(*_as_tuple(inputs))
        except TypeError as error:
            if isinstance(inputs, MAPPINGS) and (misfit := self._forward.misfit(inputs)) is not None:
                raise misfit from error
            raise

    def _drops_labels(self, inputs: Mapping[str, Any]) -> bool:
        # The loss is computed here: without labels the model spares its own. Decoders may need them to shift inputs.
        if getattr(getattr(self.model, "config", None), "is_encoder_decoder", False):
            return "decoder_input_ids" in inputs or "decoder_inputs_embeds" in inputs
        return self.compute_loss_func is not None or self._forward.open_ended

    def _labels(self, inputs: Mapping[str, Any]) -> Any:
        present = [inputs[name] for name in self.label_names if name in inputs]
        return None if not present else present[0] if len(present) == 1 else tuple(present)

    def _call_loss_func(self, outputs: Any, labels: Any, num_items: torch.Tensor | int | None) -> torch.Tensor:
        if self.compute_loss_func is None:
            raise ConfigError("is missing.", field="compute_loss_func")
        if not self._loss_func_takes_items:
            return self.compute_loss_func(outputs, labels)
        if num_items is None:
            return self.compute_loss_func(outputs, labels, num_items_in_batch=None)
        items = num_items if isinstance(num_items, CountedItems) else CountedItems.of(num_items, self.device)
        loss = self.compute_loss_func(outputs, labels, num_items_in_batch=items)
        self._items_used = items.used
        return loss

    # -- prediction ---------------------------------------------------------------------------------------------------

    def prediction_step(
        self, model: nn.Module, inputs: Any, prediction_loss_only: bool, ignore_keys: list[str] | None = None
    ) -> tuple[torch.Tensor | None, Any, Any]:
        """Loss, logits and labels of one batch, detached; None where there is none.

        Logits are the outputs without the loss and without `ignore_keys` (default: the configuration's
        ``keys_to_ignore_at_inference``); a single one stands alone, several are a tuple.
        """
        has_labels = isinstance(inputs, MAPPINGS) and bool(self.label_names)
        has_labels = has_labels and all(inputs.get(name) is not None for name in self.label_names)
        computes_loss = has_labels or self._loss_without_labels(inputs)
        inputs = self._prepare_inputs(inputs)
        if ignore_keys is None:
            ignore_keys = self._ignored_outputs
        # A compute_loss that pops the labels out of the inputs must not hide them from the metrics.
        labels = nested.detach(tuple(inputs[name] for name in self.label_names)) if has_labels else None
        with torch.no_grad(), self.compute_loss_context_manager():
            loss, outputs, first_is_loss = self._predicted(model, inputs, computes_loss)
        if prediction_loss_only:
            return loss, None, None
        logits = _logits(outputs, ignore_keys, first_is_loss=first_is_loss)
        if labels is not None and len(labels) == 1:
            labels = labels[0]
        return loss, nested.detach(logits), labels

    def _loss_without_labels(self, inputs: Any) -> bool:
        said = inputs.get("return_loss") if isinstance(inputs, MAPPINGS) else None
        return bool(self.can_return_loss if said is None else said)

    def _predicted(self, model: nn.Module, inputs: Any, computes_loss: bool) -> tuple[torch.Tensor | None, Any, bool]:
        if not computes_loss:
            outputs = self._called(model, inputs)
            self._keep_past(outputs)
            return None, outputs, False
        if not self._compute_loss_takes_outputs:
            loss = self.compute_loss(model, dict(inputs))
            outputs = self._called(model, inputs)
        else:
            loss, outputs = self.compute_loss(model, inputs, return_outputs=True)
        # The model's own loss comes first; one computed here is no part of the outputs.
        own = self.compute_loss_func is None and not isinstance(outputs, torch.Tensor)
        own = own and isinstance(outputs, list | tuple) and _is_scalar(outputs[0])
        return loss.detach().mean(), outputs, own


def _is_scalar(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.ndim == 0


def _as_tuple(inputs: Any) -> tuple[Any, ...]:
    return tuple(inputs) if isinstance(inputs, list | tuple) else (inputs,)


def _logits(outputs: Any, ignore_keys: list[str], *, first_is_loss: bool) -> Any:
    if isinstance(outputs, torch.Tensor):
        return outputs
    if isinstance(outputs, MAPPINGS):
        parts = tuple(v for name, v in outputs.items() if name not in ignore_keys and name != "loss" and v is not None)
    else:
        parts = tuple(outputs[1:] if first_is_loss else outputs)
    return parts[0] if len(parts) == 1 else parts or None
