"""An optimizer's state by parameter *name*, as tensors and JSON: any torch optimizer, bit for bit, without pickle.

torch numbers parameters by their position in the groups; a name survives a reordering, another wrapper and another
world size. State is taken as it is - nested dicts, lists, numbers, 0-dim tensors - and put back as it was. (torch's own
``load_state_dict`` casts floating state to the parameter's dtype, which destroys fp32 moments of bf16 weights.)
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from trainer_lib.checkpoint.values import from_json, to_json
from trainer_lib.errors import ConfigError, DamagedError
from trainer_lib.sharding import is_sharded, load_like, read_spec

_IMPLEMENTATION = {"foreach", "fused", "capturable", "differentiable"}
"""Group settings that say how to compute, not what: the current ones stay."""


@dataclass
class OptimizerSnapshot:
    """An optimizer's state.

    Attributes:
        tensors: ``<parameter name>/<state key>`` → tensor; not copied. Divided over processes where parameters are.
        groups: the parameter groups' settings; ``params`` holds names.
        scalars: ``state``: parameter name → its state with references into `tensors`.
    """

    tensors: Mapping[str, Tensor]
    groups: list[dict[str, Any]]
    scalars: dict[str, Any] = field(default_factory=dict)


def snapshot_optimizer(
    optimizer: torch.optim.Optimizer, named_params: Mapping[str, Tensor] | Iterable[tuple[str, Tensor]]
) -> OptimizerSnapshot:
    """The state of an optimizer whose parameters have these names.

    Raises:
        ConfigError: a parameter has no name, or its state holds what is neither tensor nor JSON.
    """
    names = _names(optimizer, named_params)
    tensors: dict[str, Tensor] = {}
    groups = []
    for index, group in enumerate(optimizer.param_groups):
        settings = {key: value for key, value in group.items() if key != "params"}
        keep = _keeper(None, tensors)
        encoded = {key: to_json(value, f"group.{index}/{key}", keep) for key, value in settings.items()}
        groups.append({**encoded, "params": [names[id(param)] for param in group["params"]]})
    state = {}
    for param, values in optimizer.state.items():
        if id(param) not in names:
            raise ConfigError(
                "The optimizer keeps state for something that is not among its parameters.",
                field="optim",
                value=type(optimizer).__name__,
                remedy="Such an optimizer cannot be saved; choose another.",
            )
        name = names[id(param)]
        state[name] = {key: to_json(value, f"{name}/{key}", _keeper(param, tensors)) for key, value in values.items()}
    return OptimizerSnapshot(tensors, groups, {"state": state})


def restore_optimizer(
    optimizer: torch.optim.Optimizer,
    named_params: Mapping[str, Tensor] | Iterable[tuple[str, Tensor]],
    snapshot: OptimizerSnapshot,
) -> None:
    """Put a snapshot into an optimizer over the same parameters, in whatever order they are now.

    Raises:
        ConfigError: parameters or groups differ from the saved ones; says which.
        DamagedError: the snapshot refers to tensors it does not hold.
    """
    names = _names(optimizer, named_params)
    _check_groups(optimizer, names, snapshot)
    for group, saved in zip(optimizer.param_groups, snapshot.groups, strict=True):
        for key, value in saved.items():
            if key != "params" and key not in _IMPLEMENTATION:
                group[key] = _like(group.get(key), from_json(value, _finder(None, group, snapshot.tensors)))
    state = snapshot.scalars.get("state", {})
    optimizer.state.clear()
    for group in optimizer.param_groups:
        for param in group["params"]:
            if (values := state.get(names[id(param)])) is not None:
                find = _finder(param, group, snapshot.tensors)
                optimizer.state[param] = {key: from_json(value, find) for key, value in values.items()}


def _names(
    optimizer: torch.optim.Optimizer, named_params: Mapping[str, Tensor] | Iterable[tuple[str, Tensor]]
) -> dict[int, str]:
    pairs = named_params.items() if isinstance(named_params, Mapping) else named_params
    names: dict[int, str] = {}
    for name, param in pairs:
        names.setdefault(id(param), name)  # a tied parameter goes by its first name
    for group in optimizer.param_groups:
        unnamed = sum(id(param) not in names for param in group["params"])
        if unnamed:
            raise ConfigError(
                f"{unnamed} of the optimizer's parameters are not parameters of the model.",
                field="optim",
                value=type(optimizer).__name__,
                remedy="Build the optimizer from the model that is trained, after it is complete.",
            )
    return names


def _check_groups(optimizer: torch.optim.Optimizer, names: dict[int, str], snapshot: OptimizerSnapshot) -> None:
    now = [{names[id(param)] for param in group["params"]} for group in optimizer.param_groups]
    saved = [set(group["params"]) for group in snapshot.groups]
    if now == saved:
        return
    all_now, all_saved = set().union(*now), set().union(*saved)
    if all_now == all_saved:
        reason = f"{len(saved)} groups were saved that divide the parameters differently than the {len(now)} groups now"
    else:
        missing, new = sorted(all_saved - all_now)[:5], sorted(all_now - all_saved)[:5]
        reason = f"saved but not there now: {missing or 'none'}; there now but not saved: {new or 'none'}"
    raise ConfigError(
        f"The optimizer's parameters are not the saved ones: {reason}.",
        field="resume_from_checkpoint",
        remedy="Resume with the model and the optimizer that wrote the checkpoint, or load its weights only.",
    )


def _keeper(param: Tensor | None, tensors: dict[str, Tensor]) -> Callable[[str, Tensor], dict[str, Any]]:
    """Collects the tensors of one parameter's state (of a group, when `param` is None)."""

    def keep(key: str, tensor: Tensor) -> dict[str, Any]:
        while key in tensors:
            key += "'"
        tensors[key] = tensor.detach()
        return {"__tensor__": key, "device": _placed(tensor, param)}

    return keep


