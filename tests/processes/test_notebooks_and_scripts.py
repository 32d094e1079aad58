"""A notebook's function on processes that accelerate forks, and scripts that forget to end their process group."""

from __future__ import annotations

import json
import socket
from pathlib import Path

from tests.support.command import python

# In a separate process: forking this one, with all its threads, would prove nothing about a notebook.
TRAINS = """
import os
from accelerate import debug_launcher
from tests.support.toys import classification_rows
from tests.support.training import trainer

ROWS = classification_rows(26)  # a notebook's own data, made before, and found by what is forked

def train(folder):
    one = trainer(folder, ROWS, max_steps=4, per_device_train_batch_size=2, save_strategy="no", disable_tqdm=True)
    one.train()
    if one.is_world_process_zero():
        with open(folder + "/here", "w") as file:  # lines of processes mix
            print(one._trainflow.comm.world_size, one.state.log_history[-1]["train_loss"], file=file)

debug_launcher(train, (os.environ["OUT"],), num_processes=2)
print("left", "RANK" in os.environ, __import__("torch").distributed.is_initialized())
"""


def test_a_notebook_trains_on_two_processes(tmp_path: Path) -> None:
    done = python("-c", TRAINS, env={"OUT": str(tmp_path)})
    assert (tmp_path / "here").read_text().startswith("2 ")
    assert "left False False" in done.stdout


PAIRS = {"trainer": 5, "caller's group": 5, "own end": 5, "failing": 1}
# All pairs of processes are forked from one that has imported torch: each pair forms a group and forgets it.
SCRIPT = """
import atexit, gc, json, os, sys
import torch
import torch.distributed as dist
from trainer_lib import TrainingArguments
from trainer_lib.distributed import communicator as distributed

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
    env = {"MASTER_ADDR": "127.0.0.1", "GLOO_SOCKET_IFNAME": "lo", "PYTHONWARNINGS": "ignore"}
    ports = iter(_free_ports(sum(PAIRS.values())))
    given = {kind: [next(ports) for _ in range(pairs)] for kind, pairs in PAIRS.items()}
    done = python("-c", SCRIPT, json.dumps(given), cwd=tmp_path, env=env)
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
