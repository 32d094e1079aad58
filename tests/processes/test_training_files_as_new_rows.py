"""What `prepare` took, `trainflow predict` takes: the training files of the recipes by name, in each format."""

from __future__ import annotations

import csv
import functools
import json
import re
from collections.abc import Callable
from dataclasses import replace
from datetime import date, timedelta
from pathlib import Path
from typing import Any, NamedTuple

import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tests.support.model_folders import code_is_removed as code_is_removed
from tests.support.model_folders import publish_recipe
from tests.support.repository import ROOT
from tests.support.tiny import prepare, run
from trainer_lib import load_model
from trainer_lib.base.metric_names import read_metrics
from trainer_lib.base.records import to_record
from trainer_lib.data.rows.row_sources import find_row_files
from trainer_lib.data.rows.shards import ArrowSplit
from trainer_lib.errors import ConfigError, DataError, MissingExtraError
from trainer_lib.launch.settings.config import LaunchConfig
from trainer_lib.model_folder import export_model
from trainer_lib.model_folder.locate import find_model
from trainer_lib.protocol.recipe_names import recipe_file
from trainer_lib.protocol.requests import (
    ExportRequest,
    ExportResult,
    MeasureRowsRequest,
    MeasureRowsResult,
    PrepareRequest,
    RecipeFile,
)
from trainer_lib.worker.evaluate import digest_rows
from trainflow.flows.cli.commands.predicting import compare_measured, write_report
from trainflow.tasks.new_rows import NewRows, RowsJob, predict_new_rows

