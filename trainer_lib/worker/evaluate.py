"""The verb *evaluate*: metrics of a trained model on prepared splits."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import nn

from trainer_lib import distributed
from trainer_lib.commit import content_digest
from trainer_lib.data.shards import ArrowSplit
from trainer_lib.evaluation.metrics import is_metric_object
from trainer_lib.evaluation.named_metrics import MAX_INTERVALS, measure_slices
from trainer_lib.evaluation.outcomes import summarize_outcomes
from trainer_lib.evaluation.resamples import Remembered
from trainer_lib.hub.card import tidy_metrics
from trainer_lib.json_text import parse_json
from trainer_lib.outputs import EvalPrediction
from trainer_lib.recipe_functions import as_measurements
from trainer_lib.recipes import DataInfo
from trainer_lib.records import to_record
from trainer_lib.requests import EvaluateRequest, EvaluateResult
from trainer_lib.storage import FileEntry, Store
from trainer_lib.suggestions import counted
from trainer_lib.verb_results import OUTCOMES
from trainer_lib.worker.assembly import arguments, build_model, build_trainer, events_callback, load_weights
from trainer_lib.worker.evaluate_ranges import RangeEvaluation, find_range_metrics
from trainer_lib.worker.events import EventsCallback
from trainer_lib.worker.measurable import rehearse, require_measurable
from trainer_lib.worker.predict import single_output
from trainer_lib.worker.session import Work
from trainer_lib.worker.train import HISTORY

PREFIX = "eval"
ARTIFACTS = "artifacts"
RESAMPLES = "resamples"
OVERALL = "overall"  # what after_evaluate measured belongs to no split


def run(work: Work[EvaluateRequest]) -> EvaluateResult:
    """Evaluate every split, or only try to (`worker.measurable`). The result is complete on rank 0."""
    request = work.request
    store = Store.open(request.output, field="storage")
    prepared = to_record(request.data)
    data = DataInfo(prepared)
    splits = {name: ArrowSplit(prepared, name) for name in request.splits}
    if request.step == "rehearse":
        rehearse(work, data, splits)
        return EvaluateResult((), {})
    args = arguments(work, "evaluate", store.url)
    model = build_model(work, args, data)
    load_weights(model, request.model_url)
    merging, reason = find_range_metrics(work, data)
    if request.step == "ranges" and merging is None:
        return EvaluateResult((), {}, needs_all_rows=reason)
    events = events_callback(work, args)
    trainer = build_trainer(work, args, model, [] if merging is not None else [events])
    measured: list[FileEntry] = []
    if merging is None:
        metrics, measured = _of_all_rows(work, store, trainer, splits, data, events)
    else:
        ranges = RangeEvaluation(work, store, trainer, merging)
        if request.step != "finish":
            ranges.measure(splits)
        if request.step == "ranges":
            return EvaluateResult((), {})
        metrics = {name: ranges.metrics(name, len(split)) for name, split in splits.items()}
    files: list[FileEntry] = []
    if work.rank == 0:  # if this raises, the other ranks lose contact, and that is reported as its consequence
        data.history = _history(request.model_url)
        extra, files = _afterwards(work, store, trainer.model, data)
        metrics |= {OVERALL: extra} if extra else {}
        # Without timings: the stage's content digest, and with it the keys of what follows, must not depend on them.
        lasting = json.dumps(tidy_metrics(metrics), indent=2, sort_keys=True)
        files += [store.write_bytes("metrics.json", lasting.encode()), *measured]
    trainer._trainflow.comm.barrier()
    distributed.shutdown()
    return EvaluateResult(tuple(files), metrics)


def _of_all_rows(
    work: Work[EvaluateRequest],
    store: Store,
    trainer: Any,
    splits: Mapping[str, ArrowSplit],
    data: DataInfo,
    events: EventsCallback,
) -> tuple[dict[str, dict[str, float]], list[FileEntry]]:
    """The metrics of each split, whose rows this group of processes evaluates at once, and files beside them."""
    metrics: dict[str, dict[str, float]] = {}
    measured: list[FileEntry] = []
    request, recipes_own = work.request, trainer.compute_metrics
    function = require_measurable(recipes_own, request, trainer.args)
    before, total = 0, sum(map(len, splits.values()))
    for name, split in splits.items():
        events.begin_split(before=before, rows=len(split), total=total)
        before += len(split)
        work.events.emit("progress", message=f"evaluating {name}: {counted(len(split), 'row')}")
        # A batch at a time leaves nothing to remember.
        by_batch = trainer.args.batch_eval_metrics or is_metric_object(function)
        remembered = None if function is None or by_batch else Remembered(function)
        trainer.compute_metrics = remembered or function
        metrics[name] = _plain(trainer.evaluate(eval_dataset=split, metric_key_prefix=PREFIX))
        trainer.compute_metrics = recipes_own
        if remembered is not None and work.rank == 0:
            measured += _describe(work, store, name, split, remembered, data)
            if request.resamples:
                resampled, entry = _resample(work, store, name, remembered)
                measured.append(entry)
                metrics[name] |= remembered.intervals(resampled, _digest_rows(request, name), request.confidence)
            metrics[name] |= _sliced(work, name, split, remembered)
    return metrics, measured


def _sliced(work: Work[EvaluateRequest], name: str, split: ArrowSplit, remembered: Remembered) -> dict[str, float]:
    """The metrics on the rows of each value of the columns that the spec names, with intervals for a few slices."""
    request = work.request
    if remembered.given is None or not request.slices:
        return {}
    rows = _digest_rows(request, name)

    def bounds(part: EvalPrediction) -> dict[str, float]:
        few = Remembered(remembered.compute)
        few.given = part
        return few.intervals(few.resampled(rows, request.resamples), rows, request.confidence)

    columns = {column: split.column_values(column) for column in request.slices}
    found = measure_slices(
        remembered.compute, remembered.given, columns, bounds if request.confidence is not None else None
    )
    count = sum(each.startswith("rows/") for each in found)
    if request.confidence is not None and count > MAX_INTERVALS:
        message = f"The {count} slices of {name} have no intervals: up to {MAX_INTERVALS} have."
        work.events.emit("warning", message=message)
    return found


def _describe(
    work: Work[EvaluateRequest], store: Store, name: str, split: ArrowSplit, remembered: Remembered, data: DataInfo
) -> Iterator[FileEntry]:
    """Write what the outputs say of a split beyond its metrics."""
    if remembered.given is None:
        return
    pairs = work.recipe.outcome_pairs(remembered.given, data)
    if pairs is None:
        labels = remembered.given.label_ids
        if isinstance(labels, tuple):  # behind them is what metrics need besides
            labels = labels[0]
        pairs = {"predictions": single_output(remembered.given.predictions), "labels": labels}
    rows, names = pairs.pop("rows", None), data.info.get("classes")

    def id_of(value: int) -> int | str:
        row = value if rows is None else int(rows[value])
        row_id: int | str = split.row_ids(row, row + 1).tolist()[0]
        return row_id

    outcomes = summarize_outcomes(**pairs, id_of=id_of, classes=len(names) if isinstance(names, list) else None)
    if outcomes is not None:
        yield store.write_bytes(f"{OUTCOMES}/{name}.json", json.dumps(outcomes).encode())


def _resample(
    work: Work[EvaluateRequest], store: Store, split: str, remembered: Remembered
) -> tuple[dict[str, list[float]], FileEntry]:
    """The metrics on resampled rows of a split, and the file with them; it names the rows by their digest."""
    rows = _digest_rows(work.request, split)
    work.events.emit("progress", message=f"{work.request.resamples:,} resamples of {split}")
    found = remembered.resampled(rows, work.request.resamples)
    # Two models are compared resample by resample, so each has to have a value.
    whole = {name: values for name, values in found.items() if len(values) == work.request.resamples}
    record = {"rows": rows, "metrics": whole}
    return found, store.write_bytes(f"{RESAMPLES}/{split}.json", json.dumps(record, sort_keys=True).encode())


def _digest_rows(request: EvaluateRequest, split: str) -> str:
    """SHA-256 of a split's rows, which decides how they are drawn."""
    shards = request.data.splits[split].shards
    return content_digest(entry for entry in request.data.files if entry.path in shards)


