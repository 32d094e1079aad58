"""The context that the stages of one run share, and the metrics of evaluate that choose the weights of train."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from trainer_lib.base.metric_names import MetricCall, is_less_better, read_metrics
from trainer_lib.base.suggestions import nearest
from trainer_lib.errors import ConfigError
from trainflow.tasks.configs import EvaluateConfig, MaxAge, TrainConfig
from trainflow.tasks.keys.resolver import Resolver
from trainflow.tasks.keys.stage_code import METRICS, code_of
from trainflow.tasks.tracking.mlflow_run import RunHandle


@dataclass(frozen=True, kw_only=True)
class StageContext:
    """Whose code the stages of a run execute, where their results are kept, and how.

    ::

        context = StageContext(name="digits", recipe="recipe.py", storage=".trainflow")
        data = prepare_data(spec.prepare, context)
        model = train(spec.train, context, data)

    Attributes:
        name: the pipeline's name: default of the model card's title and of the folder below `hub/`.
        recipe: path of the recipe's Python file; a stage's `config.recipe` comes before it.
        storage: folder or URL that everything is kept below.
        root: folder where the recipe's imports start; None: found from the recipe.
        folder: where relative paths among the recipe's options start; None: the recipe's folder.
        sources: what the data is made from: an option that names one of them counts by its content.
        tracking: the MLflow run that the workers add their points to; None: no run.
        run_name: the run's name, for those that wait for its devices; None: the pipeline's.
        flavor: the flavor of MLflow that the trained model is to have, so the library that its class must be of; None:
            any.
        metrics: those of evaluate that evaluations while training measure, because they choose its weights.
        mixture: how the sources are mixed, as `trainer_lib.data.rows.mixture.Mixture.of` reads it; None: they are not.
        limit: rows of each split in a check of the pipeline; None: all rows.
        refresh: by the name of a stage, how old its result may become before the stage runs again.
        force: names of the stages whose committed result is discarded first ("train").
        debug: keep the workers' run files.
        resolver: what was worked out once for this run: arguments, launches, closures.
        stop: once set, every running stage asks its workers to save and end, and raises `Interrupted`.
    """

    name: str
    recipe: str
    storage: str
    root: str | None = None
    folder: str | None = None
    sources: tuple[str, ...] = ()
    tracking: RunHandle | None = None
    run_name: str | None = None
    flavor: str | None = None
    metrics: tuple[MetricCall, ...] = ()
    mixture: Mapping[str, Any] | None = None
    limit: int | None = None
    refresh: Mapping[str, MaxAge] = field(default_factory=dict)
    force: frozenset[str] = frozenset()
    debug: bool = False
    resolver: Resolver = field(default_factory=Resolver, repr=False, compare=False)
    stop: threading.Event = field(default_factory=threading.Event, repr=False, compare=False)


_FIELD = "train.args.metric_for_best_model"
_MEASURES = (*METRICS, "Trainer", "callbacks")


def choosing_metrics(train: TrainConfig, evaluate: EvaluateConfig, context: StageContext) -> tuple[MetricCall, ...]:
    """Those of `evaluate.metrics` that `metric_for_best_model` names; none where it names another one, or none."""
    named = train.args.get("metric_for_best_model")
    if not isinstance(named, str):
        return ()
    wanted, calls = named.removeprefix("eval_"), read_metrics(evaluate.metrics)
    # A metric of a package may give several numbers, by the names that follow its own.
    found = [call for call in calls if wanted == call.result or (call.module and wanted.startswith(f"{call.result}_"))]
    measured = found[0].name if found else wanted
    # Of a loss that the Trainer knows by its name, the least one is chosen.
    is_known = not found and wanted.endswith("loss")
    if is_less_better(measured) and not is_known and train.args.get("greater_is_better") is None:
        what = f"Less is better of {measured}, and unless the setting says so the greatest one is chosen."
        raise ConfigError(what, field="train.args.greater_is_better", remedy="Set train.args.greater_is_better=false.")
    code = code_of(train, context)
    if not found and wanted != "loss" and not any(code.defines(name) for name in _MEASURES):
        near = nearest(wanted, [call.result for call in calls])
        remedy = "Name it in evaluate.metrics, or return it from compute_metrics."
        raise ConfigError(
            "The recipe has no compute_metrics, so an evaluation while training gives the loss alone.",
            field="train.stop_early.metric" if train.stop_early else _FIELD,
            value=named,
            remedy=remedy if near is None else f'Did you mean "{near}"?',
        )
    return tuple(found)
