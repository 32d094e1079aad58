"""Requests and results as JSON: what goes in comes out, and what does not belong there is refused by name."""

from __future__ import annotations

import json
from typing import Any

import pytest

from trainer_lib.data.row_sources import RowFile
from trainer_lib.errors import ConfigError
from trainer_lib.metric_names import read_metrics
from trainer_lib.preemption import Preemption
from trainer_lib.records import to_record
from trainer_lib.requests import (
    CompareRequest,
    EstimateRequest,
    EvaluateCheckpointRequest,
    EvaluateRequest,
    FilePair,
    ImportRequest,
    MeasureRequest,
    MergeRequest,
    PredictRequest,
    PreparedData,
    PreparedSplit,
    PrepareRequest,
    ProbeRequest,
    Proof,
    RecipeFile,
    Request,
    ScoreRequest,
    TrainRequest,
    TrainResult,
    read_request,
)
from trainer_lib.storage import FileEntry

FILES = (FileEntry("data/train/00000.arrow", 3, "a" * 64),)
DATA = PreparedData("store", {"train": PreparedSplit(2, ("data/train/00000.arrow",), {"x": "int64"})}, {"n": 1}, FILES)
RECIPE = RecipeFile("/p/recipe.py", "/p")
METRICS: list[Any] = ["accuracy", {"name": "sklearn.metrics:fbeta_score", "beta": 2, "as": "f2"}]
REQUESTS: list[Request[Any]] = [
    PrepareRequest(output="o", recipe=RECIPE, options={"a": [1]}, shard_rows=3, allow_nan=True),
    TrainRequest(
        output="o",
        recipe=RECIPE,
        tracking=True,
        data=DATA,
        args={"use_cpu": True},
        proof=Proof(3, kill=True),
        preemption=Preemption(command=("check", "it"), headers={"a": "b"}, every_s=1.0),
    ),
    EstimateRequest(output="o", recipe=RECIPE, data=DATA, eval_split="test", processes=4),
    ProbeRequest(output="o", recipe=RECIPE, data=DATA, args={"max_steps": 9}, rows=7),
    EvaluateRequest(
        output="o", recipe=RECIPE, data=DATA, model_url="m", splits=("train", "test"), metrics=read_metrics(METRICS)
    ),
    EvaluateCheckpointRequest(output="o", recipe=RECIPE, data=DATA, checkpoint="c", eval_split="test"),
    PredictRequest(output="o", recipe=RECIPE, data=DATA, model_url="m", split="test", rows_per_file=5, debug=True),
    MergeRequest(output="o", recipe=RECIPE, data=DATA, args={"use_cpu": True}, model_url="m"),
    ScoreRequest(output="o", model="m", digest="d", code="c", sources=(RowFile("s3://b", "a.csv", 3),), key="k"),
    CompareRequest(output="o", recipe=RECIPE, whole="a", resumed="b"),
    MeasureRequest(output="o", files=(FilePair("a", "b", "model.safetensors"),)),
    ImportRequest(output="o", source="s"),
]


@pytest.mark.parametrize("request_", REQUESTS, ids=lambda request: request.verb)
def test_what_is_asked_for_is_what_the_worker_reads(request_: Request[Any]) -> None:
    assert read_request(json.loads(json.dumps(request_.to_json()))) == request_


def test_every_verb_has_a_request_here() -> None:
    assert [request.verb for request in REQUESTS] == list(Request.by_verb)


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"format": 99}, "request.json"),
        ({"verb": "dance"}, "verb"),
        ({"surprise": 1}, "train.surprise"),
        ({"output": None}, "train.output"),
        ({"debug": "yes"}, "train.debug"),
        ({"recipe": {"path": "p"}}, "train.recipe.root"),
        ({"data": {**to_record(DATA), "splits": {"train": {"rows": "many"}}}}, "train.data.splits.train.rows"),
    ],
)
def test_what_does_not_belong_there_is_refused_by_name(change: dict[str, Any], field: str) -> None:
    with pytest.raises(ConfigError) as caught:
        read_request({**REQUESTS[1].to_json(), **change})
    assert caught.value.field == field


def test_a_missing_field_is_refused_by_name() -> None:
    record = REQUESTS[1].to_json()
    del record["data"]
    with pytest.raises(ConfigError, match="TrainRequest needs this field") as caught:
        read_request(record)
    assert caught.value.field == "train.data"


def test_a_result_of_another_version_is_refused() -> None:
    result = TrainResult(FILES, {"loss": 0.5}, 3, 24, 2, None, ("checkpoint-3",), 7)
    assert REQUESTS[1].read_result(json.loads(json.dumps(to_record(result)))) == result
    with pytest.raises(ConfigError) as caught:
        REQUESTS[1].read_result({**to_record(result), "speed": 1})
    assert caught.value.field == "result.json.speed"
