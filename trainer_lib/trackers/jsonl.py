"""The simplest tracker: `metrics.jsonl` in the output directory, one JSON object per log call.

Each line is `{"step": 20, "time": <seconds since 1970>, "loss": 0.31, …}`. Every line is strict JSON: values that are
not finite are the strings "NaN", "Infinity" and "-Infinity". A training resumed at step s drops the lines beyond s,
because it is about to repeat them, so a step never appears twice.

`line_file` writes the lines, on a local disk one by one, elsewhere in the background.
"""

from __future__ import annotations

import json
import logging
import math
import time
from collections.abc import Mapping
from typing import Any

from trainer_lib.base.json_text import parse_json
from trainer_lib.errors import TrainflowError
from trainer_lib.storage import Store
from trainer_lib.trackers.line_file import LineFile

FILE = "metrics.jsonl"

_log = logging.getLogger(__name__)


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
