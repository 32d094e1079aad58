"""Generation in batches of rows of like length: the rows keep their order, and an interrupted run its bytes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

from tests.support import tiny
from tests.support.launched import request
from trainer_lib.errors import DataError
from trainer_lib.requests import PreparedData

RECIPE = """
import random

import torch
import trainer_lib


def prepare(options, out):
    draw = random.Random(0)
    rows = [{"input_ids": [draw.randrange(1, 9) for _ in range(draw.randrange(1, 30))]} for _ in range(60)]
    return {"test": rows}


def collate(rows):
    width = max(len(row["input_ids"]) for row in rows)
    ids = [torch.as_tensor(row["input_ids"]) for row in rows]
    return {"input_ids": torch.stack([torch.nn.functional.pad(row, (width - len(row), 0)) for row in ids])}


class Counts(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(1))

    def generate(self, input_ids):
        # As many tokens as the prompt's sum says, from the prompt alone; 0 is padding.
        most = int((input_ids.sum(1) % 7).max()) + 1
        places = torch.arange(most).expand(len(input_ids), most)
        made = torch.where(places <= (input_ids.sum(1, keepdim=True) % 7), input_ids.sum(1, keepdim=True) + places, 0)
        return made, torch.full((len(input_ids),), input_ids.shape[1])

    def forward(self, input_ids):
        raise AssertionError("it generates")


def build_model(options, data):
    return Counts()


class Trainer(trainer_lib.Trainer):
    def prediction_step(self, model, inputs, prediction_loss_only, ignore_keys=None):
        return None, model.generate(**self._prepare_inputs(inputs)), None


def prediction_columns(predictions, data):
    tokens, width = predictions
    return {"tokens": [[int(t) for t in row if t > 0] for row in tokens], "width": width}
"""


def predicted(folder: Path, data: PreparedData, name: str, sort_by: str | None) -> tuple[dict[str, Any], Path]:
    asked = request(
        folder,
        RECIPE,
        "predict",
        output=str(folder / name),
        data=data,
        model_url=str(folder / "model"),
        args={"use_cpu": True, "per_device_eval_batch_size": 4},
        split="test",
        rows_per_file=25,
        sort_by=sort_by,
    )
    tiny.run(asked, kind="in_process")
    files = folder / name / "predictions" / "test"
    return pq.read_table(files).to_pydict(), files


def test_generated_rows_keep_their_order_and_need_less_padding(tmp_path: Path) -> None:
    from safetensors.torch import save_file
    from torch import ones

    prepared = tiny.run(request(tmp_path, RECIPE, output=str(tmp_path / "data")), kind="in_process")
    data = PreparedData(str(tmp_path / "data"), prepared.splits, prepared.info, prepared.files)
    (tmp_path / "model").mkdir()
    save_file({"weight": ones(1)}, tmp_path / "model" / "model.safetensors")
    (plain, _), (by_length, files) = (predicted(tmp_path, data, str(by), by) for by in (None, "input_ids"))
    widths = [sum(table.pop("width")) for table in (plain, by_length)]
    assert plain == by_length
    assert by_length["row_id"] == list(range(60))
    assert widths[1] < 0.75 * widths[0]

    # Interrupted: a file is not there yet, and it comes as it was.
    before = {path.name: path.read_bytes() for path in files.iterdir()}
    for record in (tmp_path / "input_ids" / "records").glob("**/00000001.json"):
        record.unlink()
    (files / "part-00001.parquet").unlink()
    predicted(tmp_path, data, "input_ids", "input_ids")
    assert {path.name: path.read_bytes() for path in files.iterdir()} == before
    with pytest.raises(DataError, match="no column 'ids'"):
        predicted(tmp_path, data, "other", "ids")
