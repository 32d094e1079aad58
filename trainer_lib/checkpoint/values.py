"""Python values as JSON and back, exactly: what optimizers and schedules keep, without pickle.

Plain values, lists and dicts with text keys stand for themselves. ``{"__tuple__": [...]}`` and
``{"__dict__": [[key, value], ...]}`` (dicts with number keys) stand for what JSON has not, ``{"__tensor__": ...}`` for
a tensor that is kept elsewhere.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from torch import Tensor

from trainer_lib.errors import ConfigError, DamagedError

_MARKS = ("__tensor__", "__tuple__", "__dict__")


def to_json(value: Any, key: str, keep: Callable[[str, Tensor], dict[str, Any]] | None = None) -> Any:
    """A value as JSON.

    Args:
        value: what to write.
        key: where it stands, for error messages and for `keep`.
        keep: takes a tensor and returns the reference that stands for it; without it tensors are refused.

    Raises:
        ConfigError: it holds something that is neither JSON, nor a tuple, nor a tensor.
    """
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, Tensor) and keep is not None:
        return keep(key, value)
    if isinstance(value, list | tuple):
        items = [to_json(item, f"{key}.{index}", keep) for index, item in enumerate(value)]
        return items if isinstance(value, list) else {"__tuple__": items}
    if isinstance(value, Mapping) and all(isinstance(inner, str | int) for inner in value):
        pairs = [(inner, to_json(item, f"{key}.{inner}", keep)) for inner, item in value.items()]
        plain = all(isinstance(inner, str) and inner not in _MARKS for inner in value)
        return dict(pairs) if plain else {"__dict__": [list(pair) for pair in pairs]}
    raise ConfigError(
        f"{key!r} holds a {type(value).__name__}, which cannot be saved without pickle.",
        field="checkpoint",
        remedy="Keep numbers, texts, lists, dicts and (in an optimizer) tensors in it.",
    )


def from_json(value: Any, find: Callable[[dict[str, Any]], Tensor] | None = None) -> Any:
    """What `to_json` was given; `find` gives the tensor for a reference.

    Raises:
        DamagedError: it refers to a tensor where there is none, or is not what `to_json` makes.
    """
    try:
        return _decoded(value, find)
    except (TypeError, ValueError, RecursionError) as error:
        raise DamagedError(f"A saved value is malformed: {error}.", remedy="Use an earlier checkpoint.") from error


def _decoded(value: Any, find: Callable[[dict[str, Any]], Tensor] | None) -> Any:
    if isinstance(value, list):
        return [_decoded(item, find) for item in value]
    if not isinstance(value, dict):
        return value
    if "__tensor__" in value:
        if find is None:
            raise DamagedError("A tensor stands where none can be.", remedy="Use an earlier checkpoint.")
        return find(value)
    if "__tuple__" in value:
        return tuple(_decoded(item, find) for item in _listed(value["__tuple__"]))
    if "__dict__" in value:
        pairs = [_listed(pair) for pair in _listed(value["__dict__"])]
        return {inner: _decoded(item, find) for inner, item in pairs}
    return {inner: _decoded(item, find) for inner, item in value.items()}


def _listed(value: Any) -> list[Any]:
    if not isinstance(value, list):
        raise TypeError(f"a list is needed, not {type(value).__name__}")
    return value