LLAMA = {"model_type": "llama", "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1}
BERT = {"config": {**LLAMA, "model_type": "bert", "num_attention_heads": 2}}
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


def _answers(name: str, value: Callable[[int], Any]) -> list[dict[str, Any]]:
    """Sizes and answers, after a column that has a value for each row."""
    return [{name: value(row), "size": row % 9, "answer": "ab"[row % 2]} for row in range(40)]


def _talks() -> list[dict[str, Any]]:
    """Conversations whose last answers differ."""
    asked = [{"role": "user", "content": f"which number follows {row}?"} for row in range(40)]
    answers = [[{"role": "assistant", "content": f"{row + off}"} for off in (1, 2)] for row in range(40)]
    rows = zip(asked, answers, strict=True)
    return [{"chosen": [question, good], "rejected": [question, bad]} for question, (good, bad) in rows]


SEA = {"time": "month", "target": "temperature", "context": 12, "horizon": 3, "season": 12}
SHOPS: dict[str, Any] = {"time": "day", "target": ["sales", "visits"], "series": "shop", "known": ["holiday"]}
SHOPS |= {"rename": {"Sold": "sales"}, "context": 5, "horizon": 2, **CUT}


def _shops(days: int = 30, to_come: int = 0) -> list[dict[str, Any]]:
    """Two shops by turns, on days such as 31.01.2024, with days to come that have holidays only."""
    begin = date(2024, 1, 20)
    return [
        {
            "day": f"{begin + timedelta(day):%d.%m.%Y}",
            "shop": shop,
            "Sold": (day * factor) % 11 + 0.1 if day < days else None,
            "visits": (day * 3) % 7 + factor if day < days else None,
            "holiday": int(day % 7 == 6),
        }
        for day in range(days + to_come)
        for shop, factor in (("north", 2), ("7", 5))
    ]


TABLE, SERIES, PAIRS = "tabular-classification", "time-series-forecasting", "preference-optimization"
NET, JUDGED = {"hidden": [4]}, {"config": LLAMA, "max_length": 96, **CUT}
EXAMPLES = {
    "gaps": Example(TABLE, _gaps(), {**GAPS, **CUT}, NET),
    "wine": Example(TABLE, _table("tabular/wine.csv", 178), {"label": "cultivar"}, NET),
    "diabetes": Example("tabular-regression", _table("tabular/diabetes.csv", 60), {"label": "progression"}, {}),
    "index of pandas": Example(TABLE, _answers("", int), {"label": "answer"}, NET),
    "nested": Example(TABLE, _answers("more", lambda row: {"a": [row]}), {"label": "answer"}, NET),
    "survey": Example(TABLE,
        [{"size": row % 9, "likes": "; ".join(["red"] * (row % 2) + ["blue"] * (row % 3 == 0))} for row in range(40)],
        {"label": "likes", "target": "several", "label_separator": ";"}, NET),
    "texts": Example("text-classification", _texts(), {"text": "text", "label": "labels", **CUT}, BERT),
    "entities": Example("embeddings", _table("embeddings/entities.csv", 60),
        {"query": "entity", "positive": "character"}, BERT),
    "characters": Example("sequence-to-sequence", _table("sequence_to_sequence/characters.csv", 40),
        {"text": "name", "target": "parts", "target_length": 4, **CUT}, T5),
    "sentences": Example(PAIRS, _table("preferences/sentences.jsonl", 40), JUDGED, {}),
    "talks": Example(PAIRS, _talks(), JUDGED, {}),
    "rewards": Example("reward-modeling", _talks(), {"max_length": 96, **CUT}, {"config": LLAMA}),
    "marks": Example("feedback-optimization",
        [{"prompt": f"say {row} ", "completion": f"{row}", "label": row % 2 == 0} for row in range(40)],
        JUDGED, {}),
    "questions": Example("question-answering", _table("question_answering/questions.jsonl", 40),
        {"max_length": 96, "stride": 32}, BERT),
    "lines": Example("token-classification", _sentences(), {}, BERT),
    "documents": Example("causal-language-modeling",
        [{"text": f"one document {row} ", "source": row or None} for row in range(40)],
        {"length": 32, **CUT}, {"config": LLAMA}),
    "sea": Example(SERIES, _table("forecasting/elnino.csv", 60), SEA, {}),
    "sea by another name": Example(SERIES, _table("forecasting/elnino.csv", 60),
        SEA | {"rename": {"month": "time"}, "time": "time"}, {}),
    "shops": Example(SERIES, _shops(), SHOPS, {}),
    "minutes": Example(SERIES, [{"t": 1_700_000_000 + 60 * step, "y": float(step % 5)} for step in range(40)],
        {"time": "t", "target": "y", "context": 6, "horizon": 2, "missing": "previous"}, {}),
    "notes": Example(TABLE, _answers("note", "text {}".format), {"label": "answer", "ignore": ["note"], **CUT}, NET),
}  # fmt: skip


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


class Published(NamedTuple):
    """An example's model, which nothing may change, the file that it was prepared of, and the rows of its splits."""

    model: Path
    file: Path
    splits: dict[str, list[Any]]


Publish = Callable[[str], Published]


@pytest.fixture(scope="module")
def published(tmp_path_factory: pytest.TempPathFactory) -> Publish:
    @functools.cache
    def publish(name: str) -> Published:
        folder, (recipe, rows, options, model) = tmp_path_factory.mktemp("published"), EXAMPLES[name]
        file = _write(folder / f"rows.{_kinds(name)[0]}", rows)
        return Published(folder / "model", file, publish_recipe(folder / "model", recipe, file, options, model))

    return publish


def _kinds(name: str) -> list[str]:
    lists = name in ("questions", "lines", "nested", "talks", "rewards")
    return ["jsonl", "parquet"] if lists else ["csv", "jsonl", "parquet"]


def _predict(model: Path, data: Path, to: Path, events: list[Any] | None = None, **more: Any) -> Any:
    job = RowsJob.of(NewRows(model=str(model), data=[str(data)], to=str(to), file_format="jsonl", trust=True, **more))
    here = LaunchConfig(kind="in_process", processes=1)
    manifest, _ = predict_new_rows(
        job, on_line=print, on_event=[].append if events is None else events.append, workers=[here]
    )
    lines = [line for path in sorted((to / "predictions").iterdir()) for line in path.read_text().splitlines()]
    return manifest.facts, [json.loads(line) for line in lines]


@pytest.mark.parametrize("name", list(EXAMPLES)[: list(EXAMPLES).index("sea")])
def test_a_model_predicts_the_file_that_it_was_trained_on(name: str, published: Publish, tmp_path: Path) -> None:
    rows, (model, _, splits) = EXAMPLES[name].rows, published(name)
    files = [_write(tmp_path / f"rows.{kind}", rows) for kind in _kinds(name)]
    found = [_predict(model, file, tmp_path / file.suffix)[1] for file in files]
    assert len(found[0]) == len(rows)
    assert all(rows == found[0] for rows in found)
    if name == "documents":
        return  # its prepared rows are tokens, and have none of the files' columns
    prepared = sorted((row for rows in splits.values() for row in rows), key=lambda row: row["row_id"])
    bare = [{key: value for key, value in row.items() if key not in ("row_id", "labels")} for row in prepared]
    columns = load_model(str(model), trust_code=True).predict(bare)
    for key, values in columns.items():
        assert [row[key] for row in found[0]] == [value if isinstance(value, str) else pytest.approx(value)
                                                 for value in values], key  # fmt: skip


def _measuring(model: Path, to: Path, *, sources: tuple[Path, ...] = (), **fields: Any) -> MeasureRowsRequest:
    found = find_model(str(model))
    known: dict[str, Any] = {"digest": found.digest(), "code": found.description.code_digest}
    files = tuple(find_row_files([*map(str, sources)])) if sources else ()
    return MeasureRowsRequest(output=str(to / "out"), model=str(model), sources=files, **known, **fields)


@pytest.mark.parametrize("name", ["gaps", "wine", "diabetes", "texts", "survey", "entities"])
def test_a_model_is_measured_on_a_labelled_file_and_beside_another_one(
    name: str, published: Publish, tmp_path: Path
) -> None:
    example, (folder, file, _) = EXAMPLES[name], published(name)
    asked = _measuring(folder, tmp_path, sources=(file,), resamples=100, wants_outcomes=True)
    if name == "entities":
        with pytest.raises(ConfigError, match="something else than one class or number"):
            run(asked, kind="in_process")
        return
    result = run(asked, kind="in_process")
    label = example.options["label"]
    predicted = load_model(str(folder), trust_code=True).predict(
        [{key: value for key, value in row.items() if key != label} for row in example.rows]
    )["prediction"]
    truth = [row[label] for row in example.rows]
    if name == "diabetes":
        metric, value = "mae", sum(abs(one - other) for one, other in zip(predicted, truth, strict=True)) / len(truth)
    elif name == "survey":
        right = [
            sorted(one) == sorted(other.split("; ") if other else [])
            for one, other in zip(predicted, truth, strict=True)
        ]
        metric, value = "subset_accuracy", sum(right) / len(right)
    else:
        right = [str(one) == str(other) for one, other in zip(predicted, truth, strict=True)]
        metric, value = "accuracy", sum(right) / len(right)
    assert result.rows == len(truth)
    assert result.metrics[metric] == pytest.approx(value)
    assert result.metrics[f"{metric}_low"] <= result.metrics[metric] <= result.metrics[f"{metric}_high"]
    assert compare_measured([result, result], 0.95)[metric] == [0.0, 0.0, 0.0]  # the same model, row by row
    write_report(tmp_path / "report.html", find_model(str(folder)), result, {})
    page = (tmp_path / "report.html").read_text()
    assert "Hardest rows" in page
    assert "rows.csv, row " in page


def test_a_published_model_is_measured_on_the_rows_of_a_prepared_split(published: Publish, tmp_path: Path) -> None:
    example, (folder, file, _) = EXAMPLES["wine"], published("wine")
    asked = PrepareRequest(
        output=str(tmp_path / "data"),
        recipe=RecipeFile(str(recipe_file(example.recipe)), str(tmp_path)),
        options=example.options,
        sources=(str(file),),
    )
    data, chosen = prepare(asked), read_metrics(["f1_weighted"])
    measures = _measuring(folder, tmp_path, data=data, split="test", metrics=chosen, resamples=50)

    def measure(asked: MeasureRowsRequest) -> MeasureRowsResult:
        return run(asked, kind="in_process")

    result, split, classes = measure(measures), ArrowSplit(to_record(data), "test"), data.info["classes"]
    rows = [{**split[number], "cultivar": classes[split[number]["labels"]]} for number in range(len(split))]
    same = _write(tmp_path / "same.csv", [{name: row[name] for name in row if name != "labels"} for row in rows])
    by_file = measure(replace(measures, data=None, sources=tuple(find_row_files([str(same)]))))
    assert result.rows == by_file.rows == len(split)
    assert {name: result.metrics[name] for name in ("accuracy", "log_loss", "f1_weighted")} == pytest.approx(
        {name: by_file.metrics[name] for name in ("accuracy", "log_loss", "f1_weighted")}
    )
    assert len(result.resampled["accuracy"]) == len(result.resampled["f1_weighted"]) == 50
    assert result.digest == digest_rows(data, "test"), "the rows decide the resamples, as in an evaluation"
    other = replace(data, info={**data.info, "classes": ["another", *classes[1:]]})
    with pytest.raises(DataError, match="knows no class 'another'"):
        measure(replace(measures, data=other))


def _export(folder: Path, form: str, to: Path, *sources: str) -> ExportResult:
    asked = ExportRequest(
        output=str(to),
        model=str(folder),
        code=find_model(str(folder)).description.code_digest,
        form=form,
        sources=tuple(find_row_files(sources)) if sources else (),
    )
    return run(asked, kind="in_process")


@pytest.mark.parametrize(
    ("name", "form", "files", "refused"),
    [
        ("wine", "torch-export", {"model.pt2"}, None),
        ("gaps", "torch-export", {"model.pt2"}, None),
        ("texts", "torch-export", {"model.pt2"}, None),
        ("documents", "torch-export", {"model.pt2"}, None),
        ("texts", "transformers", {"config.json", "model.safetensors", "tokenizer.json"}, None),
        ("wine", "transformers", set(), "none of transformers"),
        ("wine", "gguf", set(), "writes no GGUF"),
        ("wine", "onnx", set(), "ONNX needs the packages onnx_of_no_name"),
    ],
)
def test_a_model_is_exported_and_its_outputs_are_compared(
    name: str,
    form: str,
    files: set[str],
    refused: str | None,
    published: Publish,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    folder, file, _ = published(name)
    if refused is not None:
        monkeypatch.setattr(export_model, "_ONNX", ("onnx_of_no_name",))
        with pytest.raises((ConfigError, MissingExtraError), match=refused) as caught:
            _export(folder, form, tmp_path / "out")
        assert caught.value.field == "--to" and caught.value.remedy
        return
    for sources in ((),) if name == "documents" else ((), (str(file),)):
        result = _export(folder, form, tmp_path / f"out-{len(sources)}", *sources)
        assert files <= set(result.files)
        assert result.rows == (min(32, len(EXAMPLES[name].rows)) if sources else 32)
        assert result.apart < 1e-4


NEW: list[dict[str, Any]] = [
    {"tenure": 5, "contract": None, "charges": None},
    {"months": "12", "contract": "monthly", "charges": " 30.5 "},
    {"charges": 3, "contract": 7, "months": True, "label": None},
]


def test_gaps_other_types_and_old_names_are_those_that_prepare_took(
    published: Publish, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    events, model = list[Any](), published("gaps").model
    facts, rows = _predict(model, _write(tmp_path / "new.jsonl", NEW), tmp_path / "out", events)
    assert (facts.rows, facts.errors) == (3, 0)
    assert sum("a text that no training row has in 1 row, such as '7'" in str(event) for event in events) == 1
    plain: list[dict[str, Any]] = [
        {"months": 5.0, "contract": "", "charges": float("nan")},
        {"months": 12.0, "contract": "monthly", "charges": 30.5},
        {"months": 1.0, "contract": "7", "charges": 3.0},
    ]
    for given in (NEW, plain, pd.DataFrame(plain)):
        found = load_model(str(model), trust_code=True).predict(given)
        assert [row["confidence"] for row in rows] == pytest.approx(found["confidence"])
    assert caplog.text.count("a text that no training row has in 1 row, such as '7'") == 3


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
def test_what_prepare_refused_is_refused_or_counted(
    row: Any, words: str, remedy: str, published: Publish, tmp_path: Path
) -> None:
    model, data = published("notes").model, _write(tmp_path / "new.jsonl", [row])
    with pytest.raises(DataError, match=words) as refused:
        _predict(model, data, tmp_path / "out")
    assert remedy in str(refused.value.remedy)
    # Where bad rows are allowed, the first ones may all be bad.
    _write(data, [*[row] * 200, {"size": 3, "note": "training left it out"}])
    facts, rows = _predict(model, data, tmp_path / "counted", max_errors=200)
    assert (facts.rows, facts.errors, rows[-1]["error"]) == (201, 200, None)
    _write(data, [row])
    facts, rows = _predict(model, data, tmp_path / "alone", max_errors=1)
    assert (facts.errors, rows[0]["row_id"]) == (1, 0)
    assert re.search(words, rows[0]["error"])


# -- a table of steps ---------------------------------------------------------------------------------------------
@pytest.mark.parametrize("kind", ["csv", "jsonl", "parquet"])
def test_the_steps_after_the_last_one_of_a_table_are_forecast(kind: str, published: Publish, tmp_path: Path) -> None:
    rows, model = EXAMPLES["sea"].rows, published("sea").model
    facts, found = _predict(model, _write(tmp_path / f"new.{kind}", rows), tmp_path / "out")
    by_hand = load_model(str(model), trust_code=True).predict(
        [{"temperature": [row["temperature"] for row in rows[-12:]]}]
    )
    assert (facts.id_column, [row["row_id"] for row in found]) == (None, [0])
    assert found[0]["temperature_forecast"] == by_hand["temperature_forecast"][0].tolist()
    assert found[0]["time"] == ["1955-01-01", "1955-02-01", "1955-03-01"]
    # Steps without a value at the end are those to come.
    later = [{"month": f"1955-0{month}-01", "temperature": None} for month in (1, 2)]
    _, again = _predict(model, _write(tmp_path / f"more.{kind}", rows + later), tmp_path / "again")
    assert again == found


@pytest.mark.parametrize("kind", ["csv", "jsonl", "parquet"])
def test_each_series_of_a_table_is_forecast_with_what_is_known_of_the_steps_to_come(
    kind: str, published: Publish, tmp_path: Path
) -> None:
    folder = published("shops").model
    model = load_model(str(folder), trust_code=True)
    # These days alone can be read as months as well, and those of the training cannot.
    new = [row for row in _shops(22, to_come=4) if row["day"][3:] == "02.2024" and row["day"] < "13"]
    new = [row | dict.fromkeys(("Sold", "visits")) if row["day"] > "10.02.2024" else row for row in new][::-1]
    facts, found = _predict(folder, _write(tmp_path / f"new.{kind}", new), tmp_path / "out")
    assert (facts.id_column, [row["row_id"] for row in found]) == ("shop", ["7", "north"])
    assert [row["time"] for row in found] == [["2024-02-11", "2024-02-12"]] * 2
    for row in found:
        window = sorted((each for each in new if each["shop"] == row["row_id"]), key=lambda each: each["day"])[-7:]
        given = {"sales": [each["Sold"] for each in window[:5]], "visits": [each["visits"] for each in window[:5]]}
        by_hand = model.predict([given | {"holiday": [each["holiday"] for each in window]}])
        for name in ("sales_forecast", "visits_forecast"):
            assert row[name] == by_hand[name][0].tolist()
    pieces = _predict(folder, tmp_path / f"new.{kind}", tmp_path / "pieces", rows_per_file=1)[1]
    assert pieces == [{key: pytest.approx(value) if "_" in key else value for key, value in row.items()}
                      for row in found]  # fmt: skip


@pytest.mark.parametrize("kind", ["csv", "jsonl"])
def test_a_history_in_each_row_is_taken_as_well(kind: str, published: Publish, tmp_path: Path) -> None:
    model = published("sea by another name").model
    rows = [{"time": "1955-01-01", "temperature": [20.5 + row + step for step in range(12)]} for row in range(3)]
    _, found = _predict(model, _write(tmp_path / f"new.{kind}", rows), tmp_path / "out")
    by_hand = load_model(str(model), trust_code=True).predict(rows)["temperature_forecast"]
    assert [row["temperature_forecast"] for row in found] == [pytest.approx(forecast) for forecast in by_hand]


def _without(rows: list[dict[str, Any]], name: str) -> list[dict[str, Any]]:
    return [{key: value for key, value in row.items() if key != name} for row in rows]


@pytest.mark.parametrize(
    ("rows", "more", "words", "remedy"),
    [
        (_shops(4, to_come=2), {}, "The series 'north' has 4 steps, and the model needs 5", "leave the series out"),
        (_shops(), {}, "'north' has 0 of the next 2 steps .2024-02-19 to 2024-02-20.* needs their 'holiday'",
         "Append rows for 2024-02-19 to 2024-02-20 with an empty 'sales'"),
        (_shops(9, 1), {}, "has 1 of the next 2 steps", "Append rows"),
        (_shops(9, 2)[2:8] + _shops(9, 2)[10:], {}, r"new\.jsonl, row 6 .* lacks 1 steps", "Correct the files"),
        ([row | {"holiday": None} for row in _shops(9, 2)], {}, "column 'holiday': there is no value", "Correct the"),
        ([row | {"visits": None} for row in _shops(9, 2)], {}, "column 'visits': there is no value", "Correct the"),
        (_shops(9, 2)[::4] + _shops(9, 2)[1::4], {}, "is not on the grid|lacks", "Correct the files"),
        (_without(_shops(9, 2), "Sold"), {}, "NEW_DATA = Sold: .* no such column", ""),
        (_without(_shops(9, 2), "day"), {}, "NEW_DATA = day: .* no such column", ""),
        (_without(_shops(9, 2), "holiday"), {}, "NEW_DATA = holiday: .* no such column", ""),
        (_shops(9, 2), {"id_column": "visits"}, "a table of steps", "names of the series"),
    ],
)  # fmt: skip
def test_a_table_from_which_nothing_can_be_forecast_is_refused(
    rows: Any, more: Any, words: str, remedy: str, published: Publish, tmp_path: Path
) -> None:
    with pytest.raises((ConfigError, DataError), match=words) as refused:
        _predict(published("shops").model, _write(tmp_path / "new.jsonl", rows), tmp_path / "out", **more)
    assert remedy in str(refused.value.remedy)
    assert refused.value.field in ("NEW_DATA", "--id")


def test_new_steps_are_on_the_grid_of_the_training_and_filled_as_it_was(published: Publish, tmp_path: Path) -> None:
    rows, model = EXAMPLES["minutes"].rows, published("minutes").model
    # Every other step, and the last one without a value, which is not filled but forecast.
    new: list[dict[str, Any]] = [*rows[:11:2], {"t": 1_700_000_780, "y": None}]
    _, found = _predict(model, _write(tmp_path / "new.csv", new), tmp_path / "out")
    assert found[0]["time"] == ["1700000660", "1700000720"]
    past = [rows[step]["y"] for step in (4, 6, 6, 8, 8, 10)]
    by_hand = load_model(str(model), trust_code=True).predict([{"y": past}])
    assert found[0]["y_forecast"] == by_hand["y_forecast"][0].tolist()
    dates = [{"t": f"2024-01-{day:02}", "y": 1.0} for day in range(1, 11)]
    with pytest.raises(ConfigError, match=r"not a step of time") as refused:
        _predict(model, _write(tmp_path / "dates.csv", dates), tmp_path / "none")
    assert (refused.value.field, str(refused.value.remedy)[:18]) == ("NEW_DATA", "Correct the files:")


def test_a_series_that_is_too_short_is_counted_where_bad_rows_are_allowed(published: Publish, tmp_path: Path) -> None:
    model = published("shops").model
    rows = [row for row in _shops(9, 2) if row["shop"] == "7" or row["day"] > "26"]
    facts, found = _predict(model, _write(tmp_path / "new.csv", rows), tmp_path / "out", max_errors=1)
    assert (facts.rows, facts.errors) == (2, 1)
    bad, good = sorted(found, key=lambda row: row["error"] is None)
    assert (bad["row_id"], bad["time"], bad["error"][:24]) == ("north", None, "The series 'north' has 3")
    assert (good["row_id"], good["time"]) == ("7", ["2024-01-29", "2024-01-30"])