def _history(model_url: str) -> list[dict[str, Any]]:
    """The log of the train stage, which lies beside the exported model; empty for a model from elsewhere."""
    stage = Store.open(model_url.rstrip("/").rpartition("/")[0])
    return list(parse_json(stage.read_bytes(HISTORY))) if stage.exists(HISTORY) else []


def _plain(metrics: Mapping[str, Any]) -> dict[str, float]:
    """The numbers, without the Trainer's prefix: the split's name stands for it."""
    numbers = {name: value for name, value in metrics.items() if isinstance(value, int | float)}
    return {name.removeprefix(f"{PREFIX}_"): float(value) for name, value in numbers.items()}


def _afterwards(
    work: Work[EvaluateRequest], store: Store, model: nn.Module, data: DataInfo
) -> tuple[dict[str, float], list[FileEntry]]:
    """The recipe's own measurements and files (samples, plots)."""
    if work.recipe.after_evaluate is None:
        return {}, []
    work.events.emit("progress", message="after_evaluate")
    # The evaluations have put the model back into the mode it had.
    model.eval()
    with torch.no_grad():
        metrics, contents = as_measurements(work.recipe.after_evaluate(model, data, work.request.recipe_options()))
    return metrics, [store.write_bytes(f"{ARTIFACTS}/{name}", content) for name, content in contents.items()]
