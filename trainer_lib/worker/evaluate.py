"""The verb *evaluate*: metrics of a trained model on prepared splits."""

from __future__ import annotations

import itertools
import json
import tempfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.utils.data import Subset

from trainer_lib.arguments import TrainingArguments
from trainer_lib.arguments.configs.parallelism_config import read_layout
from trainer_lib.base.json_text import parse_json
from trainer_lib.base.outputs import EvalPrediction
from trainer_lib.base.suggestions import counted, suggestion
from trainer_lib.data.rows.shards import ArrowSplit
from trainer_lib.errors import ConfigError, Interrupted, Preempted, first_line
from trainer_lib.evaluation import nested
from trainer_lib.evaluation.benchmarks import Suite
from trainer_lib.evaluation.evaluation_loop import stream_predictions
from trainer_lib.evaluation.importance import BATCH, Dealt, list_plain_columns, measure_importance
from trainer_lib.evaluation.metrics import (
    MAX_INTERVALS,
    SLICES,
    NamedMetrics,
    find_slices,
    is_metric_object,
    measure_slices,
)
from trainer_lib.evaluation.outcomes import collect_inputs, find_collapse, find_weak_groups, summarize_outcomes
from trainer_lib.evaluation.resamples import Remembered
from trainer_lib.hub.card import tidy_metrics
from trainer_lib.protocol.recipe_functions import as_measurements
from trainer_lib.protocol.requests import OUTCOMES, EvaluateRequest, EvaluateResult, PreparedData
from trainer_lib.recipes import DataInfo, Recipe
from trainer_lib.recipes.shared.recipe_options import SEVERAL
from trainer_lib.recipes.shared.targets import measure_labels
from trainer_lib.recipes.texts.tokenizing import kept_tokenizer
from trainer_lib.storage import FileEntry, Store
from trainer_lib.storage.commit import content_digest
from trainer_lib.worker.predict import single_output
from trainer_lib.worker.process.assembly import (
    EventsCallback,
    arguments,
    build_model,
    build_trainer,
    events_callback,
    leave_together,
    load_weights,
)
from trainer_lib.worker.process.session import Work
from trainer_lib.worker.train import HISTORY

# The step *rehearse* of evaluate: refuses, before a training, what its evaluation could not measure after it.
#
# The recipe's functions and the columns of the data are known by then. What the outputs look like shows the model as
# it begins, on a few rows of the first split.


ROWS = 64  # rows whose outputs are looked at, from all over the split
_CHANGED: Mapping[str, Any] = {"torch_compile": False, "dataloader_num_workers": 0, "report_to": "none"}


def require_measurable(
    function: Callable[..., Any] | None, request: EvaluateRequest, args: TrainingArguments
) -> Callable[..., Any] | None:
    """The recipe's function with the metrics of the spec; None: nothing is measured. Refuses what needs all rows."""
    if args.batch_eval_metrics and (function is not None or request.metrics):
        remedy = "set evaluate.args.batch_eval_metrics=false"
        _refuse_needing_rows(request, "batch_eval_metrics keeps none of them", remedy)
    elif is_metric_object(function):
        how = "the recipe's compute_metrics is an object that is given batch by batch"
        _refuse_needing_rows(request, how, "write compute_metrics as a function")
    if request.slices and function is None and not request.metrics:
        what = "The recipe has no compute_metrics, so there is nothing to measure on slices."
        remedy = "Name metrics in evaluate.metrics, or define compute_metrics."
        raise ConfigError(what, field=SLICES, value=list(request.slices), remedy=remedy)
    return NamedMetrics(function, request.metrics) if request.metrics else function


def _refuse_needing_rows(request: EvaluateRequest, how: str, instead: str) -> None:
    for name in ("metrics", "slices", "confidence", "resamples"):
        if value := getattr(request, name):
            sets = " register.metric sets it." if name == "resamples" else ""
            shown = [call.name for call in request.metrics] if name == "metrics" else value
            what, remedy = f"This needs all rows, and {how}.{sets}", f"Leave it out, or {instead}."
            raise ConfigError(what, field=f"evaluate.{name}", value=shown, remedy=remedy)