def _finder(
    param: Tensor | None, group: Mapping[str, Any], tensors: Mapping[str, Tensor]
) -> Callable[[dict[str, Any]], Tensor]:
    """Gives back what `_keeper` collected, on the device where the optimizer needs it now."""

    def find(reference: dict[str, Any]) -> Tensor:
        key = str(reference["__tensor__"])
        if key not in tensors:
            raise DamagedError(
                f"The optimizer's tensor {key!r} is not in the checkpoint.",
                field="optimizer.json",
                remedy="Use an earlier checkpoint.",
            )
        if param is not None and is_sharded(param) and read_spec(tensors, key)[1] == tuple(param.shape):
            return load_like(param, tensors, key)
        tensor = tensors[key]
        # A copy: the snapshot may be used again, and the optimizer works in place.
        return tensor.to(_device(reference.get("device"), tensor, param, group), copy=True)

    return find


def _placed(tensor: Tensor, param: Tensor | None) -> str:
    """Where a tensor lives: ``cpu`` beside a parameter elsewhere, ``param`` with it, ``any`` when both are cpu."""
    if tensor.device.type == "cpu":
        return "any" if param is None or param.device.type == "cpu" else "cpu"
    return "param"


def _device(placed: str | None, tensor: Tensor, param: Tensor | None, group: Mapping[str, Any]) -> torch.device:
    """Where a state tensor has to live now, which may be another device than then."""
    if param is None:
        return torch.device("cpu")
    if tensor.ndim == 0 and param.ndim > 0 and placed != "param":
        # A step count: on the host, but for the implementations that read it on the device (torch's own rule,
        # Optimizer._process_value_according_to_param_policy).
        on_device = group.get("capturable") or group.get("fused")
        return param.device if on_device else torch.device("cpu")
    return torch.device("cpu") if placed == "cpu" else param.device


def _like(current: Any, value: Any) -> Any:
    """The saved value in the type the optimizer uses now: another writer's JSON has lists where torch has tuples."""
    if isinstance(current, tuple) and isinstance(value, list):
        return tuple(value)
    if isinstance(current, Tensor) and isinstance(value, Tensor):
        return value.to(current.device)
    return value
