"""The recipes of tables: splits, features, formats, windows of time without a look ahead, and naive forecasts."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.support.named_recipes import Prepared, RecipeCase, collate_of, prepare_sources, refusal, trained
from tests.support.repository import ROOT
from trainer_lib import EvalPrediction
from trainer_lib.protocol.recipe_names import recipe_file
from trainer_lib.recipes import PrepareOutput, load
from trainer_lib.recipes.tabular_classification import TabularNet, text_code
from trainer_lib.storage import Store
from trainflow.flows.new_project.starting import read_sample

WINE, DIABETES = ROOT / "examples" / "tabular" / "wine.csv", ROOT / "examples" / "tabular" / "diabetes.csv"
TABLE = RecipeCase("tabular-classification", options={"label": "answer"})
SEA: dict[str, Any] = {"time": "month", "target": "temperature", "context": 36, "horizon": 6, "season": 12}
COUNT: dict[str, Any] = {"time": "t", "target": "y", "context": 4, "horizon": 2, "split": {"validation": 0.2}}
SERIES = RecipeCase("time-series-forecasting", options=COUNT)


def prepared(name: str, folder: Path, sources: list[Path], **options: Any) -> Prepared:
    return prepare_sources(name, list(map(str, sources)), options, folder)


def written(path: Path, text: str) -> Path:
    path.write_text(text)
    return path


def table(rows: int = 40) -> str:
    lines = [f"{row % 7},{'red' if row % 3 else 'blue'},{'yes' if row % 2 else 'no'},{row // 4}" for row in range(rows)]
    return "\n".join(["size,colour,answer,house", *lines]) + "\n"


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
    made = recipe, splits, data = prepared(name, tmp_path, [source], label=label, split={"test": 0.3})
    settings: dict[str, Any] = {"num_train_epochs": 12, "per_device_train_batch_size": 16, "learning_rate": 1e-2}
    trainer = trained(made, tmp_path / "run", {"hidden": [32], "dropout": 0.0}, -1, **settings)
    assert trainer.evaluate(eval_dataset=splits["test"])[f"eval_{margin}"] > least
    columns = recipe.prediction_columns(trainer.predict(splits["test"]).predictions, data)
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
    by_group = {"by": "group", "column": "house", "test": 0.25, "validation": 0.0}
    _, splits, data = TABLE.prepare(tmp_path, table(), split=by_group)
    houses = {name: {row["row_id"] // 4 for row in rows} for name, rows in splits.items()}
    assert not houses["train"] & houses["test"]
    assert len(houses["test"]) == 3
    assert "house" not in data.info["numbers"], "the column by which rows are grouped is not a feature"
    _, splits, _ = TABLE.prepare(tmp_path, table(), split={**by_group, "by": "time", "test": 0.3})
    # 30 % of 40 rows is 12, which is three whole houses.
    assert min(row["row_id"] for row in splits["test"]) == 28
    assert max(row["row_id"] for row in splits["train"]) == 27


def test_files_and_a_column_give_the_splits(tmp_path: Path) -> None:
    head, *lines = table().splitlines()
    train = written(tmp_path / "train.csv", "\n".join([head, *lines[:30]]))
    test = written(tmp_path / "test.csv", "\n".join([head, *lines[30:]]))
    files = {"train": train, "test": test}
    _, splits, _ = prepared("tabular-classification", tmp_path, [tmp_path], label="answer", files=files)
    assert {name: len(rows) for name, rows in splits.items()} == {"train": 30, "test": 10}
    assert splits["test"][0]["row_id"] == 30
    marked = [f"{line},{'train' if row % 5 else 'test'}" for row, line in enumerate(lines)]
    folds = "\n".join([f"{head},fold", *marked])
    _, splits, _ = TABLE.prepare(tmp_path, folds, split={"by": "column", "column": "fold"})
    assert {name: len(rows) for name, rows in splits.items()} == {"train": 32, "test": 8}


# -- features ---------------------------------------------------------------------------------------------------------
def test_the_network_takes_missing_numbers_and_texts_that_it_has_not_seen() -> None:
    net = TabularNet({"b": [3.0, 2.0], "a": [0.0, 1.0]}, {"t": ["x", "y"]}, 2, [8], 0.0).eval()
    assert net.mean.tolist() == [0.0, 3.0], "columns go by name, so new rows may have any order"
    texts = torch.tensor([[text_code(text)] for text in ("x", "y", "new", "newer")])
    found = net(torch.tensor([[0.0, 3.0]] * 4), texts)["logits"]
    assert not torch.allclose(found[0], found[1])
    # Not bit by bit: which kernel multiplies a row depends on the processor and on the row's place.
    assert torch.allclose(found[2], found[3]), "both are unknown"
    gap = net(torch.tensor([[math.nan, 3.0], [0.0, 3.0]]), texts[:2])["logits"]
    assert torch.isfinite(gap).all()


def test_a_package_that_is_declared_as_a_source_is_no_table(tmp_path: Path) -> None:
    error = refusal(lambda: prepare_sources("tabular-classification", ["package:numpy"], {"label": "a"}, tmp_path))
    assert (error.field, error.message) == ("prepare.sources", "There is nothing to read.")


def test_numbers_can_be_names_columns_renamed_and_gaps_filled(tmp_path: Path) -> None:
    given = {"label": "truth", "rename": {"answer": "truth"}, "categorical": ["house"], "missing": "mean"}
    _, splits, data = TABLE.prepare(tmp_path, table().replace("1,red,yes,0", ",red,yes,0", 1), **given)
    assert data.info["label"] == "truth"
    assert set(data.info["texts"]) == {"colour", "house"}
    rows = {row["row_id"]: row for part in splits.values() for row in part}
    assert math.isnan(rows[1]["size"])
    assert rows[5]["house"] == "1"


# -- series: windows of time -----------------------------------------------------------------------------------------
def counted(steps: int = 30, **more: int) -> str:
    """A series whose value is its time; those of `more` are it shifted by a number."""
    names = more or {"": 0}
    rows = [f"{step},{step + shift},{name},{step % 7}" for name, shift in names.items() for step in range(steps)]
    return "\n".join(["t,y,who,day", *rows]) + "\n"


def test_a_linear_model_beats_both_naive_forecasts_of_the_sea(tmp_path: Path) -> None:
    split, sea = {"validation": 0.1, "test": 0.3}, read_sample("elnino.csv")
    made = recipe, splits, data = SERIES.prepare(tmp_path, sea, **SEA, split=split)
    trainer = trained(made, tmp_path / "run", {}, 150, per_device_train_batch_size=32, learning_rate=1e-2)
    measured = trainer.evaluate(eval_dataset=splits["test"])
    assert measured["eval_mase_below_naive"] > 0.5
    assert measured["eval_mase_below_seasonal"] > 0.1
    assert measured["eval_loss"] > 0
    # Each month of each window is a point of the picture of residuals.
    output = trainer.predict(splits["test"])
    pairs = recipe.outcome_pairs(EvalPrediction(output.predictions, output.label_ids), data)
    assert pairs is not None
    assert pairs["labels"] == pytest.approx(np.concatenate([row["labels"].reshape(-1) for row in splits["test"]]))
    assert np.abs(pairs["predictions"] - pairs["labels"]).mean() == pytest.approx(measured["eval_mae"], rel=1e-5)
    assert pairs["rows"].tolist()[:7] == [0] * 6 + [1]
    # A new row is a history and nothing else.
    history = [{"temperature": splits["test"][0]["temperature"]}]
    columns = recipe.prediction_columns(trainer.predict(history).predictions, data)
    assert np.asarray(columns["temperature_forecast"]).shape == (1, 6)


def test_no_target_of_a_held_out_window_is_a_target_of_training(tmp_path: Path) -> None:
    _, splits, data = SERIES.prepare(tmp_path, counted(), split={"validation": 0.2, "test": 0.2})
    targets = {name: [row["labels"][:, 0].tolist() for row in rows] for name, rows in splits.items()}
    # 30 steps: 18 to train on, 6 and 6 held out, each value of which is forecast once.
    assert targets["train"][0] == [4, 5]
    assert targets["train"][-1] == [16, 17]
    assert len(targets["train"]) == 13
    assert targets["validation"] == [[18, 19], [20, 21], [22, 23]]
    assert targets["test"] == [[24, 25], [26, 27], [28, 29]]
    assert splits["test"][0]["y"].tolist() == [20, 21, 22, 23], "what is known may be of an earlier split"
    assert splits["test"][0]["time"] == "24"
    assert data.info["split_starts"] == {"train": "0.0", "validation": "18.0", "test": "24.0"}
    ids = [row["row_id"] for rows in splits.values() for row in rows]
    assert ids == list(range(len(ids)))


def test_series_are_cut_at_the_same_time_and_have_a_unit_of_their_own(tmp_path: Path) -> None:
    text = counted(30, ada=0, bea=1000).replace(",1010,", ",1500,")
    split = {"validation": 0.0, "test": 0.2}
    made = recipe, splits, data = SERIES.prepare(tmp_path, text, series="who", known=["day"], stride=3, split=split)
    assert {row["series"] for row in splits["test"]} == {"ada", "bea"}
    assert {row["time"] for row in splits["test"]} == {"24", "26", "28"}
    assert splits["train"][0]["day"].tolist() == [0, 1, 2, 3, 4, 5], "a covariate is known for the horizon, too"
    scales = {row["series"]: row["scale"][0] for row in splits["train"]}
    assert scales["ada"] == 1
    assert scales["bea"] > 20
    batch = collate_of(made)(splits["test"][:2])
    assert batch["past"].shape == (2, 4, 1)
    assert batch["known"].shape == (2, 6, 1)
    assert batch["labels"].shape == (2, 4, 2, 1)
    outputs = recipe.build_model({"hidden": [8]}, data)(past=batch["past"], known=batch["known"])
    assert outputs["logits"].shape == (2, 2, 1)


def test_naive_forecasts_repeat_the_last_value_and_the_last_season(tmp_path: Path) -> None:
    made = recipe, splits, _ = SERIES.prepare(tmp_path, counted(), season=3, horizon=4, held_out_stride=1)
    row = splits["test"][0]
    _, last, season, scale = collate_of(made)([row])["labels"][0, :, :, 0].tolist()
    end = int(row["y"][-1])
    assert last == [end] * 4
    assert season == [end - 2, end - 1, end, end - 2]
    assert scale == [3.0] * 4, "a count errs by three after three steps"
    labels = collate_of(made)(splits["test"])["labels"].numpy()
    assert recipe.compute_metrics is not None
    perfect = recipe.compute_metrics(EvalPrediction(labels[:, 0], labels))
    assert (perfect["mase"], perfect["rmse"], perfect["mae"]) == (0, 0, 0)
    assert perfect["naive_mase"] == pytest.approx((1 + 2 + 3 + 4) / 4 / 3)
    assert perfect["mase_below_seasonal"] == perfect["seasonal_mase"] == pytest.approx((3 + 3 + 3 + 6) / 4 / 3)
    assert recipe.compute_metrics(EvalPrediction(labels[:, 1], labels))["mase_below_naive"] == 0


def test_a_forecast_follows_the_level_of_its_series(tmp_path: Path) -> None:
    made = recipe, splits, data = SERIES.prepare(tmp_path, counted())
    past, model = collate_of(made)(splits["test"])["past"], recipe.build_model({}, data)
    low, high = model(past=past)["logits"], model(past=past * 10 + 500)["logits"]
    torch.testing.assert_close(low * 10 + 500, high)
    flat = model(past=torch.full((1, 4, 1), 7.0))["logits"]
    torch.testing.assert_close(flat, torch.full_like(flat, 7.0), atol=1e-4, rtol=0)


def test_steps_and_values_that_are_missing_are_filled_and_are_no_targets(tmp_path: Path) -> None:
    holes = counted().replace("\n12,12,,5", "").replace("\n13,13,", "\n13,,").replace("\n24,24,", "\n24,,")
    made = recipe, splits, data = SERIES.prepare(tmp_path, holes + "30,,,1\n31,,,2\n", missing="previous")
    assert data.info["filled"] == 3
    assert [11, 11, 11, 14] in [row["y"].tolist() for row in splits["train"]]
    assert [row["time"] for row in splits["test"]] == ["24", "26", "28"], "steps without a target are to come"
    assert "12" not in [row["time"] for row in splits["train"]], "no target of 12 and 13 was measured"
    # Against arithmetic: a forecast of 0 errs by each measured value, in the unit of the pairs that were measured.
    labels = collate_of(made)(splits["test"])["labels"]
    truth = np.array([25, 26, 27, 28, 29])
    assert labels[:, 0].numpy().ravel() == pytest.approx([np.nan, *truth], nan_ok=True)
    assert splits["test"][0]["scale"] == 1
    assert recipe.compute_metrics is not None and recipe.compute_loss_func is not None
    evaluation = EvalPrediction(np.zeros((3, 2, 1)), labels.numpy())
    measured = recipe.compute_metrics(evaluation)
    assert measured["mae"] == pytest.approx(truth.mean()) and measured["rmse"] == pytest.approx(
        (truth**2).mean() ** 0.5
    )
    assert measured["naive_mase"] == pytest.approx((2 + 1 + 2 + 1 + 2) / 5)
    logits = torch.zeros(3, 2, 1, requires_grad=True)
    loss = recipe.compute_loss_func({"logits": logits}, labels)
    loss.backward()
    assert loss.item() == pytest.approx((24.5 + 26 + 28) / 3), "rows count alike in batches of any size"
    assert logits.grad is not None
    assert logits.grad.ravel().tolist() == pytest.approx([0, -1 / 3, *[-1 / 6] * 4])
    pairs = recipe.outcome_pairs(evaluation, data)
    assert pairs is not None
    assert (pairs["labels"].tolist(), pairs["rows"].tolist()) == (truth.tolist(), [0, 1, 1, 2, 2])
    trainer = trained(made, tmp_path / "run", {}, 20, learning_rate=1e-2)
    assert math.isfinite(trainer.evaluate(eval_dataset=splits["test"])["eval_loss"])


def test_a_level_that_32_bits_round_is_named(tmp_path: Path) -> None:
    lines = "".join(f"{step},{10**9 + step % 5},{10**9}\n" for step in range(30))
    (tmp_path / "data.csv").write_text("t,y,same\n" + lines)
    out = PrepareOutput(Store.open(tmp_path / "out"), [str(tmp_path / "data.csv")], ())
    load(recipe_file("time-series-forecasting"), tmp_path).prepare({**COUNT, "known": ["same"]}, out)
    assert [text.partition(" differ")[0] for text in out.warnings] == ["The numbers of the column 'y'"]


def test_times_with_a_zone_are_named_in_utc(tmp_path: Path) -> None:
    hours = "".join(f"2024-03-31T{hour:02}:00:00+02:00,{hour}\n" for hour in range(24))
    _, splits, _ = SERIES.prepare(tmp_path, "t,y\n" + hours)
    assert (splits["test"][0]["time"], splits["test"][0]["labels"][0, 0]) == ("2024-03-31T17:00:00Z", 19)
