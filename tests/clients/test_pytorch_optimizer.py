"""Every optimizer of pytorch_optimizer that works on a CPU is restored as if it was never saved, or refused."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.support.clients import run_module

pytestmark = [pytest.mark.needs("clients"), pytest.mark.timeout(900)]


def test_a_restored_optimizer_trains_as_one_that_was_never_saved(tmp_path: Path) -> None:
    done = run_module("tests.support.optimizer_cases", str(tmp_path / "answer.json"), output=tmp_path)
    assert done.returncode == 0, done.stderr[-4000:]
    outcomes = json.loads((tmp_path / "answer.json").read_text(encoding="utf-8"))
    kinds = {name: outcome.split(":")[0] for name, outcome in outcomes.items()}
    assert [name for name, kind in kinds.items() if kind not in ("equal", "refused", "not made")] == []
    # Objects of a class of theirs cannot be saved without pickle.
    assert {name.split(",")[0] for name, kind in kinds.items() if kind == "refused"} <= {"conda", "scalableshampoo"}
    assert sum(kind == "equal" for kind in kinds.values()) > 700
