"""A script that ends with its process group formed exits with 0: the group is ended for it."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

# Many pairs of processes are forked from one that has imported torch: each pair forms a group and forgets it.
SCRIPT = """
import atexit, os, sys
import torch
import torch.distributed as dist
from trainer_lib import TrainingArguments, distributed

kind, ports = sys.argv[1], sys.argv[2:]

def work(rank, port):
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), MASTER_PORT=port)
    torch.set_num_threads(1)
    if kind != "trainer":
        dist.init_process_group("gloo")
    if kind == "own end":
        atexit.register(dist.destroy_process_group)
    comm = distributed.init(TrainingArguments("out", use_cpu=True))
    assert comm.sum_ints([1]) == [2]
    comm.twin(30).barrier()
    if kind == "failing":
        raise RuntimeError("expected")

children = []
for port in ports:
    for rank in range(2):
        child = os.fork()
        if child == 0:
            work(rank, port)
            sys.exit(0)
        children.append(child)
codes = [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]
print(codes)
os._exit(0)
"""


def _free_ports(count: int) -> list[str]:
    sockets = [socket.socket() for _ in range(count)]
    for each in sockets:
        each.bind(("127.0.0.1", 0))
    ports = [str(each.getsockname()[1]) for each in sockets]
    for each in sockets:
        each.close()
    return ports


@pytest.mark.parametrize("kind", ["trainer", "caller's group", "own end", "failing"])
def test_a_script_that_forgets_to_end_its_group_exits_in_order(kind: str, tmp_path: Path) -> None:
    env = {
        **os.environ,
        "WORLD_SIZE": "2",
        "LOCAL_WORLD_SIZE": "2",
        "MASTER_ADDR": "127.0.0.1",
        "GLOO_SOCKET_IFNAME": "lo",
        "PYTHONPATH": os.pathsep.join(sys.path),
        "PYTHONWARNINGS": "ignore",
    }
    pairs = 1 if kind == "failing" else 5
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, kind, *_free_ports(pairs)],
        env=env,
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=170,
        check=True,
    )
    codes = [int(code) for code in done.stdout.strip().strip("[]").split(",")]
    assert len(codes) == 2 * pairs
    if kind == "failing":
        assert done.stderr.count("RuntimeError: expected") == 2
        assert 0 not in codes
    else:
        assert set(codes) == {0}, done.stderr
        assert "atexit" not in done.stderr
