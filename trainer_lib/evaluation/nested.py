"""Trees of arrays: a tensor, or tuples, lists and mappings of them, as a model returns them."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from trainer_lib.base.json_text import parse_json
from trainer_lib.base.outputs import EvalPrediction
from trainer_lib.data.loading.items import MAPPINGS, SEQUENCES
from trainer_lib.errors import ConfigError

Array = npt.NDArray[Any]
# Unions such as `list | tuple` are made at every call, which takes longer than the test.
_LEAVES = (torch.Tensor, np.ndarray)


def map_tree(function: Callable[[Any], Any], tree: Any) -> Any:
    """Apply `function` to every leaf except None. Named tuples become tuples, and mappings become dicts."""
    if tree is None:
        return None
    # Tensors first: a test for Mapping is slow, and nearly every leaf is a tensor.
    if isinstance(tree, _LEAVES):
        return function(tree)
    if isinstance(tree, MAPPINGS):
        return {str(name): map_tree(function, part) for name, part in tree.items()}
    if isinstance(tree, SEQUENCES):
        parts = [map_tree(function, part) for part in tree]
        return parts if isinstance(tree, list) else tuple(parts)
    return function(tree)


def to_numpy(tree: Any) -> Any:
    """Convert every tensor to an array of that shape on the host; bfloat16, which NumPy lacks, becomes float32."""
    return map_tree(_to_array, tree)


def _to_array(leaf: Any) -> Array:
    if isinstance(leaf, torch.Tensor):
        host = leaf.detach().cpu()
        return np.asarray((host.float() if host.dtype == torch.bfloat16 else host).numpy())
    array = np.asarray(leaf)
    # The bytes of such an array are pointers.
    if array.dtype == object:
        what = "The model returned a value that is not a tensor."
        remedy = "Return tensors, or name the key in ignore_keys."
        raise ConfigError(what, field="model", value=type(leaf).__name__, remedy=remedy)
    return array


def to_tensors(tree: Any) -> Any:
    """Convert every array to a CPU tensor of that shape."""
    # np.array copies: unpacked arrays are read-only, and torch warns about such memory.
    return map_tree(lambda leaf: leaf if isinstance(leaf, torch.Tensor) else torch.from_numpy(np.array(leaf)), tree)


def detach(tree: Any) -> Any:
    """Detach every tensor from its graph."""
    return map_tree(lambda leaf: leaf.detach() if isinstance(leaf, torch.Tensor) else leaf, tree)


def list_leaves(tree: Any) -> list[Array]:
    """The leaves in order, without None."""
    found: list[Array] = []
    map_tree(found.append, tree)
    return found


def take_rows(given: EvalPrediction, rows: Array) -> EvalPrediction:
    """The predictions and labels of some rows, by their numbers."""
    return EvalPrediction(*map_tree(lambda leaf: np.asarray(leaf)[rows], (given.predictions, given.label_ids)))


def describe_form(tree: Any, arrays: list[Any]) -> Any:
    """The tree as JSON values with its arrays numbered, which are appended to `arrays`; `rebuild` is the inverse."""
    if tree is None or isinstance(tree, bool | int | float | str):
        return {"value": tree}
    # NumPy's numbers as well: JSON has no dtype.
    if isinstance(tree, torch.Tensor | np.ndarray | np.generic):
        arrays.append(to_numpy(tree))
        return {"array": len(arrays) - 1}
    if isinstance(tree, MAPPINGS):
        return {"dict": [[str(name), describe_form(part, arrays)] for name, part in tree.items()]}
    if isinstance(tree, SEQUENCES):
        return {"list" if isinstance(tree, list) else "tuple": [describe_form(part, arrays) for part in tree]}
    what = "The model returned a value that cannot be gathered."
    remedy = "Return tensors, texts, numbers, and lists or mappings of them, or name the key in ignore_keys."
    raise ConfigError(what, field="eval_use_gather_object", value=type(tree).__name__, remedy=remedy)


def rebuild(form: Any, arrays: list[Any]) -> Any:
    """The tree of a form, with `arrays` in their places."""
    if "value" in form:
        return form["value"]
    if "array" in form:
        return arrays[form["array"]]
    if "dict" in form:
        return {name: rebuild(part, arrays) for name, part in form["dict"]}
    parts = [rebuild(part, arrays) for part in form.get("list", form.get("tuple", ()))]
    return parts if "list" in form else tuple(parts)


def pack_tree(tree: Any) -> bytes:
    """A tree as bytes, without pickle: a JSON header (form, dtypes, shapes), then the arrays' bytes.

    Tensors become arrays. Tuples stay tuples; named ones become plain, and mappings become dicts.
    """
    leaves: list[Any] = []
    form = describe_form(tree, leaves)
    # ascontiguousarray turns a scalar into one element: reshape restores its shape.
    arrays = [np.ascontiguousarray(leaf).reshape(np.shape(leaf)) for leaf in leaves]
    kinds = [[array.dtype.str, list(array.shape)] for array in arrays]
    header = json.dumps({"form": form, "arrays": kinds}).encode()
    return b"".join([len(header).to_bytes(8, "little"), header, *(array.tobytes() for array in arrays)])


def unpack_tree(data: bytes | bytearray) -> Any:
    """The tree that `pack_tree` packed; its arrays are views of `data`, read-only ones of bytes."""
    header_bytes = int.from_bytes(data[:8], "little")
    header = parse_json(bytes(data[8 : 8 + header_bytes]))
    offset, arrays = 8 + header_bytes, []
    for dtype, shape in header["arrays"]:
        count = int(np.prod(shape, dtype=np.int64))
        array = np.frombuffer(data, dtype=np.dtype(dtype), count=count, offset=offset).reshape(shape)
        arrays.append(array)
        offset += array.nbytes
    return rebuild(header["form"], arrays)
