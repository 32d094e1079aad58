"""One worker, started directly: nothing is paid for a distributed runtime that one process does not need."""

from __future__ import annotations

import sys
from pathlib import Path


def build_command(verb: str, run_dir: Path) -> list[str]:
    """The command line of a single worker."""
    return [sys.executable, "-u", "-m", "trainer_lib.worker", verb, str(run_dir)]
