"""Statistics of prepared columns that can be merged: those of many parts, in any grouping, are those of the whole.

scalar number     rows, min, max, sum
few values        counts, up to 100 different ones: the distribution of labels
list, text        rows, and the fewest, most and sum of elements (of characters)
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

MAX_VALUES = 100
Statistics = dict[str, dict[str, Any]]
"""Column -> name of the statistic -> value, plain JSON."""


def describe(batch: pa.RecordBatch) -> Statistics:
    """The statistics of a record batch ``[rows]``, at least one row."""
    return {field.name: _describe_column(batch.column(field.name)) for field in batch.schema}


def merge(many: Iterable[Statistics]) -> Statistics:
    """The statistics of all rows together."""
    merged: Statistics = {}
    for one in many:
        for name, found in one.items():
            merged[name] = _merge_two(merged[name], found) if name in merged else dict(found)
    return merged


def _describe_column(column: pa.Array) -> dict[str, Any]:
    found: dict[str, Any] = {"rows": len(column)}
    kind = column.type
    if pa.types.is_large_list(kind) or pa.types.is_large_string(kind) or pa.types.is_large_binary(kind):
        is_list = pa.types.is_large_list(kind)
        sizes = pc.list_value_length(column) if is_list else pc.binary_length(column)
        ends = pc.min_max(sizes)
        found |= {"shortest": ends["min"].as_py(), "longest": ends["max"].as_py(), "elements": pc.sum(sizes).as_py()}
    elif pa.types.is_integer(kind) or pa.types.is_floating(kind):
        ends = pc.min_max(column)
        # An integer's sum as one: the float's would depend on the order of merging.
        found |= {"min": ends["min"].as_py(), "max": ends["max"].as_py(), "sum": pc.sum(column).as_py()}
    if pa.types.is_integer(kind) or pa.types.is_boolean(kind) or pa.types.is_large_string(kind):
        values = pc.value_counts(column)
        if len(values) <= MAX_VALUES:
            counts = {str(each["values"]): int(each["counts"]) for each in values.to_pylist()}
            found["counts"] = dict(sorted(counts.items()))
    return found


def _merge_two(one: Mapping[str, Any], other: Mapping[str, Any]) -> dict[str, Any]:
    merged: dict[str, Any] = {}
    for name in one.keys() & other.keys():
        if name == "counts":
            counts = {
                value: one[name].get(value, 0) + other[name].get(value, 0) for value in {**one[name], **other[name]}
            }
            if len(counts) <= MAX_VALUES:
                merged[name] = dict(sorted(counts.items()))
        elif name in ("min", "shortest"):
            merged[name] = min(one[name], other[name])
        elif name in ("max", "longest"):
            merged[name] = max(one[name], other[name])
        else:
            merged[name] = one[name] + other[name]
    return {name: merged[name] for name in one if name in merged}
