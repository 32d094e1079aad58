"""The simplest tracker: `metrics.jsonl` in the output directory, one JSON object per log call.

Each line is `{"step": 20, "time": <seconds since 1970>, "loss": 0.31, …}`. Every line is strict JSON: values that are
not finite are the strings "NaN", "Infinity" and "-Infinity". A training resumed at step s drops the lines beyond s,
because it is about to repeat them, so a step never appears twice.

On a local disk each line is appended at once. An object on a remote store cannot be appended to, so there the lines are
kept in memory and a background thread writes the whole object, at most every `UPLOAD_S` seconds and on `close`.
"""

from __future__ import annotations

import json
import logging
import math
import os
import threading
import time
from collections.abc import Mapping
from typing import Any

from trainer_lib.errors import TrainflowError
from trainer_lib.storage import Store

FILE = "metrics.jsonl"
UPLOAD_S = 10.0

_log = logging.getLogger(__name__)


class JsonlTracker:
    """Writes `metrics.jsonl` into `output_dir`, a path or any fsspec URL."""

    name = "jsonl"

    def __init__(self, output_dir: str) -> None:
        self._store = Store.open(output_dir, field="output_dir")
        self._lines: list[bytes] = []  # remote stores only: the whole file
        self._unsaved = threading.Event()
        self._closing = threading.Event()
        self._uploader: threading.Thread | None = None
        self._broken = False

    def start(self, *, run_name: str | None, params: Mapping[str, Any], resume_step: int) -> None:
        """Keep the lines up to `resume_step`; drop the others, and a line that a crash has torn."""
        self._broken = False
        try:
            kept = [line for line in self._read() if 0 <= _step(line) <= resume_step] if resume_step else []
            if self._store.is_local:
                path = self._store.local_path(FILE)
                path.parent.mkdir(parents=True, exist_ok=True)
                draft = path.with_suffix(".jsonl.new")
                draft.write_bytes(b"".join(kept))
                draft.replace(path)  # in one step: a reader sees the old file or the new one
            else:
                self._lines = kept
                self._unsaved.set()
        except (OSError, TrainflowError) as error:
            self._give_up(error)

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        """Append one line, or keep it for the next upload."""
        if self._broken:
            return
        record = {"step": step, "time": round(time.time(), 3)} | {key: _strict(value) for key, value in metrics.items()}
        line = json.dumps(record, allow_nan=False).encode() + b"\n"
        if not self._store.is_local:
            self._lines.append(line)
            self._unsaved.set()
            self._upload_in_background()
            return
        try:
            # One unbuffered write per line: after kill -9 every line but perhaps the last is whole.
            handle = os.open(self._store.local_path(FILE), os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
            try:
                os.write(handle, line)
            finally:
                os.close(handle)
        except OSError as error:
            self._give_up(error)

    def close(self, status: str = "FINISHED") -> None:
        """Write what is not in the store yet. Waits up to 30 seconds for an upload that is under way."""
        if self._uploader is not None:
            self._closing.set()
            self._uploader.join(timeout=30.0)
            self._uploader = None
            self._closing.clear()
        if self._unsaved.is_set() and not self._store.is_local:
            self._upload()

    def _read(self) -> list[bytes]:
        if not self._store.exists(FILE):
            return []
        return [line for line in self._store.read_bytes(FILE).splitlines(keepends=True) if line.endswith(b"\n")]

    def _upload_in_background(self) -> None:
        if self._uploader is None:
            self._uploader = threading.Thread(target=self._keep_uploading, name="metrics.jsonl", daemon=True)
            self._uploader.start()

    def _keep_uploading(self) -> None:
        while not self._closing.wait(UPLOAD_S):
            if self._unsaved.is_set():
                self._upload()

    def _upload(self) -> None:
        self._unsaved.clear()
        try:
            # A copy, because the training thread appends meanwhile.
            self._store.write_bytes(FILE, b"".join(list(self._lines)))
        except TrainflowError as error:  # the lines are still here: the next upload has them all
            self._unsaved.set()
            _log.warning("The metrics could not be written to %s: %s", self._store.url, error)

    def _give_up(self, error: Exception) -> None:
        self._broken = True
        _log.warning("%s cannot be written in %s, so no metrics are kept there: %s", FILE, self._store.url, error)


def _step(line: bytes) -> int:
    try:
        return int(json.loads(line)["step"])
    except (ValueError, KeyError, TypeError):
        return -1


def _strict(value: float) -> float | str:
    if math.isfinite(value):
        return value
    return "NaN" if math.isnan(value) else ("Infinity" if value > 0 else "-Infinity")
