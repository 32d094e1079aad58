"""The step *rehearse* of evaluate: refuses, before a training, what its evaluation could not measure after it.

The recipe's functions and the columns of the data are known by then. What the outputs look like shows the model as it
begins, on a few rows of the first split.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from torch.utils.data import Subset

from trainer_lib.arguments import TrainingArguments
from trainer_lib.data.shards import ArrowSplit
from trainer_lib.errors import ConfigError, Interrupted, Preempted, first_line
from trainer_lib.evaluation.metrics import is_metric_object
from trainer_lib.evaluation.named_metrics import SLICES, NamedMetrics, find_slices, require_named
from trainer_lib.outputs import EvalPrediction
from trainer_lib.recipes import DataInfo
from trainer_lib.requests import EvaluateRequest
from trainer_lib.suggestions import suggestion
from trainer_lib.worker.assembly import arguments, build_model, build_trainer
from trainer_lib.worker.session import Work

ROWS = 64
"""Rows whose outputs are looked at, from all over the split."""
_CHANGED: Mapping[str, Any] = {"torch_compile": False, "dataloader_num_workers": 0, "report_to": "none"}


def require_measurable(
    function: Callable[..., Any] | None, request: EvaluateRequest, args: TrainingArguments
) -> Callable[..., Any] | None:
    """The recipe's function with the metrics that the spec names; None where nothing is measured.

    Raises:
        ConfigError: what the spec asks for needs all rows, and they are measured batch by batch, or by nothing.
    """
    by_batch = args.batch_eval_metrics and (function is not None or bool(request.metrics))
    if is_metric_object(function) or by_batch:
        _refuse_needing_rows(request, is_object=not by_batch)
    if request.slices and function is None and not request.metrics:
        raise ConfigError(
            "The recipe has no compute_metrics, so there is nothing to measure on slices.",
            field=SLICES,
            value=list(request.slices),
            remedy="Name metrics in evaluate.metrics, or define compute_metrics.",
        )
    return NamedMetrics(function, request.metrics) if request.metrics else function


def _refuse_needing_rows(request: EvaluateRequest, *, is_object: bool) -> None:
    how = "the recipe's compute_metrics is an object that is given batch by batch"
    remedy = "Leave it out, or write compute_metrics as a function."
    if not is_object:
        how = "batch_eval_metrics keeps none of them"
        remedy = "Leave it out, or set evaluate.args.batch_eval_metrics=false."
    for name in ("metrics", "slices", "confidence", "resamples"):
        if value := getattr(request, name):
            sets = " register.metric sets it." if name == "resamples" else ""
            shown = [call.name for call in request.metrics] if name == "metrics" else value
            raise ConfigError(
                f"This needs all rows, and {how}.{sets}", field=f"evaluate.{name}", value=shown, remedy=remedy
            )


def rehearse(work: Work[EvaluateRequest], data: DataInfo, splits: Mapping[str, ArrowSplit]) -> None:
    """Try what the request asks to be measured, without a trained model.

    Raises:
        ConfigError: it could not be measured: the field says which setting is wrong.
    """
    with tempfile.TemporaryDirectory(prefix="trainflow-") as folder:
        changed = replace(work, request=replace(work.request, args={**work.request.args, **_CHANGED}))
        args = arguments(changed, "evaluate", folder)
        function = require_measurable(work.recipe.compute_metrics_with(data), work.request, args)
        _check_slices(work.request, splits)
        if args.fsdp or args.deepspeed or not (work.request.metrics or work.request.named):
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
            require_named(work.request.metrics, trial.given[-1])
        if trial.failure is None:
            _require_names(work, trial.names)
            return
        message = f"The metrics could not be tried before the training ({first_line(trial.failure)})."
        work.events.emit("warning", message=message)


def _check_slices(request: EvaluateRequest, splits: Mapping[str, ArrowSplit]) -> None:
    for column in request.slices:
        for name, split in splits.items():
            find_slices(column, split.column_values(column), split=name)


@dataclass
class _Trial:
    """What a recipe's function is given of a few rows, and the names of what it measures.

    Attributes:
        function: the recipe's, with the metrics of the spec.
        alone: it is called batch by batch, so the Trainer has to call it.
        names: those of every evaluation; None: not known, or they depend on the rows.
        failure: why it could not be tried.
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
