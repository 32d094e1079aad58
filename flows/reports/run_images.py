"""Pictures and samples for the MLflow run: the curves, and what the model got right and wrong on each split."""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping, Sequence
from typing import Any

from trainer_lib.errors import TrainflowError
from trainer_lib.hub.metric_tables import slice_tables
from trainer_lib.hub.outcome_pictures import as_file
from trainflow.flows.reports.charts import LOSS, draw_images
from trainflow.flows.spec.spec import PipelineSpec
from trainflow.flows.spec.sweep_settings import TRIAL
from trainflow.tasks.model.outcome_tables import Outcome, read_outcomes
from trainflow.tasks.stage.manifest import StageManifest
from trainflow.tasks.tracking.mlflow_run import TrackedRun

_TABLES = "mlflow.loggedArtifacts"  # the tag by which MLflow's page finds tables
_log = logging.getLogger(__name__)


def draw_pictures(spec: PipelineSpec, history: Sequence[Mapping[str, Any]], *, is_tracked: bool) -> dict[str, bytes]:
    """The curves of a training as PNG, by name, for MLflow and Prefect; without MLflow only the loss, for Prefect.

    A trial of a sweep has none: drawing takes as long as a short training, and the sweep's report has all curves.
    """
    if _is_trial(spec):
        return {}
    return draw_images(history, None if is_tracked else LOSS)


def _is_trial(spec: PipelineSpec) -> bool:
    return TRIAL in spec.tracking.tags


def log_pictures(run: TrackedRun, pictures: Mapping[str, bytes]) -> None:
    """Log the curves of a training as pictures (`plots/loss.png`)."""
    for name, image in pictures.items():
        run.log_file(image, f"plots/{name}.png")


def log_outcomes(spec: PipelineSpec, run: TrackedRun, evaluation: StageManifest, info: Mapping[str, Any]) -> None:
    """Log a confusion matrix and the calibration, or the residuals, of each evaluated split, and tables.

    The tables are of samples, of the rows that the model gets most wrong, and of the metrics of slices. A trial of a
    sweep has only tables.

    Args:
        info: what the recipe noted about the data; names of the classes are in `classes`.
    """
    tables = []
    for outcome in read_outcomes(evaluation, info):
        try:
            if not _is_trial(spec):
                for name, drawing in outcome.drawings().items():
                    run.log_file(as_file(drawing), f"plots/{name}-{outcome.split}.svg")
            tables += _log_outcome(run, outcome)
        except (TrainflowError, ValueError, KeyError, TypeError) as error:  # a picture is never worth a run
            _log.warning("The outcomes of %s are not drawn: %s", outcome.split, error)
    for split, metrics in evaluation.metrics.items():
        for column, rows in slice_tables(metrics).items() if isinstance(metrics, Mapping) else ():
            tables.append(_log_table(run, f"slices-{split}-{column}", [column, *rows.columns], rows.cells))
    if tables:
        run.set_tags({_TABLES: json.dumps([{"path": path, "type": "table"} for path in tables])})


def _log_outcome(run: TrackedRun, outcome: Outcome) -> list[str]:
    """Log the tables of a split, and return their paths."""
    found, split, names = outcome.found, outcome.split, outcome.classes
    if outcome.is_classes:
        rows = [[row, names[label], names[guess], label == guess] for row, label, guess in found["samples"]]
        columns = ["row_id", "label", "prediction", "right"]
    else:
        rows = [[row, label, guess, guess - label] for row, label, guess in found["samples"]]
        columns = ["row_id", "label", "prediction", "residual"]
    tables = [_log_table(run, split, columns, rows)]
    columns, hardest = outcome.hardest()
    return [*tables, _log_table(run, f"hardest-{split}", columns, hardest)] if hardest else tables


def _log_table(run: TrackedRun, name: str, columns: Sequence[str], rows: Sequence[Sequence[Any]]) -> str:
    path = f"samples/{name}.json"
    run.log_file(json.dumps({"columns": list(columns), "data": [list(row) for row in rows]}), path)
    return path
