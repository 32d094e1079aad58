"""torchrun with a store that listens on loopback only, or `accelerate launch`, with a record of how ranks ended.

::

    python -m trainer_lib.machines.agent <processes> <verb> <run dir>
    python -m trainer_lib.machines.agent accelerate <run dir> <command line of accelerate launch>

On several machines, `trainer_lib.machines.node` starts the workers instead, through `run_workers` as well.
"""

from __future__ import annotations

import logging
import os
import runpy
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

from torch.distributed import run
from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from typing_extensions import override

from trainer_lib.guard import is_alive
from trainer_lib.launch.run_dir import RunDir
from trainer_lib.machines.rendezvous import open_store

LOOPBACK = "127.0.0.1"
LOOK_S = 0.05


def main(argv: list[str]) -> int:
    """Run the workers until they end. Returns 0, or 1 after writing ``agent.json``."""
    by_accelerate = argv[0] == "accelerate"
    run_dir = RunDir(Path(argv[1 if by_accelerate else 2]))
    run_dir.record_process("agent", os.getpid())
    try:
        if by_accelerate:
            failures = _run_accelerate(run_dir, argv[2:])
        else:
            store = open_store(LOOPBACK, 0)
            failures = run_workers(run_dir, argv[1], int(argv[0]), master=(LOOPBACK, store.port))
    except SignalException as stopped:
        return 128 + int(stopped.sigval)
    if failures:
        run_dir.write_json("agent.json", {"failures": failures})
    return 1 if failures else 0


def run_workers(
    run_dir: RunDir, verb: str, processes: int, *, master: tuple[str, int], nodes: int = 1, node_rank: int = 0
) -> list[dict[str, Any]]:
    """Start this machine's workers through torchrun and wait for their end; the job's store listens at `master`.

    Returns how failed ranks ended (rank, exit code, pid, time); nothing if all ended well.
    """
    logging.getLogger("torch.distributed.elastic").setLevel(logging.CRITICAL)  # agent.json has what it reports
    options = run.get_args_parser().parse_args(
        [
            # No restarts by torchrun: an attempt has one start, and the launcher decides on the next.
            *("--nproc-per-node", str(processes), "--max-restarts", "0", "--monitor-interval", "0.1"),
            *("--nnodes", str(nodes), "--node-rank", str(node_rank)),
            *("--rdzv-backend", "static", "--master-addr", master[0], "--master-port", str(master[1])),
            *("--shutdown-timeout", str(int(float(os.environ.get("TRAINFLOW_GRACE_S", "60"))))),
            *("--log-dir", str(run_dir.path / "torchelastic")),  # torchrun makes this folder even if nothing uses it
            *("-m", "trainer_lib.worker", verb, str(run_dir.path)),
        ]
    )
    deaths = DeathWatch(run_dir)
    deaths.start()
    try:
        run.run(options)  # type: ignore[no-untyped-call]
    except ChildFailedError as error:
        return deaths.describe_endings(error)
    finally:
        deaths.close()
    return []


def _run_accelerate(run_dir: RunDir, options: list[str]) -> list[dict[str, Any]]:
    """Run accelerate's launcher in this process, as its own command would: torchrun's failure can be read here."""
    sys.argv = ["accelerate-launch", *options]  # runpy runs the module as a command, which reads its options there
    deaths = DeathWatch(run_dir)
    deaths.start()
    try:
        runpy.run_module("accelerate.commands.launch", run_name="__main__")
    except ChildFailedError as error:
        return deaths.describe_endings(error)
    except subprocess.CalledProcessError as error:  # accelerate starts a single worker without torchrun
        return [{"rank": 0, "exitcode": error.returncode, "pid": 0, "time": time.time()}]
    return []


class DeathWatch(threading.Thread):
    """Records when workers died.

    torchrun reports one time for all, including the workers that it then ended itself, so its report alone does not
    show which one failed first.
    """

    def __init__(self, run_dir: RunDir) -> None:
        super().__init__(name="trainflow-deaths", daemon=True)
        self._run_dir = run_dir
        self._closed = threading.Event()
        self._died: dict[int, float] = {}

    @override
    def run(self) -> None:
        # Twice as often as torchrun looks, so that a death is seen before torchrun ends the other workers.
        while not self._closed.wait(LOOK_S):
            for process in self._run_dir.find_workers():
                if not is_alive(process):
                    self._died.setdefault(process.pid, time.time())

    def close(self) -> None:
        """End the watch."""
        self._closed.set()

    def describe_endings(self, error: ChildFailedError) -> list[dict[str, Any]]:
        """Return how ranks in torchrun's failure ended."""
        return [
            {"rank": rank, "exitcode": end.exitcode, "pid": end.pid, "time": self._died.get(end.pid, end.timestamp)}
            for rank, end in error.failures.items()
        ]


if __name__ == "__main__":
    ended = main(sys.argv[1:])
    sys.stdout.flush()
    os._exit(ended)  # skip the second that an orderly shutdown of torch takes: nothing is left to do
