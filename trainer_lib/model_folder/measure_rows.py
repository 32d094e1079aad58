"""The verb *measure_rows*: the metrics of a trained model on labelled rows of files, which are in memory."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Any

import numpy as np

from trainer_lib.base.records import to_record
from trainer_lib.base.suggestions import suggestion
from trainer_lib.data.rows.row_files import read_rows
from trainer_lib.data.rows.shards import ArrowSplit
from trainer_lib.errors import ConfigError, DataError
from trainer_lib.evaluation.metrics import NamedMetrics, is_metric_object, parse_metrics
from trainer_lib.evaluation.resamples import Remembered
from trainer_lib.model_folder.loaded import LoadedModel, load_same
from trainer_lib.protocol.requests import MeasureRowsRequest, MeasureRowsResult, PreparedData
from trainer_lib.recipes.tables.cells import fold, read_names
from trainer_lib.worker.evaluate import digest_rows
from trainer_lib.worker.process.session import Work

LABELS = "labels"


def run(work: Work[MeasureRowsRequest]) -> MeasureRowsResult:
    """Measure the model on the rows and on resamples of them, which only the rows decide."""
    request = work.request
    loaded = load_same(request)
    compute = loaded.compute_metrics
    if compute is None or is_metric_object(compute):
        what = "The model's recipe has no function compute_metrics, so nothing is measured."
        raise ConfigError(what, field="MODEL", value=request.model, remedy="Predict the rows: trainflow predict.")
    if request.metrics:
        compute = NamedMetrics(compute, request.metrics)
    if request.data is None:
        read = list(read_rows(request.sources, None, loaded.form.reading if loaded.form else None))
        if not read:
            raise DataError("The files have no rows.", field="DATA", remedy="Give at least one row.")
        labels, digest = read_labels(read, loaded)
        places = [place.rpartition("/")[2] for place, _ in read]
        rows = [{name: value for name, value in row.items() if name != LABELS} for _, row in read]
    else:
        rows, labels, digest = read_prepared(request.data, request.split, loaded)
        places = [str(number) for number in range(len(rows))]
    given = loaded.measured_with(rows, labels)
    remembered = Remembered(compute, digest)
    metrics = parse_metrics(remembered(given))
    resampled = remembered.resampled(request.resamples)
    metrics |= remembered.intervals(resampled, request.confidence)
    outcomes = loaded.outcomes_of(given, places, rows) if request.wants_outcomes else None
    samples = {name: tuple(values) for name, values in resampled.items()}
    return MeasureRowsResult(len(rows), digest, metrics, samples, outcomes)


def read_labels(rows: list[tuple[str, Any]], loaded: LoadedModel) -> tuple[np.ndarray, str]:
    """The labels ``[rows, …]`` of rows with their places, and a digest of rows and labels."""
    info, form = loaded.description.info, loaded.form
    kind, several = loaded.description.columns.get(LABELS, ""), info.get("label_form")
    if not kind or ("[" in kind and several is None) or (form is not None and not isinstance(info.get("label"), str)):
        what = "The model predicts something else than one class or number for a row."
        raise ConfigError(what, field="MODEL", value=loaded.url, remedy="Evaluate it in its pipeline: evaluate.splits.")
    classes = info.get("classes") if form is not None else None
    asked = None if several is not None else "text" if classes else "number"
    labels: list[Any] = []
    digest = hashlib.sha256()
    for place, row in rows:
        if not isinstance(row, Mapping) or (form is None and LABELS not in row):
            what = f"{place}: the row has no column '{LABELS}'."
            raise DataError(what, field="DATA", remedy="Give each row a label.")
        value = row[LABELS] if form is None else form.read_answer(row, info["label"], place, kind=asked)
        digest.update(repr(sorted((str(name), str(cell)) for name, cell in row.items())).encode())
        if several is not None and classes:
            value = _mark(read_names(value, place, **several), classes, place)
        elif classes:
            value = _number_of(value, classes, place)
        labels.append(value)
    dtype = np.float32 if several is not None else np.int64 if classes else np.dtype(kind)
    return np.array(labels, dtype), digest.hexdigest()


def read_prepared(data: PreparedData, split: str, loaded: LoadedModel) -> tuple[list[dict[str, Any]], Any, str]:
    """The rows of a prepared split, their labels ``[rows]`` as the model numbers them, and the digest of the rows."""
    prepared = ArrowSplit(to_record(data), split)
    if LABELS not in prepared.column_names:
        what = "The prepared rows have no labels, so no other model is measured on them."
        raise ConfigError(what, field="split", value=split, remedy="Name the column labels in prepare.")
    rows = [prepared[number] for number in range(len(prepared))]
    labels = [row.pop(LABELS) for row in rows]
    theirs, own = data.info.get("classes"), loaded.description.info.get("classes")
    if isinstance(theirs, list) and isinstance(own, list) and theirs != own:
        places = [f"{split}, row {number}" for number in range(len(labels))]
        if "label_form" in loaded.description.info:
            named = ([theirs[number] for number in np.flatnonzero(label)] for label in labels)
            labels = [_mark(names, own, place) for names, place in zip(named, places, strict=True)]
        else:
            labels = [_number_of(theirs[label], own, place) for label, place in zip(labels, places, strict=True)]
    return rows, np.array(labels), digest_rows(data, split)


def _mark(names: list[str], classes: list[str], place: str) -> np.ndarray:
    """Whether classes are among the names ``[classes]``."""
    return np.isin(np.arange(len(classes)), [_number_of(name, classes, place) for name in names])


def _number_of(label: str, classes: list[str], place: str) -> int:
    for text in (label, fold(label)):
        if text in classes:
            return classes.index(text)
    what = f"{place}: the model knows no class '{label[:40]}'."
    raise DataError(what, field="DATA", value=label[:40], remedy=suggestion(label, classes))
