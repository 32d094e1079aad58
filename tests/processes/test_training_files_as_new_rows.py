"""What `prepare` took, `trainflow predict` takes: the training files of the recipes by name, in each format."""

from __future__ import annotations

import csv
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tasks.new_rows import NewRows, RowsJob, predict_new_rows
from tests.support.model_folders import publish_recipe, remove_fetched_code
from tests.support.repository import ROOT
from trainer_lib import load_model
from trainer_lib.errors import DataError
from trainer_lib.launch import LaunchConfig

BERT = {
    "config": {
        "model_type": "bert",
        "hidden_size": 16,
        "intermediate_size": 16,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
    }
}
LLAMA = {"model_type": "llama", "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1}
T5 = {"config": {"model_type": "t5", "d_model": 16, "d_kv": 8, "d_ff": 16, "num_layers": 1, "num_heads": 2}}
GAPS = {"label": "label", "missing": "mean", "rename": {"tenure": "months"}}
CUT = {"split": {"validation": 0, "test": 0.25}}


class Example(NamedTuple):
    """Rows, and how a recipe by name reads them."""

    recipe: str
    rows: list[dict[str, Any]]
    options: dict[str, Any]
    model: dict[str, Any]


def _table(path: str, rows: int) -> list[dict[str, Any]]:
    """The first rows of an example's file; numbers of a CSV as numbers, as other formats have them."""
    lines = (ROOT / "examples" / path).read_text().splitlines()
    if path.endswith(".jsonl"):
        return [json.loads(line) for line in lines[:rows]]
    return [{name: _number(value) for name, value in row.items()} for row in csv.DictReader(lines[: rows + 1])]


def _number(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return text


def _sentences() -> list[dict[str, Any]]:
    blocks = (ROOT / "examples" / "token_classification" / "lines.conll").read_text().split("\n\n")[:60]
    pairs = [[line.split("\t") for line in block.splitlines()] for block in blocks]
    return [
        {"words": [word for word, _ in each], "tags": ["name" if tag == "name" else "other" for _, tag in each]}
        for each in pairs
        if each
    ]


def _gaps() -> list[dict[str, Any]]:
    """Numbers and categories, each missing in some row, and a column that only prepare leaves out."""
    return [
        {
            "tenure": None if row % 7 == 3 else row,
            "contract": None if row % 5 == 2 else ("monthly", "yearly")[row % 2],
            "charges": None if row % 4 == 0 else 20 + row / 3,
            "label": "ab"[row % 2],
        }
        for row in range(40)
    ]


def _texts() -> list[dict[str, Any]]:
    """Texts with spaces around them, and columns that the recipe does not read, with gaps and of two types."""
    return [
        {"when": row if row % 2 else None, "text": f" good one {row} ", "labels": ["no", "yes"][row % 2]}
        for row in range(40)
    ]


EXAMPLES = {
    "gaps": Example("tabular-classification", _gaps(), {**GAPS, **CUT}, {"hidden": [4]}),
    "wine": Example("tabular-classification", _table("tabular/wine.csv", 178), {"label": "cultivar"}, {"hidden": [4]}),
    "diabetes": Example("tabular-regression", _table("tabular/diabetes.csv", 60), {"label": "progression"}, {}),
    "index of pandas": Example(
        "tabular-classification",
        [{"": row, "size": row % 9, "answer": "ab"[row % 2]} for row in range(40)],
        {"label": "answer"},
        {"hidden": [4]},
    ),
    "nested": Example(
        "tabular-classification",
        [{"size": row % 9, "answer": "ab"[row % 2], "more": {"a": [row]}} for row in range(40)],
        {"label": "answer"},
        {"hidden": [4]},
    ),
    "texts": Example("text-classification", _texts(), {"text": "text", "label": "labels", **CUT}, BERT),
    "entities": Example(
        "embeddings", _table("embeddings/entities.csv", 60), {"query": "entity", "positive": "character"}, BERT
    ),
    "characters": Example(
        "sequence-to-sequence",
        _table("sequence_to_sequence/characters.csv", 40),
        {"text": "name", "target": "parts", "target_length": 4, **CUT},
        T5,
    ),
    "sentences": Example(
        "preference-optimization",
        _table("preferences/sentences.jsonl", 40),
        {"config": LLAMA, "max_length": 96, **CUT},
        {},
    ),
    "questions": Example(
        "question-answering", _table("question_answering/questions.jsonl", 40), {"max_length": 96, "stride": 32}, BERT
    ),
    "lines": Example("token-classification", _sentences(), {}, BERT),
    "documents": Example(
        "causal-language-modeling",
        [{"text": f"one document {row} ", "source": row or None} for row in range(40)],
        {"length": 32, **CUT},
        {"config": LLAMA},
    ),
}


def _write(path: Path, rows: list[dict[str, Any]]) -> Path:
    if path.suffix == ".csv":
        with path.open("w", newline="") as file:
            writer = csv.DictWriter(file, list(rows[0]))
            writer.writeheader()
            writer.writerows(rows)
    elif path.suffix == ".jsonl":
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    else:
        pq.write_table(pa.Table.from_pylist(rows), path)
    return path


@pytest.fixture(autouse=True)
def _code_is_removed() -> Iterator[None]:
    yield
    remove_fetched_code()


def _predict(model: Path, data: Path, to: Path, **more: Any) -> Any:
    job = RowsJob.of(NewRows(model=str(model), data=[str(data)], to=str(to), format="jsonl", trust=True, **more))
    here = LaunchConfig(kind="in_process", processes=1)
    manifest, _ = predict_new_rows(job, on_line=print, on_event=lambda event: None, workers=[here])
    lines = [line for path in sorted((to / "predictions").iterdir()) for line in path.read_text().splitlines()]
    return manifest.facts, [json.loads(line) for line in lines]


@pytest.mark.parametrize("name", EXAMPLES)
def test_a_model_predicts_the_file_that_it_was_trained_on(name: str, tmp_path: Path) -> None:
    example = EXAMPLES[name]
    kinds = ["csv", "jsonl", "parquet"]
    if name in ("questions", "lines", "nested"):
        kinds.remove("csv")  # it has no lists
    files = [_write(tmp_path / f"rows.{kind}", example.rows) for kind in kinds]
    splits = publish_recipe(tmp_path / "model", example.recipe, files[0], example.options, example.model)
    found = [_predict(tmp_path / "model", file, tmp_path / file.suffix)[1] for file in files]
    assert len(found[0]) == len(example.rows)
    assert all(rows == found[0] for rows in found)
    if name == "documents":
        return  # its prepared rows are tokens, and have none of the files' columns
    prepared = sorted((row for rows in splits.values() for row in rows), key=lambda row: row["row_id"])
    bare = [{key: value for key, value in row.items() if key not in ("row_id", "labels")} for row in prepared]
    columns = load_model(str(tmp_path / "model"), trust_code=True).predict(bare)
    for key, values in columns.items():
        assert [row[key] for row in found[0]] == [value if isinstance(value, str) else pytest.approx(value)
                                                 for value in values], key  # fmt: skip


NEW: list[dict[str, Any]] = [
    {"tenure": 5, "contract": None, "charges": None},
    {"months": "12", "contract": "monthly", "charges": " 30.5 "},
    {"charges": 3, "contract": 7, "months": True, "label": None},
]


def test_gaps_other_types_and_old_names_are_those_that_prepare_took(tmp_path: Path) -> None:
    source = _write(tmp_path / "train.csv", _gaps())
    publish_recipe(tmp_path / "model", "tabular-classification", source, {**GAPS, **CUT}, {"hidden": [4]})
    facts, rows = _predict(tmp_path / "model", _write(tmp_path / "new.jsonl", NEW), tmp_path / "out")
    assert (facts.rows, facts.errors) == (3, 0)
    plain: list[dict[str, Any]] = [
        {"months": 5.0, "contract": "", "charges": float("nan")},
        {"months": 12.0, "contract": "monthly", "charges": 30.5},
        {"months": 1.0, "contract": "7", "charges": 3.0},
    ]
    for given in (NEW, plain):
        found = load_model(str(tmp_path / "model"), trust_code=True).predict(given)
        assert [row["confidence"] for row in rows] == pytest.approx(found["confidence"])


@pytest.mark.parametrize(
    ("row", "words", "remedy"),
    [
        ({"size": None}, r"new\.jsonl, row 0 \(line 1\), column 'size': there is no value, and the model", "Give rows"),
        ({"size": "n/k"}, "column 'size': 'n/k' is not a number", "Give rows"),
        ({"size": [1]}, "column 'size': a list is neither a number nor a text", "Give rows"),
        ({"sise": 1}, "column 'size': the model needs the column, .* the nearest column is 'sise'", "Give rows"),
        ({"size": 1, "extra": 2}, "column 'extra': the model was trained without this column", "--ignore extra"),
    ],
)
def test_what_prepare_refused_is_refused_or_counted(row: Any, words: str, remedy: str, tmp_path: Path) -> None:
    lines = [{"size": row, "note": f"text {row}", "answer": ["no", "yes"][row % 2]} for row in range(40)]
    options = {"label": "answer", "ignore": ["note"], **CUT}
    source = _write(tmp_path / "train.jsonl", lines)
    publish_recipe(tmp_path / "model", "tabular-classification", source, options, {"hidden": [4]})
    data = _write(tmp_path / "new.jsonl", [row])
    with pytest.raises(DataError, match=words) as refused:
        _predict(tmp_path / "model", data, tmp_path / "out")
    assert remedy in str(refused.value.remedy)
    # Where bad rows are allowed, the first ones may all be bad.
    _write(data, [*[row] * 200, {"size": 3, "note": "training left it out"}])
    facts, rows = _predict(tmp_path / "model", data, tmp_path / "counted", max_errors=200)
    assert (facts.rows, facts.errors, rows[-1]["error"]) == (201, 200, None)
    _write(data, [row])
    facts, rows = _predict(tmp_path / "model", data, tmp_path / "alone", max_errors=1)
    assert (facts.errors, rows[0]["row_id"]) == (1, 0)
    assert re.search(words, rows[0]["error"])
