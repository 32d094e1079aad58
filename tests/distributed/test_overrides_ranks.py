"""Overridden methods are called on two ranks as on one."""

from __future__ import annotations

from pathlib import Path

from tests.support.distributed import run_distributed
from tests.support.overrides import SURFACE, exercise

# Computed or written by rank 0 for all.
FIRST_RANK = {"_save", "create_model_card", "metrics_format"}


def test_every_overridable_method_is_called_on_both_ranks(tmp_path: Path) -> None:
    first, second = run_distributed(exercise, 2, str(tmp_path))
    assert first == SURFACE["called"]
    assert set(first) - set(second) <= FIRST_RANK
