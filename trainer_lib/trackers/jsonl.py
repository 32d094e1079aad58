"""The simplest tracker: `metrics.jsonl` in the output directory, one JSON object per log call.

A line is `{"step": 20, "time": <seconds since 1970>, "loss": 0.31, …}`. Every line is strict JSON: values that are
not finite are the strings "NaN", "Infinity" and "-Infinity". A training resumed at step s drops the lines beyond s,
because it is about to repeat them, so a step never appears twice.

On a local disk lines are appended at once. An object on a remote store cannot be appended to, so there the lines are
kept in memory and a background thread writes the whole object, at most every `UPLOAD_S` seconds and on `close`.
"""

from __future__ import annotations

import contextlib
import errno
import json
import logging
import math
import os
import threading
import time
from collections.abc import Mapping, Sequence
from typing import Any

from trainer_lib.base.json_text import parse_json
from trainer_lib.errors import TrainflowError
from trainer_lib.storage import Store
from trainer_lib.storage.local import make_folders

UPLOAD_S = 10.0
_CLOSE_S = 30.0

_log = logging.getLogger(__name__)


def append_whole(handle: int, data: bytes) -> None:
    """Append lines to an open file in one unbuffered write: after kill -9 all but perhaps the last are whole.

    Raises OSError; of a disk that is full, after half a line that must not stay in front of the next one is cut off.
    """
    if (written := os.write(handle, data)) < len(data):
        os.ftruncate(handle, os.fstat(handle).st_size - written)
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


class LineFile:
    """The file `name` of lines, which all end in a line break, in the folder `store`."""

    def __init__(self, store: Store, name: str) -> None:
        self.store = store
        self._name = name
        self._lines: list[bytes] = []  # remote stores only: the whole file
        self._unsaved = threading.Event()
        self._closing = threading.Event()
        self._uploader: threading.Thread | None = None

    def read(self) -> list[bytes]:
        """Read the whole lines that are there; a line that a crash has torn is left out."""
        if not self.store.exists(self._name):
            return []
        return [line for line in self.store.read_bytes(self._name).splitlines(keepends=True) if line.endswith(b"\n")]

    def replace(self, lines: Sequence[bytes]) -> None:
        """Make these the lines of the file. Raises OSError or TrainflowError if it cannot be written."""
        if not self.store.is_local:
            self._lines = list(lines)
            self._unsaved.set()
            return
        path = self.store.local_path(self._name)
        make_folders(path.parent)
        draft = path.with_suffix(f"{path.suffix}.new")
        try:
            draft.write_bytes(b"".join(lines))
            draft.replace(path)  # in one step: a reader sees the old file or the new one
        except OSError:
            with contextlib.suppress(OSError):
                draft.unlink()
            raise

    def append(self, line: bytes) -> None:
        """Append one line, or keep it for the next upload. Raises OSError when the local disk refuses it."""
        if not self.store.is_local:
            self._lines.append(line)
            self._unsaved.set()
            if self._uploader is None:
                self._uploader = threading.Thread(target=self._keep_uploading, name=self._name, daemon=True)
                self._uploader.start()
            return
        handle = os.open(self.store.local_path(self._name), os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        try:
            append_whole(handle, line)
        finally:
            os.close(handle)

    def close(self) -> None:
        """Write what is not in the store yet. Waits up to 30 seconds for an upload that is under way."""
        if self._uploader is not None:
            self._closing.set()
            self._uploader.join(timeout=_CLOSE_S)
            self._uploader = None
            self._closing.clear()
        if self._unsaved.is_set() and not self.store.is_local:
            self._upload()

    def _keep_uploading(self) -> None:
        while not self._closing.wait(UPLOAD_S):
            if self._unsaved.is_set():
                self._upload()

    def _upload(self) -> None:
        self._unsaved.clear()
        try:
            # A copy, because the training thread appends meanwhile.
            self.store.write_bytes(self._name, b"".join(list(self._lines)))
        except TrainflowError as error:  # the lines are still here: the next upload has them all
            self._unsaved.set()
            _log.warning("%s could not be written to %s: %s", self._name, self.store.url, error)


FILE = "metrics.jsonl"


class JsonlTracker:
    """Writes `metrics.jsonl` into `output_dir`, a path or any fsspec URL."""

    name = "jsonl"

    def __init__(self, output_dir: str) -> None:
        self._file = LineFile(Store.open(output_dir, field="output_dir"), FILE)
        self._broken = False

    def start(self, *, run_name: str | None, params: Mapping[str, Any], resume_step: int) -> None:
        """Keep the lines up to `resume_step`; drop the others, and a line that a crash has torn."""
        self._broken = False
        try:
            kept = [line for line in self._file.read() if 0 <= _step(line) <= resume_step] if resume_step else []
            self._file.replace(kept)
        except (OSError, TrainflowError) as error:
            self._give_up(error)

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        """Append one line, or keep it for the next upload."""
        if self._broken:
            return
        record = {"step": step, "time": round(time.time(), 3)} | {key: _strict(value) for key, value in metrics.items()}
        try:
            self._file.append(json.dumps(record, allow_nan=False).encode() + b"\n")
        except OSError as error:
            self._give_up(error)

    def close(self, status: str = "FINISHED") -> None:
        """Write what is not in the store yet. Waits up to 30 seconds for an upload that is under way."""
        self._file.close()

    def _give_up(self, error: Exception) -> None:
        self._broken = True
        url = self._file.store.url
        _log.warning("%s cannot be written in %s, so no metrics are kept there: %s", FILE, url, error)


def _step(line: bytes) -> int:
    try:
        return int(parse_json(line)["step"])
    except (ValueError, KeyError, TypeError):
        return -1


def _strict(value: float) -> float | str:
    if math.isfinite(value):
        return value
    return "NaN" if math.isnan(value) else ("Infinity" if value > 0 else "-Infinity")
