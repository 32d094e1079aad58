"""Scripts written for the Trainer of transformers: only the import line of Trainer and TrainingArguments changes.

Every script runs as a program on both sides, with the same model, data and arguments: it trains, evaluates, predicts,
saves, writes its model card, and runs once more from a checkpoint.
"""

from __future__ import annotations

from typing import Any

import pytest

from tests.support import client_table
from tests.support.clients import Runs
from tests.support.script_runs import SCRIPTS, SETS, official_folder, run_set, swap_imports


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Runs:
    return run_set("own", SCRIPTS, tmp_path_factory.mktemp("scripts"))


@pytest.fixture(scope="module")
def official(tmp_path_factory: pytest.TempPathFactory) -> Runs:
    folder = official_folder()
    assert folder is not None
    return run_set("official", folder, tmp_path_factory.mktemp("official"))


def _check(title: str, found: Runs, *, names_only: bool = False) -> None:
    ours, theirs = found.ours[title], found.transformers[title]
    assert client_table.differences(ours, theirs, names_only=names_only) == []
    results = [[{**outcome["results"], "step": 0}] for outcome in (ours, theirs)]
    assert client_table.log_differences(*results, names_only=names_only) == []
    assert ours["weights"].keys() == theirs["weights"].keys()
    assert set(theirs["files"]) - set(ours["files"]) == {"training_args.bin"}  # a pickle: ours is training_args.json


@pytest.mark.parametrize("title", [script.title for script in SETS["own"]])
def test_a_script_does_what_it_does_with_transformers_and_what_its_row_in_the_documentation_says(
    title: str, runs: Runs
) -> None:
    _check(title, runs)
    row = client_table.row(title, runs.ours[title], runs.transformers[title])
    assert row in client_table.PAGE.read_text(encoding="utf-8").splitlines()


@pytest.mark.needs("examples")
@pytest.mark.parametrize("script", SETS["official"], ids=lambda script: script.title)
def test_an_official_script_does_what_it_does_with_transformers(script: Any, official: Runs) -> None:
    _check(script.title, official, names_only=script.draws)


def test_only_the_import_line_of_a_script_changes_and_every_program_is_run() -> None:
    for path in SCRIPTS.glob("*.py"):
        before = path.read_text(encoding="utf-8")
        changed = [line for line in swap_imports(before).splitlines() if line and line not in before.splitlines()]
        assert all(line.startswith(("from transformers import ", "from trainer_lib import ")) for line in changed)
    swapped = swap_imports("import os\nfrom transformers import (\n    AutoModel,\n    Trainer,\n)\nx = 1\n")
    assert swapped == "import os\nfrom transformers import AutoModel\nfrom trainer_lib import Trainer\nx = 1\n"
    programs = {path.name for path in SCRIPTS.glob("*.py") if "__main__" in path.read_text(encoding="utf-8")}
    assert programs == {script.path for script in SETS["own"]}
