"""The context: everything that the stages of one run share."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from dataclasses import dataclass, field

from trainer_lib.base.metric_names import MetricCall
from trainflow.tasks.configs import MaxAge
from trainflow.tasks.keys.resolver import Resolver
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
        limit: rows of each split in a check of the pipeline; None: all rows.
        refresh: by the name of a stage, how old its result may become before the stage runs again.
        force: names of the stages whose committed result is discarded first ("train").
        debug: keep the workers' run files.
        resolver: what was worked out once for this run: arguments, launches, closures.
        stop: once set, every stage at work asks its workers to save and end, and raises `Interrupted`.
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
    limit: int | None = None
    refresh: Mapping[str, MaxAge] = field(default_factory=dict)
    force: frozenset[str] = frozenset()
    debug: bool = False
    resolver: Resolver = field(default_factory=Resolver, repr=False, compare=False)
    stop: threading.Event = field(default_factory=threading.Event, repr=False, compare=False)
