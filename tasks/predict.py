"""predict: a model and a split to sharded Parquet files with row ids, in processes of its own."""

from __future__ import annotations

from typing import Any

from trainer_lib.base.suggestions import counted
from trainer_lib.data.rows.parts import SplitParts
from trainer_lib.errors import ConfigError
from trainer_lib.locks.shared_parts import CLAIMS
from trainer_lib.protocol.requests import PredictRequest, PreparedSplit
from trainer_lib.storage.commit import MOST_FILES
from trainflow.tasks.configs import LaunchSettings, PredictConfig
from trainflow.tasks.keys.keys import predict_key
from trainflow.tasks.stage.context import StageContext
from trainflow.tasks.stage.facts import PredictFacts, PrepareFacts, TrainFacts
from trainflow.tasks.stage.manifest import StageManifest
from trainflow.tasks.stage.runner import StageAttempt, StageOutput
from trainflow.tasks.stage.task import stage_task
from trainflow.tasks.stage.worker import launch_shared, run_inference


@stage_task("predict")
def predict(
    config: PredictConfig, context: StageContext, data: StageManifest[PrepareFacts], model: StageManifest[TrainFacts]
) -> StageManifest[PredictFacts]:
    """Predict a split, unless that is committed already; finished files of an attempt that died are kept.

    Args:
        data: the manifest of prepare-data.
        model: the manifest of train.

    Returns:
        The stage's manifest: ``predictions/<split>/part-00000.parquet`` and so on; its facts are rows and split.
    """
    size = config.rows_per_file

    def predict_parts(fields: dict[str, Any], launch: LaunchSettings, attempt: StageAttempt) -> StageOutput:
        # Workers pull parts, so that a fast one does more, and those of a lost one are taken over.
        request = PredictRequest(**fields, split=config.split, rows_per_file=size, sort_by=config.sort_by)
        split = request.data.splits.get(config.split) or PreparedSplit(0)  # the worker names a split that is not there
        parts = SplitParts(attempt.store, config.split, rows=split.rows, rows_per_file=size)
        if split.rows > MOST_FILES * size:
            what = f"The predictions would be more than {MOST_FILES:,} files."
            remedy = f"Use at least {-(-split.rows // MOST_FILES):,}: the split has {counted(split.rows, 'row')}."
            raise ConfigError(what, field="predict.rows_per_file", value=size, remedy=remedy)
        parts.forget_damaged()
        launch_shared(request, launch, context, attempt)
        files = tuple(file for part in parts.collect() for file in part.files)
        attempt.store.delete_tree(CLAIMS)
        return StageOutput(files, facts=PredictFacts(split.rows, config.split))

    return run_inference(predict_key(config, context, data, model), config, context, data, model, predict_parts)
