"""An optimizer's state by parameter *name*, as tensors and JSON: any torch optimizer, bit for bit, without pickle.

torch numbers parameters by their position in the groups. A name, however, stays valid when parameters are reordered,
wrapped differently or sharded over another world size. State is saved as it is (nested dicts, lists, numbers,
0-dimensional tensors) and restored as it was. torch's own ``load_state_dict`` is not used, because it casts
floating-point state to the parameter's dtype, which destroys the fp32 moments of bf16 weights.

Some optimizers keep more than `state`: optimizers inside, what their own ``state_dict`` adds, numbers and tensors in
attributes. These are saved as well, and given back by their own ``load_state_dict`` where there is one.
"""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from trainer_lib.checkpoint.values import from_json, to_json
from trainer_lib.distributed.sharding import is_sharded, load_like, read_spec
from trainer_lib.errors import ConfigError, DamagedError

_IMPLEMENTATION = {"foreach", "fused", "capturable", "differentiable"}
"""Group settings that select an implementation, not a result: a resume keeps the current ones."""
_PARAM = "__param__"
_WHOLE = "__whole__"


@dataclass
class OptimizerSnapshot:
    """An optimizer's state by parameter name.

    Attributes:
        tensors: ``<parameter name>/<state key>`` → tensor, usually in the parameter's shape; not copied. Sharded where
            the parameters are.
        groups: the parameter groups' settings as JSON; ``params`` lists names.
        scalars: ``{"state": {parameter name: its state}}`` as JSON, with references into `tensors`; then, if the
            optimizer has them, "shared" (state under other keys), "added" (what its ``state_dict`` adds), "attributes",
            and "inner" (optimizers inside, as this by attribute).
    """

    tensors: Mapping[str, Tensor]
    groups: list[dict[str, Any]]
    scalars: dict[str, Any] = field(default_factory=dict)


def snapshot_optimizer(
    optimizer: torch.optim.Optimizer, named_params: Mapping[str, Tensor] | Iterable[tuple[str, Tensor]]
) -> OptimizerSnapshot:
    """Take the state of an optimizer; its tensors are referenced, not copied.

    `named_params`: name → parameter `[...]`, as `Module.named_parameters` gives them; a tied parameter goes by its
    first name. Raises ConfigError when a parameter has no name, or its state holds something that is neither a tensor
    nor JSON.
    """
    tensors: dict[str, Tensor] = {}
    groups, scalars = _describe(optimizer, _pairs(named_params), tensors, "")
    return OptimizerSnapshot(tensors, groups, scalars)


def _describe(
    optimizer: torch.optim.Optimizer, pairs: list[tuple[str, Tensor]], tensors: dict[str, Tensor], prefix: str
) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """Return groups and scalars of an optimizer and of those inside; add tensors under names that start with prefix."""
    names, keep = _names_by_id(optimizer, pairs), _keeper(None, tensors)
    groups = []
    for index, group in enumerate(optimizer.param_groups):
        settings = {key: value for key, value in group.items() if key != "params"}
        encoded = {key: to_json(value, f"{prefix}group.{index}/{key}", keep) for key, value in settings.items()}
        groups.append({**encoded, "params": [names[id(param)] for param in group["params"]]})
    parts: dict[str, dict[str, Any]] = {"state": {}, "shared": {}}
    by_key: Mapping[Any, Any] = optimizer.state
    for key, values in by_key.items():
        if isinstance(key, str):
            parts["shared"][key] = to_json(_name_keys(values, names), f"{prefix}shared/{key}", keep)
        elif id(key) not in names:
            what = "The optimizer keeps state for a tensor that is not one of its parameters, so it cannot be saved."
            raise ConfigError(what, field="optim", value=type(optimizer).__name__, remedy="Choose another optimizer.")
        else:
            at, keeper = f"{prefix}{names[id(key)]}", _keeper(key, tensors)
            state = {inner: to_json(value, f"{at}/{inner}", keeper) for inner, value in values.items()}
            parts["state"][names[id(key)]] = state
    for place, inner in _inner_optimizers(optimizer):
        described = _describe(inner, pairs, tensors, f"{prefix}{place}/")
        parts.setdefault("inner", {})[place] = dict(zip(("groups", "scalars"), described, strict=True))
    for kind, values in _beyond_state(optimizer, names).items():
        known = {_memory(tensor): key for key, tensor in tensors.items()} if values else {}
        named, keep = _name_keys(values, names), _keeper(None, tensors, known)
        parts[kind] = {key: to_json(value, f"{prefix}{kind}/{key}", keep) for key, value in named.items()}
    return groups, {kind: part for kind, part in parts.items() if part or kind == "state"}


