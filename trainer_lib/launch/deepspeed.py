"""N workers on this machine through the `deepspeed` launcher, which is executed, never imported: that takes seconds."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path


def build_command(verb: str, run_dir: Path, processes: int, port: int, environment: Mapping[str, str]) -> list[str]:
    """Return the command line of DeepSpeed's runner for `processes` workers.

    Args:
        environment: the workers' variables. Their CUDA_VISIBLE_DEVICES is passed on, because the runner, given a number
            only, takes the machine's first devices.
    """
    visible = [part.strip() for part in environment.get("CUDA_VISIBLE_DEVICES", "").split(",") if part.strip()]
    which = ["--include", f"localhost:{','.join(visible[:processes])}"] if visible else ["--num_gpus", str(processes)]
    return [
        *(sys.executable, "-P", "-u", "-m", "deepspeed.launcher.runner", "--quiet", *which, "--no_local_rank"),
        *("--master_addr", "127.0.0.1", "--master_port", str(port)),
        *("--module", "trainer_lib.worker", verb, str(run_dir)),
    ]
