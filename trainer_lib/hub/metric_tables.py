"""Metrics of a split as tables for people: beside what needs no model, and of slices."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from trainer_lib.trackers.names import with_intervals

_MARGIN = re.compile(r"(?P<metric>.+)_(?:over|below)_(?P<base>[a-z0-9]+)")
_SLICE = "/"


@dataclass(frozen=True)
class SliceTable:
    """The metrics of the slices by one column.

    Attributes:
        columns: names of the metrics; the number of rows comes first.
        cells: the value of the column, and its metrics in the order of `columns`; None for one that a slice has not.
    """

    columns: list[str]
    cells: list[list[Any]]

    def with_intervals(self) -> SliceTable:
        """The table with metrics as texts that have their intervals, in place of the columns of both ends."""
        ends = {name: (f"{name}_low", f"{name}_high") for name in self.columns}
        ends = {name: both for name, both in ends.items() if set(both) <= set(self.columns)}
        bounds = {bound for both in ends.values() for bound in both}
        kept = [name for name in self.columns if name not in bounds]
        rows = []
        for value, *cells in self.cells:
            found = {name: cell for name, cell in zip(self.columns, cells, strict=True) if cell is not None}
            texts = with_intervals({name: cell for name, cell in found.items() if name in bounds or name in ends})
            rows.append([value, *(texts.get(name, found.get(name)) for name in kept)])
        return SliceTable(kept, rows)


def slice_tables(metrics: Mapping[str, Any]) -> dict[str, SliceTable]:
    """The metrics ``<metric>/<column>/<value>`` of one split as tables by column."""
    found: dict[str, dict[str, dict[str, Any]]] = {}
    for name, measured in metrics.items():
        metric, _, rest = name.partition("/")
        column, _, value = rest.partition("/")
        if value:
            found.setdefault(column, {}).setdefault(value, {})[metric] = measured
    tables = {}
    for column, slices in found.items():
        names = dict.fromkeys(["rows", *sorted({metric for measured in slices.values() for metric in measured})])
        cells = [[value, *(slices[value].get(name) for name in names)] for value in sorted(slices)]
        tables[column] = SliceTable(list(names), cells)
    return tables


def whole_metrics(metrics: Mapping[str, Any]) -> dict[str, Any]:
    """The metrics of all rows of a split: those without the name of a slice."""
    return {name: value for name, value in metrics.items() if name.count(_SLICE) < 2}


def without_bounds(metrics: Mapping[str, Any]) -> dict[str, Any]:
    """The metrics of all rows, without the ends of their intervals."""
    whole = whole_metrics(metrics)
    both = [(f"{name}_low", f"{name}_high") for name in whole]
    ends = {end for low, high in both if low in whole and high in whole for end in (low, high)}
    return {name: value for name, value in whole.items() if name not in ends}


def compare_with_baselines(metrics: Mapping[str, float]) -> list[list[str]]:
    """Metrics with a margin over what needs no model, as [metric, its value, that of the other, the margin].

    A margin is named ``<metric>_over_<base>`` or ``<metric>_below_<base>``, and what it is over ``<base>_<metric>``.
    """
    texts = with_intervals(whole_metrics(metrics))
    rows = []
    for name, margin in texts.items():
        found = _MARGIN.fullmatch(name)
        other = f"{found['base']}_{found['metric']}" if found else ""
        if found and found["metric"] in texts and other in texts:
            rows.append([found["metric"], texts[found["metric"]], f"{found['base']}: {texts[other]}", margin])
    return rows