def restore_optimizer(
    optimizer: torch.optim.Optimizer,
    named_params: Mapping[str, Tensor] | Iterable[tuple[str, Tensor]],
    snapshot: OptimizerSnapshot,
) -> None:
    """Restore a snapshot into an optimizer over the same parameters `[...]`, whose order may have changed.

    Parameters go by the names that they were saved under; the tensors of `snapshot` are copied. Raises ConfigError,
    which names the parameters or groups that differ, and DamagedError when the snapshot lacks a tensor.
    """
    pairs = _pairs(named_params)
    _restore_by_name(optimizer, pairs, snapshot)
    group, params = optimizer.param_groups[0], dict(reversed(pairs))
    find = _finder(None, group, snapshot.tensors)
    attributes = _key_by_params(from_json(snapshot.scalars.get("attributes", {}), find), params)
    vars(optimizer).update({key: _convert_like(vars(optimizer).get(key), value) for key, value in attributes.items()})
    if (saved := snapshot.scalars.get("added")) is None:
        return
    kept = [{key: group[key] for key in _IMPLEMENTATION & group.keys()} for group in optimizer.param_groups]
    # Its other parts are what was restored by name.
    added = _key_by_params(from_json(saved, find), params)
    optimizer.load_state_dict(added[_WHOLE] if _WHOLE in added else {**optimizer.state_dict(), **added})
    _restore_by_name(optimizer, pairs, snapshot)  # again: torch's load_state_dict has cast what is in low precision
    for group, settings in zip(optimizer.param_groups, kept, strict=True):
        group.update(settings)


def _restore_by_name(
    optimizer: torch.optim.Optimizer, pairs: list[tuple[str, Tensor]], snapshot: OptimizerSnapshot
) -> None:
    names = _names_by_id(optimizer, pairs)
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
    find, shared = _finder(None, optimizer.param_groups[0], snapshot.tensors), snapshot.scalars.get("shared", {})
    by_text: dict[Any, Any] = optimizer.state
    by_text.update(_key_by_params(from_json(shared, find), dict(reversed(pairs))))
    for place, inner in _inner_optimizers(optimizer):
        if (saved := snapshot.scalars.get("inner", {}).get(place)) is None:
            what = f"The checkpoint has no state for the optimizer in {type(optimizer).__name__}.{place}."
            remedy = "Resume with the optimizer that wrote the checkpoint, or load its weights only."
            raise ConfigError(what, field="resume_from_checkpoint", remedy=remedy)
        restore_optimizer(inner, pairs, OptimizerSnapshot(snapshot.tensors, saved["groups"], saved["scalars"]))


def _pairs(named_params: Mapping[str, Tensor] | Iterable[tuple[str, Tensor]]) -> list[tuple[str, Tensor]]:
    return list(named_params.items() if isinstance(named_params, Mapping) else named_params)


def _inner_optimizers(optimizer: torch.optim.Optimizer) -> Iterator[tuple[str, torch.optim.Optimizer]]:
    """The optimizers in an optimizer's attributes, by attribute; not those that work on its state."""
    for name, value in vars(optimizer).items():
        parts = enumerate(value) if isinstance(value, list | tuple) else ()
        for key, inner in [(None, value), *(value.items() if isinstance(value, dict) else parts)]:
            if isinstance(inner, torch.optim.Optimizer) and inner.state is not optimizer.state:
                yield name if key is None else f"{name}.{key}", inner


