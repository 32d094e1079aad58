"""Files of predictions: arrays become the columns that lists of their rows would, and JSON lines are JSON."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from trainer_lib.data.predictions import build_table, to_parquet
from trainer_lib.data.row_predictions import RowPredictionWriter
from trainer_lib.storage import Store


@pytest.mark.parametrize("dtype", ["bool", "int8", "uint16", "int32", "int64", "float16", "float32", "float64"])
@pytest.mark.parametrize("shape", [(5,), (5, 1), (5, 3), (1, 7)])
def test_an_array_is_written_as_the_list_of_its_rows(dtype: str, shape: tuple[int, ...]) -> None:
    values: Any = np.random.default_rng(0).integers(0, 2, shape).astype(dtype)
    if dtype.startswith("float"):
        values.reshape(-1)[0] = np.nan
    for array in (values, np.asfortranarray(values), np.repeat(values, 2, axis=0)[::2]):
        rows = pa.array(range(len(array)))
        table = build_table(rows, {"v": array}, rows=len(array), of="")
        expected = build_table(rows, {"v": list(array)}, rows=len(array), of="")
        assert table.schema == expected.schema
        assert to_parquet(table) == to_parquet(expected)


def test_lists_of_unequal_lengths_are_a_column() -> None:
    spans: list[Any] = [[[1, 2], [3]], [[4]]]
    table = build_table(pa.array(range(2)), {"spans": spans}, rows=2, of="")
    assert table["spans"].to_pylist() == spans


def test_a_line_is_json_with_null_for_what_json_has_no_number_for(tmp_path: Path) -> None:
    writer = RowPredictionWriter(Store.open(str(tmp_path)), "key", "jsonl")
    columns: dict[str, Any] = {"v": np.array([[0.1, np.nan], [np.inf, -0.0]]), "word": ["é\n", "\u2028"]}
    entry = writer.write(0, ["a", None], columns, {}, text_ids=True)
    lines = (tmp_path / entry.path).read_text(encoding="utf-8").split("\n")
    assert [json.loads(line) for line in lines[:-1]] == [
        {"row_id": "a", "v": [0.1, None], "word": "é\n"},
        {"row_id": None, "v": [None, -0.0], "word": "\u2028"},
    ]
    assert lines[-1] == ""
