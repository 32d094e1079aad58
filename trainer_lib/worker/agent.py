"""torchrun, with a store that listens on loopback only and an account of how each rank ended.

``python -m trainer_lib.worker.agent <processes> <verb> <run dir>``. `torch.distributed.run` binds its store to every
interface; a store of ours, bound to 127.0.0.1 and given to the same process under the same port, is taken instead
(`multi_tenant` stores share one server per port).
"""

from __future__ import annotations

import logging
import os
import socket
import sys
from datetime import timedelta
from pathlib import Path
from typing import Any

from torch._C._distributed_c10d import TCPStore
from torch.distributed import run
from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

from trainer_lib.launch.run_dir import RunDir

LOOPBACK = "127.0.0.1"


def main(argv: list[str]) -> int:
    """Run the workers to their end. Returns 0, or 1 after writing ``agent.json``."""
    processes, verb, path = argv
    run_dir = RunDir(Path(path))
    run_dir.record_process("agent", os.getpid())
    logging.getLogger("torch.distributed.elastic").setLevel(logging.CRITICAL)  # it would tell what agent.json tells
    store = _loopback_store()
    options = run.get_args_parser().parse_args(
        [
            *("--nproc-per-node", processes, "--max-restarts", "0", "--monitor-interval", "0.1"),
            *("--rdzv-backend", "static", "--master-addr", LOOPBACK, "--master-port", str(store.port)),
            *("--shutdown-timeout", str(int(float(os.environ.get("TRAINFLOW_GRACE_S", "60"))))),
            *("--log-dir", str(run_dir.path / "torchelastic")),  # it makes one, used or not
            *("-m", "trainer_lib.worker", verb, path),
        ]
    )
    try:
        run.run(options)  # type: ignore[no-untyped-call]
    except ChildFailedError as error:
        run_dir.write_json("agent.json", {"failures": [_ending(rank, end) for rank, end in error.failures.items()]})
        return 1
    except SignalException as stopped:
        return 128 + int(stopped.sigval)
    return 0


def _loopback_store() -> TCPStore:
    listener = socket.socket()
    listener.bind((LOOPBACK, 0))
    listener.listen(1024)
    port = int(listener.getsockname()[1])
    return TCPStore(
        LOOPBACK,
        port,
        is_master=True,
        wait_for_workers=False,
        timeout=timedelta(minutes=10),
        multi_tenant=True,
        master_listen_fd=listener.detach(),
    )


def _ending(rank: int, end: Any) -> dict[str, Any]:
    return {"rank": rank, "exitcode": end.exitcode, "pid": end.pid, "time": end.timestamp}


if __name__ == "__main__":
    ended = main(sys.argv[1:])
    sys.stdout.flush()
    os._exit(ended)  # nothing is left to do, and taking torch apart takes a second
