"""The recipe time-series-forecasting: windows without a look ahead, naive forecasts beside it, and what it refuses."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from flows.new_project.starter_data import elnino
from trainer_lib import EvalPrediction, Trainer, TrainingArguments
from trainer_lib.errors import ConfigError, DataError, TrainflowError
from trainer_lib.recipe_names import recipe_file
from trainer_lib.recipes import DataInfo, PrepareOutput, Recipe, load
from trainer_lib.storage import Store

SEA: dict[str, Any] = {"time": "month", "target": "temperature", "context": 36, "horizon": 6, "season": 12}
COUNT: dict[str, Any] = {"time": "t", "target": "y", "context": 4, "horizon": 2, "split": {"validation": 0.2}}
Splits = dict[str, list[dict[str, Any]]]


def prepared(where: Path, content: str, /, **options: Any) -> tuple[Recipe, Splits, DataInfo]:
    (where / "series.csv").write_text(content)
    recipe = load(recipe_file("time-series-forecasting"), where)
    out = PrepareOutput(Store.open(where / "out"), [str(where / "series.csv")])
    splits = {name: [dict(row) for row in rows] for name, rows in recipe.prepare(options, out).items()}
    rows = {name: {"rows": len(each)} for name, each in splits.items()}
    return recipe, splits, DataInfo({"url": "", "info": out.checked_info(), "splits": rows, "files": []})


def counted(steps: int = 30, **more: int) -> str:
    """A series whose value is its time; those of `more` are it shifted by a number."""
    names = more or {"": 0}
    rows = [f"{step},{step + shift},{name},{step % 7}" for name, shift in names.items() for step in range(steps)]
    return "\n".join(["t,y,who,day", *rows]) + "\n"


def refused(where: Path, content: str, /, **options: Any) -> TrainflowError:
    with pytest.raises(TrainflowError) as caught:
        prepared(where, content, **{**COUNT, **options})
    assert isinstance(caught.value, ConfigError | DataError)
    assert caught.value.remedy, "every refusal says what to do"
    return caught.value


# -- what it makes of a real series -----------------------------------------------------------------------------------


def test_a_linear_model_beats_both_naive_forecasts_of_the_sea(tmp_path: Path) -> None:
    recipe, splits, data = prepared(tmp_path, elnino(), **SEA, split={"validation": 0.1, "test": 0.3})
    torch.manual_seed(0)
    collate = recipe.collate_with(data)
    trainer = Trainer(
        model=recipe.build_model({}, data),
        args=TrainingArguments(
            output_dir=str(tmp_path / "run"),
            max_steps=150,
            per_device_train_batch_size=32,
            learning_rate=1e-2,
            remove_unused_columns=False,
            report_to="none",
            save_strategy="no",
            disable_tqdm=True,
            use_cpu=True,
        ),
        data_collator=collate,
        train_dataset=splits["train"],
        compute_metrics=recipe.compute_metrics,
        compute_loss_func=recipe.compute_loss_func,
    )
    trainer.train()
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


# -- windows ----------------------------------------------------------------------------------------------------------


def test_no_target_of_a_held_out_window_is_a_target_of_training(tmp_path: Path) -> None:
    _, splits, data = prepared(tmp_path, counted(), **{**COUNT, "split": {"validation": 0.2, "test": 0.2}})
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
    options = {**COUNT, "series": "who", "known": ["day"], "stride": 3, "split": {"validation": 0.0, "test": 0.2}}
    recipe, splits, data = prepared(tmp_path, text, **options)
    assert {row["series"] for row in splits["test"]} == {"ada", "bea"}
    assert {row["time"] for row in splits["test"]} == {"24", "26", "28"}
    assert splits["train"][0]["day"].tolist() == [0, 1, 2, 3, 4, 5], "a covariate is known for the horizon, too"
    scales = {row["series"]: row["scale"][0] for row in splits["train"]}
    assert scales["ada"] == 1
    assert scales["bea"] > 20
    collate = recipe.collate_with(data)
    assert collate is not None
    batch = collate(splits["test"][:2])
    assert batch["past"].shape == (2, 4, 1)
    assert batch["known"].shape == (2, 6, 1)
    assert batch["labels"].shape == (2, 4, 2, 1)
    outputs = recipe.build_model({"hidden": [8]}, data)(past=batch["past"], known=batch["known"])
    assert outputs["logits"].shape == (2, 2, 1)


def test_naive_forecasts_repeat_the_last_value_and_the_last_season(tmp_path: Path) -> None:
    options = {**COUNT, "season": 3, "horizon": 4, "held_out_stride": 1}
    recipe, splits, data = prepared(tmp_path, counted(), **options)
    collate = recipe.collate_with(data)
    assert collate is not None
    row = splits["test"][0]
    _, last, season, scale = collate([row])["labels"][0, :, :, 0].tolist()
    end = int(row["y"][-1])
    assert last == [end] * 4
    assert season == [end - 2, end - 1, end, end - 2]
    assert scale == [3.0] * 4, "a count errs by three after three steps"
    labels = collate(splits["test"])["labels"].numpy()
    assert recipe.compute_metrics is not None
    perfect = recipe.compute_metrics(EvalPrediction(labels[:, 0], labels))
    assert (perfect["mase"], perfect["rmse"], perfect["mae"]) == (0, 0, 0)
    assert perfect["naive_mase"] == pytest.approx((1 + 2 + 3 + 4) / 4 / 3)
    assert perfect["mase_below_seasonal"] == perfect["seasonal_mase"] == pytest.approx((3 + 3 + 3 + 6) / 4 / 3)
    repeated = recipe.compute_metrics(EvalPrediction(labels[:, 1], labels))
    assert repeated["mase_below_naive"] == 0


def test_a_forecast_follows_the_level_of_its_series(tmp_path: Path) -> None:
    recipe, splits, data = prepared(tmp_path, counted(), **COUNT)
    collate = recipe.collate_with(data)
    assert collate is not None
    past = collate(splits["test"])["past"]
    model = recipe.build_model({}, data)
    low, high = model(past=past)["logits"], model(past=past * 10 + 500)["logits"]
    torch.testing.assert_close(low * 10 + 500, high)
    flat = model(past=torch.full((1, 4, 1), 7.0))["logits"]
    torch.testing.assert_close(flat, torch.full_like(flat, 7.0), atol=1e-4, rtol=0)


# -- what is refused, and what is filled ------------------------------------------------------------------------------


def test_a_time_that_is_there_twice_or_off_the_grid_is_refused(tmp_path: Path) -> None:
    error = refused(tmp_path, counted() + "7,99,x,1\n")
    assert "row 30 (line 32): the time 7 is that of" in error.message and "row 7 (line 9)" in error.message
    assert "prepare.options.series=NAME" in str(error.remedy)
    error = refused(tmp_path, counted().replace("\n12,", "\n12.5,"))
    assert "row 12 (line 14): the time 12.5 is not on the grid that begins at 0 and has a step of 1" in error.message
    months = elnino().replace("1960-03-01", "1960-03-05")
    error = refused(tmp_path, months, **SEA)
    assert "the time 1960-03-05 is not on the grid" in error.message
    error = refused(tmp_path, elnino().replace("1960-03-01", "March 1960"), **SEA)
    assert "column 'month': 'March 1960' is not a time" in error.message
    assert "not a step of time" in refused(tmp_path, elnino(), **SEA, step="moon").message


def test_steps_and_values_that_are_missing_are_refused_or_filled_with_what_was_before(tmp_path: Path) -> None:
    holes = counted().replace("\n12,12,,5", "").replace("\n13,13,", "\n13,,")
    assert "column 'y': there is no value, as in 1 of 29 rows" in refused(tmp_path, holes).message
    gap = counted().replace("\n12,12,,5", "")
    assert "row 12 (line 14): before this row the table lacks 1 steps, and 1 in all" in refused(tmp_path, gap).message
    _, splits, data = prepared(tmp_path, holes, **COUNT, missing="previous")
    assert data.info["filled"] == 2
    assert [11, 11, 11, 14] in [row["y"].tolist() for row in splits["train"]]
    assert not any(math.isnan(value) for row in splits["train"] for value in row["y"].tolist())
    month = next(line for line in elnino().splitlines() if line.startswith("1960-03-01"))
    months = elnino().replace(f"{month}\n", "")
    for step in (None, "MS"):
        assert "lacks 1 steps" in refused(tmp_path, months, **SEA, step=step).message
    first = counted().replace("\n0,0,", "\n0,,")
    assert "the first value is missing" in refused(tmp_path, first, missing="previous").message


def test_a_series_that_is_too_short_and_wrong_options_are_refused(tmp_path: Path) -> None:
    assert "has 30 steps, and a window needs 42" in refused(tmp_path, counted(), context=40).message
    error = refused(tmp_path, counted(12), split={"validation": 0.1, "test": 0.2})
    assert "The split 'validation' has 1 steps, and no window of 2 targets fits into it" in error.message
    assert "behind 4 known ones" in refused(tmp_path, counted(12), split={"validation": 0.3, "test": 0.3}).message
    assert refused(tmp_path, counted(), split={"by": "random"}).value == "random"
    assert "Nothing is left" in refused(tmp_path, counted(), split={"validation": 0.5, "test": 0.5}).message
    assert "does not fit into a context of 4" in refused(tmp_path, counted(), season=5).message
    assert "where the times are" in refused(tmp_path, counted(), time=None).message
    assert "what to forecast" in refused(tmp_path, counted(), target=None).message
    assert refused(tmp_path, counted(), target="Y").remedy == 'Did you mean "y"?'
    assert refused(tmp_path, counted(), horizn=3).remedy == 'Did you mean "horizon"?'
    assert "A column has one use" in refused(tmp_path, counted(), known=["y"]).message
    assert "holds texts" in refused(tmp_path, counted(ada=0, bea=5), known=["who"], series=None).message
    late = counted(30, ada=0) + "".join(f"{step},{step},bea,1\n" for step in range(20, 30))
    assert "'bea' has 0 steps to train on" in refused(tmp_path, late, series="who", season=1).message
