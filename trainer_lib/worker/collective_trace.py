"""A rank's flight recorder, written where the launch's owner asks for stacks: which collectives it has entered.

torch records the newest 2,000 collectives of each process group by itself (``TORCH_FR_BUFFER_SIZE``), over gloo as well
as NCCL. The file holds torch's own JSON, by backend.
"""

from __future__ import annotations

import importlib
import json
import sys
import threading
import time
from contextlib import suppress
from typing import Any

from typing_extensions import override

from trainer_lib.json_text import parse_json
from trainer_lib.launch.run_dir import RunDir

POLL_S = 0.25  # an owner waits two seconds for stacks and traces
# Private names of torch, which has no public ones; NCCL has a recorder of its own.
_RECORDERS = {"gloo": "_dump_fr_trace_json", "nccl": "_dump_nccl_trace_json"}


class TraceWatch(threading.Thread):
    """Writes this rank's collective trace as soon as the owner asks for stacks. It needs nothing of the main thread."""

    def __init__(self, run_dir: RunDir, rank: int) -> None:
        super().__init__(name="trainflow-trace", daemon=True)
        self._run_dir = run_dir
        self._rank = rank

    @override
    def run(self) -> None:
        while not self._run_dir.has_stacks_request():
            time.sleep(POLL_S)
        with suppress(OSError):  # the owner may be gone, and the run directory with it
            self._run_dir.write_trace(str(self._rank), json.dumps(read_trace(self._rank)))


def read_trace(rank: int) -> dict[str, Any]:
    """Return what torch has recorded in this process, by backend; without a process group, say so under "note"."""
    trace: dict[str, Any] = {"rank": rank, "recorders": {}}
    if "torch.distributed" not in sys.modules:
        return {**trace, "note": "This rank had not imported torch.distributed yet."}
    module = importlib.import_module("torch._C._distributed_c10d")
    for backend, name in _RECORDERS.items():
        dump = getattr(module, name, None)
        if dump is None:
            continue
        try:
            recorded = parse_json(dump())
        except (RuntimeError, ValueError, TypeError) as error:
            trace["recorders"][backend] = {"note": f"torch could not show it: {error}"}
            continue
        if recorded.get("pg_status") or recorded.get("entries"):
            trace["recorders"][backend] = recorded
    if not trace["recorders"]:
        trace["note"] = "This rank had entered no collective."
    return trace
