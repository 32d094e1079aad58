"""Evaluation in ranges of rows, by any number of workers, for metrics that merge: one or many give the same digits.

    sums/<split>/part-00002.json    what range 2 adds to the sums: those of `metric_sums`, of the losses, of the samples

    all       both of the following, or the evaluation of one group of processes where metrics do not merge
    ranges    measure those that no other worker takes
    finish    make metrics of all ranges

Ranges are pulled through exclusive claims (`locks.shared_parts`), so that of a worker that is lost is measured by
another one. The sums are added in the order of the ranges.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Mapping
from typing import Any

from typing_extensions import override

from trainer_lib.callbacks.base import TrainerCallback
from trainer_lib.data.parts import NumberedParts
from trainer_lib.data.row_parts import SUMS, row_range, sum_parts
from trainer_lib.data.shards import ArrowSplit
from trainer_lib.errors import DamagedError
from trainer_lib.evaluation.metric_states import MetricStates, why_not_merged
from trainer_lib.evaluation.metric_sums import RangeMetrics, RangeSums
from trainer_lib.evaluation.metrics import is_metric_object, parse_metrics
from trainer_lib.json_text import parse_json
from trainer_lib.locks.shared_parts import SharedParts
from trainer_lib.recipes import DataInfo
from trainer_lib.requests import EvaluateRequest
from trainer_lib.storage import Store
from trainer_lib.trainer import Trainer
from trainer_lib.worker.events import QUIET_S
from trainer_lib.worker.session import Work

_LIMIT = 256 << 20


def find_range_metrics(work: Work[EvaluateRequest], data: DataInfo) -> tuple[RangeMetrics | None, str]:
    """The metrics that this worker measures range by range; None, and why as a clause, where it needs all rows."""
    recipe, request = work.recipe, work.request
    for name in ("resamples", "confidence", "metrics", "slices"):
        if getattr(request, name):
            return None, f"evaluate.{name} needs all rows"
    if recipe.trainer_class(Trainer) is not Trainer:
        return None, "the recipe has a Trainer of its own"
    if work.world_size > 1:
        return None, "several processes evaluate as one group"
    if (merged := recipe.merged_metrics_with(data)) is not None:
        return RangeSums(merged), ""
    metric = recipe.compute_metrics
    if not is_metric_object(metric):
        return None, "compute_metrics needs all rows"
    reason = why_not_merged(metric)
    return (MetricStates(metric), "") if reason is None else (None, reason)


class RangeEvaluation:
    """The ranges of one request, and the Trainer that measures them."""

    def __init__(self, work: Work[EvaluateRequest], store: Store, trainer: Any, merged: RangeMetrics) -> None:
        self._request = work.request
        self._store = store
        self._trainer = trainer
        self._merged = merged
        self._progress = _Progress(work, trainer)
        trainer.add_callback(self._progress)

    def measure(self, splits: Mapping[str, ArrowSplit]) -> None:
        """Measure the ranges that no other worker takes; returns when every range is finished."""
        self._progress.total = sum(map(len, splits.values()))
        before = 0
        for name, split in splits.items():
            parts, rows = self._parts(name, len(split)), len(split)
            total = -(-rows // self._request.rows_per_range)
            # Each split has claims of its own.
            with SharedParts(self._store.child(SUMS, name), parts, total=total) as shared:
                for part in shared:
                    start, stop = row_range(part, rows, self._request.rows_per_range)
                    self._progress.begin(before + start, stop - start)
                    found = json.dumps(self._measure(split, start, stop)).encode()
                    if shared.is_ours(part):  # else another worker took it for lost, and writes the same
                        parts.write(part, found, {})
            before += rows

    def metrics(self, name: str, rows: int) -> dict[str, float]:
        """The metrics of a split whose ranges are all finished."""
        loss, items, samples, sums = 0.0, 0, 0, None
        for part in self._parts(name, rows).collect():
            found = self._read(part.entry.path)
            loss, items, samples = loss + found["loss"], items + found["items"], samples + found["samples"]
            sums = sums if found["sums"] is None else self._merged.add(sums, found["sums"])
        if samples != rows:
            raise DamagedError(f"The ranges of the split '{name}' have {samples:,} of {rows:,} rows.", field=SUMS)
        metrics = {} if sums is None else parse_metrics(self._merged.finish(sums))
        metrics = {key.removeprefix("eval_"): float(value) for key, value in metrics.items()}
        return {"loss": loss / items, **metrics} if items else metrics

    def _parts(self, split: str, rows: int) -> NumberedParts:
        return sum_parts(self._store, split, rows=rows, rows_per_range=self._request.rows_per_range)

    def _read(self, path: str) -> dict[str, Any]:
        return parse_json(self._store.read_bytes(path, limit=_LIMIT), dict)

    def _measure(self, split: ArrowSplit, start: int, stop: int) -> dict[str, Any]:
        trainer, before = self._trainer, self._trainer.compute_metrics
        batch_by_batch, trainer.args.batch_eval_metrics = trainer.args.batch_eval_metrics, False
        trainer.compute_metrics = self._merged
        try:
            evaluator = trainer._trainflow.evaluator
            trainer.evaluation_loop(evaluator.range_dataloader(split, start, stop), "Evaluation")
        finally:
            trainer.compute_metrics, trainer.args.batch_eval_metrics = before, batch_by_batch
        loss, items, samples = evaluator.counted
        return {"sums": self._merged.take(), "loss": loss, "items": items, "samples": samples}


class _Progress(TrainerCallback):
    """Says how far a worker is, twice a second at the most."""

    def __init__(self, work: Work[EvaluateRequest], trainer: Any) -> None:
        self._events = work.events
        self._size = int(trainer.args.per_device_eval_batch_size)
        self.total = 0
        self._done = self._first = self._now = self._most = 0
        self._reported = -math.inf

    def begin(self, row: int, rows: int) -> None:
        """Begin with a range of so many rows, whose first one is `row` of all splits."""
        self._done, self._first, self._now, self._most = self._done + self._now, row, 0, rows

    @override
    def on_prediction_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Count a batch."""
        self._now = min(self._most, self._now + self._size)
        if time.monotonic() - self._reported < QUIET_S:
            return
        self._reported = time.monotonic()
        row = self._first + self._now
        self._events.emit("progress", step=row, max_steps=self.total, row=row, rows=self._done + self._now)