def rehearse(work: Work[EvaluateRequest], data: DataInfo, splits: Mapping[str, ArrowSplit]) -> None:
    """Try what the request asks to be measured, without a trained model. Raises ConfigError about the wrong setting."""
    with tempfile.TemporaryDirectory(prefix="trainflow-") as folder:
        changed = replace(work, request=replace(work.request, args={**work.request.args, **_CHANGED}))
        args = arguments(changed, "evaluate", folder)
        if work.request.benchmarks:
            _suite(work, args, data).load(folder)
        function = require_measurable(work.recipe.compute_metrics_with(data), work.request, args)
        for column, (name, split) in itertools.product(work.request.slices, splits.items()):
            find_slices(column, split.column_values(column), split=name)
        if args.fsdp or args.deepspeed or read_layout(args) or not (work.request.metrics or work.request.named):
            return
        alone = args.batch_eval_metrics or is_metric_object(function)
        trial = _Trial(function if alone or work.request.named else None, alone)
        try:
            _try_rows(changed, args, data, next(iter(splits.values())), trial)
        except (Interrupted, Preempted):
            raise
        except Exception as error:  # by the model or the recipe, which the training will show, or only at its beginning
            trial.failure = error
        if trial.given and work.request.metrics:
            NamedMetrics(None, work.request.metrics).require(trial.given[-1])
        if trial.failure is None:
            _require_names(work, trial.names)
            return
        message = f"The metrics could not be tried before the training ({first_line(trial.failure)})."
        work.events.emit("warning", message=message)


@dataclass
class _Trial:
    """The input of a recipe's function for a few rows, and the names of its metrics.

    `alone`: it is called batch by batch, so the Trainer has to call it. `names`: those of every evaluation; None: they
    are not known, or they depend on the rows. `failure`: why it could not be tried.
    """

    function: Callable[..., Any] | None
    alone: bool
    given: list[EvalPrediction] = field(default_factory=list)
    names: set[str] | None = None
    failure: Exception | None = None

    def __call__(self, p: EvalPrediction) -> dict[str, Any]:
        self.given.append(p)
        try:
            return {} if self.function is None else dict(self.function(p))
        except Exception as error:  # after the metrics by name were looked at
            self.failure = error
            return {}


