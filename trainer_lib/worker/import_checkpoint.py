"""The verb *import_checkpoint*: a checkpoint of the transformers Trainer, committed in our format."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from trainer_lib.checkpoint.catalogue import read_checkpoint_info
from trainer_lib.checkpoint.layout import checkpoint_name
from trainer_lib.checkpoint.snapshot import Snapshot
from trainer_lib.checkpoint.transformers_checkpoint import (
    Source,
    convert_optimizer,
    convert_scheduler,
    converted,
    derive_position,
    load_adapter,
    read_source,
)
from trainer_lib.checkpoint.writer import save_checkpoint
from trainer_lib.distributed.communicator import SingleProcess
from trainer_lib.errors import ConfigError
from trainer_lib.optim.optimizers import get_decay_parameter_names
from trainer_lib.protocol.requests import ImportRequest, ImportResult
from trainer_lib.storage import Store
from trainer_lib.strategies.base import Strategy
from trainer_lib.trainer.model import models
from trainer_lib.worker.process.assembly import require_module
from trainer_lib.worker.process.session import Work

Names = list[list[str]]  # parameter names by group, in the order of the group's numbers

# State tensors of torch's optimizers that have the parameter's shape.
_LIKE_THE_PARAMETER = ("exp_avg", "exp_avg_sq", "momentum_buffer", "square_avg", "sum", "max_exp_avg_sq", "acc_delta")
# Names that transformers' Trainer leaves out of weight decay.
_PEERS_RULE = re.compile(r"bias|layernorm|rmsnorm|(?:^|\.)norm(?:$|\.)|_norm(?:$|\.)")


def run(work: Work[ImportRequest]) -> ImportResult:
    """Read everything, then write and commit."""
    request = work.request
    root = Store.open(request.output, field="destination")
    source = read_source(Store.open(request.source, field="source"))
    step = int(source.state.global_step)
    if read_checkpoint_info(root, checkpoint_name(step)) is not None:
        what = f"There is a checkpoint of step {step} already."
        remedy = "Name another folder, or remove that checkpoint."
        raise ConfigError(what, field="destination", value=root.url, remedy=remedy)
    work.events.emit("progress", message=f"read {len(source.tensors):,} tensors of step {step}")
    built = work.recipe.call(request.model)
    model = require_module(built, work, request.model, field="model", remedy="Return the model as it was trained.")
    weights, meta = _weights(source, model)
    names = _names(source, model)
    snapshot = Snapshot(
        step=step,
        model=weights,
        optimizer=convert_optimizer(source.optimizer, names),
        scheduler=convert_scheduler(source.scheduler, names),
        scaler=source.scaler,
        rng=source.rngs[0] if source.rngs else {},
        more_rngs=source.rngs[1:],
        data=derive_position(source.state),
        trainer_state=_trainer_state(source, root),
        files=source.files,
        meta={**meta, "imported_from": source.url, "strategy": "transformers", "global_samples": 0},
    )
    info = save_checkpoint(root, snapshot, SingleProcess())
    return ImportResult(
        step=step,
        url=info.url,
        parameters=sum(map(len, names)),
        files=len(info.commit.files),
        bytes=sum(entry.size for entry in info.commit.files),
        left_out=tuple(source.left_out),
        notes=tuple(_notes(source, names, model)),
    )


def _names(source: Source, model: nn.Module) -> Names:
    """The one choice of parameter names, by group and place, that fits the optimizer's state, which has no names."""
    trained = {name: tuple(param.shape) for name, param in model.named_parameters() if param.requires_grad}
    # Whichever rule fits the groups and shapes made them, transformers' or ours.
    candidates = [
        [[name for name in trained if name in decaying], [name for name in trained if name not in decaying]]
        for decaying in (set(_peers_decay_names(model)), set(get_decay_parameter_names(model)))
    ]
    candidates.append([list(trained)])
    state, groups = source.optimizer["state"], source.optimizer["param_groups"]
    saved = [[_saved_shape(state.get(number, {})) for number in group["params"]] for group in groups]
    fitting: list[Names] = []
    for names in candidates:
        # Two candidates may be the same names: then it does not matter which one is meant.
        if names not in fitting and _fits(names, saved, trained):
            fitting.append(names)
    if len(fitting) == 1:
        return fitting[0]
    sizes = [len(group) for group in saved]
    if fitting:
        what = f"The model's parameters fit the optimizer's groups of {sizes} in more than one way."
        remedy = "The transformers Trainer does not make these groups by itself; train on from the weights."
        raise ConfigError(what, field="model", remedy=remedy)
    offered = " or ".join(str([len(group) for group in names]) for names in candidates)
    what = f"The optimizer's groups have {sizes} parameters; the model's would have {offered}, or other shapes."
    remedy = "Give the model as it was trained (--model), with the same parameters frozen."
    raise ConfigError(what, field="model", remedy=remedy)


