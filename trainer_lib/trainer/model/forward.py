"""`Forward`: one batch through the model. Inputs moved to the device, outputs, loss, and the model's memory."""

from __future__ import annotations

import contextlib
import functools
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import CodeType
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import nn

from trainer_lib.data.loading.items import MAPPINGS, count_items
from trainer_lib.errors import ConfigError, DataError, is_out_of_memory
from trainer_lib.evaluation import nested
from trainer_lib.trainer.model.trained_model import LabelSmoother
from trainer_lib.trainer.overrides import is_set, own_classes
from trainer_lib.trainer.weighting import CountedItems, LossScale, plain_items

if TYPE_CHECKING:
    from trainer_lib.strategies.tensor.layers import DividedLoss
    from trainer_lib.trainer.internals import Internals
    from trainer_lib.trainer.trainer import Trainer

_log = logging.getLogger(__name__)
T = TypeVar("T")
_NO_TARGET = -100
_STEPS = frozenset({"current_gradient_accumulation_steps", "gradient_accumulation_steps"})
_RANKS = frozenset({"num_processes", "world_size"})


@dataclass(frozen=True)
class LossRule:
    """The scale of losses, as far as it is known before they are computed: some authors scale theirs for the step.

    A subclass states it by `loss_is_scaled_for_ga`, or by setting `model_accepts_loss_kwargs`. Without a statement, a
    loss counts as scaled when the code that computes it reads the number of micro-batches of a step, or when the
    subclass gives a `compute_loss_func` that cannot be called: that switches scaling off in the transformers Trainer.
    Every other loss is taken for a mean over its target items, unless it uses `num_items_in_batch`.
    """

    undivided: LossScale = LossScale.MEAN  # of a loss that did not use `num_items_in_batch`
    divided: LossScale = LossScale.SHARE  # of a loss that an override divided by it
    passes_items: bool = True  # `compute_loss` is given it
    model_takes_items: bool = False  # the model is given it, whatever its forward declares

    @classmethod
    def of(cls, trainer: Trainer, *, computes_own: bool) -> LossRule:
        """Find the rule of a Trainer; `computes_own`: a subclass overrides `compute_loss`. Raises ConfigError."""
        func: Any = trainer.compute_loss_func  # some subclasses give text, to switch scaling off
        stated = trainer.loss_is_scaled_for_ga
        accepts = trainer.model_accepts_loss_kwargs if is_set(trainer, "model_accepts_loss_kwargs") else None
        passes = func is not None or accepts is not False
        given: dict[str, Any] = {"passes_items": passes, "model_takes_items": accepts is True}
        if stated is not None:
            scale = LossScale.STEP if stated else LossScale.BATCH
            return cls(scale, scale, **given)
        if func is not None and not callable(func) and not computes_own:
            what = "The loss function cannot be called."
            remedy = "Give a function of (outputs, labels, num_items_in_batch)."
            raise ConfigError(what, field="compute_loss_func", value=type(func).__name__, remedy=remedy)
        names = set(_names_read([func], type(trainer)))
        if computes_own:
            owners = (trainer, *own_classes(type(trainer)))  # it may be replaced on this Trainer alone
            versions = [vars(owner)["compute_loss"] for owner in owners if "compute_loss" in vars(owner)]
            names |= set(_names_read(versions, type(trainer)))
        divided = LossScale.STEP if computes_own and names & _RANKS else LossScale.SHARE
        if found := names & _STEPS:
            _log.info(
                "The loss counts as scaled for the step, because its code reads %s; loss_is_scaled_for_ga = False on "
                "the Trainer states the opposite.",
                ", ".join(sorted(found)),
            )
        scaled = computes_own and ((func is not None and not callable(func)) or accepts is True)
        scale = LossScale.STEP if scaled else LossScale.BATCH if not passes else LossScale.MEAN
        if found:  # one that reads the number of ranks may have left dummy batches out by itself
            scale = LossScale.STEP if names & _RANKS else LossScale.PART
        return cls(scale, divided, **given)


