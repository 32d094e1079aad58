"""N workers on this machine through torchrun.

`trainer_lib.machines.agent` is torchrun (it calls `torch.distributed.run`) with two additions: its store listens on the
loopback address only, and it records in ``agent.json`` how each rank ended. It runs in a process of its own, so that
the launching process never imports torch.
"""

from __future__ import annotations

import sys
from pathlib import Path


def build_command(verb: str, run_dir: Path, processes: int) -> list[str]:
    """Return the command line of the agent that starts `processes` workers."""
    return [sys.executable, "-P", "-u", "-m", "trainer_lib.machines.agent", str(processes), verb, str(run_dir)]
