"""Recipes: loaded from where they lie, filled up with defaults, their results checked, their errors the user's own."""

from __future__ import annotations

import functools
import os
import pickle
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest

from trainer_lib.errors import CodeError, ConfigError, DataError, OutOfMemoryError, TrainflowError
from trainer_lib.protocol.recipe_functions import as_measurements, user_error
from trainer_lib.recipes import DataInfo, PrepareOutput, Recipe, default_prediction_columns, load
from trainer_lib.storage import Store

MINIMAL = (
    "def prepare(options, out):\n    return {'train': [{'x': 1}]}\n\ndef build_model(options, data):\n    return 7\n"
)


@pytest.fixture(autouse=True)
def _module_path() -> Iterator[None]:
    before, modules = list(sys.path), set(sys.modules)
    yield
    sys.path[:] = before
    for name in set(sys.modules) - modules:
        if name.startswith("_trainflow_recipe_") or name in ("tasks_of_mine", "helper_of_mine"):
            del sys.modules[name]


def written(folder: Path, text: str, name: str = "recipe.py") -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / name).write_text(text)
    return folder / name


def loaded(folder: Path, text: str) -> Recipe:
    return load(written(folder, text), folder)


def data(url: str = "", **fields: Any) -> DataInfo:
    return DataInfo({"url": url, "splits": {}, "info": {}, "files": [], **fields})


def test_defaults_of_a_minimal_recipe(tmp_path: Path) -> None:
    recipe = loaded(tmp_path, MINIMAL)
    assert recipe.build_model({}, data()) == 7
    assert recipe.collate is recipe.compute_metrics is recipe.compute_loss_func is recipe.after_evaluate is None
    assert recipe.preprocess_logits_for_metrics is None
    assert recipe.callbacks({}) == []
    assert recipe.trainer_class(dict) is dict


def test_an_edit_of_equal_size_in_the_same_second_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "dont_write_bytecode", False)
    for size in (7, 8):
        path = written(tmp_path, MINIMAL.replace("return 7", f"return {size}"))
        os.utime(path, (1e9, 1e9))
        assert load(path, tmp_path).build_model({}, data()) == size


def test_what_a_recipe_defines_is_used(tmp_path: Path) -> None:
    text = MINIMAL + (
        "def collate(rows):\n    return len(rows)\n"
        "def callbacks(options):\n    return [options['one']]\n"
        "def prediction_columns(predictions, data):\n    return {'twice': predictions * 2}\n"
        "class Trainer(dict):\n    pass\n"
    )
    recipe = loaded(tmp_path, text)
    assert recipe.collate is not None
    assert recipe.collate([1, 2]) == 2
    assert recipe.callbacks({"one": 1}) == [1]
    assert list(recipe.prediction_columns(np.array([1, 2]), data())["twice"]) == [2, 4]
    assert recipe.trainer_class(dict).__name__ == "Trainer"
    imported = loaded(tmp_path / "other", MINIMAL + "from collections import OrderedDict as Trainer\n")
    assert imported.trainer_class(ModuleType) is ModuleType  # not a subclass: some other Trainer it imported
    other = loaded(tmp_path / "third", MINIMAL + "class Trainer: pass\n")
    assert "class Trainer does not derive from" in raised(lambda: other.trainer_class(dict)).message
    assert pickle.loads(pickle.dumps(recipe.collate))([1, 2, 3]) == 3, "as it travels to data workers"


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (MINIMAL.replace("prepare", "something_else"), r"no function prepare\(\)"),
        (MINIMAL.replace("build_model", "something_else"), r"no function build_model\(\)"),
        (MINIMAL + "from operator import add as metric_sums\n", r"metric_sums\(\) of a recipe is not called"),
        (MINIMAL + "collate = 3\n", "The name collate is not a function"),
        (MINIMAL + "def collate(): pass\n", r"cannot be called as collate\(rows\)"),
        (MINIMAL + "collate = lambda: 5\n", r"cannot be called as collate\(rows\)"),
        (None, "There is no such file"),
    ],
)
def test_a_file_that_is_no_recipe_is_refused(tmp_path: Path, text: str | None, words: str) -> None:
    with pytest.raises(ConfigError, match=words) as caught:
        loaded(tmp_path, text) if text else load(tmp_path / "recipe.py", tmp_path)
    assert (caught.value.field, caught.value.value) == ("recipe", str(tmp_path / "recipe.py"))
    assert caught.value.remedy
    loaded(tmp_path, MINIMAL + "from math import sin as compute_metrics\n")  # it takes one argument