def _names_read(functions: list[Any], cls: type) -> Iterator[str]:
    """The names of attributes and globals that functions read, and methods of `cls` of such a name."""
    waiting, seen = [code for function in functions for code in _code_of(function)], set[CodeType]()
    while waiting:
        code = waiting.pop()
        if code in seen:
            continue
        seen.add(code)
        yield from code.co_names
        waiting += [const for const in code.co_consts if isinstance(const, CodeType)]
        methods = (vars(owner).get(name) for owner in own_classes(cls) for name in code.co_names)
        waiting += [inner for method in methods for inner in _code_of(method)]


def _code_of(function: Any) -> Iterator[CodeType]:
    while isinstance(function, functools.partial):
        function = function.func
    if isinstance(function, nn.Module):
        function = function.forward
    plain: Callable[..., Any] = getattr(function, "__wrapped__", None) or getattr(function, "__func__", function)
    instance: Any = vars(type(plain)).get("__call__")  # of an object that can be called
    code = getattr(plain, "__code__", None) or getattr(instance, "__code__", None)
    if isinstance(code, CodeType):
        yield code


class Forward:
    """Calls the model and reads its loss."""

    def __init__(self, trainer: Trainer, internals: Internals) -> None:
        self._trainer = trainer
        self._internals = internals
        self.rule = LossRule()
        self.scale = LossScale.MEAN  # of the newest loss
        self.past: Any = None  # with `past_index`, what the model remembers of the last batch, without its graph
        self.sources: torch.Tensor | None = None  # of the labels of the batch under way, in a mixture
        self._needs_autograd = False

    def _keep_past(self, outputs: Any) -> None:
        """Keep the output at `past_index` for the next batch, without its graph."""
        index = self._trainer.args.past_index
        values = list(outputs.values()) if isinstance(outputs, MAPPINGS) else outputs
        has_loss = "loss" in outputs if isinstance(outputs, MAPPINGS) else len(values) > 0 and _is_scalar(values[0])
        place = index - (0 if has_loss else 1)  # `past_index` counts the loss even where it is absent
        if isinstance(values, torch.Tensor) or not 0 <= place < len(values):
            count = "one tensor" if isinstance(values, torch.Tensor) else f"{len(values)} values"
            what = f"The model returns {count}: none of them is at that position."
            raise ConfigError(what, field="past_index", value=index, remedy="Count from the loss, which is position 0.")
        self.past = nested.detach(values[place])

    def call(self, model: nn.Module, inputs: Any) -> Any:
        """The model's outputs. Raises ConfigError for a batch with names that its forward does not take."""
        try:
            if isinstance(inputs, MAPPINGS):
                return model(**inputs)
            return model(*(inputs if isinstance(inputs, list | tuple) else (inputs,)))
        except TypeError as error:
            # A TypeError may come from anywhere inside the forward: only names that do not fit replace it.
            if isinstance(inputs, MAPPINGS) and (misfit := self._internals.facts.misfit(inputs)) is not None:
                raise misfit from error
            raise

    def target_items(self, inputs: Any, samples: int | None = None) -> int:
        """Target items of a batch, whose collator was given `samples`: what its loss is a mean over. Raises DataError.

        Labels ``[batch, sequence]`` that are not -100, shifted by one where the model's loss shifts them; else samples.
        """
        facts = self._internals.facts
        shifts = facts.shifts_labels and not facts.has_prompt
        items = count_items(inputs, self._trainer.label_names, shifts=shifts, samples=samples)
        if items is None:
            what = "The samples of the batch cannot be counted, so its loss would have no weight."
            remedy = "Give the batch a __len__ that counts its samples, or its DataLoader a batch_size."
            raise DataError(what, field="data_collator", value=type(inputs).__name__, remedy=remedy)
        return items

    # -- the loss -----------------------------------------------------------------------------------------------------

    def training_loss(self, model: nn.Module, inputs: Any, num_items: torch.Tensor | int | None) -> torch.Tensor:
        """The loss ``[]`` from the Trainer's `compute_loss`; notes in `scale` what it is."""
        trainer, signatures, rule = self._trainer, self._internals.signatures, self.rule
        loss: torch.Tensor
        if (divided := self._divisible_loss(model)) is not None:
            with divided:
                return self.training_loss(model, inputs, num_items)
        self.scale = rule.undivided
        if num_items is None or not signatures.compute_loss_takes_items or not rule.passes_items:
            loss = trainer.compute_loss(model, inputs)
        elif "compute_loss" not in signatures.overridden:
            loss = trainer.compute_loss(model, inputs, num_items_in_batch=num_items)
        else:
            items = CountedItems.of(num_items, self._internals.world.device)
            loss = trainer.compute_loss(model, inputs, num_items_in_batch=items)
            # The default body has noted a division of its own, also in a compiled model, which gets a plain copy.
            if items.used and self.scale is not LossScale.SHARE:
                self.scale = rule.divided
        return loss

    def compute_loss(self, model: nn.Module, inputs: Any, num_items: torch.Tensor | int | None) -> tuple[Any, Any]:
        """(loss ``[]``, outputs): the model's own loss, or `compute_loss_func`'s, or the label smoother's."""
        trainer, facts = self._trainer, self._internals.facts
        func, smoother, labels = trainer.compute_loss_func, trainer.label_smoother, None
        if isinstance(inputs, MAPPINGS) and (func is not None or smoother is not None):
            labels = self._labels(inputs)
            if labels is not None and self._drops_labels(inputs):
                inputs = {name: value for name, value in inputs.items() if name not in trainer.label_names}
        own = func is None and (smoother is None or labels is None)
        takes_items = facts.uses_num_items or self.rule.model_takes_items
        if own and num_items is not None and takes_items and isinstance(inputs, MAPPINGS):
            outputs = self._call_with_items(model, inputs, num_items)
        else:
            outputs = self.call(model, inputs)
        if trainer.args.past_index >= 0:
            self._keep_past(outputs)
        if self.sources is not None:
            self._note_sources(outputs, inputs, labels)
        if func is not None:
            return self._call_loss_func(func, outputs, labels, num_items), outputs
        if smoother is not None and labels is not None:
            divided = self._internals.engine.strategy.divided_loss(model)
            over: dict[str, Any] = {"cross_entropy": divided.cross_entropy} if divided and divided.is_on else {}
            return smoother(outputs, labels, shift_labels=facts.shifts_labels, **over), outputs
        loss = loss_of(outputs, inputs)
        if self.scale is LossScale.SHARE and isinstance(outputs, MAPPINGS) and outputs.get("aux_loss") is not None:
            loss = self._weigh_routers(loss, outputs["aux_loss"])
        return loss, outputs

    def _weigh_routers(self, loss: torch.Tensor, routers: torch.Tensor) -> torch.Tensor:
        """A mixture's share ``[]`` of the step's loss, with a share of `routers` ``[]``, the mean over its batch."""
        run, config = self._internals.run, getattr(self._trainer.model, "config", None)
        config = getattr(config, "text_config", config)
        factor = getattr(config, "router_aux_loss_coef", getattr(config, "aux_loss_coef", 0.0))  # JetMoE's is shorter
        weights = None if run is None or not run.weights.computing else run.weights  # an evaluation has no shares
        if not factor or weights is None or not weights.num_items or weights.micro_step >= len(weights.items):
            return loss
        share = weights.items[weights.micro_step] / float(weights.num_items)
        return loss + (share - 1) * factor * routers

    def _divisible_loss(self, model: nn.Module) -> DividedLoss | None:
        """The model's loss over divided logits; None while it is on, and where something else reads whole logits."""
        divided = self._internals.engine.strategy.divided_loss(model)
        if divided is None or divided.is_on or self.sources is not None:
            return None
        trainer, overridden = self._trainer, "compute_loss" in self._internals.signatures.overridden
        is_own = trainer.compute_loss_func is None and type(trainer.label_smoother) in (LabelSmoother, type(None))
        return divided if is_own and not overridden and trainer.args.past_index < 0 else None

    def _note_sources(self, outputs: Any, inputs: Any, labels: Any) -> None:
        run, sources, self.sources = self._internals.run, self.sources, None
        if sources is not None and run is not None and run.history.sources is not None:
            labels = self._labels(inputs) if labels is None else labels
            shifts = self._internals.facts.shifts_labels
            part = self._internals.engine.strategy.part_of_targets(self._trainer.model_wrapped)
            if part is not None:
                labels, sources, shifts = part(labels, _NO_TARGET), part(sources, 0), False
            run.history.sources.add(outputs, labels, sources, shifts=shifts)

    def _call_with_items(self, model: nn.Module, inputs: Mapping[str, Any], num_items: torch.Tensor | int) -> Any:
        """The outputs of a model that may divide its loss by the count; notes in `scale` if it did."""
        device = self._internals.world.device
        if self._trainer.args.torch_compile:  # a compiled graph takes a plain tensor, so trust what its source says
            if self._internals.facts.divides_by_items:
                self.scale = LossScale.SHARE
            return self.call(model, {**inputs, "num_items_in_batch": plain_items(num_items, device)})
        items = num_items if isinstance(num_items, CountedItems) else CountedItems.of(num_items, device)
        outputs = self.call(model, {**inputs, "num_items_in_batch": items})
        if items.used:
            self.scale = LossScale.SHARE
        return outputs

    def _call_loss_func(self, func: Callable[..., T], outputs: Any, labels: Any, num_items: Any) -> T:
        if not self._internals.signatures.loss_func_takes_items:
            return func(outputs, labels)
        if num_items is None:
            return func(outputs, labels, num_items_in_batch=None)
        device = self._internals.world.device
        items = num_items if isinstance(num_items, CountedItems) else CountedItems.of(num_items, device)
        loss = func(outputs, labels, num_items_in_batch=items)
        if items.used:
            self.scale = LossScale.SHARE
        return loss

    def _labels(self, inputs: Mapping[str, Any]) -> Any:
        present = [inputs[name] for name in self._trainer.label_names if name in inputs]
        return None if not present else present[0] if len(present) == 1 else tuple(present)

    def _drops_labels(self, inputs: Mapping[str, Any]) -> bool:
        # The loss is computed here, so without labels the model skips its own. Decoders may need them to shift inputs.
        if getattr(getattr(self._trainer.model, "config", None), "is_encoder_decoder", False):
            return "decoder_input_ids" in inputs or "decoder_inputs_embeds" in inputs
        return self._trainer.compute_loss_func is not None or self._internals.facts.open_ended

    # -- prediction ---------------------------------------------------------------------------------------------------

    def predict(
        self, model: nn.Module, inputs: Any, loss_only: bool, ignore_keys: list[str] | None
    ) -> tuple[torch.Tensor | None, Any, Any]:
        """(loss ``[]``, logits, labels ``[batch, ...]``) of one batch; `Trainer.prediction_step` documents them."""
        trainer, names = self._trainer, self._trainer.label_names
        has_labels = isinstance(inputs, MAPPINGS) and bool(names)
        has_labels = has_labels and all(inputs.get(name) is not None for name in names)
        asked = inputs.get("return_loss") if isinstance(inputs, MAPPINGS) else None
        computes_loss = has_labels or bool(trainer.can_return_loss if asked is None else asked)
        inputs = trainer._prepare_inputs(inputs)
        if ignore_keys is None:
            ignore_keys = list(self._internals.facts.ignored_outputs)
        # A compute_loss that pops the labels out of the inputs must not hide them from the metrics.
        labels = nested.detach(tuple(inputs[name] for name in names)) if has_labels else None

        def compute() -> tuple[torch.Tensor | None, Any, bool]:
            with trainer.compute_loss_context_manager():
                return self._loss_and_outputs(model, inputs, computes_loss)

        divided = self._divisible_loss(model) if loss_only and computes_loss else None
        with divided or contextlib.nullcontext():
            loss, outputs, first_is_loss = self.without_gradients(compute)
        if loss_only:
            return loss, None, None
        logits = logits_of(outputs, ignore_keys, first_is_loss=first_is_loss)
        if labels is not None and len(labels) == 1:
            labels = labels[0]
        return loss, nested.detach(logits), labels

    def without_gradients(self, compute: Callable[[], T]) -> T:
        """Compute without gradients, and where possible past torch's autograd.

        Autograd looks at every operation even under `no_grad`, which takes a sixth of the host's time in an evaluation
        of GPT-2. Unlike under `inference_mode`, what a module keeps for later (a table of positions) is an ordinary
        tensor that may be trained with. A model that differentiates in its forward fails then; it is computed again
        with autograd, and so is every batch after it.
        """
        # Compiled graphs are shared with training; sharded models gather their weights by autograd's hooks; torchao's
        # tensors in float8 know only the operations that autograd makes of others.
        args = self._trainer.args
        needed = args.torch_compile or args.fp8 or self._internals.engine.strategy.forward_communicates
        if not self._needs_autograd and not needed and self._internals.world.device.type in ("cpu", "cuda"):
            try:
                with torch.no_grad(), torch._C._AutoDispatchBelowAutograd():
                    return compute()
            except RuntimeError as error:
                if is_out_of_memory(error):
                    raise
                self._needs_autograd = True
        with torch.no_grad():
            return compute()

    def _loss_and_outputs(
        self, model: nn.Module, inputs: Any, computes_loss: bool
    ) -> tuple[torch.Tensor | None, Any, bool]:
        """(loss, outputs, whether the outputs start with the loss)."""
        trainer = self._trainer
        if not computes_loss:
            outputs = self.call(model, inputs)
            if trainer.args.past_index >= 0:
                self._keep_past(outputs)
            return None, outputs, False
        if not self._internals.signatures.compute_loss_takes_outputs:
            # Such an override returns the loss alone, so a second forward gives the outputs; it may pop from its copy.
            loss = trainer.compute_loss(model, dict(inputs))
            outputs = self.call(model, inputs)
        else:
            loss, outputs = trainer.compute_loss(model, inputs, return_outputs=True)
        # The model's own loss comes first; a loss that is computed here is not among the outputs.
        own = trainer.compute_loss_func is None and not isinstance(outputs, torch.Tensor)
        own = own and isinstance(outputs, list | tuple) and _is_scalar(outputs[0])
        return loss.detach().mean(), outputs, own


