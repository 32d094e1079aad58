"""What a model's forward and a user's overrides take, found out once: five ages of signatures run side by side."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn

from trainer_lib.errors import ConfigError
from trainer_lib.trainer import models

_SHIFTING = ("CausalLM", "LMHeadModel", "ForConditionalGeneration")


def parameters_of(function: Callable[..., Any]) -> dict[str, inspect.Parameter]:
    """The parameters by name; none when the signature cannot be read (some builtins)."""
    try:
        return dict(inspect.signature(function).parameters)
    except (TypeError, ValueError):
        return {}


def takes(function: Callable[..., Any], name: str) -> bool:
    """Whether `function` can be given the keyword `name`, by name or through ``**kwargs``."""
    parameters = parameters_of(function)
    return name in parameters or any(p.kind is p.VAR_KEYWORD for p in parameters.values())


def takes_positionals(function: Callable[..., Any], count: int) -> bool:
    """Whether a (bound) function can be given that many positional arguments."""
    kinds = [parameter.kind for parameter in parameters_of(function).values()]
    places = sum(kind in (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD) for kind in kinds)
    return places >= count or inspect.Parameter.VAR_POSITIONAL in kinds


def takes_trial(model_init: Callable[..., Any]) -> bool:
    """Whether `model_init` wants a search's trial: its first parameter has no default, or is called so."""
    first = next(iter(parameters_of(model_init).values()), None)
    if first is None or first.kind in (first.KEYWORD_ONLY, first.VAR_KEYWORD, first.VAR_POSITIONAL):
        return False
    return first.default is first.empty or first.name == "trial"


@dataclass(frozen=True)
class ForwardInfo:
    """What `model.forward` takes.

    Attributes:
        columns: names of data it takes; None when ``**kwargs`` takes any (those of transformers' models take settings,
            no data).
        open_ended: there are ``**kwargs``.
        required: those of them that have no default.
        labels: those of them that hold labels.
        uses_num_items: it can be given `num_items_in_batch`, and may divide its loss by it.
        divides_by_items: as far as its code tells, it does.
        shifts_labels: its loss compares position t with label t + 1.
        returns_loss: ``return_loss`` defaults to True (contrastive models).
    """

    columns: tuple[str, ...] | None
    open_ended: bool
    required: tuple[str, ...]
    labels: tuple[str, ...]
    uses_num_items: bool
    divides_by_items: bool
    shifts_labels: bool
    returns_loss: bool

    @classmethod
    def of(cls, model: nn.Module, label_names: Sequence[str] | None = None) -> ForwardInfo:
        """Look at a model (inside torch.compile's or an adapter's wrapper)."""
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
            divides_by_items="num_items_in_batch" in parameters or _divides(inner),
            shifts_labels=_shifts(inner),
            returns_loss=returns_loss,
        )

    def misfit(self, names: Collection[str]) -> ConfigError | None:
        """Why a batch with these names cannot be given to the model; None when it can."""
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
    found = [name for name in named if "label" in name]
    if "QuestionAnswering" in type(model).__name__:
        found += [name for name in named if name in ("start_positions", "end_positions")]
    return tuple(found) or ("labels",)


def _uses_num_items(model: nn.Module, parameters: dict[str, inspect.Parameter], open_ended: bool) -> bool:
    said = getattr(model, "accepts_loss_kwargs", None)
    if isinstance(said, bool):
        return said
    # transformers' models pass **kwargs on to their loss function; another model's **kwargs mean nothing of the kind.
    return "num_items_in_batch" in parameters or (open_ended and _has_loss_function(model))


def _has_loss_function(model: nn.Module) -> bool:
    # Asked of the class: the property itself warns for models whose task it does not know.
    return hasattr(type(model), "loss_function") or "loss_function" in vars(model)


def _divides(model: nn.Module) -> bool:
    if getattr(model, "accepts_loss_kwargs", None) is True:
        return True
    try:
        return "loss_function(" in inspect.getsource(type(model).forward)
    except (OSError, TypeError):
        return False


def _shifts(model: nn.Module) -> bool:
    said = getattr(model, "shifts_labels", None)
    if isinstance(said, bool):
        return said
    config = getattr(model, "config", None)
    if config is None or getattr(config, "is_encoder_decoder", False):
        return False  # an encoder-decoder shifts the decoder's inputs: every label is a target
    name = str(getattr(model, "loss_type", None) or type(model).__name__)
    return any(part in name for part in _SHIFTING)
