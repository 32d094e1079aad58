"""Workers that share the parts of one job (`trainer_lib.locks.shared_parts`), found from outside, to kill one."""

from __future__ import annotations

import contextlib
import subprocess
import time
from pathlib import Path
from typing import Any

from trainer_lib.locks.lease import Holder


def find_worker(folder: Path, process: subprocess.Popen[Any], finished: str, wanted: int) -> Holder | None:
    """Wait for a number of finished parts, and return a worker that works on another one.

    Args:
        folder: the job's.
        process: the command that started the workers.
        finished: the pattern of what is there for each finished part, below `folder`.
        wanted: how many of them to wait for.

    Returns:
        The worker; None where the command ended before.
    """
    while process.poll() is None:
        if len(list(folder.glob(finished))) >= wanted:
            for path in folder.glob("claims/*/*/WRITING.json"):
                with contextlib.suppress(FileNotFoundError):
                    if (holder := Holder.from_bytes(path.read_bytes())) is not None:
                        return holder
        time.sleep(0.002)
    return None
