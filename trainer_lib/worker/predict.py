"""The verb *predict*: a split's predictions as Parquet parts, each exactly once, by any number of workers."""

from __future__ import annotations

import contextlib
from functools import partial
from typing import Any, cast

import numpy as np
from torch.utils.data import Subset

from trainer_lib.data.rows.given_rows import in_order, longest_first, require_column
from trainer_lib.data.rows.parts import SplitParts
from trainer_lib.data.rows.predictions import write_split_predictions
from trainer_lib.data.rows.shards import ArrowSplit
from trainer_lib.evaluation import nested
from trainer_lib.evaluation.evaluation_loop import stream_predictions
from trainer_lib.evaluation.prediction_spool import PredictionSpool
from trainer_lib.locks.shared_parts import SharedParts
from trainer_lib.protocol.requests import PartsResult, PredictRequest
from trainer_lib.recipes import DataInfo
from trainer_lib.storage import Store
from trainer_lib.worker.process.assembly import arguments, build_model, build_trainer, leave_together, load_weights
from trainer_lib.worker.process.session import Pace, Work


def run(work: Work[PredictRequest]) -> PartsResult:
    """Predict the parts of one split that no other worker takes; returns when every part is finished."""
    request = work.request
    store = Store.open(request.output, field="storage")
    args = arguments(work, "predict", store.url)
    data, split = DataInfo(work.prepared), ArrowSplit(work.prepared, request.split)
    model = build_model(work, args, data)
    load_weights(model, request.model_url)
    trainer = build_trainer(work, args, model, [])
    if request.sort_by is not None:
        require_column(split.column_names, request.sort_by, field="predict.sort_by")
    parts = SplitParts(store, request.split, rows=len(split), rows_per_file=request.rows_per_file)
    written = rows = 0
    with SharedParts(store, parts, total=parts.total) as shared:
        for part in shared:
            start, stop = parts.row_range(part)
            order, pace, shown, first = list[int](), Pace(), cast(Any, split), start
            if (column := request.sort_by) is not None:
                order = longest_first([split[row][column] for row in range(start, stop)])
                shown, first = Subset(shown, [start + place for place in order]), 0
            with contextlib.closing(PredictionSpool(None)) as spool:  # a part's outputs, large ones on disk
                for numbers, outputs in stream_predictions(trainer, shown, start=first, stop=first + stop - start):
                    spool.append(outputs)
                    if pace.is_due():
                        row = start + int(numbers[-1]) - first + 1
                        work.events.emit("progress", step=row, max_steps=len(split), row=row, rows=rows + row - start)
                tree = spool.tree() if column is None else nested.map_tree(partial(in_order, order=order), spool.tree())
                columns = work.recipe.prediction_columns(single_output(tree), data)
                if shared.is_ours(part):  # else another worker took it for lost, and writes the same
                    write_split_predictions(parts, part, split.row_ids(start, stop), columns, split=split.name)
            written, rows = written + 1, rows + stop - start
    leave_together(trainer)
    return PartsResult(written, rows)


def single_output(outputs: Any) -> Any:
    """The only array of the outputs; several outputs stay a tree."""
    # A model with one output is the usual case: the recipe gets the array itself.
    if isinstance(outputs, dict | list | tuple) and len(outputs) == 1:
        return next(iter(outputs.values() if isinstance(outputs, dict) else outputs))
    return np.asarray(outputs) if isinstance(outputs, np.ndarray) else outputs
