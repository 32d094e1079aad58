"""Points that a run has already are not written again, whichever request or record brings them."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.support.mlflow_store import fresh_store, points, runs
from trainer_lib.trackers.delivery import Delivery
from trainer_lib.trackers.spool import Session

KEY = "test_accuracy"


def deliver(folder: Path, records: Sequence[Mapping[str, Any]]) -> list[tuple[int, float]]:
    """Deliver records in one pass; return the points that the run has then."""
    uri = fresh_store(folder / "store")
    head = {"tracking_uri": uri, "token": "t", "experiment": "digits", "run_name": "run", "start_ms": 1}
    session = Session.create(folder / "spool", head)
    for record in records:
        session.write({"s": 100, **record})
    session.close()
    assert Delivery(folder / "spool", uri).deliver()
    [run] = runs(uri)
    return points(uri, run.info.run_id, KEY)


@pytest.mark.parametrize("value", [0.98, math.inf])
def test_equal_values_of_several_records_are_one_point(tmp_path: Path, value: float) -> None:
    """They were measured once and told by several tries of a stage, before the server was reached."""
    found = deliver(tmp_path, [{"t": time_ms, "m": {KEY: value}, "once": True} for time_ms in (1, 2, 3)])
    assert len(found) == 1


def test_a_value_measured_again_is_a_point_of_its_own(tmp_path: Path) -> None:
    told = [(1, 0.98), (2, 0.98), (3, 0.99), (4, 0.99)]
    found = deliver(tmp_path, [{"t": time_ms, "m": {KEY: value}, "once": True} for time_ms, value in told])
    assert found == [(100, 0.98), (100, 0.99)]


def test_a_step_that_is_evaluated_beside_the_training_has_one_point_whatever_the_value(tmp_path: Path) -> None:
    told = [{"t": 1, "m": {KEY: 0.5}}, {"t": 2, "m": {KEY: 0.6}, "once": "step"}]
    assert deliver(tmp_path, told) == [(100, 0.5)]
