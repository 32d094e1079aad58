"""Logs of a run's workers, next to its record.

    <storage>/runs/<id>/logs/<stage>/<attempt>-<part>.jsonl     one line of JSON for each line

A line says when it came, what it is (a line of a worker, a warning, the beginning or end of the attempt), and what was
written. On a disk they are there at once, on an object store some ten seconds later. Secrets are masked.
"""

from __future__ import annotations

import contextlib
import json
import logging
import re
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from trainer_lib.base.json_text import parse_json
from trainer_lib.errors import TrainflowError
from trainer_lib.secrets import mask
from trainer_lib.storage import Store
from trainer_lib.trackers.jsonl import LineFile
from trainflow.flows.records.past_runs import PastRun, run_folder
from trainflow.tasks.stage.manifest import stage_folder
from trainflow.tasks.stage.progress import Event, describe, measured, subscribe
from trainflow.tasks.stage.retry import Ledger, now

LOGS = "logs"
_PART_BYTES = 1 << 20
_MOST_PARTS = 64
"""Of one attempt: 64 MiB. What a worker writes beyond that is left out, and a line says so."""
_LINE_CHARS = 8_000
_RANK = re.compile(r"\[rank (\d+)\] ")
_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class LogLine:
    """One line of a run's log."""

    at: str  # when it was written, ISO-8601 in UTC
    # stage, attempt: where it belongs.
    stage: str
    attempt: int
    # "line" (a worker's), "warning", "begin", "resume", "wait", "progress" or "stage" (how the attempt began or ended).
    kind: str
    text: str
    rank: int | None = None  # the rank that wrote it; None of what no rank wrote


@dataclass(frozen=True)
class Attempt:
    """One attempt at a stage."""

    stage: str
    number: int  # from 1
    # started, ended: ISO-8601 in UTC; ended is None while it runs, and of one that died.
    started: str
    ended: str | None
    outcome: str  # "committed", "failed", "interrupted", or "open"
    reason: str
    decision: str | None  # whether it was tried again, and why (not)
    error: Mapping[str, Any] = field(default_factory=dict)  # the record of its failure; empty without one
    where: str = ""

    @classmethod
    def of(cls, stage: str, start: Mapping[str, Any], end: Mapping[str, Any]) -> Attempt:
        """The attempt of a start and an end in the stage's ledger."""
        error, number = end.get("error"), start.get("attempt")
        return cls(
            stage=stage,
            number=number if isinstance(number, int) else 0,
            started=str(start.get("started") or ""),
            ended=str(end["ended"]) if end.get("ended") else None,
            outcome=str(end.get("outcome") or "open"),
            reason=str(start.get("reason") or ""),
            decision=str(end["decision"]) if end.get("decision") else None,
            error=error if isinstance(error, dict) else {},
            where=f"process {start.get('pid')} on {start.get('host')}",
        )

    @property
    def place(self) -> str:
        """The rank and the step of its failure, as the end of a phrase."""
        return "".join(f", {key} {self.error[key]}" for key in ("rank", "step") if self.error.get(key) is not None)


class _StageLog:
    """The log of one attempt, in parts of limited size."""

    def __init__(self, folder: Store, attempt: int) -> None:
        self._folder = folder
        self._attempt = attempt
        self._part = 0
        self._bytes = 0
        self._file: LineFile | None = None

    def write(self, kind: str, text: str) -> None:
        """Append one line."""
        if self._file is None or self._bytes > _PART_BYTES:
            if self._part >= _MOST_PARTS:
                return
            self.close()
            self._part, self._bytes = self._part + 1, 0
            self._file = LineFile(self._folder, f"{self._attempt:04d}-{self._part:03d}.jsonl")
            self._file.replace([])
            if self._part == _MOST_PARTS:
                kind, text = "warning", "The workers wrote more than is kept of one attempt; the rest is left out."
        prefix = _RANK.match(text) if kind == "line" else None
        written = mask(text[prefix.end() if prefix else 0 :][:_LINE_CHARS])
        record: dict[str, Any] = {"t": now(), "kind": kind, "text": written}
        if kind == "line":
            record["rank"] = int(prefix[1]) if prefix else 0  # rank 0 writes without a prefix
        line = json.dumps(record).encode() + b"\n"
        self._bytes += len(line)
        self._file.append(line)

    def close(self) -> None:
        """Write what is not in the store yet."""
        if self._file is not None:
            self._file.close()


