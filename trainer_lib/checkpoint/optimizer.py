"""An optimizer's state by parameter *name*, as tensors and JSON: any torch optimizer, bit for bit, without pickle.

torch numbers parameters by their position in the groups. A name, however, stays valid when parameters are reordered,
wrapped differently or sharded over another world size. State is saved as it is (nested dicts, lists, numbers,
0-dimensional tensors) and restored as it was. torch's own ``load_state_dict`` is not used, because it casts
floating-point state to the parameter's dtype, which destroys the fp32 moments of bf16 weights.
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
"""Group settings that select an implementation, not a result: a resume keeps the current ones."""


@dataclass
class OptimizerSnapshot:
    """An optimizer's state by parameter name.

    Attributes:
        tensors: ``<parameter name>/<state key>`` → tensor, usually in the parameter's shape; not copied. Sharded where
            the parameters are.
        groups: the parameter groups' settings as JSON; ``params`` lists names.
        scalars: ``{"state": {parameter name: its state}}`` as JSON, with references into `tensors`.
    """

    tensors: Mapping[str, Tensor]
    groups: list[dict[str, Any]]
    scalars: dict[str, Any] = field(default_factory=dict)


def snapshot_optimizer(
    optimizer: torch.optim.Optimizer, named_params: Mapping[str, Tensor] | Iterable[tuple[str, Tensor]]
) -> OptimizerSnapshot:
    """Take the state of an optimizer; its tensors are referenced, not copied.

    Args:
        optimizer: any torch optimizer.
        named_params: name → parameter `[...]`, as `Module.named_parameters` gives them; a tied parameter goes by its
            first name.

    Raises:
        ConfigError: a parameter has no name, or its state holds something that is neither a tensor nor JSON.
    """
    names = _names_by_id(optimizer, named_params)
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
                "The optimizer keeps state for a tensor that is not one of its parameters, so it cannot be saved.",
                field="optim",
                value=type(optimizer).__name__,
                remedy="Choose another optimizer.",
            )
        name = names[id(param)]
        state[name] = {key: to_json(value, f"{name}/{key}", _keeper(param, tensors)) for key, value in values.items()}
    return OptimizerSnapshot(tensors, groups, {"state": state})


def restore_optimizer(
    optimizer: torch.optim.Optimizer,
    named_params: Mapping[str, Tensor] | Iterable[tuple[str, Tensor]],
    snapshot: OptimizerSnapshot,
) -> None:
    """Restore a snapshot into an optimizer over the same parameters, whose order may have changed.

    Args:
        optimizer: the optimizer; its state and its groups' settings are replaced.
        named_params: name → parameter `[...]`, by the same names as when it was saved.
        snapshot: the saved state; its tensors are copied.

    Raises:
        ConfigError: the parameters or groups differ from the saved ones; the message names them.
        DamagedError: the snapshot refers to tensors that it does not hold.
    """
    names = _names_by_id(optimizer, named_params)
    _check_groups(optimizer, names, snapshot)
    for group, saved in zip(optimizer.param_groups, snapshot.groups, strict=True):
        for key, value in saved.items():
            if key != "params" and key not in _IMPLEMENTATION:
                group[key] = _convert_like(group.get(key), from_json(value, _finder(None, group, snapshot.tensors)))
    state = snapshot.scalars.get("state", {})
    # Emptied first: a parameter without saved state must not keep what it has.
    optimizer.state.clear()
    for group in optimizer.param_groups:
        for param in group["params"]:
            if (values := state.get(names[id(param)])) is not None:
                find = _finder(param, group, snapshot.tensors)
                optimizer.state[param] = {key: from_json(value, find) for key, value in values.items()}


def _names_by_id(
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
                f"The optimizer has {unnamed} parameters that are not parameters of the model.",
                field="optim",
                value=type(optimizer).__name__,
                remedy="Build the optimizer from the model that is trained, after it is complete.",
            )
    return names


def _check_groups(optimizer: torch.optim.Optimizer, names: dict[int, str], snapshot: OptimizerSnapshot) -> None:
    now = [{names[id(param)] for param in group["params"]} for group in optimizer.param_groups]
    saved = [set(group["params"]) for group in snapshot.groups]
    # The order within a group may differ: names decide, not numbers.
    if now == saved:
        return
    all_now, all_saved = set().union(*now), set().union(*saved)
    if all_now == all_saved:
        reason = f"the {len(saved)} saved groups divide the parameters differently than the {len(now)} groups now"
    else:
        missing, new = sorted(all_saved - all_now)[:5], sorted(all_now - all_saved)[:5]
        reason = f"only in the checkpoint: {missing or 'none'}; only in the optimizer now: {new or 'none'}"
    raise ConfigError(
        f"The optimizer's parameters differ from the saved ones: {reason}.",
        field="resume_from_checkpoint",
        remedy="Resume with the model and the optimizer that wrote the checkpoint, or load its weights only.",
    )


def _keeper(param: Tensor | None, tensors: dict[str, Tensor]) -> Callable[[str, Tensor], dict[str, Any]]:
    """Make the `keep` of `to_json` that collects one parameter's tensors (a group's, if `param` is None)."""

    def keep(key: str, tensor: Tensor) -> dict[str, Any]:
        while key in tensors:  # two state keys that read alike, such as 1 and "1"
            key += "'"
        tensors[key] = tensor.detach()
        reference: dict[str, Any] = {"__tensor__": key, "device": _describe_place(tensor, param)}
        is_plain = tensor.layout is torch.strided and not is_sharded(tensor)
        if is_plain and (strides := tensor.stride()) != _default_strides(tensor.shape, param):
            reference["order"] = sorted(range(tensor.ndim), key=lambda dim: -strides[dim])
        return reference

    return keep


def _finder(
    param: Tensor | None, group: Mapping[str, Any], tensors: Mapping[str, Tensor]
) -> Callable[[dict[str, Any]], Tensor]:
    """Make the `find` of `from_json` that returns what `_keeper` collected, on the device that needs it now."""

    def find(reference: dict[str, Any]) -> Tensor:
        key = str(reference["__tensor__"])
        if key not in tensors:
            raise DamagedError(
                f"The optimizer's tensor {key!r} is not in the checkpoint.",
                field="optimizer.json",
                remedy="Use an earlier checkpoint.",
            )
        if param is not None and is_sharded(param) and read_spec(tensors, key)[1] == tuple(param.shape):
            return load_like(param, tensors, key)  # this rank's rows of the state, as it holds them of the parameter
        tensor, order = tensors[key], reference.get("order")
        # A copy, because the optimizer works in place and the snapshot may be used again.
        device = _target_device(reference.get("device"), tensor, param, group)
        strides = _default_strides(tensor.shape, param) if order is None else _ordered_strides(tensor.shape, order)
        return torch.empty_strided(tensor.shape, strides, dtype=tensor.dtype, device=device).copy_(tensor)

    return find


def _default_strides(shape: torch.Size, param: Tensor | None) -> tuple[int, ...]:
    """The strides of state that an optimizer makes: its parameter's, as `zeros_like`, or row-major in another shape.

    They matter: fused kernels walk through the parameter and its state in the order of their memory.
    """
    if param is None or param.shape != shape:
        return torch.empty(shape, device="meta").stride()
    return torch.empty_like(torch.empty_strided(shape, param.stride(), device="meta")).stride()


def _ordered_strides(shape: torch.Size, order: list[int]) -> tuple[int, ...]:
    """Dense strides whose dimensions lie in `order` in memory, the one with the largest stride first."""
    if sorted(order) != list(range(len(shape))):
        raise ValueError(f"{order} is not an order of {len(shape)} dimensions")
    dense = torch.empty([shape[dim] for dim in order], device="meta")
    return dense.permute([order.index(dim) for dim in range(len(shape))]).stride()


def _describe_place(tensor: Tensor, param: Tensor | None) -> str:
    """Where a tensor was: ``param`` (with its parameter), ``cpu`` (alone on the host), ``any`` (both on the host)."""
    if tensor.device.type == "cpu":
        return "any" if param is None or param.device.type == "cpu" else "cpu"
    return "param"


def _target_device(placed: str | None, tensor: Tensor, param: Tensor | None, group: Mapping[str, Any]) -> torch.device:
    """The device on which a state tensor is needed now, which may differ from the one it was saved on."""
    if param is None:
        return torch.device("cpu")
    if tensor.ndim == 0 and param.ndim > 0 and placed != "param":
        # A step count belongs on the host, except for implementations that read it on the device. The rule is torch's
        # own: Optimizer._process_value_according_to_param_policy.
        on_device = group.get("capturable") or group.get("fused")
        return param.device if on_device else torch.device("cpu")
    return torch.device("cpu") if placed == "cpu" else param.device


def _convert_like(current: Any, value: Any) -> Any:
    """Convert a saved value to the type that the optimizer uses now: an imported state has lists in place of tuples."""
    if isinstance(current, tuple) and isinstance(value, list):
        return tuple(value)
    if isinstance(current, Tensor) and isinstance(value, Tensor):
        return value.to(current.device)
    return value
