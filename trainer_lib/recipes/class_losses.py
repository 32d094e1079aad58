"""Losses for classes of unequal sizes: rows weighted by their class, and the focal loss.

The loss of a batch is the mean over its rows of `weight * (1 - p) ** gamma * -log p`, where `p` is the probability of
the row's class. It is divided by the rows and not by their weights, as that of torch is: so micro-batches and processes
add up to the loss of the whole batch, whatever classes their rows have.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from trainer_lib.base.suggestions import suggestion
from trainer_lib.errors import ConfigError
from trainer_lib.recipes.option_names import choose
from trainer_lib.trainer.model.models import innermost

FIELD = "train.model"
LOSS: dict[str, Any] = {
    "class_weights": None,  # balanced, or class -> the weight of its rows; those that are not named have 1
    "focal_gamma": 0.0,  # of the focal loss: rows that are right already count less
}
"""The settings of the loss (`train.model`), with their defaults."""
BALANCED = "balanced"


def count_classes(labels: Sequence[int], rows: Any, classes: int) -> list[int]:
    """The number of rows of each class, among rows by their number, for `DataInfo.info["class_rows"]`."""
    counts: list[int] = np.bincount(np.asarray(labels)[rows], minlength=classes).tolist()
    return counts


def split_loss(options: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """The settings of a model without those of its loss, and those of its loss."""
    own = {name: value for name, value in options.items() if name in LOSS}
    return {name: value for name, value in options.items() if name not in LOSS}, own


def use_class_loss(model: nn.Module, options: Mapping[str, Any], info: Mapping[str, Any]) -> nn.Module:
    """Let a model that is given labels return the loss that these settings ask for; without any, its own.

    Args:
        model: returns `logits` ``[batch, classes]`` by name.
        options: those of `LOSS`.
        info: the `classes` of the data, and `class_rows`: the training rows of each.

    Raises:
        ConfigError: a class is unknown, or a weight or gamma is out of range.
    """
    chosen = choose(options, LOSS, field=FIELD)
    weights, gamma = find_weights(chosen["class_weights"], info), float(chosen["focal_gamma"])
    if not 0 <= gamma < float("inf"):
        remedy = "Give 0 for the usual loss, or such as 2."
        what = "The focal loss takes a gamma from 0 on."
        raise ConfigError(what, field=f"{FIELD}.focal_gamma", value=gamma, remedy=remedy)
    if weights is None and not gamma:
        return model
    of_class = torch.tensor(weights or [1.0] * len(info["classes"]), dtype=torch.float32)

    def replace_loss(model: nn.Module, args: tuple[Any, ...], named: dict[str, Any], outputs: Any) -> Any:
        if named.get("labels") is None:
            return None
        outputs["loss"] = class_loss(outputs["logits"], named["labels"], of_class, gamma)
        return outputs

    # The loss is a mean over rows: the Trainer does not pass it their number, by which transformers' own would divide.
    inner: Any = innermost(model)
    inner.accepts_loss_kwargs, inner.has_class_loss = False, True
    model.register_forward_hook(replace_loss, with_kwargs=True)
    return model


def class_loss(logits: Tensor, labels: Tensor, weights: Tensor, gamma: float) -> Tensor:
    """The loss ``[]`` of logits ``[batch, classes]`` for labels ``[batch]``, by weights ``[classes]``."""
    labels = labels.reshape(-1)
    logs = nn.functional.log_softmax(logits.float(), dim=-1).gather(1, labels[:, None]).squeeze(1)
    losses = -logs * weights.to(logits.device)[labels]
    if gamma:  # Lin et al., Focal Loss for Dense Object Detection, 2017
        losses = losses * (-torch.expm1(logs)).clamp(min=0) ** gamma
    return losses.mean()


def find_weights(given: Any, info: Mapping[str, Any]) -> list[float] | None:
    """The weight of each class; None where all are 1.

    Balanced weights are scikit-learn's: all rows by the classes times the rows of this one, so that their mean over
    the training rows is 1.

    Raises:
        ConfigError: they are neither `balanced` nor weights above 0 by the names of classes.
    """
    field, classes = f"{FIELD}.class_weights", [str(name) for name in info["classes"]]
    if given is None:
        return None
    if given == BALANCED:
        rows = info.get("class_rows")
        if rows is None:
            remedy = "Run with --force prepare, or give the weights by class."
            raise ConfigError("The prepared data has no count of its classes.", field=field, value=given, remedy=remedy)
        return [sum(rows) / (len(rows) * max(1, count)) for count in rows]
    if not isinstance(given, Mapping) or not given:
        remedy = f"Write balanced, or a mapping: {{{classes[-1]}: 5}}."
        raise ConfigError("These are not weights of classes.", field=field, value=given, remedy=remedy)
    by_name = {str(name): weight for name, weight in given.items()}
    for name, weight in by_name.items():
        if name not in classes:
            what, remedy = "The data has no such class.", suggestion(name, classes)
            raise ConfigError(what, field=f"{field}.{name}", value=weight, remedy=remedy)
        if isinstance(weight, bool) or not isinstance(weight, int | float) or not 0 < weight < float("inf"):
            remedy = "Give a number above 0: 5 has a row count like five."
            raise ConfigError("This is not a weight.", field=f"{field}.{name}", value=weight, remedy=remedy)
    return [float(by_name.get(name, 1.0)) for name in classes]
