"""Many random edits of recipes: no result is kept that would change, and a plan says what the run then does."""

from __future__ import annotations

import tempfile
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.support.recipe_edits import Counts, check, compare_plans_with_runs
from trainflow.flows.spec import checks


@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck), derandomize=True)
@given(st.integers(1 << 20, 1 << 40))
def test_no_edit_that_changes_an_output_keeps_its_key(seed: int) -> None:
    with tempfile.TemporaryDirectory() as folder:
        check(seed, Path(folder), Counts())


@pytest.mark.parametrize("seed", range(4))
def test_the_plan_is_what_the_run_does(tmp_path: Path, seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    # The random functions take one argument; how a recipe's functions are called is not the question here.
    monkeypatch.setattr(checks, "check_definitions", lambda *_, **__: None)
    assert compare_plans_with_runs(tmp_path, seed, most=12) > 4
