"""The verb *measure*: how far the numbers of two results are apart, where their bytes differ."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from trainer_lib.checkpoint.tensors import read_safetensors
from trainer_lib.data.rows.predictions import read_columns
from trainer_lib.protocol.requests import FileDifference, FilePair, MeasureRequest, MeasureResult
from trainer_lib.storage import Store
from trainer_lib.worker.process.session import Work

Arrays = Mapping[str, np.ndarray[Any, Any] | list[Any]]


def run(work: Work[MeasureRequest]) -> MeasureResult:
    """Read both files of each pair and measure their differences. Raises DamagedError and StorageError."""
    return MeasureResult(tuple(_measure(pair) for pair in work.request.files))


def _measure(pair: FilePair) -> FileDifference:
    sides = [_read(Store.open(url), pair.path) for url in (pair.one, pair.other)]
    return measure_arrays(pair.path, *sides)


def _read(store: Store, path: str) -> Arrays:
    if path.endswith(".safetensors"):
        return {name: _plain(tensor) for name, tensor in read_safetensors(store, path).items()}
    return read_columns(store, path)


def _plain(tensor: torch.Tensor) -> np.ndarray[Any, Any]:
    """The values of a tensor, `[...]`, as float64; those of a complex one as pairs."""
    real = torch.view_as_real(tensor) if tensor.is_complex() else tensor
    return real.to(torch.float64).numpy()


def measure_arrays(path: str, one: Arrays, other: Arrays) -> FileDifference:
    """Compare two files, given as name -> `[values]`."""
    if one.keys() != other.keys():
        return FileDifference(path, problem=f"only one of them has {sorted(one.keys() ^ other.keys())[0]}")
    values, different, largest = 0, 0, 0.0
    for name, left in one.items():
        right = other[name]
        if not isinstance(left, np.ndarray) or not isinstance(right, np.ndarray):
            if left is not right and list(left) != list(right):
                return FileDifference(path, values, different, largest, f"{name} differs")
            continue
        if left.shape != right.shape:
            return FileDifference(path, values, different, largest, f"{name} has another shape")
        values += left.size
        unequal = ~((left == right) | (np.isnan(left) & np.isnan(right)))
        if unequal.any():
            different += int(unequal.sum())
            distance = _relative(left[unequal], right[unequal], scale=left)
            if not math.isfinite(distance):
                return FileDifference(
                    path, values, different, largest, f"{name} is not finite, or all zero, in one of them"
                )
            largest = max(largest, distance)
    return FileDifference(path, values, different, largest)


def _relative(left: np.ndarray[Any, Any], right: np.ndarray[Any, Any], *, scale: np.ndarray[Any, Any]) -> float:
    finite = np.abs(scale[np.isfinite(scale)])
    largest = float(finite.max()) if finite.size else 0.0
    distance = float(np.abs(left - right).max())
    return distance / largest if largest > 0 else math.inf
