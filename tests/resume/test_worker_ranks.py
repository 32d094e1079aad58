"""The real worker on two ranks: evaluation and prediction shared out."""

from __future__ import annotations

from pathlib import Path

from tests.support import tiny
from tests.support.launched import request
from trainer_lib.protocol.requests import PreparedData


def test_two_ranks_share_out_evaluation_and_prediction(tmp_path: Path, prepared_data: PreparedData) -> None:
    output = str(tmp_path / "train")
    tiny.run(tiny.train_request(tmp_path, prepared_data, output, max_steps=4), kind="in_process")
    more = {"data": prepared_data, "model_url": f"{output}/model", "model": {}, "args": tiny.ARGS}
    results = []
    for config in ({"processes": 2}, {"kind": "in_process"}):
        base = {"output": str(tmp_path / str(config)), **more}
        evaluated = tiny.run(request(tmp_path, tiny.RECIPE, "evaluate", splits=["test"], **base), **config)
        tiny.run(request(tmp_path, tiny.RECIPE, "predict", split="test", rows_per_file=10, **base), **config)
        files = (tmp_path / str(config) / "predictions" / "test").glob("*.parquet")
        results.append((evaluated.metrics["test"]["accuracy"], {file.name: file.read_bytes() for file in files}))
    assert len(results[0][1]) == 3
    assert results[0] == results[1]
