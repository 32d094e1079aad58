"""Which points its MLflow run has already: from another session, an earlier command, or a request without an answer.

A point keeps the timestamp of its record however often it is sent, and a database has a point of one key, time, step
and value once. So a request without an answer that arrives after it was repeated adds nothing.
"""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

from trainer_lib.trackers import mlflow_client as calls
from trainer_lib.trackers.mlflow_client import GoneError, Point
from trainer_lib.trackers.spool import Session

if TYPE_CHECKING:
    from mlflow import MlflowClient


class Repeats:
    """The points of a session that the run has from another session: a resumed training repeats some steps.

    What is not behind the run's last step is one of them. If the run's last point is the later one in time, another
    machine has gone on before this session was delivered: then the run's own steps decide.
    """

    def __init__(self, client: MlflowClient, run_id: str, session: Session) -> None:
        self._client = client
        self._run_id = run_id
        self._steps: dict[str, set[int]] = {}
        is_resumable = bool(session.head.get("dedupe"))
        self._may_be_late = is_resumable and session.over  # no other process goes on while this one lives
        if session.state.floor is None and is_resumable:
            session.state.floor = {key: point.step for key, point in self._latest.items()}
            session.save_state()
        self._floor = session.state.floor or {}

    def __contains__(self, point: Point) -> bool:
        if not self._may_be_late or not self._is_late(point):
            return point.step <= self._floor.get(point.key, -1)
        if point.key not in self._steps:
            self._steps[point.key] = calls.known_steps(self._client, self._run_id, point.key)
        return point.step in self._steps[point.key]

    def _is_late(self, point: Point) -> bool:
        last = self._latest.get(point.key)
        return last is not None and last.timestamp > point.timestamp and last.step >= point.step

    @functools.cached_property
    def _latest(self) -> dict[str, Point]:
        return calls.latest_points(self._client, self._run_id)


def leave_out_latest(
    client: MlflowClient, run_id: str, points: Sequence[Point], waiting: Sequence[Point] = ()
) -> list[Point]:
    """Return the points whose value at that step is not the last one that the run has, whenever it was measured.

    Args:
        waiting: points that go to the run before these.
    """
    latest = calls.latest_points(client, run_id)
    for point in waiting:
        if point.key not in latest or _order(latest[point.key]) <= _order(point):
            latest[point.key] = point
    known = {(key, each.step, _comparable(each.value)) for key, each in latest.items()}
    return [point for point in points if (point.key, point.step, _comparable(point.value)) not in known]


def _order(point: Point) -> tuple[int, int]:
    """What decides which of two points MLflow calls the latest one."""
    return point.step, point.timestamp


def leave_out_known(
    client: MlflowClient, run_id: str, points: Sequence[Point], waiting: Sequence[Point] = ()
) -> list[Point]:
    """Return the points of metrics that the run does not have at their step, whatever the value.

    Args:
        waiting: points that go to the run before these.
    """
    latest = calls.latest_points(client, run_id)
    steps = {key: {latest[key].step} if key in latest else set() for key in {point.key for point in points}}
    for key in {point.key for point in points if point.key in latest and point.step < latest[point.key].step}:
        steps[key] = calls.known_steps(client, run_id, key)
    for point in waiting:
        steps.get(point.key, set()).add(point.step)
    return [point for point in points if point.step not in steps[point.key]]


def leave_out_arrived(client: MlflowClient, run_id: str, points: Sequence[Point]) -> list[Point]:
    """Return the points that the run does not have yet, by key, timestamp, step and value."""
    latest = calls.latest_points(client, run_id)
    arrived = {_identity(each) for each in latest.values()}
    # Nothing is behind the last point of a key; what is before it needs the key's history, a request for each.
    before = [each for each in points if each.key in latest and _order(each) <= _order(latest[each.key])]
    for key in {each.key for each in before if _identity(each) not in arrived}:
        with contextlib.suppress(GoneError):  # a file store does not know a metric without points
            history = client.get_metric_history(run_id, key)
            arrived |= {_identity(Point(key, each.value, each.timestamp, each.step)) for each in history}
    return [point for point in points if _identity(point) not in arrived]


def _identity(point: Point) -> tuple[str, int, int, float | str]:
    return point.key, point.timestamp, point.step, _comparable(point.value)


def _comparable(value: float) -> float | str:
    # Databases keep infinity as the largest number.
    return "nan" if math.isnan(value) else max(-1.7e308, min(1.7e308, value))
