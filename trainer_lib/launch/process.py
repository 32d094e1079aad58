"""One worker, started directly: a single process needs no distributed runtime."""

from __future__ import annotations

import sys
from pathlib import Path


def build_command(verb: str, run_dir: Path) -> list[str]:
    """Return the command line of a single worker."""
    return [sys.executable, "-P", "-u", "-m", "trainer_lib.worker", verb, str(run_dir)]
