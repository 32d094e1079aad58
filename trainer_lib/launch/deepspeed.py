"""N workers on this machine through the `deepspeed` launcher. It is executed, never imported: that takes seconds."""

from __future__ import annotations

import sys
from pathlib import Path


def command(verb: str, run_dir: Path, processes: int, port: int) -> list[str]:
    """The command line of DeepSpeed's runner that starts `processes` workers."""
    return [
        *(sys.executable, "-u", "-m", "deepspeed.launcher.runner", "--num_gpus", str(processes), "--no_local_rank"),
        *("--master_addr", "127.0.0.1", "--master_port", str(port)),
        *("--module", "trainer_lib.worker", verb, str(run_dir)),
    ]
