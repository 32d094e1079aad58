"""Trees of arrays: what models return (a tensor, or tuples, lists, mappings of them), on its way to disk and back."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from trainer_lib.data.items import MAPPINGS
from trainer_lib.errors import ConfigError

Array = npt.NDArray[Any]


def map_tree(function: Callable[[Any], Any], tree: Any) -> Any:
    """`function` on every leaf that is not None; named tuples become tuples, mappings dicts."""
    if tree is None:
        return None
    if isinstance(tree, torch.Tensor | np.ndarray):  # first: asking whether something is a Mapping is slow
        return function(tree)
    if isinstance(tree, MAPPINGS):
        return {str(name): map_tree(function, part) for name, part in tree.items()}
    if isinstance(tree, list | tuple):
        parts = [map_tree(function, part) for part in tree]
        return parts if isinstance(tree, list) else tuple(parts)
    return function(tree)


def to_numpy(tree: Any) -> Any:
    """Every tensor as an array on the host; NumPy has no bfloat16, so that becomes float32."""
    return map_tree(_array, tree)


def _array(leaf: Any) -> Array:
    if isinstance(leaf, torch.Tensor):
        host = leaf.detach().cpu()
        return np.asarray((host.float() if host.dtype == torch.bfloat16 else host).numpy())
    array = np.asarray(leaf)
    if array.dtype == object:
        raise ConfigError(
            "The model returned something that is no tensor.",
            field="model",
            value=type(leaf).__name__,
            remedy="Return tensors, or name the key in ignore_keys.",
        )
    return array


def to_tensors(tree: Any) -> Any:
    """Every array as a CPU tensor."""
    return map_tree(lambda leaf: leaf if isinstance(leaf, torch.Tensor) else torch.from_numpy(np.array(leaf)), tree)


def detach(tree: Any) -> Any:
    """Every tensor without its graph."""
    return map_tree(lambda leaf: leaf.detach() if isinstance(leaf, torch.Tensor) else leaf, tree)


def leaves(tree: Any) -> list[Array]:
    """The leaves in order; None is no leaf."""
    found: list[Array] = []
    map_tree(found.append, tree)
    return found


def flatten(tree: Any, into: list[Array]) -> Any:
    """Append the leaves to `into` as arrays, in order; what is returned is equal for trees of equal structure.

    A None in a mapping counts as absent.
    """
    if tree is None:
        return None
    if isinstance(tree, torch.Tensor | np.ndarray) or not isinstance(tree, Mapping | list | tuple):
        into.append(_array(tree))
        return _LEAF
    if isinstance(tree, MAPPINGS):
        return {str(name): flatten(part, into) for name, part in tree.items() if part is not None}
    parts = [flatten(part, into) for part in tree]
    return parts if isinstance(tree, list) else tuple(parts)


_LEAF = "leaf"


def structure(tree: Any) -> Any:
    """The tree as JSON with leaves numbered; `rebuild` inverts it."""
    numbers = iter(range(1_000_000))

    def walk(part: Any) -> Any:
        if isinstance(part, MAPPINGS):
            return {"dict": {str(name): walk(value) for name, value in part.items()}}
        if isinstance(part, list | tuple):
            return {"list" if isinstance(part, list) else "tuple": [walk(value) for value in part]}
        return None if part is None else next(numbers)

    return walk(tree)


def rebuild(shape: Any, values: list[Any]) -> Any:
    """The tree of `structure` with its leaves replaced by `values`."""
    if isinstance(shape, int):
        return values[shape]
    if shape is None:
        return None
    if "dict" in shape:
        return {name: rebuild(part, values) for name, part in shape["dict"].items()}
    parts = [rebuild(part, values) for part in shape.get("list", shape.get("tuple", ()))]
    return parts if "list" in shape else tuple(parts)


def pack(tree: Any) -> bytes:
    """A tree of arrays as bytes: a JSON header (structure, dtypes, shapes), then the arrays' bytes. No pickle."""
    arrays = [np.ascontiguousarray(leaf).reshape(np.shape(leaf)) for leaf in leaves(tree)]
    header = json.dumps(
        {"tree": structure(tree), "arrays": [[array.dtype.str, list(array.shape)] for array in arrays]}
    ).encode()
    return b"".join([len(header).to_bytes(8, "little"), header, *(array.tobytes() for array in arrays)])


def unpack(data: bytes) -> Any:
    """What `pack` packed."""
    size = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + size])
    at, arrays = 8 + size, []
    for dtype, shape in header["arrays"]:
        count = int(np.prod(shape, dtype=np.int64))
        array = np.frombuffer(data, dtype=np.dtype(dtype), count=count, offset=at).reshape(shape)
        arrays.append(array)
        at += array.nbytes
    return rebuild(header["tree"], arrays)
