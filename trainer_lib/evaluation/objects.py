"""Outputs that are not only arrays (`eval_use_gather_object`): lists of boxes per image, texts, numbers.

A batch is a tree of mappings, lists, arrays, texts, numbers and booleans. Its form may differ from batch to batch.
Batches wait in one temporary file. They are returned in memory, since no array can map them.
"""

from __future__ import annotations

import contextlib
import json
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch

from trainer_lib.base.json_text import parse_json
from trainer_lib.errors import ConfigError
from trainer_lib.evaluation import nested
from trainer_lib.evaluation.prediction_spool import (
    FILE_PREFIX,
    MAX_MEMORY_BYTES,
    compute_padded_shape,
    fill_padded,
    full_disk_named,
)


def pack_objects(tree: Any) -> bytes:
    """A tree as bytes, without pickle: its form as JSON with the arrays numbered, then the arrays."""
    arrays: list[Any] = []
    form = json.dumps(_describe_form(tree, arrays)).encode()
    return b"".join([len(form).to_bytes(8, "little"), form, nested.pack_tree(arrays)])


def unpack_objects(data: bytes) -> Any:
    """The tree that `pack_objects` packed. Tuples come back as tuples, tensors as arrays."""
    form_bytes = int.from_bytes(data[:8], "little")
    return _rebuild(parse_json(data[8 : 8 + form_bytes]), nested.unpack_tree(data[8 + form_bytes :]))


def _describe_form(tree: Any, arrays: list[Any]) -> Any:
    if tree is None or isinstance(tree, bool | int | float | str):
        return {"value": tree}
    # NumPy's numbers as well: JSON has no dtype.
    if isinstance(tree, torch.Tensor | np.ndarray | np.generic):
        arrays.append(nested.to_numpy(tree))
        return {"array": len(arrays) - 1}
    if isinstance(tree, Mapping):
        return {"dict": [[str(name), _describe_form(part, arrays)] for name, part in tree.items()]}
    if isinstance(tree, list | tuple):
        return {"list" if isinstance(tree, list) else "tuple": [_describe_form(part, arrays) for part in tree]}
    raise ConfigError(
        "The model returned a value that cannot be gathered.",
        field="eval_use_gather_object",
        value=type(tree).__name__,
        remedy="Return tensors, texts, numbers, and lists or mappings of them, or name the key in ignore_keys.",
    )


def _rebuild(form: dict[str, Any], arrays: list[Any]) -> Any:
    if "value" in form:
        return form["value"]
    if "array" in form:
        return np.array(arrays[form["array"]])  # a copy, because the unpacked array is read-only
    if "dict" in form:
        return {name: _rebuild(part, arrays) for name, part in form["dict"]}
    parts = [_rebuild(part, arrays) for part in form.get("list", form.get("tuple", ()))]
    return parts if "list" in form else tuple(parts)


class ObjectSpool:
    """Collects trees batch by batch, with the interface of `PredictionSpool`."""

    def __init__(self, folder: Path | None = None) -> None:
        self._file = tempfile.SpooledTemporaryFile(  # noqa: SIM115 - closed by close()
            max_size=MAX_MEMORY_BYTES, dir=str(folder) if folder else None, prefix=FILE_PREFIX
        )
        self._sizes: list[int] = []
        self._folder = folder

    @property
    def num_batches(self) -> int:
        """Number of batches."""
        return len(self._sizes)

    def append(self, tree: Any) -> None:
        """Add a batch."""
        data = pack_objects(tree)
        with full_disk_named(self._folder, len(data)):
            self._file.write(data)
        self._sizes.append(len(data))

    def by_batch(self) -> list[Any]:
        """All batches as a list of trees."""
        with full_disk_named(self._folder, sum(self._sizes)):
            self._file.seek(0)  # writes what is buffered
        return [unpack_objects(self._file.read(size)) for size in self._sizes]

    def tree(self) -> Any:
        """All batches as one tree: lists joined, arrays concatenated (padded with -100); None without any batch."""
        batches = self.by_batch()
        return join_batches(batches) if batches else None

    def close(self) -> None:
        """Close the file."""
        with contextlib.suppress(OSError):  # on a full disk it fails to write what none will read
            self._file.close()


def join_batches(batches: list[Any]) -> Any:
    """Join trees into one: mappings and tuples part by part, lists end to end, arrays ``[batch, …]`` along axis 0."""
    first = batches[0]
    if isinstance(first, dict):
        return {name: join_batches([batch[name] for batch in batches]) for name in first}
    if isinstance(first, tuple):
        return tuple(join_batches([batch[place] for batch in batches]) for place in range(len(first)))
    if isinstance(first, list):
        return [each for batch in batches for each in batch]
    if isinstance(first, np.ndarray):
        return _concatenate(batches)
    return None if first is None else batches


def _concatenate(arrays: list[Any]) -> Any:
    arrays = [np.atleast_1d(array) for array in arrays]
    widths = {array.shape[1:] for array in arrays}
    if len({len(width) for width in widths}) > 1:  # no common shape: a list of arrays, one per batch
        return arrays
    if len(widths) == 1:
        return np.concatenate(arrays)
    rows = sum(len(array) for array in arrays)
    return fill_padded(np.empty(compute_padded_shape(rows, widths), dtype=np.result_type(*arrays)), arrays)