# -- errors -----------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("text", "kind", "place"),
    [
        ("x = 1\ndef prepare(:\n", "SyntaxError", "2 in the file itself"),
        ("def half():\n    return 1 / 0\nhalf()\n", "ZeroDivisionError", "2 in half"),
        (MINIMAL.replace("7", "json.loads('{')") + "import json\n", "JSONDecodeError", "5 in build_model"),
    ],
)
def test_an_error_has_the_users_frames_only(tmp_path: Path, text: str, kind: str, place: str) -> None:
    with pytest.raises(CodeError, match=kind) as caught:
        loaded(tmp_path, text).build_model({}, data())
    assert caught.value.value == f"{tmp_path}/recipe.py:{place}"
    assert not [name for name in ("recipes.py", "json/decoder.py") if name in (caught.value.details or "")]


def test_an_error_of_a_row_generator_is_typed(tmp_path: Path) -> None:
    text = "def prepare(options, out):\n    def rows():\n        yield {'x': 1}\n        raise RuntimeError('dry')\n"
    recipe = loaded(tmp_path, text + "    return {'train': rows()}\ndef build_model(options, data): ...\n")
    rows = iter(recipe.prepare({}, PrepareOutput(Store.open(tmp_path)))["train"])
    assert next(rows) == {"x": 1}
    with pytest.raises(CodeError, match="dry"):
        next(rows)


@pytest.mark.parametrize(
    ("body", "kind", "text"),
    [("import sys; sys.exit(3)", CodeError, "sys.exit"), ("raise MemoryError('big')", OutOfMemoryError, "big")],
)
def test_other_ways_to_fail(tmp_path: Path, body: str, kind: type[Exception], text: str) -> None:
    recipe = loaded(tmp_path, MINIMAL.replace("return 7", body))
    with pytest.raises(kind, match=text):
        recipe.build_model({}, data())


def test_an_error_told_by_a_data_worker_is_read_from_its_message_and_one_from_elsewhere_says_so(tmp_path: Path) -> None:
    told = (
        "Caught ValueError in DataLoader worker process 0.\nOriginal Traceback (most recent call last):\n"
        f'  File "/x/site-packages/torch/fetch.py", line 5, in fetch\n    data = f()\n'
        f'  File "{tmp_path}/recipe.py", line 9, in collate\n    raise ValueError("odd")\nValueError: odd\n'
    )
    error = user_error(ValueError(told), tmp_path)
    assert (error.message, error.value) == ("ValueError: odd", f"{tmp_path}/recipe.py:9 in collate")
    error = user_error(ValueError("inside"), tmp_path)
    assert isinstance(error, CodeError)
    assert "not raised in the recipe" in (error.remedy or "")


# -- where modules are from -------------------------------------------------------------------------------------------
def test_the_projects_root_is_searched_last(tmp_path: Path) -> None:
    written(tmp_path / "project", "VALUE = 5\n", "helper_of_mine.py")
    written(tmp_path / "project", "raise RuntimeError('shadowed')\n", "json.py")
    text = "import json\nfrom helper_of_mine import VALUE\n" + MINIMAL.replace("7", "VALUE")
    assert load(written(tmp_path / "project" / "deep", text), tmp_path / "project").build_model({}, data()) == 5
    assert sys.path[-2:] == [str(tmp_path / "project"), str(tmp_path / "project" / "deep")]


@pytest.mark.parametrize("folder", ["src", "recipes"])
def test_modules_of_src_and_of_the_recipes_folder_are_found(tmp_path: Path, folder: str) -> None:
    written(tmp_path / folder, "VALUE = 5\n", "helper_of_mine.py")
    text = "from helper_of_mine import VALUE\n" + MINIMAL.replace("7", "VALUE")
    home = tmp_path if folder == "src" else tmp_path / folder
    assert load(written(home, text), tmp_path).build_model({}, data()) == 5
    with pytest.raises(CodeError, match=f"'absent_of_mine'.*Modules are found in {tmp_path}, its src"):
        load(written(tmp_path / "other", "import absent_of_mine\n"), tmp_path)


