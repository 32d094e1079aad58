"""predict: a model and a split to sharded Parquet files with row ids, in processes of its own."""

from __future__ import annotations

from functools import partial

from tasks.configs import PredictConfig
from tasks.stage.context import StageContext
from tasks.stage.facts import PredictFacts, PrepareFacts, TrainFacts
from tasks.stage.inference import run_inference
from tasks.stage.keys import predict_key
from tasks.stage.manifest import StageManifest
from tasks.stage.runner import StageOutput
from tasks.stage.task import stage_task
from trainer_lib.requests import PredictRequest


@stage_task("predict")
def predict(
    config: PredictConfig,
    context: StageContext,
    data: StageManifest[PrepareFacts],
    model: StageManifest[TrainFacts],
) -> StageManifest[PredictFacts]:
    """Predict a split, unless that is committed already; finished files of an attempt that died are kept.

    Args:
        data: the manifest of prepare-data.
        model: the manifest of train.

    Returns:
        The stage's manifest: ``predictions/<split>/part-00000.parquet`` and so on; its facts are rows and split.
    """
    return run_inference(
        predict_key(config, context, data, model),
        config,
        context,
        data,
        model,
        request=partial(PredictRequest, split=config.split, rows_per_file=config.rows_per_file),
        output=lambda result: StageOutput(result.files, facts=PredictFacts(result.rows, config.split)),
    )
