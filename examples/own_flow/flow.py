"""The five stages of trainflow in a flow of your own, with a stage of your own between two of them.

    python examples/own_flow/flow.py examples/digits/pipeline.yaml

A stage of your own is a Prefect task made by `stage_task`. What it gives to `stage_key` decides when it runs again, and
what it writes is committed, verified and found again like the results of the other stages.
"""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass
from typing import Any

from prefect import flow

from trainflow.flows.server.api import prefect_api, quiet_environment
from trainflow.flows.spec.spec import PipelineSpec, load_spec
from trainflow.tasks.evaluate import evaluate
from trainflow.tasks.predict import predict
from trainflow.tasks.prepare_data import prepare_data
from trainflow.tasks.push_to_hub import push_to_hub
from trainflow.tasks.stage.facts import PrepareFacts, StageFacts
from trainflow.tasks.stage.runner import StageAttempt, StageContext, StageManifest, StageOutput, run_stage, stage_key
from trainflow.tasks.stage.task import stage_task
from trainflow.tasks.train import train


@dataclass(frozen=True)
class RowFacts(StageFacts, stage="count-rows"):
    """Facts of `count_rows`: the split with the most rows."""

    largest: str


@stage_task("count-rows")
def count_rows(context: StageContext, data: StageManifest[PrepareFacts]) -> StageManifest[RowFacts]:
    """Write down how many rows each split has."""

    def work(attempt: StageAttempt) -> StageOutput:
        rows = {name: split.rows for name, split in data.facts.splits.items()}
        file = attempt.store.write_bytes("rows.json", json.dumps(rows).encode())
        return StageOutput([file], metrics=rows, facts=RowFacts(max(rows, key=rows.__getitem__)))

    return run_stage(stage_key("count-rows", {"data": data.content_digest}), context, work)


@flow(name="own-flow", persist_result=False, validate_parameters=False)
def own_flow(spec: PipelineSpec) -> dict[str, Any]:
    """Prepare, count rows, train on the split that has most of them, evaluate and predict side by side, publish."""
    context = StageContext(name=spec.name, recipe=spec.recipe, storage=spec.storage)
    data = prepare_data(spec.prepare, context)
    counted = count_rows(context, data)
    config = spec.train.model_copy(update={"train_split": counted.facts.largest})
    model = train.with_options(retries=1)(config, context, data)
    predicting = predict.submit(spec.predict_config(), context, data, model)
    measured = evaluate(spec.evaluate_config(), context, data, model)
    published = push_to_hub(spec.publish_config(), context, data, model, measured)
    return {
        "rows": counted.metrics,
        "trained on": counted.facts.largest,
        "metrics": measured.metrics,
        "predicted": predicting.result().facts.rows,
        "published": published.facts.published_url,
    }


if __name__ == "__main__":
    quiet_environment()
    given = load_spec(sys.argv[1], sys.argv[2:])
    with prefect_api():
        print(json.dumps(own_flow(given), indent=2))