def _is_scalar(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.ndim == 0


def logits_of(outputs: Any, ignore_keys: Sequence[str], *, first_is_loss: bool) -> Any:
    """A model's outputs ``[batch, ...]`` without the loss and without `ignore_keys`; None when there are none."""
    if isinstance(outputs, torch.Tensor):
        return outputs
    if isinstance(outputs, MAPPINGS):
        parts = tuple(v for name, v in outputs.items() if name not in ignore_keys and name != "loss" and v is not None)
    else:
        parts = tuple(outputs[1:] if first_is_loss else outputs)
    return parts[0] if len(parts) == 1 else parts or None


def loss_of(outputs: Any, inputs: Any) -> torch.Tensor:
    """The loss in a model's outputs, ``[]``: under "loss" in a mapping, else the first element. Raises ConfigError."""
    if isinstance(outputs, Mapping):
        loss = outputs.get("loss")
    elif isinstance(outputs, torch.Tensor) or not hasattr(outputs, "__len__"):
        loss = outputs
    else:
        loss = outputs[0] if len(outputs) else None
    if isinstance(loss, torch.Tensor) and loss.numel() == 1:
        return loss.reshape(()) if loss.ndim else loss  # some models return `[1]`
    given = ", ".join(map(str, inputs)) if isinstance(inputs, Mapping) else type(inputs).__name__
    if isinstance(loss, torch.Tensor):
        got = f"a tensor of shape {tuple(loss.shape)} first"
    elif isinstance(outputs, Mapping):
        got = "only " + ", ".join(map(str, outputs))
    else:
        got = "none" if hasattr(outputs, "__len__") else f"{type(outputs).__name__}, neither a mapping nor a tuple"
    remedy = "Return the loss first when labels are given (and give labels), or pass compute_loss_func."
    raise ConfigError(f"The model returned no loss but {got}; it was given {given}.", field="model", remedy=remedy)
