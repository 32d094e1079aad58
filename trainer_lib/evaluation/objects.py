"""Outputs that are no arrays alone (`eval_use_gather_object`): lists of boxes per image, texts, numbers.

A tree of mappings, lists, arrays, texts, numbers and truth values, whose form may differ from batch to batch. Batches
wait in one temporary file; handed out, they are in memory, for no array holds them.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch

from trainer_lib.errors import ConfigError
from trainer_lib.evaluation import nested
from trainer_lib.evaluation.spool import IN_MEMORY, fill_padded, padded_shape


def pack(tree: Any) -> bytes:
    """A tree as bytes, without pickle: its form as JSON with the arrays numbered, then the arrays."""
    arrays: list[Any] = []
    form = json.dumps(_form(tree, arrays)).encode()
    return b"".join([len(form).to_bytes(8, "little"), form, nested.pack(arrays)])


def unpack(data: bytes) -> Any:
    """What `pack` packed; tuples come back as tuples, tensors as arrays."""
    size = int.from_bytes(data[:8], "little")
    return _tree(json.loads(data[8 : 8 + size]), nested.unpack(data[8 + size :]))


def _form(tree: Any, arrays: list[Any]) -> Any:
    if tree is None or isinstance(tree, bool | int | float | str):
        return {"value": tree}
    if isinstance(tree, torch.Tensor | np.ndarray | np.generic):
        arrays.append(nested.to_numpy(tree))
        return {"array": len(arrays) - 1}
    if isinstance(tree, Mapping):
        return {"dict": [[str(name), _form(part, arrays)] for name, part in tree.items()]}
    if isinstance(tree, list | tuple):
        return {"list" if isinstance(tree, list) else "tuple": [_form(part, arrays) for part in tree]}
    raise ConfigError(
        "The model returned something that cannot be gathered.",
        field="eval_use_gather_object",
        value=type(tree).__name__,
        remedy="Return tensors, texts, numbers, and lists or mappings of them, or name the key in ignore_keys.",
    )


def _tree(form: dict[str, Any], arrays: list[Any]) -> Any:
    if "value" in form:
        return form["value"]
    if "array" in form:
        return np.array(arrays[form["array"]])
    if "dict" in form:
        return {name: _tree(part, arrays) for name, part in form["dict"]}
    parts = [_tree(part, arrays) for part in form.get("list", form.get("tuple", ()))]
    return parts if "list" in form else tuple(parts)


class ObjectSpool:
    """Collects trees batch by batch; the same interface as `spool.Spool`."""

    def __init__(self, folder: Path | None = None) -> None:
        self._file = tempfile.SpooledTemporaryFile(  # noqa: SIM115 - kept open
            max_size=IN_MEMORY, dir=str(folder) if folder else None, prefix="trainflow-spool-"
        )
        self._sizes: list[int] = []

    @property
    def batches(self) -> int:
        """How many were added."""
        return len(self._sizes)

    def append(self, tree: Any) -> None:
        """Add a batch."""
        data = pack(tree)
        self._file.write(data)
        self._sizes.append(len(data))

    def by_batch(self) -> list[Any]:
        """Everything as a list of the batches' trees."""
        self._file.seek(0)
        return [unpack(self._file.read(size)) for size in self._sizes]

    def tree(self) -> Any:
        """Everything as one tree: lists joined, arrays concatenated (padded with -100); None when nothing was added."""
        batches = self.by_batch()
        return joined(batches) if batches else None

    def close(self) -> None:
        """Close the file."""
        self._file.close()


def joined(batches: list[Any]) -> Any:
    """One tree out of the batches' trees: mappings and tuples by part, lists end to end, arrays along axis 0."""
    first = batches[0]
    if isinstance(first, dict):
        return {name: joined([batch[name] for batch in batches]) for name in first}
    if isinstance(first, tuple):
        return tuple(joined([batch[place] for batch in batches]) for place in range(len(first)))
    if isinstance(first, list):
        return [each for batch in batches for each in batch]
    if isinstance(first, np.ndarray):
        return _concatenated(batches)
    return None if first is None else batches


def _concatenated(arrays: list[Any]) -> Any:
    arrays = [np.atleast_1d(array) for array in arrays]
    widths = {array.shape[1:] for array in arrays}
    if len({len(width) for width in widths}) > 1:
        return arrays
    if len(widths) == 1:
        return np.concatenate(arrays)
    rows = sum(len(array) for array in arrays)
    return fill_padded(np.empty(padded_shape(rows, widths), dtype=np.result_type(*arrays)), arrays)
