"""What a recipe's functions return by mistake, in words that name the function."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from trainer_lib.errors import ConfigError, DataError, TrainflowError
from trainer_lib.recipe_functions import as_measurements
from trainer_lib.recipes import DataInfo, PrepareOutput, Recipe, load
from trainer_lib.storage import Store

MINIMAL = "def prepare(options, out):\n    {prepare}\n\n\ndef build_model(options, data):\n    return 7\n"
NO_DATA = DataInfo({"url": "", "splits": {}, "info": {}, "files": []})


def recipe(folder: Path, text: str = "", prepare: str = "return {'train': []}") -> Recipe:
    (folder / "recipe.py").write_text(MINIMAL.format(prepare=prepare) + text)
    return load(folder / "recipe.py", folder)


def raised(call: Callable[[], Any]) -> TrainflowError:
    with pytest.raises(TrainflowError) as caught:
        call()
    error = caught.value
    assert "NoneType" not in str(error)
    assert error.remedy
    return error


@pytest.mark.parametrize(
    ("body", "why"),
    [
        ("return None", "not None"),
        ("return [1]", "not a list"),
        ("return {'train': 5}", "returned an int for the split 'train'"),
    ],
)
def test_prepare_returns_splits_of_rows(tmp_path: Path, body: str, why: str) -> None:
    one = recipe(tmp_path, prepare=body)
    error = raised(lambda: one.prepare({}, PrepareOutput(Store.open(tmp_path))))
    assert isinstance(error, DataError)
    assert why in error.message


@pytest.mark.parametrize(
    ("text", "call", "why"),
    [
        ("def collate(rows): pass", lambda one: one.collate([]), "collate() must return a mapping .* returned None"),
        (
            "def compute_loss_func(outputs, labels): return 1.0",
            lambda one: one.compute_loss_func({}, None),
            "compute_loss_func() must return the loss as a tensor, and returned a float",
        ),
        ("def callbacks(options): pass", lambda one: one.callbacks({}), "must return a list of callbacks, and"),
        ("def callbacks(options): return 'early'", lambda one: one.callbacks({}), "and returned a str"),
        (
            "def prediction_columns(predictions, data): pass",
            lambda one: one.prediction_columns(np.zeros(2), NO_DATA),
            "must return a mapping of names to columns, and returned None",
        ),
        (
            "def prediction_columns(predictions, data): return {'p': 1}",
            lambda one: one.prediction_columns(np.zeros(2), NO_DATA),
            "must return one value per row for 'p', and returned an int",
        ),
        (
            "def outcome_pairs(p): return {'labels': [1]}",
            lambda one: one.outcome_pairs(None, NO_DATA),
            "must return predictions and labels by name, and returned a dict",
        ),
        (
            "def outcome_pairs(p, data): return {'labels': [1], 'predictions': [1, 2]}",
            lambda one: one.outcome_pairs(None, NO_DATA),
            "outcome_pairs() returned arrays of different lengths",
        ),
        ("class Trainer: pass", lambda one: one.trainer_class(dict), "class Trainer does not derive from"),
    ],
)
def test_a_wrong_result_is_named(tmp_path: Path, text: str, call: Callable[[Recipe], Any], why: str) -> None:
    one = recipe(tmp_path, text + "\n")
    error = raised(lambda: call(one))
    assert isinstance(error, ConfigError)
    start, _, rest = why.partition(" .* ")
    assert start in error.message
    assert rest in error.message


@pytest.mark.parametrize(
    ("result", "why"),
    [
        (None, "metrics and files by name, and returned None"),
        ([1], "and returned a list"),
        ({"accuracy": 1}, "unknown keys"),
        ({"metrics": 5}, "metrics and files by name"),
        ({"metrics": {"a": "b"}}, "a number for 'a', and returned a str"),
        ({"files": {"a": 5}}, "bytes or text for the file 'a', and returned an int"),
    ],
)
def test_measurements_after_evaluation(result: Any, why: str) -> None:
    assert why in raised(lambda: as_measurements(result)).message


def test_measurements_and_files_may_be_left_out() -> None:
    assert as_measurements({}) == ({}, {})
    assert as_measurements({"metrics": {"a": 1}, "files": {"b": "text"}}) == ({"a": 1.0}, {"b": b"text"})


def test_an_attempt_to_write_outside_names_the_call(tmp_path: Path) -> None:
    out = PrepareOutput(Store.open(tmp_path))
    assert raised(lambda: out.write_file("../a", b"x")).field == "out.write_file"
    assert "Encode" in str(raised(functools.partial(out.write_file, "a", "text")).remedy)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "text", ["def collate(): pass", "collate = lambda: 5", "from math import sin as compute_metrics"]
)
def test_a_signature_is_checked_when_the_recipe_is_loaded(tmp_path: Path, text: str) -> None:
    if text.startswith("from math"):
        recipe(tmp_path, text + "\n")  # it takes one argument
        return
    assert "cannot be called as collate(rows)" in raised(lambda: recipe(tmp_path, text + "\n")).message
