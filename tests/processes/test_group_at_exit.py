"""A script that ends with its process group formed exits with 0: the group is ended for it."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

PAIRS = {"trainer": 3, "caller's group": 3, "own end": 3, "failing": 1}
# All pairs of processes are forked from one that has imported torch: each pair forms a group and forgets it.
SCRIPT = """
import atexit, gc, json, os, sys
import torch
import torch.distributed as dist
from trainer_lib import TrainingArguments, distributed

distributed.init(TrainingArguments("out", use_cpu=True))  # alone: imports what it needs, and forms nothing
os.environ["WORLD_SIZE"] = os.environ["LOCAL_WORLD_SIZE"] = "2"

def work(kind, rank, port):
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

gc.collect()
gc.freeze()  # what is imported already need not be looked through at the end of each process
found = {}
for kind, ports in json.loads(sys.argv[1]).items():
    children = []
    for port in ports:
        for rank in range(2):
            child = os.fork()
            if child == 0:
                os.dup2(os.open(kind, os.O_WRONLY | os.O_CREAT | os.O_APPEND), 2)
                work(kind, rank, port)
                sys.exit(0)
            children.append(child)
    found[kind] = [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]
print(json.dumps(found), flush=True)
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


def test_a_script_that_forgets_to_end_its_group_exits_in_order(tmp_path: Path) -> None:
    env = {
        **os.environ,
        "MASTER_ADDR": "127.0.0.1",
        "GLOO_SOCKET_IFNAME": "lo",
        "PYTHONPATH": os.pathsep.join(sys.path),
        "PYTHONWARNINGS": "ignore",
    }
    ports = iter(_free_ports(sum(PAIRS.values())))
    given = {kind: [next(ports) for _ in range(pairs)] for kind, pairs in PAIRS.items()}
    command = [sys.executable, "-c", SCRIPT, json.dumps(given)]
    done = subprocess.run(command, env=env, cwd=tmp_path, capture_output=True, text=True, timeout=170, check=True)
    assert not done.stderr, done.stderr
    for kind, codes in json.loads(done.stdout).items():
        stderr = (tmp_path / kind).read_text()
        assert len(codes) == 2 * PAIRS[kind]
        if kind == "failing":
            assert stderr.count("RuntimeError: expected") == 2
            assert 0 not in codes
        else:
            assert set(codes) == {0}, stderr
            assert "atexit" not in stderr
