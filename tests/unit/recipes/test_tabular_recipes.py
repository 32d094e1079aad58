"""The tabular recipes: what they make of real tables, and which bad tables they refuse before anything is trained."""

from __future__ import annotations

import gzip
import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from tests.support.repository import ROOT
from trainer_lib import EvalPrediction, Trainer, TrainingArguments
from trainer_lib.errors import ConfigError, DataError, TrainflowError
from trainer_lib.recipe_names import recipe_file
from trainer_lib.recipes import DataInfo, PrepareOutput, Recipe, load
from trainer_lib.recipes.tabular_net import TabularNet, text_code
from trainer_lib.storage import Store

WINE, DIABETES = ROOT / "examples" / "tabular" / "wine.csv", ROOT / "examples" / "tabular" / "diabetes.csv"
Splits = dict[str, list[dict[str, Any]]]


def prepared(name: str, folder: Path, sources: list[str | Path], **options: Any) -> tuple[Recipe, Splits, DataInfo]:
    recipe = load(recipe_file(name), folder)
    out = PrepareOutput(Store.open(folder / "out"), [str(source) for source in sources])
    splits = {name: [dict(row) for row in rows] for name, rows in recipe.prepare(options, out).items()}
    rows = {name: {"rows": len(rows)} for name, rows in splits.items()}
    return recipe, splits, DataInfo({"url": "", "info": out.checked_info(), "splits": rows, "files": []})


def written(path: Path, text: str) -> Path:
    path.write_text(text)
    return path


def table(rows: int = 40) -> str:
    lines = [f"{row % 7},{'red' if row % 3 else 'blue'},{'yes' if row % 2 else 'no'},{row // 4}" for row in range(rows)]
    return "\n".join(["size,colour,answer,house", *lines]) + "\n"


def refused(tmp_path: Path, text: str, name: str = "tabular-classification", **options: Any) -> TrainflowError:
    path = written(tmp_path / "data.csv", text)
    with pytest.raises(TrainflowError) as caught:
        prepared(name, tmp_path, [path], **{"label": "answer", **options})
    assert isinstance(caught.value, ConfigError | DataError)
    assert caught.value.remedy, "every refusal says what to do"
    return caught.value


# -- what they make of real data --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "source", "label", "margin", "least"),
    [
        ("tabular-classification", WINE, "cultivar", "accuracy_over_majority", 0.4),
        ("tabular-regression", DIABETES, "progression", "rmse_below_mean", 8.0),
    ],
)
def test_a_trained_model_beats_the_best_constant_on_rows_that_it_has_not_seen(
    tmp_path: Path, name: str, source: Path, label: str, margin: str, least: float
) -> None:
    recipe, splits, data = prepared(name, tmp_path, [source], label=label, split={"test": 0.3})
    torch.manual_seed(0)
    trainer = Trainer(
        model=recipe.build_model({"hidden": [32], "dropout": 0.0}, data),
        args=TrainingArguments(
            output_dir=str(tmp_path / "run"),
            num_train_epochs=12,
            per_device_train_batch_size=16,
            learning_rate=1e-2,
            remove_unused_columns=False,
            report_to="none",
            save_strategy="no",
            disable_tqdm=True,
            use_cpu=True,
        ),
        data_collator=recipe.collate,
        train_dataset=splits["train"],
        compute_metrics=recipe.compute_metrics,
    )
    trainer.train()
    measured = trainer.evaluate(eval_dataset=splits["test"])
    assert measured[f"eval_{margin}"] > least
    output = trainer.predict(splits["test"])
    columns = recipe.prediction_columns(output.predictions, data)
    assert len(columns["prediction"]) == len(splits["test"])


def test_the_trivial_model_is_measured_on_the_same_rows(tmp_path: Path) -> None:
    recipe = load(recipe_file("tabular-classification"), tmp_path)
    labels = np.array([0, 0, 0, 1, 2])
    scores = np.eye(3)[[0, 0, 1, 1, 2]] * 9
    assert recipe.compute_metrics is not None
    found = recipe.compute_metrics(EvalPrediction(scores, labels))
    assert found["accuracy"] == pytest.approx(0.8)
    assert found["majority_accuracy"] == pytest.approx(0.6)
    assert found["accuracy_over_majority"] == pytest.approx(0.2)
    assert found["macro_f1"] == pytest.approx((0.8 + 2 / 3 + 1) / 3)
    numbers = load(recipe_file("tabular-regression"), tmp_path)
    assert numbers.compute_metrics is not None
    constant = numbers.compute_metrics(EvalPrediction(np.full(4, 2.5), np.array([1.0, 2.0, 3.0, 4.0])))
    assert constant["r2"] == pytest.approx(0)
    assert constant["rmse_below_mean"] == pytest.approx(0)


# -- splits -----------------------------------------------------------------------------------------------------------