def _beyond_state(optimizer: torch.optim.Optimizer, names: Mapping[int, str]) -> dict[str, dict[str, Any]]:
    """An optimizer's values besides its state and groups: what its `state_dict` adds, or attributes."""
    if type(optimizer).state_dict is not torch.optim.Optimizer.state_dict:
        whole: Any = optimizer.state_dict()
        if not isinstance(whole, Mapping):  # a list, one for each optimizer inside
            return {"added": {_WHOLE: whole}}
        return {"added": {key: value for key, value in whole.items() if key not in ("state", "param_groups")}}
    known = vars(torch.optim.SGD([torch.empty(0)])).keys()
    kept = {key: value for key, value in vars(optimizer).items() if key not in known and _is_state(value, names)}
    return {"attributes": kept}


def _is_state(value: Any, names: Mapping[int, str]) -> bool:
    """Whether an attribute is a number, a tensor, or a collection with tensors or empty; parameters are not state."""
    if isinstance(value, bool | nn.Parameter):
        return False
    leaves = list(_leaves(value))
    if any(isinstance(leaf, nn.Parameter) or id(leaf) in names for leaf in leaves):
        return False
    return not leaves or isinstance(value, int | float) or any(isinstance(leaf, Tensor) for leaf in leaves)


def _leaves(value: Any) -> Iterator[Any]:
    if not isinstance(value, Mapping | list | tuple | deque):
        yield value
        return
    for inner in value.values() if isinstance(value, Mapping) else value:
        yield from _leaves(inner)


def _name_keys(value: Any, names: Mapping[int, str]) -> Any:
    """Replace parameters that are keys of dictionaries by a mark and their names."""
    if isinstance(value, Mapping):
        pairs = ((key, _name_keys(inner, names)) for key, inner in value.items())
        return {(_PARAM, names[id(key)]) if id(key) in names else key: inner for key, inner in pairs}
    return [_name_keys(inner, names) for inner in value] if type(value) is list else value


def _key_by_params(value: Any, params: Mapping[str, Tensor]) -> Any:
    """Undo `_name_keys`."""
    if isinstance(value, dict):
        pairs = ((key, _key_by_params(inner, params)) for key, inner in value.items())
        return {
            params[key[1]] if isinstance(key, tuple) and key[:1] == (_PARAM,) else key: inner for key, inner in pairs
        }
    return [_key_by_params(inner, params) for inner in value] if type(value) is list else value


def _names_by_id(optimizer: torch.optim.Optimizer, pairs: Iterable[tuple[str, Tensor]]) -> dict[int, str]:
    names: dict[int, str] = {}
    for name, param in pairs:
        names.setdefault(id(param), name)  # a tied parameter goes by its first name
    for group in optimizer.param_groups:
        unnamed = sum(id(param) not in names for param in group["params"])
        if unnamed:
            what = f"The optimizer has {unnamed} parameters that are not parameters of the model."
            remedy = "Build the optimizer from the model that is trained, after it is complete."
            raise ConfigError(what, field="optim", value=type(optimizer).__name__, remedy=remedy)
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
    what = f"The optimizer's parameters differ from the saved ones: {reason}."
    remedy = "Resume with the model and the optimizer that wrote the checkpoint, or load its weights only."
    raise ConfigError(what, field="resume_from_checkpoint", remedy=remedy)


