"""Which points of a session its MLflow run has already from another one."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING

from trainer_lib.trackers import mlflow_client as calls
from trainer_lib.trackers.mlflow_client import Point
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
