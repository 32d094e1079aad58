"""`accelerate launch`, with an account of how each rank ended.

``python -m trainer_lib.machines.accelerated <run dir> …``: what follows the run directory is its own command line. It
is executed in this process as its command would be, so that torchrun's failure, which it lets pass, can be read here.
"""

from __future__ import annotations

import os
import runpy
import subprocess
import sys
import time
from pathlib import Path

from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

from trainer_lib.launch.run_dir import RunDir
from trainer_lib.machines.agent import DeathWatch


def main(argv: list[str]) -> int:
    """Run it to its end. Returns 0, or 1 after writing ``agent.json``."""
    path, *options = argv
    run_dir = RunDir(Path(path))
    run_dir.record_process("agent", os.getpid())
    sys.argv = ["accelerate-launch", *options]
    deaths = DeathWatch(run_dir)
    deaths.start()
    try:
        runpy.run_module("accelerate.commands.launch", run_name="__main__")
    except ChildFailedError as error:
        failures = deaths.describe_endings(error)
    except subprocess.CalledProcessError as error:  # one worker, started without torchrun
        failures = [{"rank": 0, "exitcode": error.returncode, "pid": 0, "time": time.time()}]
    except SignalException as stopped:
        return 128 + int(stopped.sigval)
    else:
        return 0
    run_dir.write_json("agent.json", {"failures": failures})
    return 1


if __name__ == "__main__":
    ended = main(sys.argv[1:])
    sys.stdout.flush()
    os._exit(ended)  # nothing is left to do, and taking torch apart takes a second
