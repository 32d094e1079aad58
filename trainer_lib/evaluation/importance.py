"""Permutation importance: what a metric loses when the values of one column are dealt out among the rows.

Breiman, Random forests, 2001. The columns are those of the prepared rows, whatever a recipe makes of them.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from trainer_lib.base.metric_names import is_less_better
from trainer_lib.base.outputs import EvalPrediction
from trainer_lib.evaluation import nested
from trainer_lib.evaluation.prediction_spool import PredictionSpool

ROWS, REPEATS, COLUMNS = 500, 5, 50
"""The most rows that are predicted, how often columns are dealt out, and the most columns."""
BATCH = 256  # rows of a forward pass at least, because a table's rows are small
_DRAWS, _T = 20, 2.09  # of the rows, for the interval, and Student's quantile for 95 %


class Dealt:
    """Rows with one column's values dealt out among them, a few times; read like a dataset.

    `orders`: of each time, the row whose value a row gets ``[times, rows]``.
    """

    def __init__(self, rows: Sequence[Mapping[str, Any]], column: str, orders: np.ndarray) -> None:
        self._rows, self._column, self._order = rows, column, orders.reshape(-1)

    def __len__(self) -> int:
        return len(self._order)

    def __getitem__(self, index: int) -> dict[str, Any]:
        row = self._rows[index % len(self._rows)]
        return {**row, self._column: self._rows[self._order[index]][self._column]}


def list_plain_columns(row: Mapping[str, Any]) -> list[str]:
    """The columns of a table's row, which are numbers and texts; none where it has other inputs or a single one."""
    columns = [name for name in row if name != "labels"]
    is_table = all(isinstance(row[name], bool | int | float | str) for name in columns)
    return columns if is_table and len(columns) > 1 else []


def measure_importance(
    compute: Callable[[EvalPrediction], Mapping[str, Any]],
    given: EvalPrediction,
    row_at: Callable[[int], Mapping[str, Any]],
    predict: Callable[[Dealt], Iterable[Any]],
    *,
    seed: str,
    seconds: float,
) -> dict[str, Any] | None:
    """The importance of columns for the first metric of all rows; None for rows that are no table's.

    `given` are predictions and labels of all rows, trees of arrays ``[rows, …]``, and `predict` gives the outputs of
    rows, batch by batch. The rows decide `seed`; after `seconds` no further column is predicted.

    Returns:
        `metric`; `rows`, those that were predicted; `columns` as [name, what the metric loses, the ends of its 95 %
        interval over draws of the rows], the greatest first; `left_out`, the columns that there was no time for.
    """
    total = len(nested.list_leaves((given.predictions, given.label_ids))[0])
    draw, deadline = np.random.default_rng(int(seed[:16], 16)), time.monotonic() + seconds
    names = list_plain_columns(row_at(0))
    places = np.sort(draw.choice(total, min(total, ROWS), replace=False))
    part = nested.take_rows(given, places)
    metric = next((name for name, value in _numbers(compute(part)).items() if np.isfinite(value)), None)
    if not names or metric is None:
        return None
    rows, sign = [row_at(int(place)) for place in places], -1.0 if is_less_better(metric) else 1.0
    draws = [None, *(draw.integers(0, len(rows), len(rows)) for _ in range(_DRAWS))]

    def score(outputs: EvalPrediction, chosen: np.ndarray | None) -> float:
        some = outputs if chosen is None else nested.take_rows(outputs, chosen)
        return sign * _numbers(compute(some)).get(metric, np.nan)

    usual = [score(part, chosen) for chosen in draws]
    measured: list[list[Any]] = []
    for name in names[:COLUMNS]:
        orders = np.array([draw.permutation(len(rows)) for _ in range(REPEATS)])
        dealt = _predict(predict(Dealt(rows, name, orders)), orders, part.label_ids, deadline)
        if dealt is None:
            break
        value = float(np.mean([usual[0] - score(outputs, None) for outputs in dealt]))
        lost = [usual[n] - score(dealt[(n - 1) % len(dealt)], draws[n]) for n in range(1, len(draws))]
        spread = _T * float(np.nanstd(lost))
        measured.append([name, *(float(f"{number:.6g}") for number in (value, value - spread, value + spread))])
    measured.sort(key=lambda row: -row[1])
    return {"metric": metric, "rows": len(rows), "columns": measured, "left_out": len(names) - len(measured)}


def _predict(batches: Iterable[Any], orders: np.ndarray, labels: Any, deadline: float) -> list[EvalPrediction] | None:
    """The outputs of all times that the rows were dealt out, and their labels; None where there is no time."""
    with contextlib.closing(PredictionSpool(None)) as spool:
        for outputs in batches:
            if time.monotonic() > deadline:
                return None
            spool.append(outputs)
        whole = EvalPrediction(spool.tree(), None)
        times = np.arange(orders.size).reshape(orders.shape)
        return [EvalPrediction(nested.take_rows(whole, rows).predictions, labels) for rows in times]


def _numbers(metrics: Mapping[str, Any]) -> dict[str, float]:
    return {name: float(value) for name, value in metrics.items() if isinstance(value, int | float | np.number)}