def _keeper(
    param: Tensor | None, tensors: dict[str, Tensor], known: Mapping[Any, str] | None = None
) -> Callable[[str, Tensor], dict[str, Any]]:
    """Make the `keep` of `to_json` for a parameter's tensors (None: a group's), except those `known` by memory."""

    def keep(key: str, tensor: Tensor) -> dict[str, Any]:
        wrapper: Any = tensor
        if is_traceable_wrapper_subclass(wrapper) and not is_sharded(tensor):
            names, attributes = wrapper.__tensor_flatten__()
            return {
                "__tensor__": key,
                "class": f"{type(tensor).__module__}:{type(tensor).__name__}",
                "form": to_json([attributes, list(tensor.shape), list(tensor.stride())], key),
                "inner": {name: keep(f"{key}.{name}", getattr(tensor, name)) for name in names},
            }
        if is_sharded(tensor) and is_traceable_wrapper_subclass(wrapper.to_local()):
            what = "The optimizer keeps quantized state of sharded parameters, which cannot be saved."
            remedy = "Train without sharding, or choose an optimizer whose state is not quantized."
            raise ConfigError(what, field="optim", remedy=remedy)
        if param is None and is_sharded(tensor):
            what = f"The optimizer keeps a sharded tensor in {key!r}, outside of its state by parameter."
            raise ConfigError(what, field="optim", remedy="Train without sharding, or choose another optimizer.")
        while key in tensors:  # two state keys that read alike, such as 1 and "1"
            key += "'"
        key = (known or {}).get(_memory(tensor), key)
        tensors.setdefault(key, tensor.detach())
        reference: dict[str, Any] = {"__tensor__": key, "device": _describe_place(tensor, param)}
        is_plain = tensor.layout is torch.strided and not is_sharded(tensor)
        if is_plain and (strides := tensor.stride()) != _default_strides(tensor.shape, param):
            reference["order"] = sorted(range(tensor.ndim), key=lambda dim: -strides[dim])
        return reference

    return keep


def _memory(tensor: Tensor) -> Any:
    is_plain = tensor.layout is torch.strided and not is_sharded(tensor) and not tensor.is_meta and tensor.numel() > 0
    return (tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype) if is_plain else id(tensor)


def _finder(
    param: Tensor | None, group: Mapping[str, Any], tensors: Mapping[str, Tensor]
) -> Callable[[dict[str, Any]], Tensor]:
    """Make the `find` of `from_json` that returns what `_keeper` collected, on the device that needs it now."""

    def find(reference: dict[str, Any]) -> Tensor:
        key = str(reference["__tensor__"])
        if "class" in reference:
            parts = {name: find(inner) for name, inner in reference["inner"].items()}
            attributes, shape, strides = from_json(reference["form"])
            made: Tensor = _wrapper_class(reference["class"]).__tensor_unflatten__(parts, attributes, shape, strides)
            return made
        if key not in tensors:
            what = f"The optimizer's tensor {key!r} is not in the checkpoint."
            raise DamagedError(what, field="optimizer.json", remedy="Use an earlier checkpoint.")
        if param is not None and is_sharded(param) and read_spec(tensors, key)[1] == tuple(param.shape):
            return load_like(param, tensors, key)  # this rank's part of the state, as it holds it of the parameter
        tensor, order = tensors[key], reference.get("order")
        # A copy, because the optimizer works in place and the snapshot may be used again.
        device = _target_device(reference.get("device"), tensor, param, group)
        strides = _default_strides(tensor.shape, param) if order is None else _ordered_strides(tensor.shape, order)
        return torch.empty_strided(tensor.shape, strides, dtype=tensor.dtype, device=device).copy_(tensor)

    return find


def _wrapper_class(name: str) -> Any:
    """The class of a tensor that consists of others, of what torch or an imported torchao has. Raises DamagedError."""
    module, _, attribute = name.partition(":")
    found = getattr(sys.modules.get(module), attribute, None)
    known = module.partition(".")[0] in ("torch", "torchao")
    if not known or not isinstance(found, type) or not issubclass(found, Tensor):
        what = f"The optimizer's tensors are of a class {name!r} that is not known here."
        remedy = "Resume with the optimizer that wrote the checkpoint, and the version of its package."
        raise DamagedError(what, field="optimizer.json", remedy=remedy)
    return found


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
    """A tensor's place: ``param`` (with its parameter), ``cpu`` (alone on the host), ``any`` (both on the host)."""
    if tensor.device.type == "cpu":
        return "any" if param is None or param.device.type == "cpu" else "cpu"
    return "param"


def _target_device(placed: str | None, tensor: Tensor, param: Tensor | None, group: Mapping[str, Any]) -> torch.device:
    """The device on which a state tensor is needed now, which may differ from the one it was saved on."""
    if param is None:
        home = next((member.device for member in group["params"]), torch.device("cpu"))
        return home if placed == "param" else torch.device("cpu")
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
