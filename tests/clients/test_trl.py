"""TRL's trainers do on our Trainer what they do on that of transformers: names, figures, checkpoints, models."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support import client_table
from tests.support.clients import Runs, run_cases, run_side
from tests.support.trl_cases import CASES

pytestmark = [pytest.mark.needs("clients"), pytest.mark.timeout(600)]
NAMES = [case.name for case in CASES]


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Runs:
    return run_cases("TRL", tmp_path_factory.mktemp("trl"))


@pytest.mark.parametrize("name", NAMES)
def test_it_trains_evaluates_saves_resumes_and_loads(name: str, runs: Runs) -> None:
    ours, theirs = runs.ours[name], runs.transformers[name]
    assert (ours["errors"], theirs["errors"]) == ({}, {})
    assert client_table.log_differences(ours["logs"], theirs["logs"]) == []
    assert client_table.resumed_differences(ours) == []
    assert ours["loaded"] == 0


@pytest.mark.parametrize("name", NAMES)
def test_its_row_in_the_documentation_is_what_happened(name: str, runs: Runs) -> None:
    row = client_table.row(name, runs.ours[name], runs.transformers[name])
    assert row in client_table.PAGE.read_text(encoding="utf-8").splitlines()


def test_what_the_compatibility_page_says_it_was_tried_with_has_run(runs: Runs) -> None:
    assert client_table.unfounded_claims("TRL", runs.names) == []


def test_two_processes_train_like_one(runs: Runs, tmp_path: Path) -> None:
    name = "SFTTrainer, conversations"
    both = run_side("TRL", "ours", tmp_path / "both", only=name, processes=2)["outcomes"][name]
    assert both["errors"] == {}
    assert client_table.resumed_differences({"resumed": both["logs"], "logs": runs.ours[name]["logs"]}) == []
    assert client_table.resumed_differences(both) == []
