"""What a spool holds that its server does not have yet."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from trainer_lib.trackers.spool import Session


@dataclass(frozen=True)
class Waiting:
    """What a spool holds that its server does not have yet.

    Attributes:
        root: the spool.
        runs: how many runs it belongs to.
        points, files: how many points of metrics and how many files; the end of a run is neither.
        servers: the addresses that they wait for, as the commands that logged them had them.
    """

    root: Path
    runs: int
    points: int
    files: int
    servers: tuple[str, ...] = ()

    def __str__(self) -> str:
        runs = f"{self.runs} run{'s' if self.runs > 1 else ''}"
        counts = [f"{count} {word}{'s' if count > 1 else ''}" for count, word in self._counts() if count]
        return f"{runs} ({', '.join(counts)})" if counts else f"the end of {runs}"

    def _counts(self) -> list[tuple[int, str]]:
        return [(self.points, "point"), (self.files, "file")]


def count_waiting(root: Path) -> Waiting | None:
    """Count what waits in sessions that are over; None when nothing does."""
    sessions = [session for session in Session.stored(root) if session.over]
    points = files = 0
    for session in sessions:
        for record, _ in session.read(session.state.offset):
            points += len(record.get("m") or ())
        for record, _ in session.read(session.state.files_offset):
            files += bool(record.keys() & {"file", "model"})
    runs = {session.head.get("token") or session.head.get("run_id") for session in sessions}
    servers = {str(session.head.get("tracking_uri")) for session in sessions}
    return Waiting(root, len(runs), points, files, tuple(sorted(servers))) if sessions else None
