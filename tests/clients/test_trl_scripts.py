"""TRL's own scripts, started by their command lines, log and write what they do on the Trainer of transformers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.support import client_table
from tests.support.clients import run_module
from tests.support.trl_scripts import SCRIPTS

pytestmark = [pytest.mark.needs("clients"), pytest.mark.timeout(600)]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    made = {side: tmp_path_factory.mktemp(side) for side in ("ours", "transformers")}
    for side, folder in made.items():
        done = run_module("tests.support.trl_scripts", side, str(folder), output=folder)
        assert done.returncode == 0, done.stderr[-4000:]
    return made


def _logged(folder: Path) -> list[dict[str, Any]]:
    state = json.loads((folder / "checkpoint-4" / "trainer_state.json").read_text(encoding="utf-8"))
    history: list[dict[str, Any]] = state["log_history"]
    return history


@pytest.mark.parametrize("script", SCRIPTS)
def test_a_script_logs_the_same_names_and_figures(script: str, folders: dict[str, Path]) -> None:
    ours, theirs = (_logged(folders[side] / script) for side in ("ours", "transformers"))
    assert len(theirs) == 6
    assert client_table.log_differences(ours, theirs) == []


@pytest.mark.parametrize("script", SCRIPTS)
def test_a_script_leaves_the_same_model_behind(script: str, folders: dict[str, Path]) -> None:
    ours, theirs = (folders[side] / script for side in ("ours", "transformers"))
    assert {each.name for each in ours.iterdir()} == {each.name for each in theirs.iterdir()} ^ {
        "training_args.bin",
        "training_args.json",
    }
