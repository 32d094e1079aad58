"""`mlflow.pyfunc` takes what the recipe takes: frames, lists of rows and arrays give one prediction a row."""

from __future__ import annotations

import io
import json
import math
import warnings
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest

from tests.support.model_folders import publish_line, publish_recipe, remove_fetched_code
from trainer_lib.commit import content_digest
from trainer_lib.model_folder.description import FILE, Places, read_description
from trainer_lib.model_folder.locate import PIN, model_digest
from trainer_lib.recipes.table_form import TableForm
from trainer_lib.trackers import mlflow_models
from trainer_lib.trackers.model_record import ModelRecord

COLLATE = """
def collate(rows):
    import numpy
    import torch

    return {"x": torch.tensor([[float(numpy.sum(row["x"])) + float(row.get("n", 0))] for row in rows])}
"""
CSV = "size,colour,answer\n" + "".join(
    f"{row},{'red' if row % 3 else ''},{'no' if row % 2 else 'yes'}\n" for row in range(40)
)


@pytest.fixture(autouse=True)
def _code_is_removed() -> Iterator[None]:
    yield
    remove_fetched_code()


def _load(published: Path, folder: Path, columns: dict[str, str]) -> Any:
    """The model of a published folder as MLflow loads it."""
    with warnings.catch_warnings(action="ignore"):  # MLflow's own, of its import
        import mlflow.pyfunc as loader

    description = read_description((published / FILE).read_bytes(), FILE)
    description = replace(description, places=Places(weights=str(published), data=str(published)))
    description = replace(description, columns={**description.columns, **columns})
    digest = model_digest(description, content_digest(description.weights))
    files = {"code/recipe.py": published / "code" / "recipe.py"}
    for name, content in ((FILE, description.to_json()), (PIN, json.dumps({"digest": digest}).encode())):
        files[name] = published / f"logged-{name}"
        files[name].write_bytes(content)
    form = TableForm.of(description.info)
    required = () if form is None else tuple(form.columns)
    record = ModelRecord(name="m", digest=digest, step=1, columns=columns, required=required)
    folder.mkdir()
    mlflow_models._write_folder(folder, record, files, "r", "m-1")
    return loader.load_model(str(folder))


@pytest.mark.parametrize("kind", ["float32[2,2]", "float32[*]", "uint8[4]", "float64"])
def test_arrays_of_a_batch_are_rows(kind: str, tmp_path: Path) -> None:
    from tests.support.toy import RECIPE

    publish_line(tmp_path / "line", recipe=RECIPE + COLLATE)
    shape = {"float32[2,2]": (2, 2), "float32[*]": (3,), "uint8[4]": (4,), "float64": ()}[kind]
    model = _load(tmp_path / "line", tmp_path / "logged", {"x": kind, "n": "float64"})
    assert model.metadata.metadata == {"columns": {"x": kind, "n": "float64"}}
    x = np.arange(5 * math.prod(shape), dtype=kind.partition("[")[0]).reshape(5, *shape)
    n = np.arange(5)
    rows = [{"x": each.tolist(), "n": int(number)} for each, number in zip(x, n, strict=True)]
    expected = 2 * (x.reshape(5, -1).sum(axis=1) + n.astype(float))
    for given in (
        rows,
        pd.DataFrame(rows),
        {"x": x, "n": n},
        {"x": x.tolist(), "n": n.tolist()},
        pd.DataFrame({"x": list(x), "n": n}),
    ):
        assert [value[0] for value in model.predict(given)["prediction"]] == pytest.approx(expected)
    assert len(model.predict({"x": x[:1], "n": n[:1]})) == 1
    with pytest.raises(Exception, match=r"different numbers of rows|All arrays must be of the same length"):
        model.predict({"x": x, "n": n[:3]})


def test_a_table_of_pandas_is_taken_with_whole_numbers_and_gaps(tmp_path: Path) -> None:
    (tmp_path / "train.csv").write_text(CSV)
    options = {"label": "answer", "missing": "mean", "categorical": ["colour"]}
    publish_recipe(tmp_path / "m", "tabular-classification", tmp_path / "train.csv", options, {"hidden": [4]})
    model = _load(tmp_path / "m", tmp_path / "logged", {"size": "float64", "colour": "string"})
    frame = pd.read_csv(io.StringIO(CSV))
    assert frame["size"].dtype == np.int64
    whole = model.predict(frame)["confidence"].tolist()
    assert len(whole) == 40
    gaps = {"size": [1.0, None, 3], "colour": [None, "red", 5]}
    found = [
        model.predict(given)["confidence"].tolist()
        for given in (
            gaps,
            pd.DataFrame(gaps),
            pd.DataFrame(gaps).convert_dtypes(),
            [dict(zip(gaps, row, strict=True)) for row in zip(*gaps.values(), strict=True)],
            pd.DataFrame({"size": [1, math.nan, 3], "colour": [math.nan, "red", "5"]}),
        )
    ]
    assert all(values == pytest.approx(found[0]) for values in found)
    assert model.predict(frame.iloc[[0]])["confidence"].tolist() == pytest.approx(whole[:1])
    with pytest.raises(Exception, match="missing inputs"):
        model.predict(frame[["size"]])
    with pytest.raises(Exception, match="Row 0, column 'size': 'big' is not a number"):
        model.predict([{"size": "big", "colour": "red"}])


def test_a_list_of_texts_is_as_many_rows(tmp_path: Path) -> None:
    (tmp_path / "train.csv").write_text("text,label\n" + "good,yes\nbad,no\n" * 20)
    config = {"model_type": "bert", "hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1}
    publish_recipe(
        tmp_path / "m",
        "text-classification",
        tmp_path / "train.csv",
        {"text": "text", "label": "label"},
        {"config": {**config, "num_attention_heads": 2}},
    )
    model = _load(tmp_path / "m", tmp_path / "logged", {"text": "string"})
    for given in (
        {"text": ["good", "bad"]},
        pd.DataFrame({"text": ["good", "bad"]}),
        [{"text": "good"}, {"text": "bad"}],
    ):
        assert len(model.predict(given)) == 2
