"""torchrun, with a store that listens on loopback only and an account of how each rank ended.

``python -m trainer_lib.machines.agent <processes> <verb> <run dir>``. Machines that train together
have `trainer_lib.machines.node`, which starts their workers through the same `run_workers`.
"""

from __future__ import annotations

import logging
import os
import sys
import threading
import time
from pathlib import Path
from typing import Any

from torch.distributed import run
from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

from trainer_lib.guard import is_alive
from trainer_lib.launch.run_dir import RunDir, read_process
from trainer_lib.machines.rendezvous import open_store

LOOPBACK = "127.0.0.1"
LOOK_S = 0.05


def main(argv: list[str]) -> int:
    """Run the workers to their end. Returns 0, or 1 after writing ``agent.json``."""
    processes, verb, path = argv
    run_dir = RunDir(Path(path))
    run_dir.record_process("agent", os.getpid())
    store = open_store(LOOPBACK, 0)
    try:
        failures = run_workers(run_dir, verb, int(processes), master=(LOOPBACK, store.port))
    except SignalException as stopped:
        return 128 + int(stopped.sigval)
    if failures:
        run_dir.write_json("agent.json", {"failures": failures})
    return 1 if failures else 0


def run_workers(
    run_dir: RunDir, verb: str, processes: int, *, master: tuple[str, int], nodes: int = 1, node_rank: int = 0
) -> list[dict[str, Any]]:
    """Have torchrun start this machine's workers and wait for their end.

    Args:
        master: where the store of the whole job listens.

    Returns:
        How each rank ended that did not end well (rank, exit code, pid, time); empty when all is done.
    """
    logging.getLogger("torch.distributed.elastic").setLevel(logging.CRITICAL)  # it would tell what agent.json tells
    options = run.get_args_parser().parse_args(
        [
            *("--nproc-per-node", str(processes), "--max-restarts", "0", "--monitor-interval", "0.1"),
            *("--nnodes", str(nodes), "--node-rank", str(node_rank)),
            *("--rdzv-backend", "static", "--master-addr", master[0], "--master-port", str(master[1])),
            *("--shutdown-timeout", str(int(float(os.environ.get("TRAINFLOW_GRACE_S", "60"))))),
            *("--log-dir", str(run_dir.path / "torchelastic")),  # it makes one, used or not
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


class DeathWatch(threading.Thread):
    """Notes when each worker died. torchrun gives all the time at which it noticed the first, those included that it
    then ended itself, so from its account alone the one to blame cannot be told."""

    def __init__(self, run_dir: RunDir) -> None:
        super().__init__(name="trainflow-deaths", daemon=True)
        self._run_dir = run_dir
        self._closed = threading.Event()
        self._died: dict[int, float] = {}

    def run(self) -> None:
        """Look twenty times a second, for torchrun looks ten times."""
        while not self._closed.wait(LOOK_S):
            for path in self._run_dir.path.glob("worker-*.pid"):
                process = read_process(path)
                if process is not None and not is_alive(process):
                    self._died.setdefault(process.pid, time.time())

    def close(self) -> None:
        """Stop looking."""
        self._closed.set()

    def describe_endings(self, error: ChildFailedError) -> list[dict[str, Any]]:
        """How each rank ended that torchrun's failure names."""
        return [
            {"rank": rank, "exitcode": end.exitcode, "pid": end.pid, "time": self._died.get(end.pid, end.timestamp)}
            for rank, end in error.failures.items()
        ]


if __name__ == "__main__":
    ended = main(sys.argv[1:])
    sys.stdout.flush()
    os._exit(ended)  # nothing is left to do, and taking torch apart takes a second