def _try_rows(
    work: Work[EvaluateRequest], args: TrainingArguments, data: DataInfo, split: ArrowSplit, trial: _Trial
) -> None:
    """Evaluate a few rows, and half as many, with the model as it begins."""
    places = np.unique(np.linspace(0, len(split) - 1, min(ROWS, len(split))).round().astype(int)).tolist()
    trainer = build_trainer(work, args, build_model(work, args, data), [])
    trainer.compute_metrics = trial.function if trial.alone else trial
    measured = []
    for rows in (places[: -(-len(places) // 2)], places):
        part: Any = Subset(split, rows)  # type: ignore[arg-type] # it is read like a Dataset
        found = trainer.evaluate(eval_dataset=part)
        measured.append({name.removeprefix("eval_") for name, value in found.items() if isinstance(value, int | float)})
    trial.names = measured[0] if measured[0] == measured[1] else None


def _require_names(work: Work[EvaluateRequest], names: set[str] | None) -> None:
    """Refuse a setting that counts on a metric which the evaluation will not have."""
    request = work.request
    if names is None:
        return
    if request.confidence is not None:
        names = names | {f"{name}_{end}" for name in names for end in ("low", "high")}
    for setting, metric in request.named.items():
        prefixes = ("eval",) if metric.startswith("eval_") and "eval" not in request.splits else request.splits
        known = sorted(f"{prefix}_{name}" for prefix in prefixes for name in names)
        # Known after the training alone: a slice's values, what after_evaluate measures, and what callbacks add.
        is_late = "/" in metric if request.slices else work.recipe.after_evaluate and metric.startswith("overall_")
        if metric not in known and not is_late and not (prefixes == ("eval",) and work.recipe.has_callbacks):
            what = f"The evaluation has no metric {metric}."
            options = [name for name in known if not name.endswith(("runtime", "_per_second"))]
            raise ConfigError(what, field=setting, value=metric, remedy=suggestion(metric, options))


PREFIX = "eval"
ARTIFACTS = "artifacts"
RESAMPLES = "resamples"
OVERALL = "overall"  # what after_evaluate measured belongs to no split


def run(work: Work[EvaluateRequest]) -> EvaluateResult:
    """Evaluate every split, or only try to (`rehearse`). The result is complete on rank 0."""
    request = work.request
    store = Store.open(request.output, field="storage")
    data = DataInfo(work.prepared)
    splits = {name: ArrowSplit(work.prepared, name) for name in request.splits}
    if request.is_rehearsal:
        rehearse(work, data, splits)
        return EvaluateResult((), {})
    args = arguments(work, "evaluate", store.url)
    model = build_model(work, args, data)
    load_weights(model, request.model_url)
    events = events_callback(work, args)
    trainer = build_trainer(work, args, model, [events])
    metrics, measured, warnings = _measure_splits(work, store, trainer, splits, data, events)
    files: list[FileEntry] = []
    if work.rank == 0:  # if this raises, the other ranks lose contact, and that is reported as its consequence
        data.history, data.build_first = _history(request.model_url), partial(build_model, work, args, data)
        extra, files = _afterwards(work, store, trainer.model, data)
        metrics |= {OVERALL: extra} if extra else {}
    leave_together(trainer)
    if work.rank == 0:  # the other ranks end meanwhile, so benchmarks may take longer than a rank waits
        if request.benchmarks:
            suite = _suite(work, args, data)
            metrics |= suite.measure(trainer.model, args.per_device_eval_batch_size, request.confidence)
            warnings += suite.warnings
        # Without timings: the stage's content digest, and with it the keys of what follows, must not depend on them.
        lasting = json.dumps(tidy_metrics(metrics), indent=2, sort_keys=True)
        files += [store.write_bytes("metrics.json", lasting.encode()), *measured]
    return EvaluateResult(tuple(files), metrics, warnings=tuple(warnings))


def _suite(work: Work[EvaluateRequest], args: TrainingArguments, data: DataInfo) -> Suite:
    """The benchmarks of the request; refuses those that the layout of the model or the data cannot have."""
    folder = "." if work.request.paths is None else work.request.paths.folder
    tokenizer = kept_tokenizer(data) if "tokenizer" in data.info else None
    suite = Suite(work.request.benchmarks, folder, tokenizer, work.events.emit)
    suite.require(is_divided=bool(args.fsdp or args.deepspeed))
    return suite


def _measure_splits(
    work: Work[EvaluateRequest],
    store: Store,
    trainer: Any,
    splits: Mapping[str, ArrowSplit],
    data: DataInfo,
    events: EventsCallback,
) -> tuple[dict[str, dict[str, float]], list[FileEntry], list[str]]:
    """The metrics of the splits, files next to them, and warnings."""
    metrics: dict[str, dict[str, float]] = {}
    measured: list[FileEntry] = []
    warnings: list[str] = []
    request, recipes_own = work.request, trainer.compute_metrics
    function = require_measurable(recipes_own, request, trainer.args)
    before, total = 0, sum(map(len, splits.values()))
    for name, split in splits.items():
        events.begin_split(before=before, rows=len(split), total=total)
        before += len(split)
        work.events.emit("progress", message=f"evaluating {name}: {counted(len(split), 'row')}")
        # A batch at a time leaves nothing to remember.
        by_batch = trainer.args.batch_eval_metrics or is_metric_object(function)
        remembered = None if function is None or by_batch else Remembered(function, digest_rows(request.data, name))
        trainer.compute_metrics = remembered or function
        metrics[name] = _plain(trainer.evaluate(eval_dataset=split, metric_key_prefix=PREFIX))
        trainer.compute_metrics = recipes_own
        if remembered is not None and work.rank == 0:
            if (outcomes := _describe(split, remembered, work, data)) is not None:
                outcomes |= _explain(work, trainer, name, split, remembered)
                measured.append(store.write_bytes(f"{OUTCOMES}/{name}.json", json.dumps(outcomes).encode()))
                warnings += warn_of_collapse(name, outcomes, data.info.get("classes"))
            if request.resamples:
                resampled, entry = _resample(work, store, name, remembered)
                measured.append(entry)
                metrics[name] |= remembered.intervals(resampled, request.confidence)
            metrics[name] |= _sliced(work, name, split, remembered) | _of_labels(remembered, data)
    for message in warnings:
        work.events.emit("warning", message=message)
    return metrics, measured, warnings


def _of_labels(remembered: Remembered, data: DataInfo) -> dict[str, float]:
    """The metrics of each class, where rows have several."""
    given, info = remembered.given, data.info
    if given is None or info.get("target") != SEVERAL:
        return {}
    return measure_labels(
        single_output(given.predictions), given.label_ids, classes=info["classes"], threshold=info["threshold"]
    )


def _sliced(work: Work[EvaluateRequest], name: str, split: ArrowSplit, remembered: Remembered) -> dict[str, float]:
    """The metrics on the rows of each value of the columns that the spec names, with intervals for a few slices."""
    request = work.request
    if remembered.given is None or not request.slices:
        return {}

    def bounds(part: EvalPrediction) -> dict[str, float]:
        few = Remembered(remembered.compute, remembered.seed)
        few.given = part
        return few.intervals(few.resampled(request.resamples), request.confidence)

    columns = {column: split.column_values(column) for column in request.slices}
    found = measure_slices(
        remembered.compute, remembered.given, columns, bounds if request.confidence is not None else None
    )
    count = sum(path.startswith("rows/") for path in found)
    if request.confidence is not None and count > MAX_INTERVALS:
        message = f"The {count} slices of {name} have no intervals: up to {MAX_INTERVALS} have."
        work.events.emit("warning", message=message)
    return found


def warn_of_collapse(split: str, outcomes: Mapping[str, Any], classes: Any) -> list[str]:
    """A warning where the model predicts one class for all rows of a split that has several; none otherwise."""
    name = find_collapse(outcomes, classes if isinstance(classes, list) else ())
    if name is None:
        return []
    remedy = "recipes by name take train.model.class_weights=balanced, and stop_early with metric: macro_f1"
    return [f"The model predicts '{name}' for each row of {split}, so it tells no classes apart: {remedy}."]


def _describe(
    split: ArrowSplit, remembered: Remembered, work: Work[EvaluateRequest], data: DataInfo
) -> dict[str, Any] | None:
    """The outcomes of a split's outputs; None for outputs of another kind."""
    if remembered.given is None:
        return None
    pairs = pair_outcomes(work.recipe, remembered.given, data)
    show = split.__getitem__ if work.request.show_inputs else None
    outcomes = summarize_pairs(pairs, data, id_of=lambda row: split.row_ids(row, row + 1).tolist()[0], show=show)
    if outcomes is not None and show is not None and "rows" not in pairs and len(pairs["labels"]) == len(split):
        columns = {name: partial(split.column_values, name) for name in split.column_names if name != "labels"}
        names = data.info.get("classes")
        outcomes["weak"] = find_weak_groups(pairs["predictions"], pairs["labels"], columns, names)
    return outcomes


def pair_outcomes(recipe: Recipe, given: EvalPrediction, data: DataInfo) -> dict[str, Any]:
    """`predictions` and `labels` of rows, and their numbers in `rows` where the recipe says them."""
    pairs = recipe.outcome_pairs(given, data)
    if pairs is None:
        labels = given.label_ids
        if isinstance(labels, tuple):  # behind them is what metrics need besides
            labels = labels[0]
        pairs = {"predictions": single_output(given.predictions), "labels": labels}
    return pairs


def summarize_pairs(
    pairs: Mapping[str, Any],
    data: DataInfo,
    *,
    id_of: Callable[[int], int | str],
    show: Callable[[int], Mapping[str, Any]] | None,
) -> dict[str, Any] | None:
    """The outcomes of rows, as `summarize_outcomes` has them, with the inputs of those that they name.

    `id_of` and `show` take the number of a row, and give its id and its columns; without `show` there are no inputs.
    """
    rows, names = pairs.get("rows"), data.info.get("classes")
    places: dict[int | str, int] = {}

    def name_row(value: int) -> int | str:
        row = value if rows is None else int(rows[value])
        row_id = id_of(row)
        places.setdefault(row_id, row)
        return row_id

    known: dict[str, Any] = {"classes": len(names) if isinstance(names, list) else None}
    known |= {"threshold": data.info["threshold"]} if "threshold" in data.info else {}
    given = {name: value for name, value in pairs.items() if name != "rows"}
    outcomes = summarize_outcomes(**given, **known, id_of=name_row)
    if outcomes is not None and show is not None:
        outcomes["inputs"] = collect_inputs(outcomes, lambda row_id: show(places[row_id]))
    return outcomes


def _explain(
    work: Work[EvaluateRequest], trainer: Any, name: str, split: ArrowSplit, remembered: Remembered
) -> dict[str, Any]:
    """The importance of a table's columns; empty for other data, and where the model cannot predict by itself."""
    given, seconds = remembered.given, work.request.importance_seconds
    if given is None or not seconds or len(nested.list_leaves(given.label_ids)[0]) != len(split):
        return {}
    if not list_plain_columns(split[0]):
        return {}
    work.events.emit("progress", message=f"importance of the columns of {name}")

    def predict(dataset: Dealt) -> Iterator[Any]:
        return (outputs for _, outputs in stream_predictions(trainer, dataset, start=0, stop=len(dataset)))

    usual = trainer.args.per_device_eval_batch_size
    trainer.args.per_device_eval_batch_size = max(usual, BATCH)
    try:
        found = measure_importance(
            remembered.compute, given, split.__getitem__, predict, seed=remembered.seed, seconds=seconds
        )
    except Exception as error:  # never worth an evaluation
        work.events.emit("warning", message=f"The importance of columns was not measured: {first_line(error)}")
        return {}
    finally:
        trainer.args.per_device_eval_batch_size = usual
    return {} if found is None else {"importance": found}


def _resample(
    work: Work[EvaluateRequest], store: Store, split: str, remembered: Remembered
) -> tuple[dict[str, list[float]], FileEntry]:
    """The metrics on resampled rows of a split, and the file with them; it names the rows by their digest."""
    work.events.emit("progress", message=f"{work.request.resamples:,} resamples of {split}")
    found = remembered.resampled(work.request.resamples)
    # Two models are compared resample by resample, so each has to have a value.
    whole = {name: values for name, values in found.items() if len(values) == work.request.resamples}
    record = {"rows": remembered.seed, "metrics": whole}
    return found, store.write_bytes(f"{RESAMPLES}/{split}.json", json.dumps(record, sort_keys=True).encode())


def digest_rows(data: PreparedData, split: str) -> str:
    """SHA-256 of a split's rows, which decides how they are drawn."""
    shards = frozenset(data.splits[split].shards)
    return content_digest(entry for entry in data.files if entry.path in shards)


def _history(model_url: str) -> list[dict[str, Any]]:
    """The log of the train stage, which lies next to the exported model; empty for a model from elsewhere."""
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