def test_a_package_in_front_of_ours_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    written(tmp_path / "trainflow", "", "__init__.py")
    for name in [name for name in sys.modules if name.partition(".")[0] == "trainflow"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(ConfigError, match="This folder hides trainflow's own package 'trainflow'") as caught:
        loaded(tmp_path / "project", MINIMAL)
    assert caught.value.value == str(tmp_path / "trainflow")


# -- what the functions return ----------------------------------------------------------------------------------------
def raised(call: Callable[[], Any]) -> TrainflowError:
    with pytest.raises(TrainflowError) as caught:
        call()
    error = caught.value
    assert "NoneType" not in str(error)
    assert error.remedy
    return error


@pytest.mark.parametrize(
    ("result", "why"),
    [
        (None, "mapping from split names"),
        (None, "not None"),
        ([1], "not a list"),
        ([{"x": 1}], "mapping from split names"),
        ({}, "mapping from split names"),
        ({"train": 5}, "returned an int for the split 'train'"),
    ],
)
def test_prepare_returns_splits_of_rows(tmp_path: Path, result: object, why: str) -> None:
    recipe = loaded(tmp_path, MINIMAL.replace("{'train': [{'x': 1}]}", repr(result)))
    error = raised(lambda: recipe.prepare({}, PrepareOutput(Store.open(tmp_path))))
    assert isinstance(error, DataError)
    assert why in error.message


GIVEN: dict[str, tuple[Any, ...]] = {"collate": ([],), "compute_loss_func": ({}, None), "callbacks": ({},)}
GIVEN |= {"prediction_columns": (np.zeros(2), data()), "outcome_pairs": (None, data())}


@pytest.mark.parametrize(
    ("function", "result", "why"),
    [
        ("collate(rows)", None, "collate() must return a mapping … returned None"),
        ("compute_loss_func(outputs, labels)", 1.0, "compute_loss_func() must return the loss as a tensor … a float"),
        ("callbacks(options)", None, "must return a list of callbacks, and"),
        ("callbacks(options)", "early", "and returned a str"),
        ("prediction_columns(predictions, data)", None, "a mapping of names to columns, and returned None"),
        ("prediction_columns(predictions, data)", {"p": 1}, "one value per row for 'p', and returned an int"),
        ("outcome_pairs(p)", {"labels": [1]}, "predictions and labels by name, and returned a dict"),
        ("outcome_pairs(p, data)", {"labels": [1], "predictions": [1, 2]}, "returned arrays of different lengths"),
    ],
)
def test_a_wrong_result_is_named(tmp_path: Path, function: str, result: object, why: str) -> None:
    recipe, name = loaded(tmp_path, f"{MINIMAL}def {function}: return {result!r}\n"), function.partition("(")[0]
    error = raised(lambda: getattr(recipe, name)(*GIVEN[name]))
    assert isinstance(error, ConfigError)
    assert all(part in error.message for part in (f"{name}()", *why.split(" … ")))


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
    assert as_measurements({}) == ({}, {})
    assert as_measurements({"metrics": {"a": 1}, "files": {"b": "text"}}) == ({"a": 1.0}, {"b": b"text"})


def test_what_prepare_writes_is_what_data_reads(tmp_path: Path) -> None:
    out = PrepareOutput(Store.open(tmp_path))
    out.write_file("tokenizer/vocab.txt", b"one")
    out.write_file("tokenizer/vocab.txt", b"two")
    out.info["classes"] = ["a", "b"]
    files = [{"path": entry.path, "size": entry.size, "sha256": entry.sha256} for entry in out.files()]
    info = data(str(tmp_path), files=files, info=out.checked_info(), splits={"train": {"rows": 3}})
    assert (len(files), info.read_file("tokenizer/vocab.txt")) == (1, b"two")
    assert (info.info, info.splits) == ({"classes": ["a", "b"]}, {"train": 3})
    with pytest.raises(ConfigError, match="no such file") as caught:
        info.read_file("other.txt")
    assert "tokenizer/vocab.txt" in (caught.value.remedy or "")
    (tmp_path / "assets/tokenizer/vocab.txt").write_bytes(b"2wo")
    with pytest.raises(DataError, match="differs"):
        info.read_file("tokenizer/vocab.txt")


def test_an_attempt_to_write_outside_names_the_call(tmp_path: Path) -> None:
    out = PrepareOutput(Store.open(tmp_path))
    assert raised(lambda: out.write_file("../a", b"x")).field == "out.write_file"
    assert "Encode" in str(raised(functools.partial(out.write_file, "a", "text")).remedy)  # type: ignore[arg-type]


@pytest.mark.parametrize("value", [np.float32(1), float("nan"), object()])
def test_info_must_be_json(tmp_path: Path, value: object) -> None:
    out = PrepareOutput(Store.open(tmp_path))
    out.info["x"] = value
    with pytest.raises(DataError, match="JSON"):
        out.checked_info()


def test_default_prediction_columns() -> None:
    scores = np.array([[0.1, 0.9], [0.8, 0.2]])
    columns = default_prediction_columns(scores, data())
    assert list(columns["prediction"]) == [1, 0]
    assert np.array_equal(np.array(columns["scores"]), scores)
    assert list(default_prediction_columns(np.array([1.5, 2.5]), data())["prediction"]) == [1.5, 2.5]