@contextlib.contextmanager
def keep_logs(folder: Store) -> Iterator[None]:
    """Inside the block, keep in a run's folder what the workers of its stages write, until it cannot be written."""
    logs: dict[str, _StageLog] = {}
    lock, has_failed = threading.Lock(), threading.Event()

    def listen(event: Event) -> None:
        stage, kind = str(event.get("stage") or ""), str(event.get("event"))
        if not stage or has_failed.is_set():
            return
        text = _text_of(event, kind)
        with lock:
            try:
                if kind == "stage" and event.get("status") == "started":
                    if stage in logs:
                        logs[stage].close()
                    logs[stage] = _StageLog(folder.child(LOGS, stage), int(event.get("attempt") or 1))
                if text and stage in logs:
                    logs[stage].write(kind if kind != "log" else "progress", text)
            except (OSError, TrainflowError) as error:  # the work does not depend on its log
                has_failed.set()
                _log.warning("What the workers write is not kept: %s", error)

    try:
        with subscribe(listen):
            yield
    finally:
        with lock, contextlib.suppress(OSError, TrainflowError):
            for log in logs.values():
                log.close()


def _text_of(event: Event, kind: str) -> str:
    match kind:
        case "line" | "warning" | "begin" | "resume" | "save" | "wait":
            return str(event.get("message") or "")
        case "log":
            return measured(event) or describe(event)
        case "stage":
            said = (event.get("status"), event.get("reason"), event.get("message"))
            return ": ".join(str(part) for part in said if part)
        case _:
            return ""


class LogReader:
    """Reads the logs of a run, also while it grows: what is new of some stages, or all, and of one rank, or all."""

    def __init__(self, storage: str, run: PastRun, *, stages: list[str] | None = None, rank: int | None = None) -> None:
        self._folder = run_folder(storage, run.id).child(LOGS)
        self._stages = stages
        self._rank = rank
        self._seen: dict[str, int] = {}

    def read(self) -> list[LogLine]:
        """The lines that were not returned before, in the order in which they came. Raises StorageError."""
        found: list[LogLine] = []
        for stage in self._folder.children():
            if self._stages is None or stage in self._stages:
                for name in sorted(self._folder.children(stage)):
                    found += self._read_part(stage, name)
        # Stable: lines of one second stay in the order of their file.
        return sorted(found, key=lambda line: line.at)

    def _read_part(self, stage: str, name: str) -> list[LogLine]:
        path, number = f"{stage}/{name}", name.partition("-")[0]
        if not number.isdecimal():
            return []
        lines = (self._folder.read_if_exists(path) or b"").splitlines(keepends=True)
        whole = [line for line in lines if line.endswith(b"\n")]  # the last one may be half written
        new = whole[self._seen.get(path, 0) :]
        self._seen[path] = len(whole)
        parsed = (_parse(stage, int(number), line) for line in new)
        return [line for line in parsed if line is not None and self._rank in (None, line.rank)]


def read_attempts(storage: str, run: PastRun) -> list[Attempt]:
    """The attempts at the stages that a run worked in, in their order. Raises StorageError.

    A stage's folder belongs to its key: an attempt of another run with the same key is among them.
    """
    found = []
    for stage, key in {**run.stages, **run.worked_in}.items():
        records = Ledger(stage_folder(Store.open(storage), stage, key)).records()
        found += [Attempt.of(stage, start, end) for start, end in records]
    return found


def _parse(stage: str, attempt: int, line: bytes) -> LogLine | None:
    try:
        record = parse_json(line)
        rank = None if record.get("rank") is None else int(record["rank"])
        return LogLine(str(record["t"]), stage, attempt, str(record["kind"]), str(record["text"]), rank)
    except (ValueError, KeyError, TypeError, AttributeError):
        return None


def follow_lines(reader: LogReader, is_over: Callable[[], bool], every_s: float = 1.0) -> Iterator[LogLine]:
    """Yield the lines as they come, until `is_over()` and nothing is new."""
    while True:
        over = is_over()
        yield from reader.read()
        if over:
            return
        time.sleep(every_s)
