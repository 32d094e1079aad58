"""The verb *predict*: a split's predictions as Parquet parts, each exactly once."""

from __future__ import annotations

import operator
import time
from typing import Any

import numpy as np

from trainer_lib import distributed
from trainer_lib.data.shards import ArrowSplit, PredictionWriter
from trainer_lib.evaluation.prediction_spool import PredictionSpool
from trainer_lib.evaluation.stream import stream_predictions
from trainer_lib.recipes import DataInfo
from trainer_lib.records import from_record, to_record
from trainer_lib.requests import PredictRequest, PredictResult
from trainer_lib.storage import FileEntry, Store
from trainer_lib.worker.assembly import arguments, build_model, build_trainer, load_weights
from trainer_lib.worker.events import QUIET_S
from trainer_lib.worker.session import Work


def run(work: Work[PredictRequest]) -> PredictResult:
    """Predict one split. The result is complete on rank 0."""
    request = work.request
    store = Store.open(request.output, field="storage")
    args = arguments(work, "predict", store.url)
    prepared = to_record(request.data)
    data, split = DataInfo(prepared), ArrowSplit(prepared, request.split)
    model = build_model(work, args, data)
    load_weights(model, request.model_url)
    trainer = build_trainer(work, args, model, [])
    writer = PredictionWriter(store, request.split, rows=len(split), rows_per_file=request.rows_per_file)
    parts = {part: _part(work, writer, part, trainer, split, data) for part in writer.parts(work.rank, work.world_size)}
    gathered = trainer._trainflow.comm.gather_json([[part, to_record(entry)] for part, entry in parts.items()])
    pairs = sorted((pair for rank in gathered or [] for pair in rank), key=operator.itemgetter(0))
    files = tuple(from_record(FileEntry, entry) for _, entry in pairs)
    trainer._trainflow.comm.barrier()
    distributed.shutdown()
    return PredictResult(files, len(split))


def _part(
    work: Work[PredictRequest], writer: PredictionWriter, part: int, trainer: Any, split: ArrowSplit, data: DataInfo
) -> FileEntry:
    """The finished part of an earlier run, or a new one. Memory holds the outputs of one part, large ones on disk."""
    finished = writer.finished(part)
    if finished is not None:
        return finished
    start, stop = writer.row_range(part)
    spool = PredictionSpool(None)
    reported = 0.0
    try:
        for rows, outputs in stream_predictions(trainer, split, start=start, stop=stop):
            spool.append(outputs)
            if time.monotonic() - reported >= QUIET_S:
                reported = time.monotonic()
                message = f"predicting: row {int(rows[-1]) + 1:,} of {len(split):,}"
                work.events.emit("progress", step=int(rows[-1]) + 1, max_steps=len(split), message=message)
        outputs = spool.tree()
        columns = work.recipe.prediction_columns(single_output(outputs), data)
        return writer.write(part, split.row_ids(start, stop), columns)
    finally:
        spool.close()


def single_output(outputs: Any) -> Any:
    """The only array of the outputs; several outputs stay a tree."""
    # A model with one output is the usual case: the recipe gets the array itself.
    if isinstance(outputs, dict | list | tuple) and len(outputs) == 1:
        return next(iter(outputs.values() if isinstance(outputs, dict) else outputs))
    return np.asarray(outputs) if isinstance(outputs, np.ndarray) else outputs
