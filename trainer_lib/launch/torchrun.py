"""N workers on this machine through torchrun.

`trainer_lib.machines.agent` is torchrun (it calls `torch.distributed.run`) with two things added: its store listens on
the loopback address only, and it leaves in ``agent.json`` which rank ended how. It runs in a process of its own, so
torch is executed here, never imported.
"""

from __future__ import annotations

import sys
from pathlib import Path


def build_command(verb: str, run_dir: Path, processes: int) -> list[str]:
    """The command line of the agent that starts `processes` workers."""
    return [sys.executable, "-u", "-m", "trainer_lib.machines.agent", str(processes), verb, str(run_dir)]