def test_classes_have_equal_shares_and_every_row_is_in_one_split(tmp_path: Path) -> None:
    _, splits, data = prepared("tabular-classification", tmp_path, [WINE], label="cultivar")
    assert sorted(row["row_id"] for rows in splits.values() for row in rows) == list(range(178))
    assert list(splits) == ["train", "validation", "test"]
    for rows in splits.values():
        shares = np.bincount([row["labels"] for row in rows], minlength=3) / len(rows)
        assert shares == pytest.approx([0.33, 0.40, 0.27], abs=0.04)
    assert data.info["classes"] == ["cultivar 0", "cultivar 1", "cultivar 2"]
    assert len(data.info["numbers"]) == 13


def test_a_group_is_in_one_split_and_the_newest_rows_are_the_test(tmp_path: Path) -> None:
    path = written(tmp_path / "data.csv", table())
    by_group = {"by": "group", "column": "house", "test": 0.25, "validation": 0.0}
    _, splits, data = prepared("tabular-classification", tmp_path, [path], label="answer", split=by_group)
    houses = {name: {row["row_id"] // 4 for row in rows} for name, rows in splits.items()}
    assert not houses["train"] & houses["test"]
    assert len(houses["test"]) == 3
    assert "house" not in data.info["numbers"], "the column by which rows are grouped is not a feature"
    by_time = {**by_group, "by": "time", "test": 0.3}
    _, splits, _ = prepared("tabular-classification", tmp_path, [path], label="answer", split=by_time)
    # 30 % of 40 rows is 12, which is three whole houses.
    assert min(row["row_id"] for row in splits["test"]) == 28
    assert max(row["row_id"] for row in splits["train"]) == 27


def test_files_and_a_column_give_the_splits(tmp_path: Path) -> None:
    lines = table().splitlines()
    train = written(tmp_path / "train.csv", "\n".join(lines[:31]))
    test = written(tmp_path / "test.csv", "\n".join([lines[0], *lines[31:]]))
    files = {"train": train, "test": test}
    _, splits, _ = prepared("tabular-classification", tmp_path, [tmp_path], label="answer", files=files)
    assert {name: len(rows) for name, rows in splits.items()} == {"train": 30, "test": 10}
    assert splits["test"][0]["row_id"] == 30
    marked = [
        f"{lines[0]},fold",
        *(f"{line},{'test' if row % 5 == 0 else 'train'}" for row, line in enumerate(lines[1:])),
    ]
    path = written(tmp_path / "folds.csv", "\n".join(marked))
    split = {"by": "column", "column": "fold"}
    _, splits, _ = prepared("tabular-classification", tmp_path, [path], label="answer", split=split)
    assert {name: len(rows) for name, rows in splits.items()} == {"train": 32, "test": 8}


@pytest.mark.parametrize("kind", ["csv", "csv.gz", "jsonl", "parquet"])
def test_every_format_gives_the_same_rows(tmp_path: Path, kind: str) -> None:
    path = tmp_path / f"data.{kind}"
    rows = [dict(zip(table().split("\n")[0].split(","), line.split(","), strict=True)) for line in table().split()[1:]]
    typed = [{**row, "size": int(row["size"]), "house": int(row["house"])} for row in rows]
    if kind == "parquet":
        pq.write_table(pa.Table.from_pylist(typed), path)
    elif kind == "jsonl":
        path.write_text("".join(json.dumps(row) + "\n" for row in typed))
    else:
        path.write_bytes(gzip.compress(table().encode()) if kind == "csv.gz" else table().encode())
    _, splits, data = prepared("tabular-classification", tmp_path, [path], label="answer")
    assert data.info["texts"] == {"colour": ["blue", "red"]}
    assert splits["train"][0]["size"] == splits["train"][0]["row_id"] % 7


# -- features ---------------------------------------------------------------------------------------------------------


def test_the_network_takes_missing_numbers_and_texts_that_it_has_not_seen() -> None:
    net = TabularNet({"b": [3.0, 2.0], "a": [0.0, 1.0]}, {"t": ["x", "y"]}, 2, [8], 0.0).eval()
    assert net.mean.tolist() == [0.0, 3.0], "columns go by name, so new rows may have any order"
    texts = torch.tensor([[text_code(text)] for text in ("x", "y", "new", "newer")])
    found = net.outputs(torch.tensor([[0.0, 3.0]] * 4), texts)
    assert not torch.allclose(found[0], found[1])
    # Not bit by bit: which kernel multiplies a row depends on the processor and on the row's place.
    assert torch.allclose(found[2], found[3]), "both are unknown"
    gap = net.outputs(torch.tensor([[math.nan, 3.0], [0.0, 3.0]]), texts[:2])
    assert torch.isfinite(gap).all()


def test_numbers_can_be_names_columns_renamed_and_gaps_filled(tmp_path: Path) -> None:
    text = table().replace("1,red,yes,0", ",red,yes,0", 1)
    path = written(tmp_path / "data.csv", text)
    given = {"label": "truth", "rename": {"answer": "truth"}, "categorical": ["house"], "missing": "mean"}
    _, splits, data = prepared("tabular-classification", tmp_path, [path], **given)
    assert data.info["label"] == "truth"
    assert set(data.info["texts"]) == {"colour", "house"}
    rows = {row["row_id"]: row for part in splits.values() for row in part}
    assert math.isnan(rows[1]["size"])
    assert rows[5]["house"] == "1"


# -- what is refused --------------------------------------------------------------------------------------------------


def test_a_column_that_is_not_there_is_refused_with_the_nearest_name(tmp_path: Path) -> None:
    error = refused(tmp_path, table(), label="anser")
    assert error.field == "prepare.options.label"
    assert error.remedy == 'Did you mean "answer"?'
    assert refused(tmp_path, table(), features=["sise"]).remedy == 'Did you mean "size"?'
    assert refused(tmp_path, table(), ignored=["size"]).remedy == 'Did you mean "ignore"?'
    assert refused(tmp_path, table(), split={"by": "grup"}).remedy == 'Did you mean "group"?'
    assert "label" in str(refused(tmp_path, table(), label=None))


def test_a_column_of_mixed_types_is_refused_by_file_and_row(tmp_path: Path) -> None:
    error = refused(tmp_path, table().replace("3,blue,yes,0", "unknown,blue,yes,0", 1))
    assert "data.csv, row 3 (line 5), column 'size': 'unknown' is not a number" in error.message
    assert "39 of the 40 values" in error.message
    assert "categorical=[size]" in str(error.remedy)


def test_missing_values_are_refused_unless_a_policy_is_given(tmp_path: Path) -> None:
    gap = table().replace("1,red,yes,0", ",red,yes,0", 1)
    error = refused(tmp_path, gap)
    assert "row 1 (line 3), column 'size': there is no value, as in 1 of 40 rows" in error.message
    assert "missing=mean" in str(error.remedy)
    label = table().replace("1,red,yes,0", "1,red,,0", 1)
    assert "column 'answer': there is no value" in refused(tmp_path, label).message


def test_splits_that_cannot_be_measured_are_refused(tmp_path: Path) -> None:
    rare = table() + "1,red,maybe,10\n"
    error = refused(tmp_path, rare)
    assert "has no row of the class 'maybe', of which there are 1 in all" in error.message
    assert "absent_classes" in str(error.remedy)
    unseen = refused(tmp_path, rare, split={"by": "time", "column": "house"})
    assert "row 40 (line 42): the label 'maybe' in the split 'test' is in no row of train" in unseen.message
    one = "\n".join(line for line in table().splitlines() if ",no," not in line)
    assert "All training rows have the label 'yes'" in refused(tmp_path, one).message
    assert "gets none of the 4 rows" in refused(tmp_path, "\n".join(table().splitlines()[:5])).message
    assert "Nothing is left to train on" in refused(tmp_path, table(), split={"test": 0.9}).message
    assert "needs the name of a column" in refused(tmp_path, table(), split={"by": "group"}).message


def test_identifiers_labels_of_text_and_bad_ids_are_refused(tmp_path: Path) -> None:
    lines = table(120).splitlines()
    named = "\n".join([f"{lines[0]},name", *(f"{line},n{row}" for row, line in enumerate(lines[1:]))])
    assert "it is not a category" in refused(tmp_path, named).message
    assert "holds texts, such as 'no'" in refused(tmp_path, table(), "tabular-regression").message
    for prices in ([f"{row % 25}.5" for row in range(200)], [str(7 * row) for row in range(40)]):
        priced = "\n".join(["size,answer", *(f"{row},{price}" for row, price in enumerate(prices))])
        amounts = refused(tmp_path, priced)
        assert "amounts, not classes" in amounts.message
        assert "tabular-regression" in str(amounts.remedy)
    assert refused(tmp_path, table(), id="house").message == "Two rows have one id."
    reserved = table().replace("colour", "labels", 1)
    assert "uses the name 'labels' itself" in refused(tmp_path, reserved).message


def test_files_that_cannot_be_read_are_refused(tmp_path: Path) -> None:
    whole = tmp_path / "whole.parquet"
    pq.write_table(pa.table({"size": [1, 2], "answer": ["a", "b"]}), whole)
    torn = tmp_path / "torn.parquet"
    torn.write_bytes(whole.read_bytes()[:-20])
    for source, says in (
        (torn, "cannot be read"),
        (tmp_path / "none.csv", "no such file"),
        (written(tmp_path / "ragged.csv", "a,b\n1,2\n1\n"), "row 1 (line 3)"),
        (written(tmp_path / "broken.jsonl", '{"a": 1}\n{"a": \n'), "row 1 (line 2)"),
        (written(tmp_path / "uneven.jsonl", '{"a": 1}\n{"a": 1, "b": 2}\n'), "a column 'b' more"),
        (written(tmp_path / "empty.csv", "a,b\n"), "no rows"),
    ):
        with pytest.raises(TrainflowError) as caught:
            prepared("tabular-classification", tmp_path, [source], label="a")
        assert says in str(caught.value), caught.value
        assert caught.value.field == "prepare.sources"
        assert caught.value.remedy
    with pytest.raises(DataError, match="nothing to read"):
        prepared("tabular-classification", tmp_path, ["package:numpy"], label="a")
