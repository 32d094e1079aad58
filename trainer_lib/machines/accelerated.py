"""`accelerate launch`, with a record of how ranks ended.

``python -m trainer_lib.machines.accelerated <run dir> …``: the rest of the command line is accelerate's. The launcher
runs in this process, as its own command would, so that torchrun's failure, which it does not catch, can be read here.
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
    """Run accelerate's launcher until it ends. Returns 0, or 1 after writing ``agent.json``."""
    path, *options = argv
    run_dir = RunDir(Path(path))
    run_dir.record_process("agent", os.getpid())
    # runpy runs the module as a command, which reads its options here.
    sys.argv = ["accelerate-launch", *options]
    deaths = DeathWatch(run_dir)
    deaths.start()
    try:
        runpy.run_module("accelerate.commands.launch", run_name="__main__")
    except ChildFailedError as error:
        failures = deaths.describe_endings(error)
    except subprocess.CalledProcessError as error:  # accelerate starts a single worker without torchrun
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
    os._exit(ended)  # skip the second that an orderly shutdown of torch takes: nothing is left to do
