"""Options that a recipe never reads are named, unless they may be read in a way that does not show."""

from __future__ import annotations

from pathlib import Path

import pytest

from tasks.configs import PrepareConfig, TrainConfig
from tasks.stage.options_read import warn_of_unread
from tasks.stage.resolver import Resolver

SPELT = "def prepare(options, out):\n    return rows(options['rows'], options.get('seed', 1))\n\ndef rows(n, s): ...\n"


def warnings(folder: Path, recipe: str) -> list[str]:
    (folder / "recipe.py").write_text(recipe)
    code = Resolver().code(folder / "recipe.py", None, folder)
    config = PrepareConfig(options={"row": 1, "seed": 2})
    return list(warn_of_unread("prepare-data", "prepare", config, code))


def test_an_option_that_is_never_read_is_named_with_the_nearest_that_is(tmp_path: Path) -> None:
    [warning] = warnings(tmp_path, SPELT)
    assert warning == "The recipe never reads prepare.options.row. Did you mean 'rows'?"


@pytest.mark.parametrize(
    "body",
    [
        "print(options)",
        "f(**options)",
        "[options[n] for n in names]",
        "dict(options)",
        "options.items()",
        "eval('options')",
    ],
)
def test_options_that_are_handed_on_as_a_whole_may_all_be_read(tmp_path: Path, body: str) -> None:
    assert warnings(tmp_path, f"def prepare(options, out):\n    {body}\n") == []


def test_options_without_a_function_that_takes_them_are_never_read(tmp_path: Path) -> None:
    (tmp_path / "recipe.py").write_text(SPELT)
    code = Resolver().code(tmp_path / "recipe.py", None, tmp_path)
    config = TrainConfig(options={"patience": 3})
    assert list(warn_of_unread("train", "train", config, code)) == ["The recipe never reads train.options.patience."]
