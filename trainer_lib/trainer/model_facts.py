"""What the Trainer knows about a model: what its forward takes, its labels, what a step of it costs."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn

from trainer_lib.errors import ConfigError
from trainer_lib.trainer import models
from trainer_lib.trainer.signatures import parameters_of

# Parts of transformers' class names (or `loss_type`) whose loss predicts the next token.
_SHIFTING = ("CausalLM", "LMHeadModel", "ForConditionalGeneration")


@dataclass(frozen=True)
class ForwardInfo:
    """What `model.forward` takes.

    Attributes:
        columns: names of its parameters; None when ``**kwargs`` takes any name. The ``**kwargs`` of a transformers
            model take settings and no data.
        open_ended: it has ``**kwargs``.
        required: parameters without a default.
        labels: parameters that hold labels.
        uses_num_items: it takes `num_items_in_batch`, and may divide its loss by it.
        accepts_loss_kwargs: it is given `num_items_in_batch` by the reference: it declares so, or has ``**kwargs``.
        divides_by_items: its source divides the loss by `num_items_in_batch`, as far as it can be read.
        shifts_labels: its loss compares position t with label t + 1.
        has_prompt: trained virtual tokens precede every row, so the first label is a target as well.
        returns_loss: ``return_loss`` defaults to True (contrastive models).
    """

    columns: tuple[str, ...] | None
    open_ended: bool
    required: tuple[str, ...]
    labels: tuple[str, ...]
    uses_num_items: bool
    accepts_loss_kwargs: bool
    divides_by_items: bool
    shifts_labels: bool
    has_prompt: bool
    returns_loss: bool

    @classmethod
    def of(cls, model: nn.Module, label_names: Sequence[str] | None = None) -> ForwardInfo:
        """Look at a model; the wrappers of torch.compile and of adapters are looked through."""
        inner = models.innermost(model)
        parameters = parameters_of(inner.forward)
        open_ended = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
        named = tuple(name for name, p in parameters.items() if p.kind is not p.VAR_KEYWORD)
        labels = tuple(label_names) if label_names is not None else _label_names(inner, named)
        returns_loss = "return_loss" in parameters and parameters["return_loss"].default is True
        return cls(
            columns=None if open_ended and not (named and models.is_transformers(inner)) else named,
            open_ended=open_ended,
            required=tuple(name for name in named if _is_required(parameters[name])),
            labels=labels,
            uses_num_items=_uses_num_items(inner, parameters, open_ended),
            accepts_loss_kwargs=bool(getattr(inner, "accepts_loss_kwargs", open_ended)),
            divides_by_items="num_items_in_batch" in parameters or _divides(inner),
            shifts_labels=_shifts(inner),
            has_prompt=models.has_virtual_tokens(model),
            returns_loss=returns_loss,
        )

    def misfit(self, names: Collection[str]) -> ConfigError | None:
        """The error for a batch with names that the model does not take; None when it takes them."""
        unknown = [name for name in names if not self.open_ended and name not in (self.columns or ())]
        missing = [name for name in self.required if name not in names]
        if not unknown and not missing:
            return None
        takes = ", ".join(self.columns or self.required)
        return ConfigError(
            f"The batch has {', '.join(names)}; the model's forward takes {takes}.",
            field="model",
            remedy="Let collate (the data_collator) name its tensors like the parameters of forward.",
        )


def _is_required(parameter: inspect.Parameter) -> bool:
    return parameter.default is parameter.empty and parameter.kind is not parameter.VAR_POSITIONAL


def _label_names(model: nn.Module, named: tuple[str, ...]) -> tuple[str, ...]:
    # The rule of transformers' `find_labels`.
    found = [name for name in named if "label" in name]
    if "QuestionAnswering" in type(model).__name__:
        found += [name for name in named if name in ("start_positions", "end_positions")]
    return tuple(found) or ("labels",)


def _uses_num_items(model: nn.Module, parameters: dict[str, inspect.Parameter], open_ended: bool) -> bool:
    declared = getattr(model, "accepts_loss_kwargs", None)
    if isinstance(declared, bool):
        return declared
    # A transformers model passes **kwargs to its loss function; the **kwargs of other models mean something else.
    return "num_items_in_batch" in parameters or (open_ended and _has_loss_function(model))


def _has_loss_function(model: nn.Module) -> bool:
    # Look at the class: reading the property warns for models whose task it does not know.
    return hasattr(type(model), "loss_function") or "loss_function" in vars(model)


def _divides(model: nn.Module) -> bool:
    if getattr(model, "accepts_loss_kwargs", None) is True:
        return True
    try:
        # transformers' own loss functions divide by the count.
        return "loss_function(" in inspect.getsource(type(model).forward)
    except (OSError, TypeError):
        return False


def _shifts(model: nn.Module) -> bool:
    declared = getattr(model, "shifts_labels", None)
    if isinstance(declared, bool):
        return declared
    config = getattr(model, "config", None)
    if config is None or getattr(config, "is_encoder_decoder", False):
        return False  # an encoder-decoder shifts the decoder's inputs: every label is a target
    name = str(getattr(model, "loss_type", None) or type(model).__name__)
    return any(part in name for part in _SHIFTING)


@dataclass(frozen=True)
class ModelFacts:
    """What is known about the model under training.

    Attributes:
        forward: what its forward takes.
        main_input: the name of its main input, whose elements count as tokens.
        flops_per_item: floating-point operations of a forward and backward pass for one token or sample.
        own_flops: the model's own `floating_point_ops(inputs)`, if it has one.
        ignored_outputs: outputs that predictions leave out (``keys_to_ignore_at_inference``).
    """

    forward: ForwardInfo
    main_input: str
    flops_per_item: int
    own_flops: Callable[[Any], Any] | None
    ignored_outputs: tuple[str, ...]

    @classmethod
    def of(
        cls, model: nn.Module, label_names: Sequence[str] | None, numel: Callable[[nn.Parameter], int]
    ) -> ModelFacts:
        """Look at a model; `numel` gives the elements of a whole parameter, even of a sharded one."""
        own = getattr(model, "floating_point_ops", None)
        ignored = getattr(getattr(model, "config", None), "keys_to_ignore_at_inference", None)
        return cls(
            forward=ForwardInfo.of(model, label_names),
            main_input=getattr(model, "main_input_name", "input_ids"),
            flops_per_item=6 * models.non_embedding_parameters(model, numel),
            own_flops=own if callable(own) else None,
            ignored_outputs=tuple(ignored or ()),
        )