def _saved_shape(values: Mapping[str, Any]) -> tuple[int, ...] | None:
    """The shape of a parameter by its optimizer's state; None when that holds no tensor of the parameter's shape."""
    shapes = (tuple(values[key].shape) for key in _LIKE_THE_PARAMETER if isinstance(values.get(key), Tensor))
    return next(shapes, None)


def _fits(
    names: Names, saved: Sequence[Sequence[tuple[int, ...] | None]], shapes: Mapping[str, tuple[int, ...]]
) -> bool:
    if [len(group) for group in names] != [len(group) for group in saved]:
        return False
    pairs = [pair for group in zip(names, saved, strict=True) for pair in zip(*group, strict=True)]
    return all(shape in (None, shapes[name]) for name, shape in pairs)


def _peers_decay_names(module: nn.Module) -> Iterator[str]:
    """The transformers Trainer's own rule (`get_parameter_names` in its trainer_pt_utils)."""
    for name, child in module.named_children():
        if not isinstance(child, nn.LayerNorm):
            inner = (f"{name}.{below}" for below in _peers_decay_names(child))
            yield from (below for below in inner if not _PEERS_RULE.search(below.lower()))
    yield from (name for name in module._parameters if not _PEERS_RULE.search(name.lower()))


def _weights(source: Source, model: nn.Module) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """The weights under the names that a resumed model has, and what the commit records of a frozen base."""
    if source.adapter:
        load_adapter(model, source.tensors)
        state = Strategy(torch.device("cpu"), SingleProcess()).model_state(model)
        return models.trained_state(model, state), {"frozen": models.frozen_fingerprint(model, state)}
    return _complete(source.tensors, model), {}


def _complete(tensors: Mapping[str, Tensor], model: nn.Module) -> dict[str, Tensor]:
    """All names of the model's state; tied weights, which the file holds once, under each of their names."""
    objects = model.state_dict(keep_vars=True)  # the parameters themselves: tied names share one object
    if not tensors.keys() <= objects.keys():
        tensors = converted(model, tensors) or tensors
    present = {id(objects[name]): tensor for name, tensor in tensors.items() if name in objects}
    complete = {name: tensors.get(name, present.get(id(value))) for name, value in objects.items()}
    missing = [name for name, tensor in complete.items() if tensor is None]
    unknown = [name for name in tensors if name not in objects]
    reshaped = [name for name, tensor in complete.items() if tensor is not None and tensor.shape != objects[name].shape]
    parts = (("missing", missing), ("unknown", unknown), ("of another shape", reshaped))
    if what := ", ".join(f"{problem} {names[:5]}" for problem, names in parts if names):
        remedy = "Let the function of --model return the model as it was trained."
        raise ConfigError(f"The weights are not this model's: {what}.", field="model", remedy=remedy)
    return {name: tensor for name, tensor in complete.items() if tensor is not None}


def _trainer_state(source: Source, root: Store) -> dict[str, Any]:
    """The state; the best checkpoint is the one of its step in the new place, if it is there."""
    state = source.state.to_dict()
    best = source.state.best_global_step
    name = None if best is None else checkpoint_name(best)
    is_here = name is not None and (best == source.state.global_step or read_checkpoint_info(root, name) is not None)
    state["best_model_checkpoint"] = root.child(name).url if name is not None and is_here else None
    return state


def _notes(source: Source, names: Names, model: nn.Module) -> list[str]:
    notes = [
        "The training arguments are not imported: give the same ones when you resume. With shuffled data the rest of "
        "this epoch comes in another order, so some samples of it are seen twice and others not; with "
        'train_sampling_strategy="sequential" it continues exactly.'
    ]
    if not source.rngs:
        notes.append("There are no random states: dropout differs from an uninterrupted run.")
    best = source.state.best_global_step
    if best is not None and best != source.state.global_step:
        notes.append(f"The best checkpoint is that of step {best}: import it first, to have it at the end.")
    if len([called for called in names if called]) > 1:
        ours = set(get_decay_parameter_names(model))
        if set(names[0]) != ours & {name for called in names for name in called}:
            notes.append(
                "Weight decay was applied to other parameters than ours would choose: override "
                "get_decay_parameter_names to resume."
            )
    return notes
